"""The Llama oracle fails on the faults that a Llama is likely to have: a test that cannot fail proves nothing.

Most faults are planted in the files that we load while the reference is made from the files as they were: a rotation
that runs one position ahead, a softmax scale or a transposed grouping of heads are each the same as some edit of the
projection weights. What no file can express (the mask, a dropped residual, the cache) is planted in the loaded
module, through the layer interface that model authors use.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torchplug
from checkpoints import OracleMismatch, assert_same_logits, assert_same_tokens, edit_weights, module_logits
from llama_cases import DYNAMIC, LINEAR, LLAMA3, ODD, YARN
from torch import Tensor
from torchplug.forward_context import ForwardContext, get_forward_context, set_forward_context
from torchplug.layers.attention import Attention

pytestmark = pytest.mark.oracle

HEADS, KV_HEADS, HEAD_DIM, THETA = 6, 3, 16, 10000.0
CONFIG = ODD | {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "attention_bias": True,
    "mlp_bias": True,
    "rms_norm_eps": 1e-6,
}
SEED = 0
(PROMPT,) = checkpoints.random_prompts(CONFIG["vocab_size"], (40,), seed=1)
GREEDY = torchplug.SamplingParams(temperature=0, max_tokens=checkpoints.STEPS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("faultless"), CONFIG, seed=SEED)


@pytest.fixture(scope="module")
def reference(faultless: Path) -> Tensor:
    return checkpoints.oracle_logits(checkpoints.oracle_model(faultless), PROMPT)


@pytest.fixture
def copied(faultless: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(faultless, tmp_path / "copy"))


def our_module(host: Any, directory: Path) -> Any:
    return host.load(str(directory), device="cpu", dtype="float32").module


def test_without_a_fault_the_oracle_agrees(host: Any, faultless: Path, reference: Tensor) -> None:
    assert_same_logits(module_logits(our_module(host, faultless), PROMPT), reference)


# Faults that an edit of the files expresses


def theta_off_by_2_percent(directory: Path) -> None:
    change_rope(directory, rope_theta=THETA * 1.02)


def eps_1e_4_in_place_of_1e_6(directory: Path) -> None:
    change_config(directory, rms_norm_eps=1e-4)


def keys_rotated_one_position_ahead(directory: Path) -> None:
    # Rotations about the same planes add up, so a fixed turn of the key projection's rows by one position is the same
    # fault.
    angles = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    cos, sin = torch.cat([angles.cos()] * 2), torch.cat([angles.sin()] * 2)

    def turn(rows: Tensor) -> Tensor:  # [kv_heads * head_dim, ...]
        heads = rows.double().reshape(KV_HEADS, HEAD_DIM, -1)
        first, second = heads.chunk(2, dim=1)
        turned = heads * cos[:, None] + torch.cat([-second, first], dim=1) * sin[:, None]
        return turned.reshape(rows.shape).float()

    change_tensors(directory, "k_proj", turn)


def rope_on_neighbouring_pairs(directory: Path) -> None:
    # (0, 1), (2, 3), ... in place of (0, d/2), (1, d/2 + 1), ...
    order = torch.arange(HEAD_DIM).reshape(-1, 2).T.flatten()

    def reorder(rows: Tensor) -> Tensor:
        return rows.reshape(-1, HEAD_DIM, *rows.shape[1:])[:, order].reshape(rows.shape)

    change_tensors(directory, "q_proj", reorder)
    change_tensors(directory, "k_proj", reorder)


def softmax_scale_2_percent_high(directory: Path) -> None:
    change_tensors(directory, "q_proj", lambda rows: rows * 1.02)


def softmax_scale_from_hidden_size_over_heads(directory: Path) -> None:
    width = CONFIG["hidden_size"] // HEADS
    change_tensors(directory, "q_proj", lambda rows: rows * (HEAD_DIM / width) ** 0.5)


def kv_heads_repeated_in_turn(directory: Path) -> None:
    # Query head i reads kv head i % kv_heads in place of i // group: the same as moving the query heads and o_proj's
    # columns.
    order = torch.tensor([i for kv in range(KV_HEADS) for i in range(HEADS) if i % KV_HEADS == kv])

    def move_rows(rows: Tensor) -> Tensor:
        return rows.reshape(HEADS, HEAD_DIM, *rows.shape[1:])[order].reshape(rows.shape)

    change_tensors(directory, "q_proj", move_rows)
    change_tensors(directory, "o_proj.weight", lambda weight: move_rows(weight.T.contiguous()).T)


def gate_and_up_swapped(directory: Path) -> None:
    def swap(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if "gate_proj" in name]:
            other = name.replace("gate_proj", "up_proj")
            weights[name], weights[other] = weights[other], weights[name]

    edit_weights(directory, swap)


def gate_and_up_swapped_in_one_layer(directory: Path) -> None:
    def swap(weights: dict[str, Tensor]) -> None:
        for leaf in ("weight", "bias"):
            gate, up = f"model.layers.2.mlp.gate_proj.{leaf}", f"model.layers.2.mlp.up_proj.{leaf}"
            weights[gate], weights[up] = weights[up], weights[gate]

    edit_weights(directory, swap)


def head_tied_though_it_is_not(directory: Path) -> None:
    def tie(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    edit_weights(directory, tie)


def bias_dropped(name: str) -> Callable[[Path], None]:
    def drop(directory: Path) -> None:
        change_tensors(directory, f"layers.1.{name}.bias", torch.zeros_like)

    return drop


def norm_weight_ignored(name: str) -> Callable[[Path], None]:
    def ignore(directory: Path) -> None:
        change_tensors(directory, f"model.{name}.weight", torch.ones_like)

    return ignore


def norm_weight_off_in_one_channel(directory: Path) -> None:
    def nudge(weight: Tensor) -> Tensor:
        return torch.cat([weight[:-1], weight[-1:] * 1.05])

    change_tensors(directory, "model.layers.2.input_layernorm.weight", nudge)


BIASES = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]
NORMS = ["layers.0.input_layernorm", "layers.2.input_layernorm", "layers.1.post_attention_layernorm", "norm"]
FILE_FAULTS: dict[str, Callable[[Path], None]] = {
    fault.__name__: fault
    for fault in (
        theta_off_by_2_percent,
        eps_1e_4_in_place_of_1e_6,
        keys_rotated_one_position_ahead,
        rope_on_neighbouring_pairs,
        softmax_scale_2_percent_high,
        softmax_scale_from_hidden_size_over_heads,
        kv_heads_repeated_in_turn,
        gate_and_up_swapped,
        gate_and_up_swapped_in_one_layer,
        head_tied_though_it_is_not,
        norm_weight_off_in_one_channel,
    )
}
FILE_FAULTS |= {f"bias_dropped: {name}": bias_dropped(name) for name in BIASES}
FILE_FAULTS |= {f"norm_weight_ignored: {name}": norm_weight_ignored(name) for name in NORMS}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_the_oracle_fails_on_a_fault_in_the_arithmetic(host: Any, copied: Path, reference: Tensor, fault: str) -> None:
    FILE_FAULTS[fault](copied)
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(our_module(host, copied), PROMPT), reference)


def test_the_oracle_fails_when_a_tied_head_is_not_the_embedding(host: Any, tmp_path: Path) -> None:
    directory = checkpoints.write_checkpoint(tmp_path, CONFIG | {"tie_word_embeddings": True}, seed=SEED)
    expected = checkpoints.oracle_logits(checkpoints.oracle_model(directory), PROMPT)
    assert_same_logits(module_logits(our_module(host, directory), PROMPT), expected)
    change_config(directory, tie_word_embeddings=False)

    def untie(weights: dict[str, Tensor]) -> None:
        embedding = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = torch.randn_like(embedding) * embedding.std()

    edit_weights(directory, untie)
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(our_module(host, directory), PROMPT), expected)


ROPE_FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear ignored": (LINEAR, {"rope_type": "default"}),
    "linear factor 2 % off": (LINEAR, {"factor": LINEAR["factor"] * 1.02}),
    "dynamic ignored": (DYNAMIC, {"rope_type": "default"}),
    "dynamic taken for linear": (DYNAMIC, {"rope_type": "linear"}),
    "llama3 ignored": (LLAMA3, {"rope_type": "default"}),
    "llama3 taken for linear": (LLAMA3, {"rope_type": "linear"}),
    "llama3 low bound ignored": (LLAMA3, {"low_freq_factor": 0.5}),
    "llama3 high bound ignored": (LLAMA3, {"high_freq_factor": 3.0}),
    "llama3 original length 5 % off": (LLAMA3, {"original_max_position_embeddings": 67}),
    "yarn ignored": (YARN, {"rope_type": "default"}),
    "yarn taken for linear": (YARN, {"rope_type": "linear"}),
    "yarn attention factor ignored": (YARN, {"attention_factor": 1.0}),
    "yarn mscale ignored": (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale": None}),
    "yarn beta_fast ignored": (YARN | {"beta_fast": 2.0}, {"beta_fast": 32.0}),
    "yarn beta_slow ignored": (YARN | {"beta_slow": 0.3}, {"beta_slow": 1.0}),
    "yarn truncate ignored": (YARN | {"beta_fast": 6.0, "truncate": False}, {"truncate": True}),
    "yarn factor 2 % off": (YARN, {"factor": YARN["factor"] * 1.02}),
}


@pytest.mark.parametrize("fault", ROPE_FAULTS)
def test_the_oracle_fails_on_a_fault_in_rope_scaling(host: Any, tmp_path: Path, fault: str) -> None:
    right, wrong = ROPE_FAULTS[fault]
    length = 32 if right["rope_type"] == "dynamic" else 256  # dynamic scaling acts beyond the original length only
    config = CONFIG | {"rope_parameters": right, "max_position_embeddings": length}
    directory = checkpoints.write_checkpoint(tmp_path, config, seed=SEED)
    expected = checkpoints.oracle_logits(checkpoints.oracle_model(directory), PROMPT)
    assert_same_logits(module_logits(our_module(host, directory), PROMPT), expected)
    change_rope(directory, **wrong)
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(our_module(host, directory), PROMPT), expected)


# Faults that only code can have


def plain_attention(sees: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What replaces a layer's forward: attention over one sequence, the query at i seeing the key at j where `sees(i,
    j)`."""

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n = query.shape[0]
        q = query.reshape(n, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        k, v = key.reshape(n, KV_HEADS, HEAD_DIM), value.reshape(n, KV_HEADS, HEAD_DIM)
        scores = torch.einsum("ikgd,jkd->kgij", q, k) * HEAD_DIM**-0.5
        places = torch.arange(n)
        hidden = ~sees(places[:, None], places[None, :])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("kgij,jkd->ikgd", weights, v).reshape(n, -1)

    return forward


def attend(host: Any, directory: Path, sees: Callable[[Tensor, Tensor], Tensor]) -> Any:
    module = our_module(host, directory)
    layers = [layer for layer in module.modules() if isinstance(layer, Attention)]
    assert len(layers) == CONFIG["num_hidden_layers"]
    for layer in layers:
        layer.forward = plain_attention(sees)
    return module


MASK_FAULTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one token of the future is seen": lambda i, j: j <= i + 1,
    "the newest token is not seen": lambda i, j: (j < i) | (j == 0),
    "the oldest token of forty is not seen": lambda i, j: (j <= i) & ((j > 0) | (i < 39)),
    "nothing is masked": lambda i, j: j >= 0 * i,
}


