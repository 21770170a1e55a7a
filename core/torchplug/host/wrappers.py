"""Wrapper plugins: objects whose generator functions run around a model's hooks.

pluggy never sees a plugin's own function: it sees an adapter generated from the hook table that takes every argument,
hands on those that the function wants, and checks what comes back, so that an error names the wrapper that broke a
result.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from torchplug.errors import ContractError, Problem, note_origin
from torchplug.hookspecs import HOOKS, Hook
from torchplug.host.contracts import location, of_class
from torchplug.host.marks import PROJECT, hookimpl
from torchplug.results import Facts, describe

_ATTRIBUTE: Final = f"{PROJECT}_impl"


class Wrapper:
    """One wrapper plugin, checked once: `plugin` is the author's object, `hook_names` the hooks that it wraps.

    Args:
        plugin: A module or an instance with functions marked `@hookimpl(wrapper=True)`.
        subject: The plugin for error messages, e.g. "wrapper plugin 'trace' (torchplug-trace==0.1.0, torchplug_trace)".

    Raises:
        ContractError: with every problem of the plugin.
    """

    def __init__(self, plugin: Any, subject: str = "") -> None:
        self.plugin = plugin
        self.subject = subject or f"wrapper plugin {getattr(plugin, '__name__', type(plugin).__name__)!r}"
        problems: list[Problem] = []
        if isinstance(plugin, type):
            says, fix = "a wrapper plugin is a module or an instance", f"name an instance of it: {plugin.__name__}()"
            raise ContractError(self.subject, Problem(of_class(plugin), f"is a class; {says}", fix))
        self._functions: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
        for name, function, options in _marked(plugin):
            found = list(_function_problems(name, function, options))
            problems += found
            if not found:
                parameters = inspect.signature(function).parameters
                self._functions[name] = (function, tuple(parameters))
        if problems:
            raise ContractError(self.subject, problems)
        if not self._functions:
            fix = "mark a generator function with @torchplug.hookimpl(wrapper=True)"
            raise ContractError(self.subject, Problem("", "has no function marked with hookimpl", fix))

    @property
    def hook_names(self) -> Mapping[str, Any]:
        return self._functions

    def adapter(self, facts: Facts) -> SimpleNamespace:
        """The object that pluggy registers: one generated wrapper per hook, which checks its own result."""
        adapter = SimpleNamespace()
        for name, (function, arguments) in self._functions.items():
            hook = HOOKS[name]
            setattr(adapter, name, hookimpl(wrapper=True)(self._adapted(hook, function, arguments, facts)))
        return adapter

    def _adapted(
        self, hook: Hook, function: Callable[..., Any], arguments: tuple[str, ...], facts: Facts
    ) -> Callable[..., Any]:
        where = f"{hook.name} ({location(function)})"

        def broken(result: Any, found: str | None) -> NoReturn:
            says = f"gave back {found or describe(result)}, expected {hook.returns.says}"
            fix = "end with `return result`" if result is None else f"return {hook.returns.says}"
            raise ContractError(self.subject, Problem(where, says, fix))

        if hook.returns.test is not None:
            check = "    found = _test(result)\n    if found is not None:\n        _broken(result, found)\n"
        else:
            check = "    if result.__class__ is not _exact:\n        _broken(result, None)\n"
        every = "".join(f", {name}" for name in hook.arguments)
        source = (
            f"def {hook.name}(model{every}):\n"
            "    try:\n"
            f"        result = yield from _function({', '.join(arguments)})\n"
            "    except Exception as error:\n        _note(error)\n        raise\n"
            f"{check}    return result"
        )
        scope: dict[str, Any] = {
            "_function": function,
            "_test": hook.returns.test(facts) if hook.returns.test is not None else None,
            "_exact": hook.returns.exact,
            "_broken": broken,
            "_note": lambda error: note_origin(error, f"{where} of {self.subject}"),
        }
        exec(compile(source, f"<torchplug wrapper {hook.name}>", "exec"), scope)
        adapted: Callable[..., Any] = scope.pop(hook.name)
        return adapted


def observer(
    before: Callable[[str, Any, dict[str, Any]], object] | None = None,
    after: Callable[[str, Any, dict[str, Any], Any], object] | None = None,
    failed: Callable[[str, Any, dict[str, Any], BaseException], object] | None = None,
) -> SimpleNamespace:
    """A wrapper plugin around every hook, to be attached like any other; it can look at results, not change them.

    For each call that `before` has seen, either `after` or `failed` follows, with the same `arguments` dict.

    Args:
        before: Called as before(hook_name, model, arguments) when a hook is called.
        after: Called as after(hook_name, model, arguments, result) when it has returned.
        failed: Called as failed(hook_name, model, arguments, error) when it has raised; the error goes on afterwards.
    """
    plugin = SimpleNamespace(__name__="observer")
    for hook in HOOKS.values():
        call = f"{hook.name!r}, model, arguments"
        lines = [
            f"def {hook.name}(model{''.join(f', {name}' for name in hook.arguments)}):",
            f"    arguments = {{{', '.join(f'{name!r}: {name}' for name in hook.arguments)}}}",
            *([f"    _before({call})"] if before else []),
            *(["    try:", "        result = yield"] if failed else ["    result = yield"]),
            *(
                ["    except BaseException as error:", f"        _failed({call}, error)", "        raise"]
                if failed
                else []
            ),
            *([f"    _after({call}, result)"] if after else []),
            "    return result",
        ]
        scope: dict[str, Any] = {"_before": before, "_after": after, "_failed": failed}
        exec(compile("\n".join(lines), f"<torchplug observer {hook.name}>", "exec"), scope)
        setattr(plugin, hook.name, hookimpl(wrapper=True)(scope.pop(hook.name)))
    return plugin


def _marked(plugin: Any) -> list[tuple[str, Callable[..., Any], Mapping[str, Any]]]:
    """Functions of a plugin that carry the mark. Raw attributes are read, so that no property of the plugin runs."""
    found = []
    for name in dir(plugin):
        raw = inspect.getattr_static(plugin, name)
        options = getattr(getattr(raw, "__func__", raw), _ATTRIBUTE, None)
        if isinstance(options, Mapping):
            found.append((name, getattr(plugin, name), options))
    return found


def _function_problems(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> list[Problem]:
    where = f"{name} ({location(function)})"
    problems = []
    if name not in HOOKS:
        near = difflib.get_close_matches(name, HOOKS, 1, 0.6)
        fix = f"did you mean {near[0]}?" if near else f"the hooks are {', '.join(HOOKS)}"
        return [Problem(where, "no hook has this name", fix)]
    if options.get("hookwrapper"):
        problems.append(
            Problem(
                where,
                "is an old-style hookwrapper",
                "mark it @hookimpl(wrapper=True): `result = yield`, then `return result`",
            )
        )
    elif not options.get("wrapper"):
        text = "is a plain implementation; only the model that owns a hook implements it"
        problems.append(Problem(where, text, "mark it @hookimpl(wrapper=True): `result = yield`, then `return result`"))
    elif not inspect.isgeneratorfunction(function):
        problems.append(
            Problem(
                where,
                "is not a generator function",
                "`result = yield` where the model's own hook runs, then `return result`",
            )
        )
    wrong = [option for option in ("tryfirst", "trylast", "optionalhook", "specname") if options.get(option)]
    if wrong:
        text = f"sets {', '.join(wrong)}; the order of wrappers is the order of attaching"
        problems.append(Problem(where, text, f"remove {', '.join(wrong)}"))
    known = ("model", *HOOKS[name].arguments)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            text = f"takes {parameter.name!r} by keyword only; a wrapper gets its arguments by position"
            problems.append(Problem(where, text, f"take {parameter.name!r} before the `*`"))
        elif parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            text = f"takes {parameter}, which is not a plain positional argument"
            problems.append(Problem(where, text, f"take any of {', '.join(known)}"))
        elif parameter.name not in known:
            near = difflib.get_close_matches(parameter.name, known, 1, 0.5)
            fix = f"rename {parameter.name!r} to {near[0]!r}" if near else f"take any of {', '.join(known)}"
            problems.append(Problem(where, f"takes {parameter.name!r}, which the hook does not have", fix))
    return problems
