"""Every hook of torchplug's table, called through the installed tour: right and wrong, direct and wrapped.

    python hook_cases.py DEVICE     prints one JSON document: where the code came from, and what each trial found

A case per hook says with which arguments it is called (each is given, and no two are alike), what must come of that,
and which results must be refused. The trials are made from the cases and from the table: called directly and under two
wrappers, on a loaded model and, for class-phase hooks, on the class; with every result that the author or a wrapper
could get wrong; and with each tensor argument in a wrong place. There are no test tools in here, so that it runs where
only the wheels are.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torchplug_tour
from safetensors.torch import save_file
from torch import nn
from torchplug import ContractError, HookNotProvided, Host, hookimpl, observer
from torchplug.hookspecs import HOOKS, Phase, Place
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
        """The model's own configuration with something changed, so that it can be told from the one it was built with.
        """
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
        assert "update_physical_experts_metadata (torchplug_tour/tour.py:" in note and "torchplug-tour 0.1.0" in note
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
        lambda tour: (("image", 3), {}), check_placeholder, lambda device: {"int": 5, "bytes": b"<image>", "list": ["<"]}
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


# -- trials ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One thing to try; `run()` raises AssertionError where something else happens than must."""

    hook: str
    kind: str
    run: Callable[[], None]


def trials(name: str, directory: Path, device: str) -> Iterator[Trial]:
    """Everything that is tried of one hook on one device."""
    hook, case = HOOKS[name], CASES[name]
    handles = ["model", "class"] if hook.phase is Phase.CLASS else ["model"]
    for handle in handles:
        for wrapped in (False, True):
            face = f"{'wrapped' if wrapped else 'direct'}, {handle}"
            yield Trial(name, f"right, {face}", lambda h=handle, w=wrapped: try_right(name, directory, device, h, w))
            for fault in case.wrong(torch.device(device)):
                yield Trial(
                    name,
                    f"author returns wrong {fault}, {face}",
                    lambda h=handle, w=wrapped, f=fault: try_wrong_author(name, directory, device, h, w, f),
                )
        for fault in case.wrong(torch.device(device)):
            yield Trial(
                name,
                f"wrapper returns wrong {fault}, {handle}",
                lambda h=handle, f=fault: try_wrong_wrapper(name, directory, device, h, f),
            )
    for argument, place in hook.places.items():
        for wrapped in (False, True):
            yield Trial(
                name,
                f"{argument} in a wrong place, {'wrapped' if wrapped else 'direct'}",
                lambda a=argument, w=wrapped: try_wrong_place(name, directory, device, a, w),
            )
            if device != "cpu":
                yield Trial(
                    name,
                    f"{argument} on the CPU, {'wrapped' if wrapped else 'direct'}",
                    lambda a=argument, p=place, w=wrapped: try_cpu(name, directory, device, a, p, w),
                )
    if hook.phase is not Phase.CLASS:
        yield Trial(name, "needs a loaded model", lambda: try_class_handle(name))


def try_right(name: str, directory: Path, device: str, handle: str, wrapped: bool) -> None:
    tour = Tour(directory, device)
    arguments = CASES[name].arguments(tour)
    given = given_arguments(name, arguments)
    for (one, first), (other, second) in combinations(given.items(), 2):
        assert not alike(first, second), f"{one} and {other} are alike: a swap would not show"
    target = tour.model if handle == "model" else tour.host.model_class(ARCHITECTURE)
    owner = tour.module if handle == "model" else torchplug_tour.TourForCausalLM
    assert name in dir(target.hooks)
    with under_wrappers(target, name, owner, given) if wrapped else ExitStack():
        result = getattr(target.hooks, name)(*arguments[0], **arguments[1])
        CASES[name].check(tour, arguments, result)


