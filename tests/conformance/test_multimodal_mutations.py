"""The oracles of the vision-language models fail on faults in towers, connectors, positions and merging.

Faults are planted in the files that we load while the reference is made from the files as they were, in the loaded
module, or in the functions that it calls. Those of the language models are in test_llama_mutations and
test_families_mutations.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchplug_models.qwen2_5_vl
import torchplug_models.qwen2_vl
import torchplug_models.qwen3_vl
import torchplug_models.qwen_vision
from checkpoints import OracleMismatch, assert_same_logits, assert_same_tokens, edit_weights, read_config, write_config
from multimodal_cases import (
    CASES,
    Prompt,
    oracle_continuation,
    oracle_logits,
    oracle_model,
    our_continuation,
    our_logits,
    our_positions,
    prompts_of,
    video_prompt_of,
    write_case,
)
from torch import Tensor
from torchplug.layers import MRotaryEmbedding

pytestmark = pytest.mark.oracle

FAULTLESS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava")
QWEN = FAULTLESS[:3]
MODULES = {
    "qwen2_vl": torchplug_models.qwen2_vl,
    "qwen2_5_vl": torchplug_models.qwen2_5_vl,
    "qwen3_vl": torchplug_models.qwen3_vl,
}


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_case(CASES[name], tmp_path_factory.mktemp(name)) for name in FAULTLESS}


@pytest.fixture(scope="module")
def references(host: Any, faultless: dict[str, Path]) -> dict[str, list[tuple[Prompt, Tensor]]]:
    """Of each family, prompts and their logits: several images, and where it takes them videos."""
    found = {}
    for name, directory in faultless.items():
        case, oracle = CASES[name], oracle_model(CASES[name], directory)
        images = prompts_of(case)["three images"]
        found[name] = [(images, oracle_logits(case, oracle, images))]
        if name != "llava":
            film = video_prompt_of(case)
            positions, _ = our_positions(host.load(str(directory), device="cpu", dtype="float32"), film)
            found[name].append((film, oracle_logits(case, oracle, film, positions)))
    return found


def load(host: Any, directory: Path) -> Any:
    return host.load(str(directory), device="cpu", dtype="float32")


def assert_agrees(model: Any, references: list[tuple[Prompt, Tensor]]) -> None:
    for prompt, expected in references:
        assert_same_logits(our_logits(model, prompt), expected)


@pytest.mark.parametrize("name", FAULTLESS)
def test_without_a_fault_the_oracle_agrees(
    host: Any, faultless: dict[str, Path], references: dict[str, Any], name: str
) -> None:
    assert_agrees(load(host, faultless[name]), references[name])


# Faults that an edit of the files expresses

Fault = Callable[[Path], None]


def config_says(path: str, change: Callable[[Any], Any]) -> Fault:
    """Change the value at a dotted path of config.json."""

    def edit(directory: Path) -> None:
        config = read_config(directory)
        *outer, last = path.split(".")
        inner = config
        for key in outer:
            inner = inner[key]
        inner[last] = change(inner.get(last))
        write_config(directory, config)

    return edit


def tensor(end: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Change the one tensor whose name ends so."""

    def edit(weights: dict[str, Tensor]) -> None:
        (name,) = [name for name in weights if name.endswith(end)]
        weights[name] = change(weights[name])

    return lambda directory: edit_weights(directory, edit)


def to(value: Any) -> Callable[[Any], Any]:
    return lambda _: copy.deepcopy(value)


