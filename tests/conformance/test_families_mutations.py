"""The oracles of Mistral, Qwen2 and Qwen3 fail on the faults that set these families apart from Llama.

Faults are planted in the files that we load while the reference is made from the files as they were, or in the loaded
module. Those of the arithmetic that the families share with Llama are in test_llama_mutations.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torchplug
from checkpoints import (
    OracleMismatch,
    assert_same_logits,
    assert_same_tokens,
    edit_weights,
    module_logits,
    read_config,
    write_config,
)
from family_cases import CASES, WINDOW
from torch import Tensor, nn
from torchplug.forward_context import get_forward_context
from torchplug.layers import Attention

pytestmark = pytest.mark.oracle

FAULTLESS = {
    "mistral": CASES["mistral-5_heads_of_24_one_kv_head"],
    "qwen2": CASES["qwen2-window_in_the_upper_layers"],
    "qwen3": CASES["qwen3-layer_types_and_biases"],
}
GREEDY = torchplug.SamplingParams(temperature=0, max_tokens=checkpoints.STEPS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: checkpoints.write_checkpoint(
            tmp_path_factory.mktemp(family), case.config, seed=case.seed, **case.options
        )
        for family, case in FAULTLESS.items()
    }


@pytest.fixture(scope="module")
def references(faultless: dict[str, Path]) -> dict[str, Tensor]:
    return {
        family: checkpoints.oracle_logits(checkpoints.oracle_model(directory), FAULTLESS[family].logits_prompt)
        for family, directory in faultless.items()
    }


def our_module(host: Any, directory: Path) -> Any:
    return host.load(str(directory), device="cpu", dtype="float32").module


@pytest.mark.parametrize("family", FAULTLESS)
def test_without_a_fault_the_oracle_agrees(
    host: Any, faultless: dict[str, Path], references: dict[str, Tensor], family: str
) -> None:
    module = our_module(host, faultless[family])
    assert_same_logits(module_logits(module, FAULTLESS[family].logits_prompt), references[family])


# Faults that an edit of the files expresses

Fault = Callable[[Path], None]


def config_says(**changes: Any) -> Fault:
    return lambda directory: write_config(directory, read_config(directory) | changes)


def theta_2_percent_high(directory: Path) -> None:
    rope = read_config(directory)["rope_parameters"]
    config_says(rope_parameters=rope | {"rope_theta": rope["rope_theta"] * 1.02})(directory)


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    def edit(weights: dict[str, Tensor]) -> None:
        weights[name] = change(weights[name])

    return lambda directory: edit_weights(directory, edit)


def dropped(name: str) -> Fault:
    return tensor(f"model.layers.1.self_attn.{name}.bias", torch.zeros_like)


def head_tied_though_it_is_not(directory: Path) -> None:
    def tie(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    edit_weights(directory, tie)


def query_norm_on_keys_and_the_reverse(directory: Path) -> None:
    def swap(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if "q_norm" in name]:
            other = name.replace("q_norm", "k_norm")
            weights[name], weights[other] = weights[other], weights[name]

    edit_weights(directory, swap)


_WINDOWS: dict[str, Fault] = {
    "window one token short": config_says(sliding_window=WINDOW - 1),
    "window one token long": config_says(sliding_window=WINDOW + 1),
}
_SHARED: dict[str, Fault] = {
    "theta 2 % high": theta_2_percent_high,
    "eps 1e-4 too large": config_says(rms_norm_eps=1.1e-4),
    "head tied though it is not": head_tied_though_it_is_not,
}
FILE_FAULTS: dict[str, dict[str, Fault]] = {
    "mistral": _SHARED
    | _WINDOWS
    | {
        "window ignored": config_says(sliding_window=None),
        "window on every second layer": config_says(
            layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        "softmax scale 2 % high": tensor("model.layers.1.self_attn.q_proj.weight", lambda rows: rows * 1.02),
    },
    "qwen2": _SHARED
    | _WINDOWS
    | {
        "windows ignored": config_says(use_sliding_window=False),
        "windows one layer early": config_says(max_window_layers=0),
        "windows one layer late": config_says(max_window_layers=2),
        "windows in the lower layers": config_says(
            layer_types=["sliding_attention", "full_attention", "full_attention"]
        ),
        "q bias dropped": dropped("q_proj"),
        "k bias dropped": dropped("k_proj"),
        "v bias dropped": dropped("v_proj"),
    },
    "qwen3": _SHARED
    | _WINDOWS
    | {
        "layer_types ignored": config_says(layer_types=None),
        "layer_types upside down": config_says(layer_types=["full_attention", "sliding_attention", "full_attention"]),
        "q bias dropped": dropped("q_proj"),
        "k bias dropped": dropped("k_proj"),
        "v bias dropped": dropped("v_proj"),
        "o bias dropped": dropped("o_proj"),
        "query norm weight ignored": tensor("model.layers.0.self_attn.q_norm.weight", torch.ones_like),
        "key norm weight ignored": tensor("model.layers.2.self_attn.k_norm.weight", torch.ones_like),
        "query norm on keys and the reverse": query_norm_on_keys_and_the_reverse,
    },
}


@pytest.mark.parametrize(
    ("family", "fault"), [(family, fault) for family in FILE_FAULTS for fault in FILE_FAULTS[family]]
)
def test_the_oracle_fails_on_a_fault_in_the_files(
    host: Any, tmp_path: Path, faultless: dict[str, Path], references: dict[str, Tensor], family: str, fault: str
) -> None:
    directory = Path(shutil.copytree(faultless[family], tmp_path / "copy"))
    FILE_FAULTS[family][fault](directory)
    with pytest.raises(OracleMismatch):
        assert_same_logits(
            module_logits(our_module(host, directory), FAULTLESS[family].logits_prompt), references[family]
        )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_oracle_fails_when_a_tied_head_is_not_the_embedding(host: Any, tmp_path: Path, family: str) -> None:
    case = CASES[f"{family}-tied"]
    checkpoints.write_checkpoint(tmp_path, case.config, seed=case.seed, **case.options)
    expected = checkpoints.oracle_logits(checkpoints.oracle_model(tmp_path), case.logits_prompt)
    config_says(tie_word_embeddings=False)(tmp_path)

    def untie(weights: dict[str, Tensor]) -> None:
        embedding = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = torch.randn_like(embedding) * embedding.std()

    edit_weights(tmp_path, untie)
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(our_module(host, tmp_path), case.logits_prompt), expected)


# Faults that only code can have: the norm of queries and keys


class WithoutNorm(nn.Module):
    def forward(self, heads: Tensor) -> Tensor:
        return heads


class NormOfTheWholeProjection(nn.Module):
    """One mean square over all heads of a token, as in OLMo 2, in place of one for each head."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, heads: Tensor) -> Tensor:
        return heads * (heads.square().mean((-2, -1), keepdim=True) + self.eps).rsqrt() * self.weight


