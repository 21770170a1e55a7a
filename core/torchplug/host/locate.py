"""Where a module's code is and which names it defines, found without importing anything.

`importlib.util.find_spec("a.b")` imports `a`; here only the top-level name goes through the import system's finders
(which also know editable installs), and every further part is looked up in the directories of the part before.
"""

from __future__ import annotations

import importlib.util
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


def _spec(module: str) -> ModuleSpec | None:
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for part in parts:
            if spec is None or spec.submodule_search_locations is None:
                return None
            # The bare part: with a dotted name, a namespace package would look for its parent in sys.modules.
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    except Exception:
        # A foreign finder may raise anything, and find_spec raises ValueError for a half-made module.
        return None
    return spec


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
