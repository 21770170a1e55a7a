"""`model.hooks`: every hook of a model as a function with the interface's exact signature, checked and placed.

Two faces of a hook. A caller sees the interface's own signature; pluggy sees a positional one with the model first,
since it delivers neither keyword-only arguments nor `**kwargs`. Both are generated from the hook table. While nothing
wraps a hook, `model.hooks.X` calls the author's method directly; when something does, it calls the model's own small
PluginManager. Which of the two was decided when the wrapper was attached, never during a call.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from pluggy import PluginManager

from torchplug.errors import ContractError, HookNotProvided, Problem, note_origin
from torchplug.hookspecs import HOOKS, TABLE, Hook, Phase, Place
from torchplug.host.contracts import ClassReport, Implementation
from torchplug.host.marks import PROJECT, hookimpl, hookspec
from torchplug.host.wrappers import Wrapper
from torchplug.results import Facts, describe

if TYPE_CHECKING:
    import torch

HookFunction = Callable[..., Any]


class Hooks:
    """The hooks of one model, by name. `dir()` lists those that are there; any other raises HookNotProvided with the
    reason.

    Read `model.hooks.X` at each use: attaching a wrapper replaces it.
    """

    def __init__(self, subject: str, absent: Mapping[str, str]) -> None:
        self._subject = subject
        self._absent = absent

    def __getattr__(self, name: str) -> HookFunction:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._absent:
            says, fix = self._absent[name], "see `torchplug show` for what this model has"
        else:
            says, fix = "no such hook", f"the hooks are {', '.join(HOOKS)}"
        raise HookNotProvided(self._subject, Problem(name, says, fix))

    def __dir__(self) -> list[str]:
        return sorted(name for name in vars(self) if not name.startswith("_"))


class Binding:
    """The hooks of one class or one loaded model, and the wrappers around them.

    Args:
        model: The class, or the instance that owns the methods.
        report: What the contract checks said of the class.
        phases: The phases that can be called on `model`.
        claimed: Interfaces of `model`.
        facts: Device and dtype for placement and result checks.
    """

    def __init__(
        self, model: Any, report: ClassReport, *, phases: Iterable[Phase], claimed: Iterable[str], facts: Facts
    ) -> None:
        self._model = model
        self._subject = report.subject
        self._facts = facts
        self._wrappers: list[Wrapper] = []
        self._direct: dict[str, HookFunction] = {}
        self._inner: dict[str, HookFunction] = {}
        self._wrapped: dict[str, HookFunction] = {}
        absent = dict(report.absent)
        usable = {*claimed, "VllmModel"}
        for hook in TABLE:
            implementation = report.implementations.get(hook.name)
            if implementation is None:
                continue
            if not usable.intersection(hook.interfaces):
                absent[hook.name] = f"the model does not claim {' or '.join(hook.interfaces)}"
            elif hook.phase not in phases:
                absent[hook.name] = f"is a {hook.phase}-phase hook and needs a loaded model: host.load(...)"
            else:
                self._direct[hook.name] = _direct_function(model, implementation, self._subject, facts)
                self._inner[hook.name] = _direct_function(model, implementation, self._subject, facts, placed=True)
        self.hooks = Hooks(self._subject, absent)
        self._manager = PluginManager(PROJECT)
        self._manager.add_hookspecs(_specs())  # type: ignore[arg-type]
        self._manager.register(_owner_adapter(self._inner), name=self._subject)
        self._manager.check_pending()
        for name, function in self._direct.items():
            setattr(self.hooks, name, function)

    @property
    def wrappers(self) -> tuple[Wrapper, ...]:
        """The attached wrappers, innermost first."""
        return tuple(self._wrappers)

    def attach(self, wrapper: Wrapper) -> None:
        """Put `wrapper` around the hooks that it names; the last attached is the outermost."""
        if any(other.plugin is wrapper.plugin for other in self._wrappers):
            raise ContractError(
                wrapper.subject, Problem("attach", f"is already attached to {self._subject}", "detach it first")
            )
        self._manager.register(wrapper.adapter(self._facts), name=f"{wrapper.subject} {id(wrapper.plugin)}")
        self._wrappers.append(wrapper)
        self._replace(wrapper)

    def detach(self, plugin: Any) -> None:
        """Take the wrapper plugin away from every hook of this model."""
        for wrapper in self._wrappers:
            if wrapper.plugin is plugin:
                self._manager.unregister(name=f"{wrapper.subject} {id(plugin)}")
                self._wrappers.remove(wrapper)
                self._replace(wrapper)
                return
        raise ContractError(self._subject, Problem("detach", f"{describe(plugin)} is not attached", "attach it first"))

    @contextmanager
    def attached(self, wrapper: Wrapper) -> Iterator[None]:
        self.attach(wrapper)
        try:
            yield
        finally:
            self.detach(wrapper.plugin)

    def close(self) -> None:
        """Detach everything and let go of the model; every hook is gone afterwards."""
        for wrapper in self.wrappers:
            self.detach(wrapper.plugin)
        for name in self._direct:
            delattr(self.hooks, name)
        self.hooks._absent = dict.fromkeys(HOOKS, "the model is closed")
        self._direct.clear()
        self._inner.clear()
        self._wrapped.clear()
        self._model = None

    def _replace(self, wrapper: Wrapper) -> None:
        """Point the slots of the hooks that `wrapper` names to the manager, or back to the author's method."""
        update: dict[str, HookFunction] = {}
        for name in wrapper.hook_names:
            if name not in self._direct:
                continue
            if any(name in other.hook_names for other in self._wrappers):
                if name not in self._wrapped:
                    caller = getattr(self._manager.hook, name)
                    self._wrapped[name] = _wrapped_function(
                        self._model, HOOKS[name], caller, self._subject, self._facts
                    )
                update[name] = self._wrapped[name]
            else:
                update[name] = self._direct[name]
        vars(self.hooks).update(update)


