"""What must come of every hook of the tour: a case per hook of torchplug's table.

A case says with which arguments a hook is called (each is given, and no two are alike), what must come of that, and
which results must be refused. `hook_trials` makes the calls. No test tools in here, so that it runs where only the
wheels are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torchplug import Host
from torchplug.interfaces import MultiModalFeatureSpec, PlaceholderRange
from torchplug_tour import TourForCausalLM

ARCHITECTURE = "TourForCausalLM"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


# -- what must come of each hook -------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One hook: its arguments for a model, what must come of the call, and results that must be refused.

    `check(tour, arguments, result)` raises AssertionError; `wrong(device)` is result by what is wrong with it.
    """

    arguments: Callable[[Tour], Arguments]
    check: Callable[[Tour, Arguments, Any], None]
    wrong: Callable[[torch.device], dict[str, Any]]


class Tour:
    """A loaded tour and the weights of its checkpoint, on the model's device."""

    def __init__(self, directory: Path, device: str) -> None:
        self.host = Host()
        self.model = self.host.load(directory, device=device, dtype="float32")
        self.module: Any = self.model.module
        self.device = self.model.device
        self.weights = {name: tensor.to(self.device) for name, tensor in weights().items()}

    def tensor(self, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def config(self, *, tensor_parallel_size: int = 1, dtype: torch.dtype = torch.float32) -> Any:
        """The model's configuration with something changed, so that it can be told from the one it was built with."""
        config = copy.deepcopy(self.model.vllm_config)
        config.parallel_config.tensor_parallel_size = tensor_parallel_size
        config.model_config.dtype = dtype
        return config


def same(found: Any, expected: Any) -> None:
    """Equal values, and for tensors also dtype and device."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected), f"found {found!r}, expected {expected!r}"
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert type(found) is type(expected) and found == expected, f"found {found!r}, expected {expected!r}"


def check_state_shape(tour: Tour, arguments: Arguments, result: Any) -> None:
    same(result, ((4,),))  # 8 wide, in halves: the configuration that was passed, not the model's own


def check_state_dtype(tour: Tour, arguments: Arguments, result: Any) -> None:
    same(result, (torch.float32,))
    same(tour.model.hooks.get_mamba_state_dtype_from_config(tour.config(dtype=torch.bfloat16)), (torch.bfloat16,))


def check_copy_function(tour: Tour, arguments: Arguments, result: Any) -> None:
    (function,) = result
    state = torch.arange(24.0, device=tour.device).reshape(3, 8)
    piece = function(state, [2, 0, 1], 0, 3)
    same((piece.start_addr, piece.num_elements), (state[1].data_ptr(), 8))


def check_placeholder(tour: Tour, arguments: Arguments, result: Any) -> None:
    same(result, "<image:3>")
    same(tour.model.hooks.get_placeholder_str(modality="audio", i=5), "<audio:5>")
    same(tour.model.hooks.get_placeholder_str("video", 1), None)


def check_language_model(tour: Tour, arguments: Arguments, result: Any) -> None:
    assert result is tour.module.language_model


def check_eplb(tour: Tour, arguments: Arguments, result: Any) -> None:
    """The model reads and writes the very tensors that it was given, for as long as it lives."""
    (load, slots_of, replicas), _ = arguments
    module = tour.module
    assert len(module.expert_weights) == len(module.moe_layers) == 3
    for index, layer in enumerate(module.moe_layers):
        for mine, given in zip(layer.views, (load, slots_of, replicas), strict=True):
            assert mine.data_ptr() == given[index].data_ptr(), "a copy, not a view"
        assert module.expert_weights[index][0] is layer.weight
    layer = module.moe_layers[1]
    rows = torch.ones(6, 8, device=tour.device) * layer.gate.weight[2]  # all go to logical expert 2
    assert set(layer.gate(rows).argmax(-1).tolist()) == {2}
    for slots in ([2, 4], [0, 1]):
        slots_of[1, 2] = tour.tensor(slots)  # the balancer moves the expert, and tells nobody
        replicas[1, 2] = 2
        load.zero_()
        expected = rows * layer.weight[tour.tensor(slots * 3)]
        same(layer(rows), expected)
        assert [int(load[1, slot]) for slot in slots] == [3, 3] and int(load.sum()) == 6
    tour.model.hooks.set_eplb_state(load, slots_of, replicas)
    assert len(module.expert_weights) == 3, "a second call starts afresh"


def check_physical_experts(tour: Tour, arguments: Arguments, result: Any) -> None:
    module = tour.module
    same((module.num_physical_experts, module.num_local_physical_experts, module.num_redundant_experts), (9, 5, 6))
    try:
        tour.model.hooks.update_physical_experts_metadata(9, num_local_physical_experts=4)
    except ValueError as error:
        assert "5 experts for life, not 4" in str(error)
        (note,) = error.__notes__
        assert "update_physical_experts_metadata (torchplug_tour/tour.py:" in note and "torchplug-tour==0.1.0" in note
    else:
        raise AssertionError("another number of local experts was accepted")


def check_aux_layers(tour: Tour, arguments: Arguments, result: Any) -> None:
    ids = tour.tensor([4, 9, 2])
    _, read = tour.module(ids, torch.arange(3, device=tour.device))
    assert len(read) == 2
    same(read[0], tour.weights["language_model.embed_tokens.weight"][ids])
    assert not torch.allclose(read[0], read[1]), "the second is behind the first layer"


def check_mrope(tour: Tour, arguments: Arguments, result: Any) -> None:
    positions, delta = result
    same(positions.tolist(), [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]])
    same(delta, -3)


def check_multimodal(tour: Tour, arguments: Arguments, result: Any) -> None:
    _, given = arguments
    image, audio = tour.weights["image_tower.weight"], tour.weights["audio_tower.weight"]
    images, sounds = ([tensor.to(tour.device) for tensor in given[name]] for name in ("pixel_values", "audio_values"))
    same(result, [images[0] @ image.T, images[1] @ image.T, sounds[0] @ audio.T])


def check_embeddings(tour: Tour, arguments: Arguments, result: Any) -> None:
    """Ids 90 and 91 are outside the vocabulary, so that the last argument shows too."""
    (_, items), _ = arguments
    table = tour.weights["language_model.embed_tokens.weight"]
    rows = torch.cat([item.to(tour.device) for item in items])
    same(result, torch.stack([table[3], rows[0], rows[1], table[5]]))
    same(tour.model.hooks.embed_input_ids(tour.tensor([6])), table[6:7])


def features() -> list[MultiModalFeatureSpec]:
    return [MultiModalFeatureSpec("image", PlaceholderRange(1, 6), {"grid": (2, 3)})]


def balancer_views(tour: Tour) -> Arguments:
    slots_of = torch.full((3, 3, 2), -1, device=tour.device)
    slots_of[:, :, 0] = torch.arange(3, device=tour.device)
    load = torch.zeros(3, 5, dtype=torch.int32, device=tour.device)
    return (load, slots_of, torch.ones(3, 3, dtype=torch.int64, device=tour.device)), {}


def image_and_sound(tour: Tour) -> Arguments:
    pixels = [tour.tensor([[1.0, 2, 3, 4, 5], [6, 7, 8, 9, 10]]), tour.tensor([[11.0, 12, 13, 14, 15]])]
    return (), {"pixel_values": pixels, "audio_values": [tour.tensor([[-1.0, -2, -3]])]}


def placed_rows(tour: Tour) -> Arguments:
    ids, mask = tour.tensor([3, 90, 91, 5]), tour.tensor([False, True, True, False])
    rows = [torch.full((1, 8), 20.0, device=tour.device), torch.full((1, 8), 30.0, device=tour.device)]
    return (ids, rows), {"is_multimodal": mask, "handle_oov_mm_token": True}


def wrong_embeddings(device: torch.device) -> dict[str, Any]:
    wrong = {
        "None": None,
        "shape": torch.ones(4, device=device),
        "rank": torch.ones(1, 4, 8, device=device),
        "dtype": torch.ones(4, 8, dtype=torch.bfloat16, device=device),
        "integers": torch.ones(4, 8, dtype=torch.int64, device=device),
        "device": torch.ones(4, 8, device="meta"),
        "type": [torch.ones(4, 8, device=device)],
    }
    return wrong if device.type == "cpu" else wrong | {"left on the CPU": torch.ones(4, 8)}


def wrong_multimodal(device: torch.device) -> dict[str, Any]:
    right = torch.ones(2, 8, device=device)
    wrong = {
        "None": None,
        "shape": [right, torch.ones(2, device=device)],
        "rank": right,
        "dtype": (right, torch.ones(2, 8, dtype=torch.int64, device=device)),
        "device": [right, torch.ones(2, 8, device="meta")],
        "integers": torch.ones(1, 2, 8, dtype=torch.int64, device=device),
        "all on another device": torch.ones(1, 2, 8, device="meta"),
        "type": {"image": right},
        "None for an item": [right, None],
    }
    return wrong if device.type == "cpu" else wrong | {"left on the CPU": [torch.ones(2, 8)]}


def wrong_positions(device: torch.device) -> dict[str, Any]:
    right = torch.zeros(3, 8, dtype=torch.int64)
    return {
        "None": None,
        "shape": (right[0], 0),
        "rows": (right[:2], 0),
        "dtype": (right.to(torch.int32), 0),
        "device": (right.to("meta"), 0),
        "delta a tensor": (right, torch.tensor(0)),
        "delta a bool": (right, True),
        "alone": right,
        "a list": [right, 0],
        "not a tensor": ([[0], [0], [0]], 0),
    }


def wrong_nothing(device: torch.device) -> dict[str, Any]:
    """For hooks that return nothing."""
    return {"something": 1, "a tensor": torch.ones(1, device=device), "False": False}


def wrong_count(device: torch.device) -> dict[str, Any]:
    return {"None": None, "float": 2.0, "bool": True, "tensor": torch.tensor(3, device=device)}


CASES: dict[str, Case] = {
    "get_mamba_state_shape_from_config": Case(
        lambda tour: ((tour.config(tensor_parallel_size=2),), {}),
        check_state_shape,
        lambda device: {
            "None": None,
            "empty": (),
            "flat": (8, 8),
            "no dimension": ((),),
            "zero": ((8, 0),),
            "bool": ((True,),),
            "float": ((8.0,),),
            "list": [(8,)],
            "list inside": ((8,), [8]),
            "six": ((8,),) * 6,
        },
    ),
    "get_mamba_state_dtype_from_config": Case(
        lambda tour: ((tour.config(dtype=torch.float16),), {}),
        check_state_dtype,
        lambda device: {
            "None": None,
            "empty": (),
            "text": ("float32",),
            "list": [torch.float32],
            "alone": torch.float32,
            "six": (torch.float32,) * 6,
        },
    ),
    "get_mamba_state_copy_func": Case(
        lambda tour: ((), {}),
        check_copy_function,
        lambda device: {
            "None": None,
            "empty": (),
            "alone": print,
            "not callable": (print, 1),
            "list": [print],
            "six": (print,) * 6,
        },
    ),
    "get_placeholder_str": Case(
        lambda tour: (("image", 3), {}),
        check_placeholder,
        lambda device: {"int": 5, "bytes": b"<image>", "list": ["<"]},
    ),
    "get_language_model": Case(
        lambda tour: ((), {}),
        check_language_model,
        lambda device: {"None": None, "text": "language_model", "class": nn.Linear},
    ),
    "get_num_mm_encoder_tokens": Case(lambda tour: ((7,), {}), lambda tour, given, found: same(found, 28), wrong_count),
    "get_num_mm_connector_tokens": Case(
        lambda tour: ((), {"num_vision_tokens": 28}), lambda tour, given, found: same(found, 7), wrong_count
    ),
    "set_eplb_state": Case(balancer_views, check_eplb, wrong_nothing),
    "update_physical_experts_metadata": Case(lambda tour: ((9, 5), {}), check_physical_experts, wrong_nothing),
    "set_aux_hidden_state_layers": Case(lambda tour: (((0, 2),), {}), check_aux_layers, wrong_nothing),
    "get_eagle3_aux_hidden_state_layers": Case(
        lambda tour: ((), {}),
        lambda tour, given, found: same(found, (0, 1, 3)),
        lambda device: {
            "None": None,
            "empty": (),
            "list": [0, 1],
            "descending": (2, 1),
            "twice": (1, 1),
            "bool": (False, True),
            "float": (0.0, 1.0),
        },
    ),
    "get_mrope_input_positions": Case(lambda tour: ((list(range(8)), features()), {}), check_mrope, wrong_positions),
    "embed_multimodal": Case(image_and_sound, check_multimodal, wrong_multimodal),
    "embed_input_ids": Case(placed_rows, check_embeddings, wrong_embeddings),
}


# -- the checkpoint ---------------------------------------------------------------------------------------


def weights() -> dict[str, torch.Tensor]:
    """The tour's checkpoint, in float32 on the CPU."""
    config = TourForCausalLM.tiny_config()
    hidden, experts = config["hidden_size"], config["num_experts"]
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "language_model.embed_tokens.weight": (config["vocab_size"], hidden),
        "image_tower.weight": (hidden, config["patch_size"]),
        "audio_tower.weight": (hidden, config["frame_size"]),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for index, kind in enumerate(config["layers_block_type"]):
        if kind != "none":
            shapes[f"language_model.layers.{index}.experts.gate.weight"] = (experts, hidden)
            shapes[f"language_model.layers.{index}.experts.weight"] = (experts, hidden)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_checkpoint(directory: Path) -> Path:
    config = TourForCausalLM.tiny_config() | {"dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights(), directory / "model.safetensors")
    return directory
