"""RecurrentGemma equals transformers in float32, cold and warm, and the comparison notices planted faults."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torchplug import LLM, Host, SamplingParams
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, VllmConfig
from torchplug.forward_context import set_forward_context
from torchplug.layers import ForwardContext, RecurrentLayer
from torchplug.testing import conformance
from torchplug_recurrentgemma import RecurrentGemmaForCausalLM
from torchplug_recurrentgemma.recurrent import RecurrentBlock

STEPS = 24
BASE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "lru_width": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "attention_window_size": 7,
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CASES = {
    "as_released": (0, {}),
    "kernel_of_2": (1, {"conv1d_width": 2}),
    "attention_first": (2, {"block_types": ["attention", "recurrent"], "num_key_value_heads": 2}),
    "no_cap_to_speak_of": (4, {"logits_soft_cap": 1000.0, "attention_bias": True}),
}

test_conforms = conformance("RecurrentGemmaForCausalLM")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices are faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_checkpoint(directory: Path, seed: int, changes: dict) -> Path:
    model = transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**BASE | changes, **NO_TOKENS))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("bias"):
                parameter.normal_(0, 0.15, generator=generator)
            elif name.endswith("recurrent_param"):
                parameter.normal_(-3, 1, generator=generator)  # a from 0.3 to 0.99
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3, generator=generator)
            else:
                fan_in = parameter.shape[1] if "gate_weight" in name else math.prod(parameter.shape[1:])
                parameter.normal_(0, 2 / math.sqrt(fan_in), generator=generator)
        # The stream starts as the token itself, times sqrt(hidden_size), and the head is tied: make it small beside
        # what the layers add, and the logits large, else the model repeats what it reads.
        model.model.embed_tokens.weight.div_(4)
        model.model.final_norm.weight.add_(5)
    model.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Reference:
    """A checkpoint and what transformers makes of it: logits [40, vocab] of one prompt, greedy tokens after others."""

    directory: Path
    prompt: list[int]
    logits: torch.Tensor
    continuations: list[tuple[list[int], list[int]]]


def make_reference(directory: Path, seed: int, changes: dict) -> Reference:
    write_checkpoint(directory, seed, changes)
    model = transformers.RecurrentGemmaForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def logits_of(ids: list[int]) -> torch.Tensor:
        # One forward over everything: its own cache forgets what a chunk leaves behind.
        with torch.inference_mode():
            return model(torch.tensor([ids]), use_cache=False).logits[0]

    generator = torch.Generator().manual_seed(1)
    prompt, *prompts = (
        torch.randint(BASE["vocab_size"], (length,), generator=generator).tolist() for length in (40, 1, 15, 16, 17, 33)
    )
    continuations = []
    for ids in prompts:
        tokens: list[int] = []
        for _ in range(STEPS):
            best = logits_of([*ids, *tokens])[-1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "the reference has a near-tie: choose another seed"
            tokens.append(int(best.indices[0]))
        assert len(set(tokens)) >= 12, "the reference repeats itself: choose another seed"
        continuations.append((ids, tokens))
    return Reference(directory, prompt, logits_of(prompt), continuations)


def load(directory: Path) -> nn.Module:
    return Host().load(directory, device="cpu", dtype="float32").module


def relative_error(module: nn.Module, reference: Reference) -> float:
    """max|ours - reference| / max|reference| over all logits of the prompt."""
    ids = torch.tensor(reference.prompt)
    with torch.inference_mode():
        ours = module.compute_logits(module(ids, torch.arange(len(ids))))
    assert ours.shape == reference.logits.shape and not ours.isnan().any()
    return ((ours - reference.logits).abs().max() / reference.logits.abs().max()).item()


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("recurrentgemma"), *CASES[request.param])


def test_logits_equal_transformers(reference):
    assert relative_error(load(reference.directory), reference) <= 1e-4


@pytest.mark.parametrize("budget", [16, 512])
def test_greedy_tokens_equal_transformers_cold_and_warm(reference, budget):
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in reference.continuations]
    with LLM(
        reference.directory, dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=budget, max_num_seqs=8
    ) as llm:
        for round_ in ("cold", "warm"):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            assert found == [tokens for _, tokens in reference.continuations], round_
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 16, 32]


def test_the_cache_has_blocks_and_states(reference):
    with LLM(reference.directory, dtype="float32", skip_tokenizer_init=True, max_num_seqs=2) as llm:
        text = str(llm.llm_engine.kv_cache)
        assert "blocks" in text and "2 slots" in text and "6 for snapshots" in text


def test_padding_rows_leave_every_slot_as_it_was():
    """A step of two requests and two padding rows, one of them in the middle: each request as if it were alone."""
    torch.manual_seed(0)
    config = HfConfig(BASE, source="config.json", defaults=RecurrentGemmaForCausalLM.config_defaults)
    settings = VllmConfig(ModelConfig("x", config, torch.float32, 64), DeviceConfig(torch.device("cpu")))
    layer = RecurrentBlock(config, settings)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.3)
    x = torch.randn(9, 48)
    layer.state = tuple(torch.full((5, *shape), torch.nan) for shape in layer.state_shapes())
    lengths, slots = (3, 1, 4, 1), (2, -1, 0, -1)
    context = ForwardContext(
        query_start_loc=torch.tensor([0, 3, 4, 8, 9], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        block_tables=torch.zeros(0, 0, dtype=torch.int32),
        block_size=16,
        query_lens_host=lengths,
        seq_lens_host=lengths,
        block_tables_host=(),
        state_slots=torch.tensor(slots),
        state_slots_host=slots,
    )
    with set_forward_context(context):
        found = layer(x)
    for first, last, slot in ((0, 3, 2), (4, 8, 0)):
        torch.testing.assert_close(found[first:last], layer(x[first:last]))
        assert all(state[slot].isfinite().all() for state in layer.state)
    assert all(state[slot].isnan().all() for state in layer.state for slot in (1, 3, 4))


# Faults, each of which somebody could make


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("plain"), *CASES["as_released"])


FAULTS = {
    "window one wider": {"attention_window_size": 8},
    "all of a head rotated": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "partial_rotary_factor": 1.0,
    },
    "cap of 29": {"logits_soft_cap": 29.0},
    "epsilon 1e-3": {"rms_norm_eps": 1e-3},
    "exact gelu": {"hidden_activation": "gelu"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_config_shows(plain, tmp_path, fault):
    for file in plain.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | FAULTS[fault]))
    assert relative_error(load(tmp_path), plain) > 1e-4


def recurrence(name, change):
    def plant(module):
        for part in module.modules():
            if isinstance(part, RecurrentLayer):
                parameter = part.get_parameter(name)
                parameter.copy_(change(parameter.clone()))

    return plant


WEIGHT_FAULTS = {
    "taps in reverse": recurrence("conv_1d.weight", lambda w: w.flip(-1)),
    "a tap late": recurrence("conv_1d.weight", lambda w: w.roll(1, -1)),
    "gates transposed": recurrence("rg_lru.input_gate_weight", lambda w: w.transpose(1, 2)),
    "decay 2 % off": recurrence("rg_lru.recurrent_param", lambda w: w * 1.02),
    "no gate bias": recurrence("rg_lru.recurrent_gate_bias", torch.zeros_like),
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_a_fault_in_the_recurrence_shows(plain, fault):
    module = load(plain.directory)
    with torch.no_grad():
        WEIGHT_FAULTS[fault](module)
    assert relative_error(module, plain) > 1e-4
