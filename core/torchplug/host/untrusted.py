"""Reading what a stranger wrote: bounded files, strict JSON, printable names, problem lists that stay readable."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

from torchplug.errors import Problem

MOST_PROBLEMS = 20
LONGEST_NAME = 120


def shown(name: object) -> str:
    """`name` quoted for a message: escaped (control characters, lone surrogates) and cut to a readable length."""
    text = str(name)
    if len(text) > LONGEST_NAME:
        text = text[:LONGEST_NAME] + "..."
    return repr(text)


def first_of(problems: list[Problem]) -> list[Problem]:
    """`problems`, or the first MOST_PROBLEMS and one that counts the rest: a hostile file may have a million."""
    if len(problems) <= MOST_PROBLEMS:
        return problems
    rest = len(problems) - MOST_PROBLEMS
    return [*problems[:MOST_PROBLEMS], Problem("and more", f"{rest} further problems of these kinds are not listed")]


def regular_file_size(path: Path) -> int:
    """Size in bytes of a regular file; OSError for anything else (a pipe would block, a device never ends)."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    return status.st_size


def read_json_object(path: Path, *, limit: int, problems: list[Problem]) -> dict[str, Any] | None:
    """The JSON object in `path`, or None after adding to `problems` what is wrong with it.

    Args:
        limit: Greatest acceptable size in bytes; a larger file is not read.
    """
    try:
        size = regular_file_size(path)
        if size > limit:
            says = f"the file has {size:,} bytes; at most {limit:,} are accepted for such a file"
            problems.append(Problem(str(path), says, "this is not the file it claims to be: replace it"))
            return None
        raw = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        problems.append(Problem(str(path), f"cannot be read: {reason}", "check the file and its permissions"))
        return None
    value, says = parse_json_object(raw)
    if value is None:
        problems.append(Problem(str(path), says, "correct the file, or copy it again from its source"))
    return value


def parse_json_object(raw: bytes) -> tuple[dict[str, Any] | None, str]:
    """(the object, "") or (None, what is wrong). Stricter than `json.loads`: UTF-8, no NaN, no key twice."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return None, f"is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}"
    except json.JSONDecodeError as error:
        return None, f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except RecursionError:
        return None, "is not acceptable JSON: nested too deeply"
    except ValueError as error:
        return None, f"is not acceptable JSON: {error}"
    if not isinstance(value, dict):
        return None, f"must hold a JSON object {{...}}, but holds {_kind(value)}"
    return value, ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} occurs twice in one object")
            seen.add(key)
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
