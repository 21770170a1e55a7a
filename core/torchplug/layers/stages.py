"""Parts of a model that this process does not run: placeholders in place of modules, built without weight memory.

A multimodal model marks its language model and its towers while it builds them (`SupportsMultiModal._mark_*`). A part
that the configuration leaves out keeps its place in the module tree, but no parameter, so that nothing is allocated,
loaded or missed for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from torchplug.errors import ContractError, Problem

T = TypeVar("T", bound=Tensor)
Targets: TypeAlias = "type[nn.Module] | tuple[type[nn.Module], ...] | None"


class StageMissingLayer(nn.Module):
    """Stands for a module whose weights were not built. It has no parameters, buffers or children.

    Attributes of the module (a config, a width, a method) can still be read, since model classes do that while they are
    built. Calling it, or anything inside it, raises ContractError with the name of the stage.

    Args:
        stage_name: "language_model", "vision_tower", "audio_tower", ...
        module: What it stands for; it is not modified, and its tensors are not kept.
    """

    def __init__(self, stage_name: str, module: nn.Module | None = None) -> None:
        super().__init__()
        self.stage_name = stage_name
        # Past nn.Module.__setattr__: a registered child would bring its parameter names back.
        self.__dict__["original"] = None if module is None else _without_weights(module, stage_name, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = vars(self).get("original")
            if original is None or name.startswith("__"):
                raise
            return getattr(original, name)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self.stage_name)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Read the stage's tensors to the end and keep none."""
        for _ in weights:
            pass
        return set()

    def process_weights_after_loading(self) -> None:
        """Nothing to do; defined so that the original's is not found here."""

    def extra_repr(self) -> str:
        return f"stage_name={self.stage_name!r}"


@contextmanager
def mark_stage(module: nn.Module, stage_name: str, *, left_out: bool, targets: Targets = None) -> Iterator[list[str]]:
    """Collect the names of one stage while it is built; where `left_out`, placeholders take its place.

    Yields:
        The list of `collect_children`, complete after the context.
    """
    with (
        collect_children(module, targets=targets) as names,
        no_init_weights(module, partial(StageMissingLayer, stage_name), targets=targets) if left_out else nullcontext(),
    ):
        yield names


@contextmanager
def collect_children(module: nn.Module, targets: Targets = None) -> Iterator[list[str]]:
    """Collect the names of the children that this thread assigns to `module` in this context.

    Args:
        module: The parent.
        targets: Collect all descendants of these types (and placeholders of such) instead, at any depth, as they are
            when the context ends.

    Yields:
        A list of dotted names, complete after the context.
    """
    names: list[str] = []
    if targets is not None:
        yield names
        names += [name for name, part in module.named_modules() if name and isinstance(_original(part), targets)]
        return

    thread = threading.get_ident()

    def assigned(owner: nn.Module, name: str, child: nn.Module | None) -> None:
        if owner is module and child is not None and threading.get_ident() == thread:
            names.append(name)

    handle = register_module_module_registration_hook(assigned)
    try:
        yield names
    finally:
        handle.remove()
    names[:] = [name for name in dict.fromkeys(names) if module._modules.get(name) is not None]


@contextmanager
def no_init_weights(
    module: nn.Module, make_placeholder: Callable[[nn.Module], nn.Module], targets: Targets = None
) -> Iterator[None]:
    """Put `make_placeholder(child)` in place of each child that this thread assigns to `module` in this context.

    Parameters are on meta as soon as they are registered, so that a child is built without weight memory. With
    `targets` the descendants of these types are replaced instead, at any depth, each when it is assigned to its parent;
    what is not a target is built as usual, and a target only gives its memory back at that moment (under
    `Host.load`, which puts all parameters on meta, it never has any).
    """
    thread = threading.get_ident()

    def registered(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # A parameter of `module` itself belongs to no child.
        if targets is not None or threading.get_ident() != thread or parameter is None or owner is module:
            return None
        return _on_meta(parameter)

    def assigned(owner: nn.Module, name: str, child: nn.Module | None) -> nn.Module | None:
        if child is None or threading.get_ident() != thread or isinstance(child, StageMissingLayer):
            return None
        replaced = owner is module if targets is None else isinstance(child, targets)
        return make_placeholder(child) if replaced else None

    handles = (
        register_module_parameter_registration_hook(registered),  # type: ignore[arg-type]  # typed as returning None
        register_module_module_registration_hook(assigned),  # type: ignore[arg-type]
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def stage_missing_prefixes(module: nn.Module) -> tuple[str, ...]:
    """Prefixes, each with its dot, of the parameter names that placeholders below `module` stand for.

    `name.startswith(prefixes)` tells whether a checkpoint tensor belongs to a stage that was left out.
    """
    return tuple(
        f"{name}." if name else ""
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, StageMissingLayer)
    )


def _original(module: nn.Module) -> nn.Module:
    original = vars(module).get("original") if isinstance(module, StageMissingLayer) else None
    return module if original is None else original


def _refuse(stage_name: str, *_: Any) -> NoReturn:
    says = "is called, but this model was built without it"
    fix = (
        "build without mm_encoder_only"
        if stage_name == "language_model"
        else "raise the limit of its modality (limit_mm_per_prompt) above 0, or send no such input"
    )
    raise ContractError("a part of the model that is left out", Problem(f"stage {stage_name!r}", says, fix))


def _without_weights(module: nn.Module, stage_name: str, copies: dict[int, nn.Module]) -> nn.Module:
    """The module tree again with every tensor on meta and every call refused.

    New objects, because a part of the tree may be shared with a stage that is built.
    """
    if id(module) in copies:
        return copies[id(module)]
    bare = copies[id(module)] = object.__new__(type(module))
    vars(bare).update({name: _on_meta(v) if isinstance(v, Tensor) else v for name, v in vars(module).items()})
    vars(bare).update(
        _parameters={name: None if p is None else _on_meta(p) for name, p in module._parameters.items()},
        _buffers={name: None if b is None else _on_meta(b) for name, b in module._buffers.items()},
        _modules={
            name: None if child is None else _without_weights(child, stage_name, copies)
            for name, child in module._modules.items()
        },
        _forward_pre_hooks=OrderedDict(),
        _forward_pre_hooks_with_kwargs=OrderedDict(),
    )
    bare.register_forward_pre_hook(partial(_refuse, stage_name))
    return bare


def _on_meta(tensor: T) -> T:
    """The tensor without memory; a parameter stays one and keeps what was attached to it (a weight_loader)."""
    if is_lazy(tensor) or tensor.is_meta:
        return tensor
    meta: Any = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        vars(meta).update(vars(tensor))
    return cast("T", meta)