# -- the caller's face -----------------------------------------------------------------------------------


@cache
def _factory(
    hook: Hook, call: str, lacking: tuple[str, ...], on_cpu: bool, places: bool
) -> Callable[[dict[str, Any]], HookFunction]:
    """Compile the function of one hook for one way of calling; cached, since all models share it.

    The source is what a careful author would write by hand.
    """
    lines = [f"def {hook.name}{_plain_signature(hook)}:", *(_placement(hook, on_cpu) if places else ())]
    for name in lacking:
        lines += [
            f"    if {name} is not {hook.signature.parameters[name].default!r}:",
            f"        _lacking({name!r}, {name})",
        ]
    lines += [
        "    try:",
        f"        result = _call({call})",
        "    except Exception as error:",
        "        _note(error)",
        "        raise",
    ]
    if hook.returns.exact is not None:
        lines += ["    if result.__class__ is not _exact:", "        _broken(result)"]
    else:
        lines += ["    found = _test(result)", "    if found is not None:", "        _broken(result, found)"]
    lines.append("    return result")
    code = compile("\n".join(lines), f"<torchplug hook {hook.name}>", "exec")

    def make(scope: dict[str, Any]) -> HookFunction:
        exec(
            code, scope
        )  # scope is the function's globals: popping the function leaves no cycle that would keep the model
        function: HookFunction = scope.pop(hook.name)
        function.__doc__ = hook.of.__doc__
        function.__signature__ = hook.signature  # type: ignore[attr-defined]
        function.__qualname__ = f"hooks.{hook.name}"
        return function

    return make


def _placement(hook: Hook, on_cpu: bool) -> Iterator[str]:
    """Source lines that find out whether anything has to be placed. On the CPU, `.is_cpu` is all that a tensor has to
    pass.
    """
    misplaced = "not {0}.is_cpu" if on_cpu else "{0}.device != _device"
    for name in hook.places:
        parameter = hook.signature.parameters[name]
        if _takes_tensor(hook, name):
            condition = f"{name}.__class__ is not _Tensor or {misplaced.format(name)}"
            if parameter.default is None:
                condition = f"{name} is not None and ({condition})"
        else:
            condition = name if parameter.kind is parameter.VAR_KEYWORD else f"{name} is not None"
        yield f"    if {condition}:"
        yield f"        {name} = _place({name!r}, {name})"


def _plain_signature(hook: Hook) -> inspect.Signature:
    return inspect.Signature([p.replace(annotation=p.empty) for p in hook.signature.parameters.values()])


def _takes_tensor(hook: Hook, argument: str) -> bool:
    """Whether an argument is one tensor or None, rather than a container of tensors."""
    return str(hook.signature.parameters[argument].annotation).split(" |")[0] in ("Tensor", "torch.Tensor")


def _direct_function(
    model: Any, implementation: Implementation, subject: str, facts: Facts, *, placed: bool = False
) -> HookFunction:
    """The hook as a function that calls the author's method; `placed` says that the arguments are in place already."""
    hook = implementation.hook
    scope = _scope(hook, implementation.where, subject, facts)
    scope["_call"] = getattr(model, implementation.attribute)
    places = facts.device is not None and not placed
    return _factory(hook, implementation.call, implementation.lacking, _on_cpu(facts), places)(scope)


def _wrapped_function(model: Any, hook: Hook, caller: HookFunction, subject: str, facts: Facts) -> HookFunction:
    """The hook as a function that packs its arguments for the manager's caller.

    It places the arguments, for the wrappers too; the adapters behind it check the results.
    """
    lines = [f"def {hook.name}{_plain_signature(hook)}:"]
    scope: dict[str, Any] = {"_caller": caller, "_model": model}
    if facts.device is not None:
        lines += _placement(hook, _on_cpu(facts))
        scope |= _placement_scope(hook, subject, facts)
    packed = ", ".join(f"{name}={p.name}" for name, p in hook.arguments.items())
    lines.append(f"    return _caller(model=_model, {packed})")
    exec(compile("\n".join(lines), f"<torchplug wrapped hook {hook.name}>", "exec"), scope)
    function: HookFunction = scope.pop(hook.name)
    function.__doc__ = hook.of.__doc__
    function.__signature__ = hook.signature  # type: ignore[attr-defined]
    return function


