"""Checks of a model class and of a loaded model against the hook table, before anything runs.

`inspect_class` finds every problem of a class at once and, when there is none, says for each hook how its arguments
reach the author's method. `inspect_instance` adds what only an instance can tell: MixtureOfExperts attributes and flags
set in the wrong place.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torchplug import interfaces
from torchplug.errors import ContractError, Problem
from torchplug.hookspecs import BASE, HOOKS, TABLE, Hook, Phase
from torchplug.host.marks import PROJECT
from torchplug.protocols import is_protocol

_CONVENTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "forward": ("input_ids", "positions"),
    "compute_logits": ("hidden_states",),
    "load_weights": ("weights",),
}
"""Methods that the host and the engine call directly, and the arguments that they pass, by position."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """How a hook's arguments reach the author's method.

    Attributes:
        hook: The row of the table.
        attribute: The method's name on the model; differs from the hook's name for an older spelling.
        call: The argument list of the call, in terms of the hook's own arguments, e.g. `input_ids,
            is_multimodal=is_multimodal`.
        lacking: Arguments that the method does not take; they may be passed only as their default.
        where: `name (file:line)` of the method.
    """

    hook: Hook
    attribute: str
    call: str
    lacking: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class ClassReport:
    """What a model class promises and how each promise is kept.

    Attributes:
        subject: The plugin, for error messages.
        interfaces: Names of the interfaces it claims.
        possible: Interfaces that only an instance can claim (MixtureOfExperts).
        implementations: Per hook name. Includes those of MixtureOfExperts, which only an instance can claim.
        absent: Per hook name, why the model does not have it.
        warnings: What is legal but probably not meant.
    """

    subject: str
    interfaces: frozenset[str]
    possible: frozenset[str]
    implementations: Mapping[str, Implementation]
    absent: Mapping[str, str]
    warnings: tuple[Problem, ...] = field(default=())


def inspect_class(cls: Any, *, subject: str) -> ClassReport:
    """Check `cls` against the conventions and the hook table.

    Raises:
        ContractError: with every problem of the class.
    """
    problems: list[Problem] = []
    if not isinstance(cls, type):
        says = f"found an object of type {type(cls).__name__}, expected a class that derives from torch.nn.Module"
        raise ContractError(subject, Problem("entry point", says, "point it to the model class: package.module:Class"))
    problems += _convention_problems(cls)
    problems += _mark_problems(cls)
    claimed, claim_problems = _claims(cls)
    problems += claim_problems
    possible = frozenset({"MixtureOfExperts"} if interfaces.may_be_mixture_of_experts(cls) else ())

    implementations: dict[str, Implementation] = {}
    absent: dict[str, str] = {}
    warnings: list[Problem] = []
    sure = claimed | {BASE}
    for hook in TABLE:
        found = _find(cls, hook)
        if not (sure | {"MixtureOfExperts"}).intersection(hook.interfaces):
            absent[hook.name] = _not_claimed(cls, hook)
            if found is not None and found.defined:
                warnings.append(Problem(found.where, f"nobody calls it: {absent[hook.name]}", _claim_fix(hook)))
                absent[hook.name] += f", so its {found.where} is not called"
            continue
        needed = bool(sure.intersection(hook.needed)) and not _lifted(cls, hook)
        if found is None or found.refused or found.stub:
            if needed:
                problems.append(_missing(cls, hook, found))
                continue
            claims_it = sure.intersection(hook.interfaces)
            absent[hook.name] = f"{cls.__name__} does not implement it" if claims_it else _not_claimed(cls, hook)
            if found is not None and found.refused:
                problem = _missing(cls, hook, found)
                absent[hook.name] += f"; {found.where} {problem.says}"
                if found.defined:
                    warnings.append(problem)
            continue
        checked = _implementation(hook, found)
        if isinstance(checked, Implementation):
            implementations[hook.name] = checked
        else:
            problems += checked
    if problems:
        raise ContractError(subject, problems)
    warnings += _unread(cls)
    return ClassReport(subject, claimed, possible, implementations, absent, tuple(warnings))


def _lifted(cls: type, hook: Hook) -> bool:
    """Whether a flag of the class makes a hook that its claims need unnecessary."""
    return bool(hook.unless) and getattr(cls, hook.unless, False) is True


def inspect_instance(module: Any, report: ClassReport) -> frozenset[str]:
    """The interfaces of a loaded model: the class's claims, and MixtureOfExperts where all its attributes are there.

    Raises:
        ContractError: a flag was set on the instance, or a class that promises MixtureOfExperts lacks some of its
            attributes.
    """
    problems = [
        Problem(f"{flag} ({of_class(type(module))})", text, f"set {flag} in the class body")
        for flag in _FLAGS
        if (text := interfaces.flag_problem(module, flag))
    ]
    names = set(report.interfaces)
    if interfaces.is_mixture_of_experts(module):
        names.add("MixtureOfExperts")
        problems += [
            _missing(type(module), hook, _find(type(module), hook))
            for hook in TABLE
            if "MixtureOfExperts" in hook.needed
            and not _lifted(type(module), hook)
            and hook.name not in report.implementations
        ]
    elif _promises_experts(module, report) and (missing := interfaces.missing_moe_attributes(module)):
        problems.append(
            Problem(
                f"MixtureOfExperts ({of_class(type(module))})",
                f"the loaded model lacks {', '.join(missing)}",
                "set all ten attributes of MixtureOfExperts in __init__, or do not derive from it",
            )
        )
    problems += _nested_experts(module)
    if problems:
        raise ContractError(report.subject, problems)
    return frozenset(names)


def _nested_experts(module: Any) -> Iterator[Problem]:
    """Models inside this one that promise MixtureOfExperts and lack some of its attributes: a load balancer finds them
    there, in a multimodal wrapper for one."""
    for name, part in getattr(module, "named_modules", tuple)():
        promises = interfaces.may_be_mixture_of_experts(type(part)) or _has_balanced_layers(part)
        if name and promises and (missing := interfaces.missing_moe_attributes(part)):
            yield Problem(
                f"MixtureOfExperts ({of_class(type(part))}, which the model holds as {name})",
                f"lacks {', '.join(missing)}",
                "set all ten attributes of MixtureOfExperts in __init__, or do not derive from it",
            )


def _promises_experts(module: Any, report: ClassReport) -> bool:
    return bool(report.possible) or _has_balanced_layers(module)


def _has_balanced_layers(module: Any) -> bool:
    return hasattr(module, "set_eplb_state") and bool(getattr(module, "num_moe_layers", 0))


def location(function: Any) -> str:
    """`package/module.py:line` of a function, as a reader would look for it; the full path where its package is
    unknown.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return "no Python source"
    return f"{_from_package(code.co_filename, str(getattr(function, '__module__', '')))}:{code.co_firstlineno}"


def of_class(cls: type) -> str:
    """`class Name, package/module.py:line`; its module where no source tells the line."""
    try:
        file, (_, line) = inspect.getfile(cls), inspect.findsource(cls)
    except (OSError, TypeError):
        return f"class {cls.__name__}, {cls.__module__}"
    return f"class {cls.__name__}, {_from_package(file, cls.__module__)}:{line + 1}"


def _from_package(path: str, module: str) -> str:
    file = Path(path)
    package = sys.modules.get(module.partition(".")[0])
    root = getattr(package, "__file__", None)
    if root:
        base = Path(root).parent.parent if Path(root).name == "__init__.py" else Path(root).parent
        if file.is_relative_to(base):
            file = file.relative_to(base)
    return str(file)


# -- the class as a whole --------------------------------------------------------------------------------

_FLAGS: Final = tuple(row.flag for row in interfaces.INTERFACES.values() if row.flag) + interfaces.MULTIMODAL_FLAGS


def _convention_problems(cls: type) -> Iterator[Problem]:
    from torch import nn

    if not issubclass(cls, nn.Module):
        yield Problem(
            of_class(cls), "does not derive from torch.nn.Module", f"class {cls.__name__}(torch.nn.Module): ..."
        )
        return
    initializer = _parameters(cls.__init__)
    catch_all = any(p.kind is p.VAR_KEYWORD for p in initializer)
    for name in ("vllm_config", "prefix"):
        if not catch_all and name not in [p.name for p in initializer]:
            yield Problem(
                f"__init__ ({location(cls.__init__)})",
                f"does not take {name}; found ({', '.join(map(str, initializer))})",
                'def __init__(self, *, vllm_config, prefix="")',
            )
    pooling = interfaces.supports_cross_encoding(cls) or getattr(cls, "is_pooling_model", False) is True
    for name, expected in _CONVENTIONS.items():
        if name == "compute_logits" and pooling:
            continue  # it scores its input and generates nothing
        found = interfaces.find_method(cls, name)
        signature = f"def {name}(self, {', '.join(expected)}, ...)"
        if found is None or found[0] is nn.Module or interfaces.is_stub(found[1], found[0]):
            yield Problem(f"{name} ({of_class(cls)})", "every model class needs it", f"implement {signature}")
            continue
        parameters = _parameters(found[1])
        takes = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        if takes < len(expected) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            text = f"takes ({', '.join(map(str, parameters))}), expected ({', '.join(expected)}, ...)"
            yield Problem(f"{name} ({location(found[1])})", text, signature)


def _mark_problems(cls: type) -> Iterator[Problem]:
    """Methods marked with hookimpl that no hook has the name of, or that are marked as something else than a plain
    implementation.
    """
    for owner in cls.__mro__:
        for name, attribute in list(vars(owner).items()):
            function = getattr(attribute, "__func__", attribute)
            marks = _marks(attribute) or _marks(function)
            if marks is None:
                continue
            where = f"{name} ({location(function)})"
            if name not in HOOKS and not any(name in hook.older for hook in TABLE):
                yield Problem(
                    where,
                    "is marked with hookimpl, and no hook has this name",
                    _suggestion(name, HOOKS, "the hooks are"),
                )
            wrong = [
                option
                for option in ("wrapper", "hookwrapper", "optionalhook", "specname", "tryfirst", "trylast")
                if marks.get(option)
            ]
            if wrong:
                yield Problem(
                    where,
                    f"is marked with hookimpl({', '.join(wrong)}); a model's hook is a plain implementation",
                    "mark it with @hookimpl alone",
                )


def _claims(cls: type) -> tuple[frozenset[str], list[Problem]]:
    problems = [
        Problem(f"{flag} ({of_class(cls)})", text, f"write {flag} = True in the class body, or leave it out")
        for flag in _FLAGS
        if (text := interfaces.flag_problem(cls, flag))
    ]
    return interfaces.interfaces_of(cls), problems


def _unread(cls: type) -> Iterator[Problem]:
    """What a class says in the words of another vLLM version and nobody here understands."""
    for row in interfaces.INTERFACES.values():
        for attribute, says, fix in interfaces.unread_attributes(cls, row):
            found = interfaces.find_method(cls, attribute)
            if found is not None and is_protocol(found[0]):
                continue  # another engine's interface has it, not this author
            yield Problem(f"{attribute} ({of_class(cls) if found is None else location(found[1])})", says, fix)


# -- one hook --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """A method of the class that bears a hook's name, or an older spelling of it."""

    name: str
    owner: type
    function: Callable[..., Any]
    raw: Any
    stub: bool
    refused: bool = False

    @property
    def where(self) -> str:
        return f"{self.name} ({location(self.function)})"

    @property
    def defined(self) -> bool:
        """Whether an author wrote it; it does not come with an interface, ours or another engine's."""
        return not self.stub and not is_protocol(self.owner)


def _find(cls: type, hook: Hook) -> _Found | None:
    found = interfaces.find_method(cls, hook.name)
    stub = None
    if found is not None:
        owner, function = found
        this = _Found(hook.name, owner, function, vars(owner).get(hook.name), interfaces.is_stub(function, owner))
        if not this.stub:
            return this
        stub = this
    for name, call in hook.older.items():
        older = interfaces.find_method(cls, name)
        if older is not None and not interfaces.is_stub(older[1], older[0]):
            owner, function = older
            return _Found(name, owner, function, vars(owner).get(name), stub=False, refused=call is None)
    return stub


def _missing(cls: type, hook: Hook, found: _Found | None) -> Problem:
    wanted = "def " + hook.name + _with_self(hook)
    if hook.phase is Phase.CLASS:
        wanted = "@classmethod " + wanted
    fix = f"implement {wanted} -> {hook.returns.says}"
    claims = " and ".join(hook.needed or hook.optional)
    if found is not None and found.refused:
        return Problem(
            found.where,
            f"is the spelling of another vLLM version and has other arguments; this hook is {hook.name}",
            fix,
        )
    where = f"{hook.name} ({of_class(cls)})"
    if found is not None:
        return Problem(where, f"claims {claims} but inherits the interface's empty method", fix)
    if BASE in hook.needed:
        return Problem(where, "every model class needs it", fix)
    return Problem(where, f"claims {claims} but does not implement it", fix)


def _implementation(hook: Hook, found: _Found) -> Implementation | list[Problem]:
    problems: list[Problem] = []
    wanted = f"def {hook.name}{_with_self(hook)}"
    if inspect.iscoroutinefunction(found.function) or inspect.isasyncgenfunction(found.function):
        problems.append(Problem(found.where, "is async; hooks are called and return", f"write it as {wanted}"))
    elif inspect.isgeneratorfunction(found.function):
        problems.append(
            Problem(found.where, "is a generator; hooks return their result", f"return instead of yield in {wanted}")
        )
    bound = isinstance(found.raw, (classmethod, staticmethod))
    if hook.phase is Phase.CLASS and not bound:
        text = "is an instance method; a class-phase hook is asked before any model is built"
        problems.append(Problem(found.where, text, f"put @classmethod above {wanted}"))
    parameters = list(inspect.signature(found.function).parameters.values())
    if not isinstance(found.raw, staticmethod):
        if not parameters or parameters[0].kind is parameters[0].KEYWORD_ONLY:
            return [*problems, Problem(found.where, "takes no self", f"write it as {wanted}")]
        if parameters[0].kind is not parameters[0].VAR_POSITIONAL:
            parameters = parameters[1:]
    call, lacking, call_problems = _call(hook, found, parameters, wanted)
    problems += call_problems
    return problems or Implementation(hook, found.name, call, lacking, found.where)


def _call(
    hook: Hook, found: _Found, parameters: list[inspect.Parameter], wanted: str
) -> tuple[str, tuple[str, ...], list[Problem]]:
    """The call's argument list, the arguments that the method lacks, and what makes a call impossible."""
    offered = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    any_position = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    parts: list[str] = []
    lacking: list[str] = []
    missing: list[str] = []
    in_order = True
    order = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for index, (name, parameter) in enumerate(hook.signature.parameters.items()):
        if parameter.kind is parameter.VAR_KEYWORD:
            if any_keyword:
                parts.append(f"**{name}")
            elif not offered:
                missing.append(f"**{name}")
            else:
                parts.append(f"**{name}")  # the author names the keywords that its processor produces
            continue
        position = in_order and index < len(order) and order[index] == name
        in_order = in_order and (position or (any_position and index >= len(order)))
        if parameter.kind is not parameter.KEYWORD_ONLY and in_order:
            parts.append(name)
        elif (name in offered and offered[name].kind is not inspect.Parameter.POSITIONAL_ONLY) or any_keyword:
            parts.append(f"{name}={name}")
        elif parameter.default is not parameter.empty:
            lacking.append(name)
        else:
            missing.append(name)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in hook.signature.parameters.values())
    extra = [p for name, p in offered.items() if name not in hook.signature.parameters and not takes_any]
    problems = []
    unmatched = missing + lacking
    for parameter in extra:
        near = difflib.get_close_matches(parameter.name, unmatched, 1, 0.5)
        near = near or (missing[:1] if len(extra) == 1 else [])
        if parameter.default is parameter.empty:
            text = f"takes {parameter.name!r}, which the hook does not have, so it would never be given"
        elif near:
            text = f"takes {parameter.name!r}, which the hook does not have, so it would silently keep its default"
        else:
            continue
        fix = (
            f"rename {parameter.name!r} to {near[0]!r}: {wanted}"
            if near
            else f"remove {parameter.name!r}, or give it a default: {wanted}"
        )
        problems.append(Problem(found.where, text, fix))
        missing = [name for name in missing if name not in near]
    if missing:
        problems.append(Problem(found.where, f"does not take {', '.join(map(repr, missing))}", f"write it as {wanted}"))
    return ", ".join(parts), tuple(lacking), problems


# -- texts -----------------------------------------------------------------------------------------------


def _not_claimed(cls: type, hook: Hook) -> str:
    flags = [row.flag for name in hook.interfaces if (row := interfaces.INTERFACES.get(name)) is not None]
    denied = [flag for flag in flags if flag and getattr(cls, flag, None) is False]
    remark = f" ({' and '.join(denied)} is False)" if denied else ""
    return f"{cls.__name__} does not claim {' or '.join(hook.interfaces)}{remark}"


def _claim_fix(hook: Hook) -> str:
    row = interfaces.INTERFACES[hook.interfaces[0]]
    return f"derive from {row.name}" + (f" or write {row.flag} = True in the class body" if row.flag else "")


def _with_self(hook: Hook) -> str:
    first = "cls" if hook.phase is Phase.CLASS else "self"
    plain = [p.replace(annotation=p.empty) for p in hook.signature.parameters.values()]
    rest = str(inspect.Signature(plain))[1:-1]
    return f"({first}, {rest})" if rest else f"({first})"


def _parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())[1:]


def _marks(function: Any) -> Mapping[str, Any] | None:
    marks = getattr(function, f"{PROJECT}_impl", None)
    return marks if isinstance(marks, Mapping) else None


def _suggestion(name: str, known: Mapping[str, Any], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"{otherwise} {', '.join(known)}"
