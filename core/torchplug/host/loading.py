"""From a model class to a module with its weights on the device, at a peak of one copy of the model.

Parameters become meta tensors the moment they are registered, so building a module allocates nothing that lasts; the
tensors on the device are made once and filled while the checkpoint streams. Buffers are built for real, since authors
compute them in `__init__`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchplug.errors import CheckpointError, ContractError, Problem
from torchplug.host.blame import LOADING, blamed
from torchplug.host.contracts import location
from torchplug.host.untrusted import shown
from torchplug.results import describe

if TYPE_CHECKING:
    from torchplug.config import VllmConfig
    from torchplug.host.checkpoint import Checkpoint

Progress = Callable[[int, int], None]


def build_module(cls: type[nn.Module], vllm_config: VllmConfig, subject: str) -> nn.Module:
    """Construct the class with its parameters on `meta` and its buffers on the model's device, in the model's dtype.

    Raises:
        PluginError: the constructor failed; the cause is chained.
        DeviceError: there is not enough memory.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        with blamed(subject, cls, "__init__", LOADING), _parameters_on_meta():
            module = cls(vllm_config=vllm_config, prefix="")
    finally:
        torch.set_default_dtype(before)
    _move_buffers(module, vllm_config.device_config.device)
    return module


def load_weights(
    module: nn.Module, checkpoint: Checkpoint, device: torch.device, subject: str, progress: Progress | None = None
) -> None:
    """Allocate the module's parameters on `device` and fill them from the checkpoint.

    Raises:
        CheckpointError: with every missing, unexpected and wrongly shaped tensor.
        ContractError: the class's load_weights does not return the names that it filled.
        PluginError: a method of the class failed; the cause is chained.
        DeviceError: there is not enough memory.
    """
    from torchplug.layers.weights import WeightsMismatch

    with blamed(subject, type(module), "load_weights", LOADING):
        _materialise(module, device)
    problems: list[Problem] = []
    with torch.no_grad():
        try:
            with blamed(subject, type(module), "load_weights", LOADING):
                loaded = module.load_weights(_reported(checkpoint.weights(), checkpoint.total_bytes, progress))  # type: ignore[operator]
        except WeightsMismatch as mismatch:
            loaded = mismatch.loaded
            problems += mismatch.problems
    if not isinstance(loaded, (set, frozenset)):
        where = f"load_weights ({location(getattr(type(module), 'load_weights', None))})"
        says = f"returned {describe(loaded)}, expected the set of parameter names that it filled"
        raise ContractError(subject, Problem(where, says, "collect the names and return the set"))
    problems += _missing(module, loaded, {problem.where for problem in problems})
    if problems:
        problems = [*_quantised(checkpoint.config), *problems]
        raise CheckpointError(f"checkpoint {checkpoint.name!r} for {subject}", problems)
    with torch.no_grad():
        for part in module.modules():
            finish = getattr(part, "process_weights_after_loading", None)
            if finish is not None:
                with blamed(subject, type(part), "process_weights_after_loading", LOADING):
                    finish()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Turn every parameter that this thread registers into a meta tensor. Initialisers that run afterwards cost nothing
    on meta.
    """
    builder = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        if threading.get_ident() != builder or parameter is None or parameter.is_meta:
            return None
        meta = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
        vars(meta).update(vars(parameter))  # a weight_loader and the like, set before registration
        return meta

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Replace meta parameters by uninitialised ones on `device`; parameters that were tied stay one."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                # Not empty_like: on a meta tensor it imports torch's decompositions, 0.3 s and 33 MB.
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                real = nn.Parameter(values, requires_grad=False)
                vars(real).update(vars(parameter))
                made[id(parameter)] = real
            part._parameters[name] = made[id(parameter)]


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


def _missing(module: nn.Module, loaded: Iterable[str], reported: set[str]) -> list[Problem]:
    """Parameters that nothing filled and that are not reported already; a tied parameter needs one of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    filled = set(loaded)
    return [
        Problem(
            aliases[0], "is missing", "the checkpoint must hold it: download it again, or check that it fits the class"
        )
        for aliases in names.values()
        if not filled.intersection(aliases) and not reported.intersection(aliases)
    ]


def _quantised(config: Mapping[str, Any]) -> list[Problem]:
    """Why the weights of a quantised checkpoint do not fit: nothing else in the list would say it."""
    found = config.get("quantization_config")
    if not found:
        return []
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    says = f"the checkpoint is quantised ({shown(method or 'method not named')}), which the class does not read"
    return [Problem("quantization_config", says, "use the model's unquantised weights, or a GGUF file of it")]


def _reported(
    weights: Iterable[tuple[str, torch.Tensor]], total: int, progress: Progress | None
) -> Iterable[tuple[str, torch.Tensor]]:
    """The stream of weights, telling `progress(bytes done, bytes in all)` after each tensor."""
    if progress is None:
        return weights
    return _counted(weights, total, progress)


def _counted(
    weights: Iterable[tuple[str, torch.Tensor]], total: int, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    done = 0
    for name, tensor in weights:
        yield name, tensor
        done += tensor.nbytes
        progress(min(done, total), total)
    progress(total, total)


def default_max_model_len(config: Mapping[str, Any]) -> int:
    """The longest sequence that a config.json speaks of, in tokens; 2048 where it says nothing.

    Rotary scaling that extends the trained length by a factor counts: linear and dynamic from
    `max_position_embeddings`, yarn from its own `original_max_position_embeddings`. The other types are written with
    the extended length already.
    """
    nested = config.get("text_config")
    for values in (config, nested if isinstance(nested, Mapping) else {}):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx"):
            if isinstance(values.get(key), int):
                return _extended(int(values[key]), values.get("rope_scaling") or values.get("rope_parameters"))
    return 2048


def _extended(length: int, scaling: Any) -> int:
    if not isinstance(scaling, Mapping) or not isinstance(factor := scaling.get("factor"), (int, float)):
        return length
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "yarn" and isinstance(original := scaling.get("original_max_position_embeddings"), int):
        return int(original * factor)
    return int(length * factor) if kind in ("linear", "dynamic", "yarn") else length