def no_query_norm(attention: Any) -> None:
    attention.q_norm = WithoutNorm()


def no_key_norm(attention: Any) -> None:
    attention.k_norm = WithoutNorm()


def query_norm_over_all_heads(attention: Any) -> None:
    attention.q_norm = NormOfTheWholeProjection(attention.q_norm)


def norm_after_rope(attention: Any) -> None:
    norms, inner, size = (attention.q_norm, attention.k_norm), attention.attn.forward, attention.head_size
    attention.q_norm = attention.k_norm = WithoutNorm()

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = (
            norm(heads.unflatten(-1, (-1, size))).flatten(1) for norm, heads in zip(norms, (query, key), strict=True)
        )
        return inner(query, key, value)

    attention.attn.forward = forward


QK_NORM_FAULTS = {
    fault.__name__: fault for fault in (no_query_norm, no_key_norm, query_norm_over_all_heads, norm_after_rope)
}


@pytest.mark.parametrize("fault", QK_NORM_FAULTS)
def test_the_oracle_fails_on_a_fault_in_the_norm_of_queries_and_keys(
    host: Any, faultless: dict[str, Path], references: dict[str, Tensor], fault: str
) -> None:
    module = our_module(host, faultless["qwen3"])
    QK_NORM_FAULTS[fault](module.model.layers[1].self_attn)
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(module, FAULTLESS["qwen3"].logits_prompt), references["qwen3"])


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_the_oracle_fails_when_that_norm_has_the_default_eps_in_place_of_the_configs(
    host: Any, tmp_path: Path, norm: str
) -> None:
    case = CASES["qwen3-eps_1e-2"]
    checkpoints.write_checkpoint(tmp_path, case.config, seed=case.seed, **case.options)
    expected = checkpoints.oracle_logits(checkpoints.oracle_model(tmp_path), case.logits_prompt)
    module = our_module(host, tmp_path)
    for layer in module.model.layers:
        layer.self_attn.get_submodule(norm).eps = 1e-6
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(module, case.logits_prompt), expected)