def try_wrong_author(name: str, directory: Path, device: str, handle: str, wrapped: bool, fault: str) -> None:
    with wrong_method(name) as returned:
        tour = Tour(directory, device)
        arguments = CASES[name].arguments(tour)
        returned.append(CASES[name].wrong(tour.device)[fault])
        target = tour.model if handle == "model" else tour.host.model_class(ARCHITECTURE)
        with target.attached(observer()) if wrapped else ExitStack():
            refused(
                lambda: getattr(target.hooks, name)(*arguments[0], **arguments[1]),
                f"plugin '{ARCHITECTURE}' (torchplug-tour 0.1.0, torchplug_tour:TourForCausalLM)",
                f"{name} (",
                HOOKS[name].returns.says,
                *what_was_found(returned[0]),
            )


def try_wrong_wrapper(name: str, directory: Path, device: str, handle: str, fault: str) -> None:
    tour = Tour(directory, device)
    arguments = CASES[name].arguments(tour)
    target = tour.model if handle == "model" else tour.host.model_class(ARCHITECTURE)
    wrong = CASES[name].wrong(tour.device)[fault]

    class Spoiler:
        pass

    def spoil(self: Any) -> Any:
        yield
        return wrong

    spoil.__name__ = name
    setattr(Spoiler, name, hookimpl(wrapper=True)(spoil))
    fix = "end with `return result`" if wrong is None else HOOKS[name].returns.says
    with target.attached(observer()), target.attached(Spoiler()):
        call = lambda: getattr(target.hooks, name)(*arguments[0], **arguments[1])  # noqa: E731
        refused(call, "wrapper plugin 'Spoiler'", f"{name} (", fix, *what_was_found(wrong))
    CASES[name].check(tour, arguments, getattr(target.hooks, name)(*arguments[0], **arguments[1]))


def try_wrong_place(name: str, directory: Path, device: str, argument: str, wrapped: bool) -> None:
    """`meta` is another device than the model's on every machine."""
    tour = Tour(directory, device)
    arguments = replaced(CASES[name].arguments(tour), name, argument, lambda tensor: tensor.to("meta"))
    with tour.model.attached(observer()) if wrapped else ExitStack():
        refused(
            lambda: getattr(tour.model.hooks, name)(*arguments[0], **arguments[1]),
            f"call of {name} on plugin '{ARCHITECTURE}' (torchplug-tour 0.1.0",
            argument,
            "is on meta",
            str(tour.device),
        )


def try_cpu(name: str, directory: Path, device: str, argument: str, place: Place, wrapped: bool) -> None:
    """On an accelerator: a CPU tensor is moved, and a view is refused."""
    tour = Tour(directory, device)
    arguments = replaced(CASES[name].arguments(tour), name, argument, lambda tensor: tensor.cpu())
    call = getattr(tour.model.hooks, name)
    with tour.model.attached(observer()) if wrapped else ExitStack():
        call = getattr(tour.model.hooks, name)
        if place is Place.VIEW:
            refused(lambda: call(*arguments[0], **arguments[1]), argument, "is on cpu; a view", str(tour.device))
        else:
            CASES[name].check(tour, arguments, call(*arguments[0], **arguments[1]))


def try_class_handle(name: str) -> None:
    hooks = Host().model_class(ARCHITECTURE).hooks
    assert name not in dir(hooks)
    try:
        getattr(hooks, name)
    except HookNotProvided as error:
        experts = "MixtureOfExperts" in HOOKS[name].interfaces  # which only a loaded model can claim
        assert f"{name}: " in str(error), error
        assert ("MixtureOfExperts" if experts else "needs a loaded model: host.load(...)") in str(error), error
    else:
        raise AssertionError("a class without weights has it")


# -- tools -----------------------------------------------------------------------------------------------


def given_arguments(name: str, arguments: Arguments) -> dict[str, Any]:
    """Every argument of the hook by its name in a wrapper. It is an error to leave one out."""
    signature = HOOKS[name].signature
    given = signature.bind(*arguments[0], **arguments[1]).arguments
    assert set(given) == set(signature.parameters), f"the case of {name} leaves out an argument"
    return dict(zip(HOOKS[name].arguments, given.values(), strict=True))


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and repr(one) == repr(other)


def identical(found: Any, given: Any) -> bool:
    """The same objects; containers may be others, as long as what they hold is the same."""
    if type(given) in (list, tuple):
        return len(found) == len(given) and all(map(identical, found, given))
    if type(given) is dict:
        return found.keys() == given.keys() and all(identical(found[key], given[key]) for key in given)
    return found is given


