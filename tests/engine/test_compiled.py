"""torch.compile: tokens are those of eager steps, no batch compiles anew, a machine without a compiler says so."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from fake_cuda import check_alike
from torch import nn
from torchplug import LLM, SamplingParams
from torchplug.config import (
    CompilationConfig,
    CompilationMode,
    DeviceConfig,
    HfConfig,
    ModelConfig,
    VllmConfig,
    get_current_vllm_config_or_none,
    set_current_vllm_config,
)
from torchplug.engine.compiled import CompiledForward
from torchplug.errors import PluginError, RequestError
from torchplug.layers import Linear
from torchplug.layers.native import native_kernels_allowed

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


def prompts(lengths):
    return [{"prompt_token_ids": [(11 * i + 3 * n) % 250 for i in range(length)]} for n, length in enumerate(lengths)]


def tokens(llm, lengths):
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts(lengths), GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def compiled_and_eager(tiny_checkpoint):
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 6, "use_tqdm_on_load": False}
    with LLM(tiny_checkpoint, compile=True, **options) as compiled, LLM(tiny_checkpoint, **options) as eager:
        yield compiled, eager


def test_tokens_are_those_of_eager_steps_and_no_step_compiles(compiled_and_eager):
    compiled, eager = compiled_and_eager
    assert compiled.llm_engine.execution.endswith("; torch.compile") and eager.llm_engine.execution.endswith("; eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([9], [1], [2, 30, 5, 17], [3] * 6, [40, 1]):
            found = tokens(compiled, lengths)
            assert found == tokens(eager, lengths)
            assert len({token for answer in found for token in answer}) >= 12


def test_the_model_is_one_graph(compiled_and_eager):
    compiled, _ = compiled_and_eager
    module = compiled.model.module
    ids = torch.arange(5)
    with torch.inference_mode():
        explained = torch._dynamo.explain(module)(ids, ids)
    assert explained.graph_count == 1 and explained.graph_break_count == 0


def test_a_wrapped_embedding_reaches_a_compiled_model(compiled_and_eager):
    from torchplug import hookimpl

    class Louder:
        @hookimpl(wrapper=True)
        def embed_input_ids(self, input_ids):
            return (yield) * 1.5

    found = []
    for llm in compiled_and_eager:
        with llm.model.attached(Louder()):
            found.append(tokens(llm, [5, 3]))
    assert found[0] == found[1] != tokens(compiled_and_eager[1], [5, 3])


def test_weights_of_a_compiled_model_stay_plain(compiled_and_eager):
    compiled, eager = compiled_and_eager
    for module in compiled.model.module.modules():
        if isinstance(module, Linear):
            assert not module.weight.is_mkldnn and module._product is nn.functional.linear
    assert any(m._product is not nn.functional.linear for m in eager.model.module.modules() if isinstance(m, Linear))


def test_layers_are_told_while_a_model_is_loaded_and_only_on_that_thread():
    config = VllmConfig(
        ModelConfig("test", HfConfig({}, source="x"), torch.float32, 8),
        DeviceConfig(torch.device("cpu")),
        compilation_config=CompilationConfig(CompilationMode.STOCK_TORCH_COMPILE),
    )
    assert native_kernels_allowed() and get_current_vllm_config_or_none() is None
    with set_current_vllm_config(config):
        assert not native_kernels_allowed() and get_current_vllm_config_or_none() is config
        config.compilation_config.mode = CompilationMode.NONE
        assert native_kernels_allowed()
    assert get_current_vllm_config_or_none() is None


def test_compile_and_enforce_eager_exclude_each_other(tiny_checkpoint):
    with pytest.raises(RequestError, match="leave one of them out"):
        LLM(tiny_checkpoint, compile=True, enforce_eager=True)


class Broken(nn.Module):
    def forward(self, input_ids, positions):
        raise ValueError("planted\nsecond line")


def test_a_model_that_cannot_be_compiled_is_named():
    forward = CompiledForward(Broken())
    with pytest.raises(
        PluginError, match=r"Broken: torch\.compile failed: ValueError: planted\n  fix: leave out --compile"
    ):
        forward.compile(lambda size: (torch.zeros(size, dtype=torch.int64),) * 2, lambda done, total: None)


def test_without_a_compiler_the_error_says_so(tiny_checkpoint, tmp_path):
    environment = os.environ | {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = ["generate", "--model", str(tiny_checkpoint), "--raw", "--compile", "--device", "cpu", "-n", "2", "hello"]
    done = subprocess.run(
        [sys.executable, "-m", "torchplug", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and not done.stdout, done.stderr
    assert "torch.compile finds no working compiler" in done.stderr and "leave out --compile" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_is_told_before_and_after_each_compilation():
    seen = []

    class Counted(nn.Module):
        def forward(self, input_ids, positions):
            return (input_ids + positions)[:, None] * 2.0

    forward = CompiledForward(Counted())
    sizes = []

    def inputs(size):
        sizes.append(size)
        return (torch.zeros(size, dtype=torch.int64),) * 2

    with torch.inference_mode():
        forward.compile(inputs, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)] and sizes == [1, 3]


@pytest.mark.cuda
def test_on_cuda_float32_gives_the_tokens_of_eager_steps(tiny_checkpoint):
    options = {"device": "cuda", "dtype": "float32", "max_num_seqs": 6, "use_tqdm_on_load": False}
    with LLM(tiny_checkpoint, compile=True, **options) as compiled, LLM(tiny_checkpoint, **options) as eager:
        for lengths in ([9], [2, 30, 5, 17]):
            assert tokens(compiled, lengths) == tokens(eager, lengths)


@pytest.mark.cuda
def test_on_cuda_the_compiled_model_is_what_the_graphs_record(tiny_checkpoint):
    options = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 6, "use_tqdm_on_load": False}
    asked = dataclasses.replace(GREEDY, logprobs=2)
    with (
        LLM(tiny_checkpoint, compile=True, **options) as llm,
        LLM(tiny_checkpoint, enforce_eager=True, **options) as eager,
    ):
        execution = llm.llm_engine.execution
        assert "torch.compile; CUDA graphs for decode steps of 1, 2, 4, 6 requests" in execution, execution
        found, expected = (
            {
                number: list(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True))
                for number, output in enumerate(each.generate(prompts([2, 30, 5, 17]), asked, use_tqdm=False))
            }
            for each in (llm, eager)
        )
    check_alike(found, expected, 0.5)
