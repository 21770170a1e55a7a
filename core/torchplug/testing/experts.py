"""Checks of a mixture of experts: its numbers, for one process and for several, and that experts can be moved.

Both look at whatever module claims MixtureOfExperts, the model itself or one inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from torchplug.config import DeviceConfig, EPLBConfig, ParallelConfig
from torchplug.errors import Problem, TorchplugError
from torchplug.host.contracts import of_class
from torchplug.host.loading import build_module, load_weights
from torchplug.interfaces import is_mixture_of_experts
from torchplug.testing.findings import Finding
from torchplug.testing.specimen import Skip, Specimen, poisoned_memory

NO_EXPERTS: Final = "the model has no experts"

_CPU: Final = torch.device("cpu")
_PROMPT: Final = 9
_WIDTH: Final = 1024
"""Places for the slots of one expert in the balancer's map."""

_MOVED: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Rounding of the last bit, where a product sums in another order at another address; a wrong expert is off by more."""


def expert_layers(specimen: Specimen) -> Iterator[Finding]:
    """The counts of experts fit each other in one process and in two, and every expert layer can be balanced."""
    module = specimen.build()
    for model in _models(module):
        where = f"MixtureOfExperts ({of_class(type(model))})"
        found = [*_counts(model, 1, where), *_layers(model, where), *_weights(model, where)]
        yield from found
        if found or not specimen.is_tiny:
            continue
        yield from _shared(specimen, model, where)


def expert_swap(specimen: Specimen) -> Iterator[Finding]:
    """The slots of every layer change places, weights and maps; logits stay, in every dtype, and loads follow."""
    _models(specimen.build())
    if not specimen.is_tiny:
        raise Skip("moves experts of a tiny checkpoint only")
    for device in specimen.devices:
        for dtype, allowed in _MOVED.items():
            yield from _swapped(specimen, device, dtype, allowed)


def _models(module: nn.Module) -> list[Any]:
    models = [part for part in module.modules() if is_mixture_of_experts(part)]
    if not models:
        raise Skip(NO_EXPERTS)
    return models


def _counts(model: Any, ranks: int, where: str) -> Iterator[Problem]:
    logical, redundant = model.num_logical_experts, model.num_redundant_experts
    physical, local, groups = model.num_physical_experts, model.num_local_physical_experts, model.num_expert_groups
    if physical != logical + redundant:
        says = f"{logical} logical and {redundant} redundant experts, but num_physical_experts is {physical}"
        yield Problem(where, says, f"num_physical_experts = {logical + redundant}")
    if local * ranks != physical:
        says = f"{physical} physical experts on {ranks} rank(s), but num_local_physical_experts is {local}"
        yield Problem(where, says, f"num_local_physical_experts = {physical // ranks}")
    if model.num_routed_experts != logical:
        says = f"{logical} logical experts, but num_routed_experts is {model.num_routed_experts}"
        yield Problem(where, says, "count what the router can choose; shared experts are none of these")
    if groups < 1 or logical % groups:
        says = f"{logical} logical experts do not make {groups} groups (num_expert_groups) of equal size"
        yield Problem(where, says, "num_expert_groups = 1 where there are no groups")


def _layers(model: Any, where: str) -> Iterator[Problem]:
    layers = list(model.moe_layers)
    if len(layers) != model.num_moe_layers:
        says = f"num_moe_layers is {model.num_moe_layers}, and moe_layers holds {len(layers)}"
        yield Problem(where, says, f"num_moe_layers = {len(layers)}")
    for index, layer in enumerate(layers):
        if lacking := [name for name in ("get_expert_weights", "set_eplb_state") if not hasattr(layer, name)]:
            says = f"moe_layers[{index}] ({type(layer).__name__}) lacks {' and '.join(lacking)}"
            yield Problem(where, says, "put the expert layers there (torchplug.layers.FusedMoE), not their parents")
    if not isinstance(model, nn.Module):
        return
    known = {id(layer) for layer in layers}
    forgotten = [
        name
        for name, part in model.named_modules()
        if part is not model and hasattr(part, "get_expert_weights") and id(part) not in known
    ]
    if forgotten:
        says = f"moe_layers lacks {', '.join(forgotten)}, whose experts would never be balanced"
        yield Problem(where, says, "put every expert layer there, in order")


def _weights(model: Any, where: str) -> Iterator[Problem]:
    """What an expert layer hands out to be moved: a contiguous row for each slot, once however often it is asked."""
    if any(not hasattr(layer, "get_expert_weights") for layer in model.moe_layers):
        return
    local = model.num_local_physical_experts
    for index, layer in enumerate(model.moe_layers):
        for tensor in layer.get_expert_weights():
            if tensor.shape[:1] != (local,) or not tensor.is_contiguous():
                says = (
                    f"get_expert_weights of moe_layers[{index}] gives a tensor of {list(tensor.shape)}"
                    f"{'' if tensor.is_contiguous() else ', not contiguous'}; expected [{local}, ...], contiguous"
                )
                yield Problem(where, says, "one row for each slot of this rank, in one contiguous tensor")


def _shared(specimen: Specimen, whole: Any, where: str) -> Iterator[Finding]:
    """The same class for two ranks: it either holds half of the slots, or says that they cannot be halved."""
    ranks = 2
    for asked in range(ranks):
        total = whole.num_physical_experts + asked
        label = f"{total} physical experts ({asked} of them by eplb_config.num_redundant_experts) on {ranks} ranks"
        parallel = ParallelConfig(
            tensor_parallel_size=ranks, enable_expert_parallel=True, eplb_config=EPLBConfig(asked)
        )
        module: nn.Module | None = None
        error = ""
        try:
            module = _built(specimen, torch.float32, parallel)
        except TorchplugError as refusal:
            error = str(refusal)
        if total % ranks:
            if module is not None or str(total) not in error:
                says = f"expected an error that says that {label} cannot be shared evenly, found {error or 'none'}"
                yield Problem(where, says, "place experts with torchplug.layers.ExpertPlacement, which says what fits")
            continue
        if module is None:
            yield Problem(where, f"expected {label} to be possible, found {error}", "count slots, not experts")
            continue
        for model in _models(module):
            if model.num_physical_experts != total:
                says = f"expected {label}, found {model.num_physical_experts}"
                fix = "add vllm_config.parallel_config.eplb_config.num_redundant_experts to the slots"
                yield Problem(where, says, fix)
                return
            yield from _counts(model, ranks, where)
            yield from _weights(model, where)


def _built(specimen: Specimen, dtype: torch.dtype, parallel: ParallelConfig, device: torch.device = _CPU) -> nn.Module:
    """A module whose parameters have no memory yet."""
    config = specimen.vllm_config
    config = replace(
        config,
        model_config=replace(config.model_config, dtype=dtype),
        device_config=DeviceConfig(device),
        parallel_config=parallel,
    )
    return build_module(specimen.cls, config, specimen.subject).eval()


def _swapped(specimen: Specimen, device: torch.device, dtype: torch.dtype, allowed: float) -> Iterator[Finding]:
    module = _built(specimen, dtype, ParallelConfig(eplb_config=EPLBConfig(1)), device)
    with poisoned_memory():
        load_weights(module, specimen.checkpoint, device, specimen.subject)
    where = specimen.where("forward")
    label = f"in {str(dtype).removeprefix('torch.')} on {device}"
    tokens = torch.tensor(specimen.token_ids(_PROMPT), device=device)
    plain = _logits(module, tokens)
    for model in _models(module):
        states = _Balanced(model, device)
        placed = _logits(module, tokens)
        if not _off(placed, plain) <= allowed:
            says = f"{label}: the logits change when set_eplb_state hands over maps of the slots as they were loaded"
            yield Problem(where, says, "slot i starts with expert i % num_logical_experts, in every layer")
            return
        before = states.load.clone()
        if bool((before.sum(dim=1) == 0).any()):
            idle = [index for index, row in enumerate(before) if not row.sum()]
            says = f"{label}: expert_load_view stays 0 for moe_layers {idle}"
            yield Problem(where, says, "add 1 for every token and expert chosen, at the slot that served it")
            return
        states.reverse()
        moved = _logits(module, tokens)
        if not _off(moved, plain) <= allowed:
            says = (
                f"{label}: the logits change when the slots of all layers change places, weights and maps; "
                f"off by {_off(moved, plain):.2g} of the greatest"
            )
            fix = (
                "ask logical_to_physical_map at every step, never a copy of it, for every tensor that belongs to an "
                "expert; compute nothing from expert weights at load that is not in get_expert_weights()"
            )
            yield Problem(where, says, fix)
            return
        counted = states.load - before
        if not torch.equal(counted, before.flip(1)):
            says = f"{label}: expert_load_view is not counted at the slots that served the tokens"
            yield Problem(where, says, "count physical experts, after the map")
    yield f"slots moved {label}"


class _Balanced:
    """What a load balancer keeps for one model whose slots hold their first experts."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        layers, logical, physical = model.num_moe_layers, model.num_logical_experts, model.num_physical_experts
        held = [list(range(expert, physical, logical)) for expert in range(logical)]
        self._slots = torch.full((layers, logical, _WIDTH), -1, device=device)
        for expert, slots in enumerate(held):
            self._slots[:, expert, : len(slots)] = torch.tensor(slots, device=device)
        replicas = torch.tensor([len(slots) for slots in held], device=device).repeat(layers, 1)
        self.load = torch.zeros(layers, physical, dtype=torch.int32, device=device)
        model.set_eplb_state(self.load, self._slots, replicas)

    def reverse(self) -> None:
        """The last slot becomes the first, in every layer, in place."""
        with torch.no_grad():
            for tensors in self._model.expert_weights:
                for tensor in tensors:
                    tensor.copy_(tensor.flip(0).clone())
        last = self._model.num_physical_experts - 1
        self._slots.copy_(torch.where(self._slots >= 0, last - self._slots, -1))


def _logits(module: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        hidden = module(tokens, torch.arange(len(tokens), device=tokens.device))
        logits: Tensor = module.compute_logits(hidden)
    return logits.float()


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
