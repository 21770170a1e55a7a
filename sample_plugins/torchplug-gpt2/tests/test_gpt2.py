"""GPT2LMHeadModel equals transformers on random checkpoints, and the comparison notices the faults a GPT-2 may have.

The weights have a standard deviation of 2 / sqrt(fan-in), with random biases and norms: at the usual 0.02 a model
hardly depends on its attention, and a wrong one passes. Biases stay small, or the last norm's would choose every token;
positions are large, or tokens repeat. A reference counts only if its greedy tokens vary and no step is a near-tie; the
seeds below are the first for which this holds.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torchplug import LLM, CheckpointError, Host, PluginError, SamplingParams
from torchplug.layers import Attention
from torchplug.testing import conformance

test_conforms = conformance("GPT2LMHeadModel")

STEPS = 24
PROMPT_LENGTHS = (1, 2, 7, 33)
BASE = {
    "vocab_size": 503,
    "n_positions": 96,
    "n_embd": 60,
    "n_layer": 3,
    "n_head": 5,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
REQUIRED = ("vocab_size", "n_embd", "n_layer", "n_head")


@dataclass(frozen=True)
class Case:
    """One checkpoint: the seed of its weights, what it changes in BASE, and which keys its config.json leaves out."""

    seed: int
    changes: dict = field(default_factory=dict)
    absent: tuple[str, ...] = ()


CASES = {
    "five_heads_of_12": Case(0),
    "one_layer": Case(0, {"n_layer": 1}),
    "one_head": Case(7, {"n_head": 1, "n_embd": 34}),
    "n_inner_77": Case(0, {"n_inner": 77}),
    "untied_head": Case(1, {"tie_word_embeddings": False}),
    "unscaled_attention": Case(0, {"scale_attn_weights": False}),
    "scaled_by_layer": Case(0, {"scale_attn_by_inverse_layer_idx": True}),
    "scaled_by_layer_only": Case(0, {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
    "reordered_attention": Case(0, {"reorder_and_upcast_attn": True}),
    "gelu": Case(0, {"activation_function": "gelu"}),
    "relu": Case(0, {"activation_function": "relu"}),
    "silu": Case(3, {"activation_function": "silu"}),
    "wide_epsilon": Case(0, {"layer_norm_epsilon": 0.05}),
    "required_keys_only": Case(0, {"n_positions": 1024}, tuple(key for key in BASE if key not in REQUIRED)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices are faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_checkpoint(directory: Path, case: Case) -> Path:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**BASE | case.changes, **NO_TOKENS))
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("bias"):
                parameter.normal_(0, 0.15, generator=generator)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif "wpe" in name:
                parameter.normal_(0, 1, generator=generator)
            else:
                in_by_out = ".c_" in name  # transformers' Conv1D; embeddings and head are [out, in]
                fan_in = parameter.shape[0 if in_by_out else 1]
                parameter.normal_(0, 2 / math.sqrt(fan_in), generator=generator)
    model.save_pretrained(directory)
    values = BASE | case.changes | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"}
    values = {key: value for key, value in values.items() if key not in case.absent}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def edit_weights(directory: Path, edit) -> None:
    """Rewrite the checkpoint's weights after `edit(weights)` changed the mapping in place."""
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")


def edit_config(directory: Path, **changes) -> None:
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | changes))


@dataclass(frozen=True)
class Reference:
    """A checkpoint and what transformers makes of it: logits [40, vocab] of one prompt, greedy tokens after others."""

    directory: Path
    prompt: list[int]
    logits: torch.Tensor
    continuations: list[tuple[list[int], list[int]]]


def make_reference(directory: Path, case: Case) -> Reference:
    write_checkpoint(directory, case)
    model = transformers.GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    (prompt, *prompts) = (
        torch.randint(BASE["vocab_size"], (1, length), generator=generator) for length in (40, *PROMPT_LENGTHS)
    )
    with torch.inference_mode():
        logits = model.eval()(prompt, use_cache=False).logits[0]
    continuations = []
    for ids in prompts:
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=STEPS,
            max_new_tokens=STEPS,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = found.sequences[0, ids.shape[1] :].tolist()
        best = torch.cat(found.logits).topk(2).values
        assert len(set(tokens)) >= 12, "the reference repeats itself: choose another seed"
        assert (best[:, 0] - best[:, 1]).min() > 1e-3, "the reference has a near-tie: choose another seed"
        continuations.append((ids[0].tolist(), tokens))
    return Reference(directory, prompt[0].tolist(), logits, continuations)


def load(directory: Path) -> nn.Module:
    return Host().load(directory, device="cpu", dtype="float32").module


def relative_error(module: nn.Module, reference: Reference) -> float:
    """max|ours - reference| / max|reference| over all logits of the prompt."""
    ids = torch.tensor(reference.prompt)
    with torch.inference_mode():
        ours = module.compute_logits(module(ids, torch.arange(len(ids))))
    assert ours.shape == reference.logits.shape and not ours.isnan().any()
    return ((ours - reference.logits).abs().max() / reference.logits.abs().max()).item()


# Equality


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("gpt2"), CASES[request.param])


def test_logits_equal_transformers(reference):
    assert relative_error(load(reference.directory), reference) <= 1e-4


