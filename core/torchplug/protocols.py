"""What typing.Protocol lacks as a base of models: a constructor that goes on, defaults per class, a test for stubs."""

from __future__ import annotations

import copy
import dis
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def cooperative(protocol: C) -> C:
    """Make a Protocol a good base class for nn.Modules, in any order of bases, on every Python from 3.11.

    `typing` gives each Protocol an `__init__` that ends the chain: in `class M(SupportsLoRA, nn.Module)` a
    `super().__init__()` would never reach nn.Module. Ours goes on to the next ordinary class. And a dict or list
    default would be one object for all model classes of the process: each subclass gets a copy of what it inherits.
    """
    interface: Any = protocol
    per_class = [
        name for name, value in vars(protocol).items() if type(value) in (dict, list) and not name.startswith("__")
    ]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        mro = type(self).__mro__
        if is_protocol(mro[0]):
            raise TypeError(f"{mro[0].__name__} is an interface: subclass it together with torch.nn.Module")
        onward: Any = next(b for b in mro[mro.index(protocol) + 1 :] if "__init__" in vars(b) and not is_protocol(b))
        onward.__init__(self, *args, **kwargs)

    def __init_subclass__(cls: type, /, **kwargs: Any) -> None:
        super(interface, cls).__init_subclass__(**kwargs)
        for name in per_class:
            inherited = getattr(cls, name)
            if name not in vars(cls) and type(inherited) in (dict, list):
                setattr(cls, name, copy.deepcopy(inherited))

    interface.__init__ = __init__
    if per_class:
        interface.__init_subclass__ = classmethod(__init_subclass__)
    return protocol


def is_protocol(cls: type) -> bool:
    """Whether a class itself is a Protocol, not an ordinary class below one."""
    # Only the class's own dict tells: below a mixin that swallows __init_subclass__ a Protocol's mark is inherited.
    return vars(cls).get("_is_protocol") is True


def find_method(cls: type, name: str) -> tuple[type, Callable[..., Any]] | None:
    """The class of the MRO that a method comes from, and its function out of classmethod or staticmethod; else None."""
    for owner in cls.__mro__:
        if name in vars(owner):
            function = _function(vars(owner)[name])
            return (owner, function) if callable(function) else None
    return None


def is_stub(function: Callable[..., Any], owner: type) -> bool:
    """Whether a method is the empty body of a Protocol, ours or anybody's, which a class inherits by a mere claim.

    Empty is: a docstring, `...`, `pass`, `return None`, `raise NotImplementedError` with a fixed text or none.

    Args:
        function: As `find_method` gives it; a bound method does too.
        owner: The class that it comes from, or any class that inherits it from there.
    """
    function = _function(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    home = (base for base in owner.__mro__ if any(_function(value) is function for value in vars(base).values()))
    return any(map(is_protocol, home)) and _effect(code) in _empty_effects()


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _effect(code: CodeType) -> tuple[tuple[str, object], ...]:
    """Bytecode in a form that two functions with the same effect share.

    Constants count by value, not by index, which a docstring shifts; a text counts as any text, since in the bodies
    compared here it is an error's message; a NOP, which only holds the line number of a `pass`, does not count.
    """
    return tuple(
        (step.opname, str if "CONST" in step.opname and isinstance(step.argval, str) else step.argval)
        for step in dis.get_instructions(code)
        if step.opname != "NOP"
    )


@cache
def _empty_effects() -> frozenset[tuple[tuple[str, object], ...]]:
    """What this very Python compiles empty functions to, so that no version's opcodes need to be known."""

    def nothing(self: object) -> Any: ...

    def unimplemented(self: object) -> Any:
        raise NotImplementedError

    def unimplemented_call(self: object) -> Any:
        raise NotImplementedError()

    def unimplemented_text(self: object) -> Any:
        raise NotImplementedError("text")

    bodies = (nothing, unimplemented, unimplemented_call, unimplemented_text)
    return frozenset(_effect(body.__code__) for body in bodies)
