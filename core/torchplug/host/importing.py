"""From an entry point to the author's object: whatever an import does wrong becomes an error that names the plugin."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torchplug.errors import PluginError, Problem
from torchplug.host.catalogue import ModelPlugin, PluginRow
from torchplug.host.locate import hiding
from torchplug.host.selection import normalized

if TYPE_CHECKING:
    from pathlib import Path

    from torchplug.host.wrappers import Wrapper


def subject_of(row: PluginRow) -> str:
    """How errors name a plugin: `plugin 'Arch' (distribution==version, package.module:Class)`."""
    kind = "plugin" if isinstance(row, ModelPlugin) else "wrapper plugin"
    return f"{kind} {row.name!r} ({row.origin}, {row.value})"


def import_object(row: PluginRow) -> Any:
    """The object that an entry point names.

    Raises:
        PluginError: The import raised or tried to end the process, or the module has no such attribute. The cause is
            chained, and the text names the line of the plugin that it came from.
    """
    try:
        return row.entry_point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(subject_of(row), import_problem(row, error)) from error


def import_wrapper(row: PluginRow) -> Wrapper:
    """The wrapper plugin of an entry point, imported and checked.

    Raises:
        PluginError: The import failed, or (a ContractError) the plugin is not one; with every problem.
    """
    from torchplug.host.wrappers import Wrapper

    return Wrapper(import_object(row), subject_of(row))


def import_wrappers(rows: Iterable[PluginRow]) -> tuple[Wrapper, ...]:
    """The wrapper plugins of a host, each imported in its own try: a broken one is a TorchplugWarning and left out."""
    import warnings

    from torchplug.errors import TorchplugWarning

    wrappers = []
    for row in rows:
        try:
            wrappers.append(import_wrapper(row))
        except PluginError as error:
            text = str(error).removeprefix("torchplug: ")
            warnings.warn(f"{text}\n  The plugin is left out; everything else works.", TorchplugWarning, stacklevel=4)
    return tuple(wrappers)


def import_problem(row: PluginRow, error: BaseException) -> Problem:
    """What is wrong with a plugin whose import raised `error`, and what to do."""
    line = _line_of(row, error)
    where = f"import of {row.module}{f' ({line})' if line else ''}"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    says = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SystemExit):
        return Problem(where, f"tries to end the process: SystemExit({error.code!r})", other_version(row))
    if isinstance(error, ModuleNotFoundError) and error.name:
        hidden = hiding(row.module) if error.name == row.module else None
        if hidden is not None:
            return Problem(where, *hidden_module(row, *hidden))
        return Problem(where, says, _missing_module(row, error.name))
    module = sys.modules.get(row.module)
    if isinstance(error, AttributeError) and module is not None and line is None:
        return Problem(where, *_missing_attribute(row, module))
    return Problem(where, says, other_version(row))


def hidden_module(row: PluginRow, first: Path, place: Path) -> tuple[str, str]:
    """What is wrong, and the fix, where `first` hides the package at `place` that has the plugin."""
    top = row.module.partition(".")[0]
    return (
        f"Python takes {first} for the package {top!r}, and there is no {row.module!r} in it; it hides the one of "
        f"{row.origin}, {place}",
        f"rename or move {first}, or start from another directory (or with PYTHONSAFEPATH=1)",
    )


def _line_of(row: PluginRow, error: BaseException) -> str | None:
    """`package/module.py:line`, the last line of the plugin's own package that the import had reached, or None."""
    top = row.module.partition(".")[0]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_from_top(error.filename, top)}:{error.lineno}"
    found = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == top:
            found = f"{_from_top(frame.f_code.co_filename, top)}:{number}"
    return found


def _from_top(file: str, top: str) -> str:
    """The file as a reader would look for it, from the top-level package on."""
    parts = re.split(r"[/\\]", file)
    starts = [index for index, part in enumerate(parts) if part in (top, f"{top}.py")]
    return "/".join(parts[starts[-1] :]) if starts else file


def _missing_module(row: PluginRow, module: str) -> str:
    top = module.partition(".")[0]
    package = row.distribution or "the plugin"
    if top == row.module.partition(".")[0]:
        return (
            f"its own files are incomplete: `pip install --force-reinstall --no-deps {package}`; if that does not help,"
            " tell its author"
        )
    for requirement in _requirements(row):
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if normalized(name) == normalized(top):
            wanted, _, marker = (part.strip() for part in requirement.partition(";"))
            extra = re.search(r"""extra\s*==\s*["']([^"']+)""", marker)
            if extra:
                return f"it comes with an extra of {package}: `pip install '{package}[{extra[1]}]'`"
            return f"{package} requires it and it is not installed: `pip install {wanted!r}`"
    return (
        f"install the package that provides {top!r}; where the metadata of {package} does not require it, "
        "tell its author"
    )


def _requirements(row: PluginRow) -> list[str]:
    try:
        return list(row.entry_point.dist.requires or ())
    except Exception:
        # Metadata that cannot be read requires nothing that we could tell.
        return []


def _missing_attribute(row: PluginRow, module: Any) -> tuple[str, str]:
    from torchplug.host.ownership import did_you_mean

    found, owner = module, row.module
    for part in row.attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            says = f"{owner} has no {part!r}{did_you_mean(part, names)}"
            break
        found, owner = getattr(found, part), f"{owner}{':' if found is module else '.'}{part}"
    else:
        says = f"{row.attribute!r} cannot be read from {row.module}"
    fix = f"its author has to correct the entry point {row.name!r}; until then {other_version(row)}"
    return says, fix


def other_version(row: PluginRow) -> str:
    """The fix where only the plugin's author can mend it."""
    package = row.distribution
    if package is None:
        return "install another version of it, or remove it"
    return f"install another version of {package}, or remove it: `pip uninstall {package}`"
