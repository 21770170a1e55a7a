"""The check of `load_weights`: every parameter filled from its own tensor, and nothing missing or too much unsaid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from torchplug.errors import Problem
from torchplug.interfaces import is_mixture_of_experts
from torchplug.layers.weights import grouped_names
from torchplug.results import describe
from torchplug.testing.findings import Finding
from torchplug.testing.specimen import Specimen, problems_of

_EXTRA: Final = "torchplug_testing.no_such_layer.weight"


def weights_round_trip(specimen: Specimen) -> Iterator[Finding]:
    """With a checkpoint of its own: it loads whole. With the tiny one: what each tensor fills, one by one.

    Values may be changed on the way (Mamba stores a logarithm), transposed or fused; so a tensor is followed by
    changing it: as many parameter elements must change as it has, and no other tensor may change the same ones.
    """
    if not specimen.is_tiny:
        yield from _finite(specimen)
        return
    tensors = specimen.tensors
    where = specimen.where("load_weights")
    module = specimen.build()
    try:
        loaded = _load(module, tensors)
    except Exception as error:
        yield from problems_of(error, where, f"its own tiny checkpoint ({', '.join(grouped_names(tensors))}) to load")
        if not specimen.has_own_tensors:
            says = "what was tried are names and shapes of its own parameters, since nobody gave those of a checkpoint"
            fix = "where checkpoints have others, write @classmethod tiny_weights(cls) -> {name: shape}"
            yield Problem(f"tiny_weights (class {specimen.cls.__name__})", says, fix)
        return
    faults = list(_filled(module, loaded, where)) or list(_followed(module, tensors, where))
    yield from faults
    if not faults:
        yield from _reported(module, tensors, where)
        yield f"{sum(tensor.numel() for tensor in tensors.values())} numbers in {len(tensors)} tensors"


def _load(module: nn.Module, tensors: Mapping[str, Tensor]) -> object:
    """Poison every parameter and fill it again; what load_weights returns."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))
        # Copies: a loader may keep or change what it is given.
        return module.load_weights((name, tensor.clone()) for name, tensor in tensors.items())  # type: ignore[operator]


def _filled(module: nn.Module, loaded: object, where: str) -> Iterator[Problem]:
    """Whether what was returned is the set of names of all parameters, and all of them hold numbers."""
    if not isinstance(loaded, (set, frozenset)):
        says = f"expected the set of the names that it filled, found {describe(loaded)}"
        yield Problem(where, says, "collect the names of the parameters and return the set")
        return
    parameters = dict(module.named_parameters(remove_duplicate=False))
    known = {*parameters, *dict(module.named_buffers(remove_duplicate=False))}
    if unknown := {str(name) for name in loaded} - known:
        says = f"expected names of the module's parameters, found {_listed(unknown)}"
        yield Problem(where, says, "return the module's names, not the checkpoint's")
    if missing := _missing(module, loaded):
        says = f"expected every parameter to be filled and named; {_listed(missing)} is not among the names returned"
        yield Problem(where, says, "fill it, or tie it by assigning the same Parameter")
    filled = {name: parameter for name, parameter in parameters.items() if name not in missing}
    if hollow := [name for name, parameter in filled.items() if not bool(parameter.isfinite().all())]:
        says = f"named {_listed(hollow)} as filled, and some of its elements were never written"
        yield Problem(where, says, "write every element, and return only the names of what was written")


def _missing(module: nn.Module, loaded: Iterable[object]) -> list[str]:
    """Parameters that are not named; a tied one is named by any of its names."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    named = set(loaded)
    return [names[0] for names in aliases.values() if not named.intersection(names)]


def _followed(module: nn.Module, tensors: Mapping[str, Tensor], where: str) -> Iterator[Problem]:
    """Change one tensor at a time and see which elements of which parameters change with it."""
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    # A redundant expert is a copy of another one, filled from the same tensor.
    copies = is_mixture_of_experts(module) and module.num_redundant_experts > 0
    taken = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in before.items()}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        _load(module, {**tensors, name: tensor + 1})
        changed, again = 0, []
        for parameter_name, parameter in module.named_parameters():
            differs = parameter != before[parameter_name]
            changed += int(differs.sum())
            if bool((differs & taken[parameter_name]).any()):
                again.append(parameter_name)
            taken[parameter_name] |= differs
        if changed < tensor.numel() or (changed > tensor.numel() and not copies):
            says = f"expected the {tensor.numel()} elements of {name} in the parameters, found that it fills {changed}"
            yield Problem(where, says, "write each tensor once, whole, to the place that its name says")
        elif again:
            says = f"expected {name} to fill elements of its own, found that {_listed(again)} is filled twice"
            yield Problem(where, says, "write each tensor once, whole, to the place that its name says")
    if left := [name for name, mask in taken.items() if before[name].is_floating_point() and not bool(mask.all())]:
        says = f"expected every element to come from the checkpoint; in {_listed(left)} some do not"
        yield Problem(where, says, "fill the whole parameter, or make what is constant a buffer")


def _reported(module: nn.Module, tensors: Mapping[str, Tensor], where: str) -> Iterator[Problem]:
    """Whether a tensor that is missing and one that belongs nowhere are noticed."""
    silent = []
    for name in tensors:
        try:
            loaded = _load(module, {other: tensor for other, tensor in tensors.items() if other != name})
        except Exception:
            continue
        if isinstance(loaded, (set, frozenset)) and not _missing(module, loaded):
            silent.append(name)
    if silent:
        says = f"expected a checkpoint without {_listed(silent)} to be refused, found that it loads without a word"
        yield Problem(where, says, "return only the names of what a tensor came for; the host reports the others")
    try:
        _load(module, {**tensors, _EXTRA: torch.zeros(2, 2)})
    except Exception as error:
        if _EXTRA in str(error):
            return
        says = f"expected an error that names the tensor {_EXTRA!r}, found {type(error).__name__}: {error}"
    else:
        says = f"expected the tensor {_EXTRA!r}, which belongs nowhere, to be refused; found that it is ignored"
    yield Problem(where, says, "use torchplug.layers.load_weights, or raise an error that names the tensor")


def _finite(specimen: Specimen) -> Iterator[Finding]:
    model = specimen.load(specimen.devices[0])
    parameters = {
        name: parameter.to_dense() if parameter.layout is not torch.strided else parameter
        for name, parameter in model.module.named_parameters()
    }
    if hollow := [name for name, parameter in parameters.items() if not bool(parameter.isfinite().all())]:
        says = f"expected finite numbers, found others in {_listed(hollow)}"
        yield Problem(specimen.where("load_weights"), says, "check the checkpoint, and that every element is written")
    yield f"{sum(parameter.numel() for parameter in parameters.values())} numbers in {len(parameters)} parameters"


def _listed(names: Iterable[str]) -> str:
    lines = grouped_names(names)
    return ", ".join(lines[:4]) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")
