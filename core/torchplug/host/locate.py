"""Where a module's code is and which names it defines, found without importing anything.

`importlib.util.find_spec("a.b")` imports `a`; here only the top-level name goes through the import system's finders
(which also know editable installs), and every further part is looked up in the directories of the part before.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator


def module_file(module: str) -> Path | None:
    """The file that `import module` would run; None where there is none (namespace package, built-in, no module)."""
    spec = _spec(module)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def module_exists(module: str) -> bool:
    """Whether `import module` would find something."""
    return _spec(module) is not None


def hiding(module: str) -> tuple[Path, Path] | None:
    """For a module that is not found: (what Python takes for its top-level package, the place that has the module).

    None where no place has it. A directory of the package's name in the working directory is the usual culprit.
    """
    top = module.partition(".")[0]
    first = _place(_spec(top))
    for spec in _all_specs(top):
        place = _place(spec)
        if first is not None and place is not None and place != first and _inside(spec, module) is not None:
            return first, place
    return None


def _spec(module: str) -> ModuleSpec | None:
    try:
        return _inside(importlib.util.find_spec(module.partition(".")[0]), module)
    except Exception:
        # A foreign finder may raise anything, and find_spec raises ValueError for a half-made module.
        return None


def _inside(spec: ModuleSpec | None, module: str) -> ModuleSpec | None:
    """The module, looked up in its top-level package."""
    for part in module.split(".")[1:]:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # The bare part: with a dotted name, a namespace package would look for its parent in sys.modules.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _all_specs(top: str) -> Iterator[ModuleSpec | None]:
    """A top-level name wherever the import path has it, also where another one comes first."""
    for entry in sys.path:
        yield PathFinder.find_spec(top, [entry])
    for finder in sys.meta_path:  # editable installs have finders of their own
        if finder is not PathFinder:
            with suppress(Exception):
                yield finder.find_spec(top, None)


def _place(spec: ModuleSpec | None) -> Path | None:
    """The directory of a package, the file of a module."""
    if spec is None:
        return None
    found = next(iter(spec.submodule_search_locations or ()), spec.origin if spec.has_location else None)
    return None if found is None else Path(found).absolute()


def defined_names(file: Path) -> frozenset[str] | None:
    """Names that a module binds at its top level (branches of `if`, `try`, `with` and loops included), from its source.

    None means that the source cannot tell: it is compiled, has a star import, or makes names on demand (`__getattr__`,
    `globals()`).

    Raises:
        SyntaxError: The source does not parse under this Python.
        OSError, UnicodeError: It cannot be read.
    """
    import ast

    if file.suffix not in SOURCE_SUFFIXES:
        return None
    source = file.read_bytes()
    if b"globals()" in source:
        return None
    try:
        names = frozenset(_bound(ast.parse(source, filename=str(file)).body))
    except RecursionError:
        return None
    except ValueError as error:
        # A null byte is a ValueError up to Python 3.11.3 and a SyntaxError after it.
        raise SyntaxError(str(error)) from None
    return None if "*" in names or "__getattr__" in names else names


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    import ast

    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case _:
                # Assignments of every kind (walrus too) bind by storing; nested blocks are of the same scope.
                yield from _stored(node)


def _stored(node: ast.AST) -> Iterator[str]:
    import ast

    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _bound([child])
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif not isinstance(child, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from _stored(child)
