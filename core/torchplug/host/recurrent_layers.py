"""What a class says of its recurrent state, against the layers that it really builds.

The class-phase hooks speak before any layer exists, and memory is planned from them. Where they differ from the layers
(another shape with draft tokens, a list of layer types under a new name) other engines die in a later step or compute
with the wrong state; here it is an error at load that names the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import torch
from torch import nn

from torchplug.config import ParallelConfig, SpeculativeConfig
from torchplug.errors import ContractError, Problem, TorchplugError
from torchplug.host.contracts import location, of_class
from torchplug.host.loading import build_module
from torchplug.layers.attention import Attention
from torchplug.layers.recurrent import RecurrentLayer
from torchplug.results import describe

if TYPE_CHECKING:
    from torchplug.config import HfConfig, VllmConfig
    from torchplug.host.model import TypedHooks

_SHAPE_HOOK: Final = "get_mamba_state_shape_from_config"
_DTYPE_HOOK: Final = "get_mamba_state_dtype_from_config"

Size: TypeAlias = tuple[int, int]
"""A tensor-parallel size and a number of draft tokens."""

ALL_SIZES: Final[tuple[Size, ...]] = tuple(product((1, 2, 3, 4), (0, 1, 2, 3)))
"""Those under which the hooks and the layers should agree."""

LOAD_SIZES: Final[tuple[Size, ...]] = (*((tp, 0) for tp in (2, 3, 4)), *((1, tokens) for tokens in (1, 2, 3)), (2, 3))
"""Those that a load looks at beside its own: every one costs as long as building the model, without its weights, takes
(12 ms for 24 layers). The conformance kit looks at all."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one recurrent layer keeps for one request: 1 to 5 tensors of any rank."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def __str__(self) -> str:
        return ", ".join(
            f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


class Handle(Protocol):
    """A model class or a loaded model, as far as its hooks and claims are asked here."""

    interfaces: frozenset[str]

    @property
    def hooks(self) -> TypedHooks: ...


def recurrent_layers(module: nn.Module) -> dict[str, RecurrentLayer]:
    """The recurrent layers of a module by name, in order."""
    return {name: part for name, part in module.named_modules() if isinstance(part, RecurrentLayer)}


def declared_state(handle: Handle, vllm_config: VllmConfig, subject: str) -> StateSpec:
    """What the class-phase hooks say of one layer's state.

    Raises:
        ContractError: there are not as many dtypes as shapes.
    """
    shapes = handle.hooks.get_mamba_state_shape_from_config(vllm_config)
    dtypes: tuple[torch.dtype, ...] = (vllm_config.model_config.dtype,) * len(shapes)
    if _DTYPE_HOOK in dir(handle.hooks):
        dtypes = handle.hooks.get_mamba_state_dtype_from_config(vllm_config)
    if len(dtypes) != len(shapes):
        says = f"gives {len(dtypes)} dtypes, and {_SHAPE_HOOK} gives {len(shapes)} shapes"
        raise ContractError(subject, Problem(_DTYPE_HOOK, says, "return one dtype for each state tensor"))
    return StateSpec(shapes, dtypes)


def check_recurrent_layers(
    handle: Handle, cls: type[nn.Module], module: nn.Module, vllm_config: VllmConfig, subject: str
) -> None:
    """Compare the class's claims, its config's list of layers and its hooks with `module`, built under `vllm_config`.

    The hooks are compared under every size of `LOAD_SIZES` for which the class can be built. A module without recurrent
    layers of ours costs nothing.

    Raises:
        ContractError: with everything that differs.
    """
    problems = [*kind_problems(handle.interfaces, cls, module, vllm_config)]
    if not problems and recurrent_layers(module):
        problems = [*state_problems(handle, cls, module, vllm_config, subject)]
    if problems:
        raise ContractError(subject, problems)


# -- which kinds of layers there are ---------------------------------------------------------------------

_ATTENTION, _RECURRENT, _BOTH, _NEITHER = "attention", "recurrent", "both", "neither"
_KINDS: Final[Mapping[Any, str]] = {
    1: _ATTENTION,  # attn_type_list
    0: _RECURRENT,
    **dict.fromkeys(("attention", "full_attention", "sliding_attention", "chunked_attention", "*"), _ATTENTION),
    **dict.fromkeys(
        ("mamba", "mamba1", "mamba2", "conv", "short_conv", "linear_attention", "recurrent", "ssm", "M"), _RECURRENT
    ),
    "hybrid": _BOTH,
    **dict.fromkeys(("moe", "mlp", "none", "no_op", "-", "E"), _NEITHER),
}
_LISTS: Final = ("layers_block_type", "attn_type_list", "layer_types")
"""The keys of config.json that say which layer is which, the first that is there counts."""


def listed_layers(config: HfConfig) -> tuple[str, Sequence[Any]] | None:
    """The key and the list of a config that say of each layer what it is; None where there is none."""
    for key in _LISTS:
        found = config.get(key)
        if isinstance(found, (list, tuple)) and found:
            return key, found
    return None


def kind_problems(
    claimed: Iterable[str], cls: type[nn.Module], module: nn.Module, vllm_config: VllmConfig
) -> Iterator[Problem]:
    """Where the flags of a class, or the list in its config, and the layers of `module` do not agree.

    A class that builds no layer of ours keeps nothing between steps, whatever it claims.
    """
    claimed = frozenset(claimed)
    attention = sum(isinstance(part, Attention) for part in module.modules())
    recurrent = len(recurrent_layers(module))
    where = of_class(cls)
    if not attention and not recurrent:
        return
    built = f"builds {_count(attention, 'Attention layer')} and {_count(recurrent, 'recurrent layer')}"
    if "IsAttentionFree" in claimed and attention:
        yield Problem(f"is_attention_free ({where})", built, "claim IsHybrid instead")
    if "IsHybrid" not in claimed:
        if attention and recurrent:
            yield Problem(
                f"is_hybrid ({where})",
                f"{built}, and does not claim IsHybrid",
                "derive from IsHybrid and HasInnerState",
            )
        elif recurrent and "HasInnerState" not in claimed:
            says = f"{built}, and claims neither HasInnerState nor IsHybrid"
            yield Problem(f"has_inner_state ({where})", says, "derive from HasInnerState and IsAttentionFree")
        elif recurrent and "IsAttentionFree" not in claimed:
            says = f"{built}, and claims HasInnerState alone"
            yield Problem(f"is_attention_free ({where})", says, "derive from IsAttentionFree too")
        elif attention and "HasInnerState" in claimed:
            says = f"{built}, and claims HasInnerState"
            fix = "let every layer with a state derive from torchplug.layers.RecurrentLayer"
            yield Problem(f"has_inner_state ({where})", says, fix)
        return
    listed = listed_layers(vllm_config.model_config.hf_text_config)
    kinds = Counter(_KINDS.get(entry, "unknown") for entry in listed[1]) if listed else Counter()
    for kind, found, layer in (
        (_ATTENTION, attention, "torchplug.layers.Attention"),
        (_RECURRENT, recurrent, "torchplug.layers.RecurrentLayer"),
    ):
        fix = f"let every such layer be (or derive from) {layer}"
        if listed is None:
            if not found:
                yield Problem(f"is_hybrid ({where})", f"claims IsHybrid and {built}", fix)
            continue
        least = kinds[kind] + kinds[_BOTH]
        most = least + kinds["unknown"]
        if not least <= found <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            says = f"{listed[0]} of the config names {wanted} of {len(listed[1])} layers {kind}, and the class {built}"
            yield Problem(f"is_hybrid ({where})", says, f"build what {listed[0]} says; {fix}")


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


# -- what each layer keeps -------------------------------------------------------------------------------


def state_problems(
    handle: Handle,
    cls: type[nn.Module],
    module: nn.Module,
    vllm_config: VllmConfig,
    subject: str,
    sizes: Iterable[Size] = LOAD_SIZES,
) -> Iterator[Problem]:
    """Where the hooks and the layers name other states, under the module's own size and `sizes`.

    Of sizes that a class cannot be built for nothing is said. The first size that differs is the last one looked at.
    """
    own = vllm_config.parallel_config.tensor_parallel_size, _speculative_tokens(vllm_config)
    for tp, tokens in dict.fromkeys((own, *sizes)):
        config, built = vllm_config, module
        if (tp, tokens) != own:
            speculative = SpeculativeConfig(tokens) if tokens else None
            config = replace(vllm_config, parallel_config=ParallelConfig(tp), speculative_config=speculative)
            try:
                built = build_module(cls, config, subject)
            except TorchplugError:
                continue
        found = list(
            _differences(handle, cls, built, config, subject, f"tensor-parallel size {tp}, {tokens} draft tokens")
        )
        yield from found
        if found:
            return


def _differences(
    handle: Handle, cls: type[nn.Module], module: nn.Module, config: VllmConfig, subject: str, sizes: str
) -> Iterator[Problem]:
    where = f"{_SHAPE_HOOK} ({location(getattr(cls, _SHAPE_HOOK, None))})"
    try:
        declared = declared_state(handle, config, subject)
    except ContractError as error:
        yield from error.problems
        return
    except Exception as error:
        says = f"raised {type(error).__name__} for {sizes}, a size for which the class builds its layers: {error}"
        yield Problem(where, says, "return the shapes of one layer's state for every size that the layers take")
        return
    found: dict[str, list[str]] = {}
    for name, layer in recurrent_layers(module).items():
        shapes, dtypes = layer.state_shapes(), layer.state_dtypes()
        if len(shapes) != len(dtypes):
            says = f"layer {name!r} has {len(shapes)} state_shapes() and {len(dtypes)} state_dtypes()"
            yield Problem(of_class(type(layer)), says, "let both have one entry for each state tensor")
            return
        if (tuple(map(tuple, shapes)), tuple(dtypes)) != (declared.shapes, declared.dtypes):
            found.setdefault(f"{StateSpec(shapes, dtypes)}", []).append(name)
    for state, names in found.items():
        layers = f"layer {names[0]!r}" + (f" and {len(names) - 1} more" if names[1:] else "")
        says = f"expected the state of {layers} ({state}) for {sizes}, found {declared}"
        if len(names) < len(recurrent_layers(module)):
            fix = (
                "all recurrent layers of a model share one state: let each report the same state_shapes() and "
                f"state_dtypes(), and {_SHAPE_HOOK} and {_DTYPE_HOOK} return them"
            )
        else:
            fix = f"let {_SHAPE_HOOK} (and {_DTYPE_HOOK}) return what the layers' state_shapes() and state_dtypes() do"
        yield Problem(where, says, fix)


def _speculative_tokens(vllm_config: VllmConfig) -> int:
    return int(getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0)


def copy_functions(handle: Handle, spec: StateSpec, subject: str) -> tuple[Any, ...] | None:
    """The copy function of each state tensor; None where the class does not claim SupportsMambaPrefixCaching.

    Raises:
        ContractError: there are not as many as state tensors.
    """
    if "SupportsMambaPrefixCaching" not in handle.interfaces:
        return None
    functions = handle.hooks.get_mamba_state_copy_func()
    if len(functions) != len(spec.shapes):
        says = f"gives {describe(functions)} for {len(spec.shapes)} state tensors"
        raise ContractError(subject, Problem("get_mamba_state_copy_func", says, "return one function for each tensor"))
    return functions