def test_plain_attention_in_place_of_ours_agrees(host: Any, faultless: Path, reference: Tensor) -> None:
    module = attend(host, faultless, lambda i, j: j <= i)
    assert_same_logits(module_logits(module, PROMPT), reference)


@pytest.mark.parametrize("fault", MASK_FAULTS)
def test_the_oracle_fails_on_a_fault_in_the_mask(host: Any, faultless: Path, reference: Tensor, fault: str) -> None:
    module = attend(host, faultless, MASK_FAULTS[fault])
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(module, PROMPT), reference)


@pytest.mark.parametrize(("norm", "branch"), [("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")])
def test_the_oracle_fails_when_one_residual_is_dropped(
    host: Any, faultless: Path, reference: Tensor, norm: str, branch: str
) -> None:
    module = our_module(host, faultless)
    layer = module.get_submodule("model.layers.0")
    stream: list[Tensor] = []

    # A norm may be given the stream, or (the branch's output, the stream before it) to add up itself.
    def remember(_: Any, arguments: tuple[Tensor, ...]) -> None:
        stream[:] = [sum(tensor for tensor in arguments if tensor is not None).clone()]

    layer.get_submodule(norm).register_forward_pre_hook(remember)
    layer.get_submodule(branch).register_forward_hook(lambda _module, _arguments, output: output - stream[0])
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(module, PROMPT), reference)