@contextmanager
def under_wrappers(target: Any, name: str, owner: Any, given: dict[str, Any]) -> Iterator[None]:
    """An observer inside, a plugin with all arguments outside; both must see what was given, once for each call."""
    seen: list[tuple[str, Any]] = []

    class Outer:
        pass

    function = "def {0}(self, model{1}):\n    enter(model, dict({2}))\n    result = yield\n    leave()\n    return result"
    scope: dict[str, Any] = {
        "enter": lambda model, arguments: seen.append(("outer", (model, arguments))),
        "leave": lambda: seen.append(("outer after", None)),
    }
    names = list(given)
    exec(function.format(name, "".join(f", {n}" for n in names), ", ".join(f"{n}={n}" for n in names)), scope)
    setattr(Outer, name, hookimpl(wrapper=True)(scope[name]))
    inner = observer(
        before=lambda hook, model, arguments: seen.append(("inner", (model, dict(arguments)))),
        after=lambda hook, model, arguments, result: seen.append(("inner after", None)),
    )
    with target.attached(inner), target.attached(Outer()):
        yield
    assert [what for what, _ in seen[:4]] == ["outer", "inner", "inner after", "outer after"], "the last is outermost"
    for _, (model, arguments) in (seen[0], seen[1]):
        assert model is owner and list(arguments) == names
        for argument, value in given.items():
            assert identical(arguments[argument], value), f"{argument} arrived as {arguments[argument]!r}"


@contextmanager
def wrong_method(name: str) -> Iterator[list[Any]]:
    """The author's method returns the first item of the list."""
    returned: list[Any] = []
    own = vars(TourForCausalLM).get(name)

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return returned[0]

    setattr(TourForCausalLM, name, classmethod(method) if HOOKS[name].phase is Phase.CLASS else method)
    try:
        yield returned
    finally:
        if own is None:
            delattr(TourForCausalLM, name)
        else:
            setattr(TourForCausalLM, name, own)


def refused(call: Callable[[], Any], *texts: str) -> None:
    """A ContractError that says all of `texts`."""
    try:
        result = call()
    except ContractError as error:
        for text in texts:
            assert text in str(error), f"{text!r} is not in: {error}"
    else:
        raise AssertionError(f"accepted {result!r}")


def what_was_found(value: Any) -> list[str]:
    """Words that an error about this result must have."""
    if isinstance(value, (tuple, list)):
        wrong = [item for item in value if isinstance(item, torch.Tensor)]
        return what_was_found(wrong[-1]) if wrong and isinstance(value[-1], torch.Tensor) else []
    if isinstance(value, torch.Tensor):
        return [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"]
    return ["None"] if value is None else [type(value).__name__]


def replaced(arguments: Arguments, name: str, argument: str, change: Callable[[Any], Any]) -> Arguments:
    """The same call with every tensor in one argument changed."""
    bound = HOOKS[name].signature.bind(*arguments[0], **arguments[1])
    bound.arguments[argument] = mapped(bound.arguments[argument], change)
    return bound.args, bound.kwargs


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return {key: mapped(item, change) for key, item in value.items()}


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


def devices() -> list[str]:
    """The CPU, and the accelerator of this machine if it has one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *([] if accelerator is None else [accelerator.type])]


def outcome(trial: Trial) -> str | None:
    """None where everything happened as it must, else what did not."""
    try:
        trial.run()
    except Exception:
        return traceback.format_exc()
    return None


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder))
        results = [
            {"hook": trial.hook, "device": device, "kind": trial.kind, "failed": outcome(trial)}
            for device in wanted or devices()
            for name in CASES
            for trial in trials(name, directory, device)
        ]
    plugin = Host().architectures[ARCHITECTURE]
    print(
        json.dumps(
            {
                "files": [inspect.getfile(Host), inspect.getfile(TourForCausalLM)],
                "plugin": [plugin.distribution, plugin.version],
                "hooks": list(HOOKS),
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