# Faults that only generation has: the window in the cache


@pytest.fixture(scope="module")
def continuations(faultless: dict[str, Path]) -> dict[str, list[checkpoints.Continuation]]:
    found = {}
    for family, directory in faultless.items():
        model = checkpoints.oracle_model(directory)
        found[family] = [checkpoints.oracle_continuation(model, prompt) for prompt in FAULTLESS[family].prompts]
        for continuation in found[family]:
            continuation.require_telling()
    return found


def assert_generation_agrees(directory: Path, references: list[checkpoints.Continuation], **limits: int) -> None:
    llm = torchplug.LLM(str(directory), dtype="float32", skip_tokenizer_init=True, **limits)
    outputs = llm.generate([{"prompt_token_ids": list(reference.prompt)} for reference in references], GREEDY)
    for output, reference in zip(outputs, references, strict=True):
        assert_same_tokens(output.outputs[0].token_ids, reference)


def window_of(tokens: int | None, *, where: Callable[[Any], bool]) -> Callable[[Any], int | None]:
    """What a sliding layer takes for its window: `tokens` in steps where `where` holds."""
    return lambda context: tokens if where(context) else WINDOW


def is_decode(context: Any) -> bool:
    return set(context.query_lens_host) == {1}


def is_later_chunk(context: Any) -> bool:
    return any(1 < new < length for new, length in zip(context.query_lens_host, context.seq_lens_host, strict=True))


CACHE_FAULTS = {
    "one token short in decode": window_of(WINDOW - 1, where=is_decode),
    "one token long in decode": window_of(WINDOW + 1, where=is_decode),
    "none in decode": window_of(None, where=is_decode),
    "one token short in later chunks": window_of(WINDOW - 1, where=is_later_chunk),
    "one token long in later chunks": window_of(WINDOW + 1, where=is_later_chunk),
}


@pytest.mark.parametrize("family", FAULTLESS)
def test_without_a_fault_generation_agrees(
    faultless: dict[str, Path], continuations: dict[str, list[checkpoints.Continuation]], family: str
) -> None:
    assert_generation_agrees(faultless[family], continuations[family], max_num_batched_tokens=12, max_num_seqs=4)


@pytest.mark.parametrize("fault", CACHE_FAULTS)
@pytest.mark.parametrize("family", FAULTLESS)
def test_the_oracle_fails_on_a_fault_in_the_cached_window(
    monkeypatch: pytest.MonkeyPatch,
    faultless: dict[str, Path],
    continuations: dict[str, list[checkpoints.Continuation]],
    family: str,
    fault: str,
) -> None:
    original, acted = Attention.forward, []

    def faulty(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        right = self.sliding_window
        if right is not None:
            self.sliding_window = CACHE_FAULTS[fault](get_forward_context())
            acted.append(self.sliding_window != right)
        try:
            return original(self, query, key, value)
        finally:
            self.sliding_window = right

    monkeypatch.setattr(Attention, "forward", faulty)
    with pytest.raises(OracleMismatch):
        assert_generation_agrees(faultless[family], continuations[family], max_num_batched_tokens=12, max_num_seqs=4)
    assert any(acted), "the planted fault never acted"