def test_greedy_tokens_of_a_mixed_batch_equal_transformers(reference):
    llm = LLM(reference.directory, dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in reference.continuations]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [tokens for _, tokens in reference.continuations]


# The checkpoint's names


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("plain"), CASES["five_heads_of_12"])


@pytest.fixture
def copied(plain, tmp_path) -> Path:
    """A copy of the plain checkpoint, for a test to change."""
    for file in plain.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def without_prefix(weights):
    for name in list(weights):
        weights[name.removeprefix("transformer.")] = weights.pop(name)


def with_mask_buffers(weights):
    for layer in range(BASE["n_layer"]):
        weights[f"transformer.h.{layer}.attn.bias"] = torch.ones(96, 96, dtype=torch.uint8).tril()[None, None]
        weights[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)


def with_a_copy_of_the_tied_head(weights):
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()


def as_the_first_release(weights):
    with_mask_buffers(weights)
    without_prefix(weights)


@pytest.mark.parametrize(
    "edit", [without_prefix, with_mask_buffers, with_a_copy_of_the_tied_head, as_the_first_release]
)
def test_every_spelling_of_the_weights_loads(plain, copied, edit):
    before = set(load_file(copied / "model.safetensors"))
    edit_weights(copied, edit)
    assert set(load_file(copied / "model.safetensors")) != before
    assert relative_error(load(copied), plain) <= 1e-4


def test_weights_that_do_not_belong_here_are_refused_by_name(copied):
    def cross_attention(weights):
        weights["transformer.h.0.crossattention.c_attn.weight"] = torch.zeros(60, 120)
        del weights["transformer.h.1.mlp.c_fc.bias"]

    edit_weights(copied, cross_attention)
    with pytest.raises(CheckpointError) as error:
        load(copied)
    assert "h.0.crossattention.c_attn.weight" in str(error.value) and "h.1.mlp.c_fc.bias" in str(error.value)


def test_a_width_that_heads_cannot_share_is_said(copied):
    edit_config(copied, n_head=7)
    with pytest.raises(PluginError, match="n_embd 60 is not a multiple of n_head 7"):
        load(copied)


def test_generation_ends_at_the_last_position(plain):
    llm = LLM(plain.directory, dtype="float32", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5] * (BASE["n_positions"] - 3)}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].finish_reason == "length"


# Mutations: each is a fault that somebody could make, planted in the files that we load


def change(pattern, function):
    def edit(weights):
        names = [name for name in weights if pattern in name]
        assert names
        for name in names:
            weights[name] = function(weights[name])

    return edit


def scaled_query(factor):
    def scale(tensor):  # query, key and value lie side by side in the last dimension
        tensor[..., : BASE["n_embd"]] *= factor
        return tensor

    return scale


def heads_interleaved(tensor):  # [in, out] with head-major rows, read as if each head kept every fifth one
    return tensor.reshape(5, 12, -1).transpose(0, 1).reshape(tensor.shape)


WEIGHT_FAULTS = {
    "square projection not turned": change("attn.c_proj.weight", lambda tensor: tensor.T),
    "heads in the wrong order": change("attn.c_proj.weight", heads_interleaved),
    "positions off by one": change("wpe.weight", lambda tensor: tensor.roll(1, 0)),
    "positions left out": change("wpe.weight", torch.zeros_like),
    "attention scale 2 % high": change("c_attn", scaled_query(1.02)),
    "query bias left out": change("c_attn.bias", scaled_query(0)),
    "output bias left out": change("mlp.c_proj.bias", torch.zeros_like),
    "last norm without its bias": change("ln_f.bias", torch.zeros_like),
    "norms swapped": lambda weights: weights.update(
        {
            name: weights[name.replace("ln_1", "ln_#").replace("ln_2", "ln_1").replace("ln_#", "ln_2")]
            for name in list(weights)
        }
    ),
}
CONFIG_FAULTS = {
    "exact gelu": {"activation_function": "gelu"},
    "epsilon 1e-3": {"layer_norm_epsilon": 1e-3},
    "attention not scaled": {"scale_attn_weights": False},
    "attention scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_a_fault_in_the_weights_shows(plain, copied, fault):
    edit_weights(copied, WEIGHT_FAULTS[fault])
    assert relative_error(load(copied), plain) > 1e-4


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_fault_in_the_config_shows(plain, copied, fault):
    edit_config(copied, **CONFIG_FAULTS[fault])
    assert relative_error(load(copied), plain) > 1e-4


def test_a_head_that_should_be_tied_shows(plain, copied):
    edit_config(copied, tie_word_embeddings=False)
    edit_weights(copied, lambda weights: weights.update({"lm_head.weight": weights["transformer.wte.weight"].flip(0)}))
    assert relative_error(load(copied), plain) > 1e-4


def test_a_mask_off_by_one_shows(plain):
    module = load(plain.directory)
    attention = next(part for part in module.modules() if isinstance(part, Attention))
    attend = attention.forward
    # The keys and values moved up by one: every token sees its successor's in place of the first one's.
    attention.forward = lambda query, key, value: attend(query, key.roll(-1, 0), value.roll(-1, 0))
    assert relative_error(module, plain) > 1e-4