def _on_cpu(facts: Facts) -> bool:
    return facts.device is not None and facts.device.type == "cpu"


def _scope(hook: Hook, where: str, subject: str, facts: Facts) -> dict[str, Any]:
    """Names that a generated function uses."""

    def broken(result: Any, found: str | None = None) -> NoReturn:
        says = f"expected {hook.returns.says}; found {found or describe(result)}"
        raise ContractError(subject, Problem(where, says, f"return {hook.returns.says}"))

    def lacking(name: str, value: Any) -> NoReturn:
        says = f"{name}={describe(value)} was passed, and the method does not take {name}"
        raise ContractError(subject, Problem(where, says, f"call the hook without {name}, or let the method take it"))

    def note(error: Exception) -> None:
        note_origin(error, f"{where} of {subject}")

    scope: dict[str, Any] = {"_broken": broken, "_lacking": lacking, "_note": note, "_exact": hook.returns.exact}
    if hook.returns.test is not None:
        scope["_test"] = hook.returns.test(facts)
    if facts.device is not None:
        scope |= _placement_scope(hook, subject, facts)
    return scope


def _placement_scope(hook: Hook, subject: str, facts: Facts) -> dict[str, Any]:
    """Names that the lines of `_placement` use."""
    from torch import Tensor

    return {"_Tensor": Tensor, "_device": facts.device, "_place": _placer(hook, subject, facts)}


def _placer(hook: Hook, subject: str, facts: Facts) -> Callable[[str, Any], Any]:
    """The slow path of placement: move a CPU tensor to the model's device, refuse everything else that is in the wrong
    place. What is in place already is given back as it is.
    """
    from torch import Tensor

    device, on_cpu = facts.device, _on_cpu(facts)
    lone = [name for name in hook.places if _takes_tensor(hook, name)]

    def refuse(name: str, says: str, fix: str) -> NoReturn:
        raise ContractError(f"call of {hook.name} on {subject}", Problem(name, says, fix))

    def in_place(value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.is_cpu if on_cpu else value.device == device
        if type(value) in (list, tuple):
            return all(map(in_place, value))
        return all(map(in_place, value.values())) if type(value) is dict else True

    def place_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        if hook.places[name.partition("[")[0]] is Place.VIEW:
            says = f"is on {tensor.device}; a view is shared for life and must be on {device}"
            refuse(name, says, f"allocate it on {device}")
        if not tensor.is_cpu:
            says = f"is on {tensor.device}, the model on {device}"
            refuse(name, says, f"give it on {device} or on the CPU")
        return tensor.to(device)

    def place_nested(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return place_tensor(name, value)
        if type(value) in (list, tuple):
            return type(value)(place_nested(f"{name}[{index}]", item) for index, item in enumerate(value))
        if type(value) is dict:
            return {key: place_nested(f"{name}[{key!r}]", item) for key, item in value.items()}
        return value

    def place(name: str, value: Any) -> Any:
        if name not in lone:
            return value if in_place(value) else place_nested(name, value)
        if not isinstance(value, Tensor):
            refuse(name, f"expected a tensor, found {describe(value)}", f"pass a tensor on {device}")
        return place_tensor(name, value)

    return place


# -- pluggy's face ---------------------------------------------------------------------------------------


@cache
def _specs() -> SimpleNamespace:
    """The pluggy specifications of the whole table: positional, without defaults, first result, the model first."""
    return SimpleNamespace(
        **{
            hook.name: hookspec(firstresult=True)(_compiled(hook, f"def {hook.name}(model{_comma(hook)}): ..."))
            for hook in TABLE
        }
    )


def _owner_adapter(direct: Mapping[str, HookFunction]) -> SimpleNamespace:
    """The owner's implementations, as pluggy wants them.

    They hold the functions weakly: a PluginManager is a reference cycle, and a model's weights must not wait for the
    garbage collector.
    """
    adapter = SimpleNamespace()
    for name, function in direct.items():
        hook = HOOKS[name]
        unpacked = ", ".join(
            f"**{argument}"
            if p.kind is p.VAR_KEYWORD
            else f"{argument}={argument}"
            if p.kind is p.KEYWORD_ONLY
            else argument
            for argument, p in hook.arguments.items()
        )
        source = f"def {name}(model{_comma(hook)}):\n    return _direct()({unpacked})"
        setattr(adapter, name, hookimpl(_compiled(hook, source, _direct=weakref.ref(function))))
    return adapter


def _comma(hook: Hook) -> str:
    return "".join(f", {argument}" for argument in hook.arguments)


def _compiled(hook: Hook, source: str, **scope: Any) -> HookFunction:
    exec(compile(source, f"<torchplug adapter {hook.name}>", "exec"), scope)
    function: HookFunction = scope.pop(hook.name)
    return function