_TIME_AND_WIDTH_SWAPPED = config_says("text_config.rope_parameters.mrope_section", to([3, 2, 1]))
_TOWER_THETA = config_says("vision_config.rope_parameters", to({"rope_type": "axial", "rope_theta": 10200.0}))
_QWEN: dict[str, Fault] = {
    "theta of the tower 2 % high": _TOWER_THETA,
    "query bias of the tower dropped": tensor(
        "visual.blocks.1.attn.qkv.bias", lambda bias: torch.cat((torch.zeros(36), bias[36:]))
    ),
    "softmax scale of the tower 2 % high": tensor(
        "visual.blocks.0.attn.qkv.weight", lambda rows: torch.cat((rows[:36] * 1.02, rows[36:]))
    ),
    "frames of a patch swapped": tensor("visual.patch_embed.proj.weight", lambda kernel: kernel.flip(2)),
    "rows of a patch upside down": tensor("visual.patch_embed.proj.weight", lambda kernel: kernel.flip(3)),
}
FILE_FAULTS: dict[str, dict[str, Fault]] = {
    "qwen2_vl": _QWEN
    | {
        "time and width swapped": _TIME_AND_WIDTH_SWAPPED,
        "exact gelu in the tower": config_says("vision_config.hidden_act", to("gelu")),
        "norm of the merger ignored": tensor("visual.merger.ln_q.weight", torch.ones_like),
        "bias of the merger dropped": tensor("visual.merger.mlp.2.bias", torch.zeros_like),
    },
    "qwen2_5_vl": _QWEN
    | {
        "time and width swapped": _TIME_AND_WIDTH_SWAPPED,
        "windows one token larger": config_says("vision_config.window_size", to(24)),
        "windows everywhere": config_says("vision_config.fullatt_block_indexes", to([])),
        "windows nowhere": config_says("vision_config.fullatt_block_indexes", to([0, 1, 2])),
        "windows one layer late": config_says("vision_config.fullatt_block_indexes", to([2])),
        "gate and up swapped": tensor("visual.blocks.0.mlp.gate_proj.weight", lambda weight: weight.flip(0)),
    },
    "qwen3_vl": _QWEN
    | {
        "rows of positions not interleaved": config_says("text_config.rope_parameters.mrope_interleaved", to(False)),
        "features of depth from a layer too early": config_says("vision_config.deepstack_visual_indexes", to([0, 1])),
        "bias of the patches dropped": tensor("visual.patch_embed.proj.bias", torch.zeros_like),
        "table of positions transposed": tensor(
            "visual.pos_embed.weight", lambda table: table.view(5, 5, -1).transpose(0, 1).reshape(25, -1)
        ),
        "norm of a deep merger ignored": tensor("deepstack_merger_list.1.norm.weight", torch.ones_like),
    },
    "llava": {
        "features of the last layer": config_says("vision_feature_layer", to(-1)),
        "exact gelu in the tower": config_says("vision_config.hidden_act", to("gelu")),
        "eps of the tower 1e-3": config_says("vision_config.layer_norm_eps", to(1e-3)),
        "relu in the projector": config_says("projector_hidden_act", to("relu")),
        "bias of the projector dropped": tensor("multi_modal_projector.linear_1.bias", torch.zeros_like),
        "key bias of the tower moved to queries": tensor("layers.0.self_attn.q_proj.bias", torch.zeros_like),
        "class token dropped from the sequence": tensor("embeddings.class_embedding", torch.zeros_like),
        "positions one patch late": tensor("position_embedding.weight", lambda table: table.roll(1, 0)),
        "first norm ignored": tensor("pre_layrnorm.weight", torch.ones_like),
        "colours reversed": tensor("patch_embedding.weight", lambda kernel: kernel.flip(1)),
    },
}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in FILE_FAULTS for fault in FILE_FAULTS[name]])
def test_the_oracle_fails_on_a_fault_in_the_files(
    host: Any, tmp_path: Path, faultless: dict[str, Path], references: dict[str, Any], name: str, fault: str
) -> None:
    directory = Path(shutil.copytree(faultless[name], tmp_path / "copy"))
    FILE_FAULTS[name][fault](directory)
    model = load(host, directory)
    with pytest.raises(OracleMismatch):
        assert_agrees(model, references[name])


# Faults that only code can have


def swapped_axes(original: Any) -> Any:
    return lambda *arguments: original(*arguments).flip(0)


def row_by_row(original: Any) -> Any:
    """Positions as if the patches were not in blocks."""
    return lambda grids, merge_size: original(grids, 1)


def images_see_each_other(original: Any) -> Any:
    return lambda grids: [sum(original(grids))]


def frames_see_each_other(original: Any) -> Any:
    return lambda grids: [frames * rows * columns for frames, rows, columns in grids]


CODE_FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rows and columns swapped": ("patch_positions", swapped_axes),
    "patches taken row by row": ("patch_positions", row_by_row),
    "images see each other": ("frame_lengths", images_see_each_other),
    "frames of a video see each other": ("frame_lengths", frames_see_each_other),
}