# Faults that only generation has: the cache


@pytest.fixture(scope="module")
def continuations(faultless: Path) -> list[checkpoints.Continuation]:
    model = checkpoints.oracle_model(faultless)
    prompts = checkpoints.random_prompts(CONFIG["vocab_size"], (1, 7, 33))
    found = [checkpoints.oracle_continuation(model, prompt) for prompt in prompts]
    for continuation in found:
        continuation.require_telling()
    return found


def generated(directory: Path, references: list[checkpoints.Continuation]) -> list[list[int]]:
    llm = torchplug.LLM(str(directory), dtype="float32", skip_tokenizer_init=True)
    outputs = llm.generate([{"prompt_token_ids": list(reference.prompt)} for reference in references], GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def is_decode(context: ForwardContext | None) -> bool:
    return context is not None and set(context.query_lens_host) == {1}


def newest_cached_token_is_lost(context: ForwardContext) -> ForwardContext:
    return replace(
        context, seq_lens=context.seq_lens - 1, seq_lens_host=tuple(length - 1 for length in context.seq_lens_host)
    )


def requests_read_each_others_cache(context: ForwardContext) -> ForwardContext:
    return replace(
        context,
        block_tables=context.block_tables.roll(1, 0),
        block_tables_host=(context.block_tables_host[-1], *context.block_tables_host[:-1]),
    )


CACHE_FAULTS = {fault.__name__: fault for fault in (newest_cached_token_is_lost, requests_read_each_others_cache)}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts how often a planted fault acted; one that never acts proves nothing."""
    acted: list[int] = []
    yield acted
    assert acted, "the planted fault never acted"


def test_without_a_fault_generation_agrees(faultless: Path, continuations: list[checkpoints.Continuation]) -> None:
    for ours, theirs in zip(generated(faultless, continuations), continuations, strict=True):
        assert_same_tokens(ours, theirs)


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_the_oracle_fails_on_a_fault_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
    planted: list[int],
    faultless: Path,
    continuations: list[checkpoints.Continuation],
    fault: str,
) -> None:
    original = Attention.forward

    def faulty(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context = get_forward_context()
        if not is_decode(context):
            return original(self, query, key, value)
        planted.append(1)
        with set_forward_context(CACHE_FAULTS[fault](context)):
            return original(self, query, key, value)

    monkeypatch.setattr(Attention, "forward", faulty)
    # Slots that nobody wrote may hold anything, NaN included, and NaN logits are refused before a token comes of them.
    with pytest.raises((OracleMismatch, torchplug.ContractError)):
        for ours, theirs in zip(generated(faultless, continuations), continuations, strict=True):
            assert_same_tokens(ours, theirs)


def test_the_oracle_fails_when_positions_are_one_ahead_in_decode(
    monkeypatch: pytest.MonkeyPatch,
    planted: list[int],
    host: Any,
    faultless: Path,
    continuations: list[checkpoints.Continuation],
) -> None:
    cls = host.model_class("LlamaForCausalLM").cls
    original = cls.forward

    def faulty(self: Any, input_ids: Tensor, positions: Tensor, *rest: Any, **more: Any) -> Tensor:
        if is_decode(get_forward_context()):
            planted.append(1)
            positions = positions + 1
        return original(self, input_ids, positions, *rest, **more)

    monkeypatch.setattr(cls, "forward", faulty)
    with pytest.raises(OracleMismatch):
        for ours, theirs in zip(generated(faultless, continuations), continuations, strict=True):
            assert_same_tokens(ours, theirs)


# The rule itself


def test_the_rule_for_logits_is_what_it_says() -> None:
    reference = torch.tensor([[4.0, -10.0], [1.0, 2.0]])
    assert_same_logits(reference + 0.9e-3, reference)
    for wrong in (reference + 1.1e-3, reference * torch.nan, reference[:1], torch.full_like(reference, torch.inf)):
        with pytest.raises(OracleMismatch):
            assert_same_logits(wrong, reference)


def test_the_rule_for_tokens_wants_all_of_them() -> None:
    reference = checkpoints.Continuation((1,), (5, 6, 7), (0.1, 0.2, 0.3))
    assert_same_tokens([5, 6, 7], reference)
    for wrong in ([5, 6], [5, 6, 7, 7], [5, 7, 7], []):
        with pytest.raises(OracleMismatch):
            assert_same_tokens(wrong, reference)


def test_a_reference_that_tells_little_is_refused() -> None:
    varied, clear = tuple(range(24)), (0.5,) * 24
    checkpoints.Continuation((1,), varied, clear).require_telling()
    for tokens, gaps in (((*varied[:11], *[0] * 13), clear), (varied, (*clear[:-1], 0.9e-3))):
        with pytest.raises(checkpoints.WeakOracle):
            checkpoints.Continuation((1,), tokens, gaps).require_telling()


def change_config(directory: Path, **changes: Any) -> None:
    checkpoints.write_config(directory, checkpoints.read_config(directory) | changes)


def change_rope(directory: Path, **changes: Any) -> None:
    parameters = checkpoints.read_config(directory)["rope_parameters"] | changes
    change_config(directory, rope_parameters={key: value for key, value in parameters.items() if value is not None})


def change_tensors(directory: Path, part: str, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to every tensor that has `part` in its name."""

    def edit(weights: dict[str, Tensor]) -> None:
        names = [name for name in weights if part in name]
        assert names, f"no tensor with {part!r} in its name"
        for name in names:
            weights[name] = change(weights[name])

    edit_weights(directory, edit)