@pytest.mark.parametrize("fault", CODE_FAULTS)
@pytest.mark.parametrize("name", QWEN)
def test_the_oracle_fails_on_a_fault_in_the_tower(
    monkeypatch: pytest.MonkeyPatch,
    host: Any,
    faultless: dict[str, Path],
    references: dict[str, Any],
    name: str,
    fault: str,
) -> None:
    function, faulty = CODE_FAULTS[fault]
    monkeypatch.setattr(MODULES[name], function, faulty(getattr(MODULES[name], function)))
    with pytest.raises(OracleMismatch):
        assert_agrees(load(host, faultless[name]), references[name])


def test_the_oracle_fails_where_tokens_stay_in_the_order_of_windows(
    monkeypatch: pytest.MonkeyPatch, host: Any, faultless: dict[str, Path], references: dict[str, Any]
) -> None:
    model = load(host, faultless["qwen2_5_vl"])
    original = Tensor.argsort
    monkeypatch.setattr(Tensor, "argsort", lambda self, *a, **k: original(original(self, *a, **k)))
    with pytest.raises(OracleMismatch):
        assert_agrees(model, references["qwen2_5_vl"])


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("name", QWEN)
def test_the_oracle_fails_where_a_row_of_positions_is_not_read(
    host: Any, faultless: dict[str, Path], references: dict[str, Any], name: str, row: int
) -> None:
    model = load(host, faultless[name])
    rotary = model.module.language_model.model.rotary_emb
    assert isinstance(rotary, MRotaryEmbedding)
    rotary.row_of_pair[rotary.row_of_pair == row] = (row + 1) % 3
    with pytest.raises(OracleMismatch):
        assert_agrees(model, references[name])


@pytest.mark.parametrize("name", QWEN)
def test_the_oracle_fails_where_generation_goes_on_without_the_delta(
    monkeypatch: pytest.MonkeyPatch, host: Any, faultless: dict[str, Path], name: str
) -> None:
    case = CASES[name]
    prompt = prompts_of(case)["three images"]
    continuation = oracle_continuation(case, oracle_model(case, faultless[name]), prompt)
    model = load(host, faultless[name])
    assert_same_tokens(our_continuation(model, prompt), continuation)
    original = type(model.module).get_mrope_input_positions
    monkeypatch.setattr(type(model.module), "get_mrope_input_positions", lambda *a, **k: (original(*a, **k)[0], 0))
    assert our_positions(load(host, faultless[name]), prompt)[1] == 0
    with pytest.raises(OracleMismatch):
        assert_same_tokens(our_continuation(load(host, faultless[name]), prompt), continuation)


@pytest.mark.parametrize("name", FAULTLESS)
def test_the_oracle_fails_where_embeddings_come_in_another_order(
    monkeypatch: pytest.MonkeyPatch, host: Any, faultless: dict[str, Path], references: dict[str, Any], name: str
) -> None:
    cls = type(load(host, faultless[name]).module)
    original = cls.embed_multimodal

    def reversed_rows(self: Any, **kwargs: Any) -> list[Tensor]:
        found = original(self, **kwargs)
        rows = torch.cat(found).flip(0)
        return list(rows.split([len(one) for one in found]))

    monkeypatch.setattr(cls, "embed_multimodal", reversed_rows)
    with pytest.raises(OracleMismatch):
        assert_agrees(load(host, faultless[name]), references[name])


def test_the_oracle_fails_where_features_of_depth_reach_the_next_layer(
    monkeypatch: pytest.MonkeyPatch, host: Any, faultless: dict[str, Path], references: dict[str, Any]
) -> None:
    model = load(host, faultless["qwen3_vl"])
    stack = model.module.language_model.model

    def one_layer_late(hidden_states: Tensor, positions: Tensor) -> Tensor:
        hidden_states, *levels = hidden_states.split(60, dim=-1)
        rotation = stack.rotary_emb(positions, hidden_states.dtype)
        for index, layer in enumerate(stack.layers):
            hidden_states = layer(hidden_states, rotation)
            if 0 < index <= len(levels):
                hidden_states = hidden_states + levels[index - 1]
        return stack.norm(hidden_states)

    monkeypatch.setattr(stack, "forward", one_layer_late)
    with pytest.raises(OracleMismatch):
        assert_agrees(model, references["qwen3_vl"])
