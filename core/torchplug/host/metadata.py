"""The full scan of installed metadata: why a plugin that is on the disk is not in the catalogue, or would not import.

Every distribution that has entry points in a group of ours is looked at, copies that Python ignores included. Nothing
is imported. `doctor` prints all of it; the catalogue asks when a requested architecture is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchplug.host import locate
from torchplug.host.catalogue import (
    MODELS,
    WRAPPERS,
    ModelPlugin,
    PluginRow,
    WrapperPlugin,
    has_metadata,
    identity,
    installed_distributions,
    lookup_name,
    metadata_path,
    read_entry_points,
)

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

_OURS: Final = {MODELS: ModelPlugin, WRAPPERS: WrapperPlugin}


class Kind(StrEnum):
    """What a finding is about."""

    UNREADABLE = "unreadable"
    SHADOWED = "shadowed"
    STALE = "stale"
    DUPLICATE = "duplicate"
    ORPHANED = "orphaned"
    TWIN = "twin"
    MALFORMED = "malformed"
    UNKNOWN_GROUP = "unknown-group"
    MISSING_MODULE = "missing-module"
    MISSING_ATTRIBUTE = "missing-attribute"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the scan found.

    Attributes:
        kind: What it is about.
        where: The distribution, path or entry point.
        says: What is wrong.
        fix: What to do; empty for a note.
        harmless: A note: nothing is lost by it.
        hides: Architectures (and wrapper names) that it keeps out of the catalogue.
    """

    kind: Kind
    where: str
    says: str
    fix: str = ""
    harmless: bool = False
    hides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Installed:
    """One distribution's metadata directory with entry points of ours.

    Attributes:
        name: As its metadata spells it; None where neither metadata nor directory tell.
        version: Its version.
        path: The `.dist-info` or `.egg-info`; None for one that does not come from files.
        editable: The source directory of an editable install.
        active: Python uses this copy. A copy of the same name earlier on the import path makes it inactive.
        rows: Its entry points in the two groups of this API.
        findings: What is wrong with it.
    """

    name: str | None
    version: str | None
    path: Path | None
    editable: Path | None
    active: bool
    rows: tuple[PluginRow, ...]
    findings: tuple[Finding, ...]

    @property
    def origin(self) -> str:
        """`name==version`, for people."""
        return f"{self.name or 'unnamed distribution'}{f'=={self.version}' if self.version else ''}"


@dataclass(slots=True)
class _Copy:
    """One metadata directory, as the walk meets it."""

    distribution: Any
    key: str
    path: Path | None
    real: str | None
    entry_points: tuple[EntryPoint, ...]
    error: str | None
    twins: list[Path]


def scan() -> tuple[Installed, ...]:
    """Every distribution with plugins, in the order of the import path, with everything that is wrong with it.

    A distribution whose entry points cannot be read is included, since it may have plugins.
    """
    failures: list[tuple[str, str]] = []
    copies = _copies(failures)
    used = {_real(path) for entry_point in read_entry_points()[0] if (path := metadata_path(entry_point.dist))}
    return tuple(
        _installed(copy, copies, active=copy.real is None or copy.real in used or copy.error is not None)
        for copy in copies
        if copy.error or _groups_of_ours(copy)
    ) + tuple(_failed_finder(where, says) for where, says in failures)


def _copies(failures: list[tuple[str, str]]) -> list[_Copy]:
    """All metadata directories; one reached twice (lib64 is often a link to lib) comes once, with its other paths."""
    copies: list[_Copy] = []
    by_real: dict[str, _Copy] = {}
    for distribution in installed_distributions(failures):
        path = metadata_path(distribution)
        real = _real(path) if path is not None else None
        if path is not None and real in by_real:
            by_real[real].twins.append(path)
            continue
        entry_points, error = _read(distribution)
        copy = _Copy(distribution, lookup_name(distribution), path, real, entry_points, error, [])
        copies.append(copy)
        if real is not None:
            by_real[real] = copy
    return copies


def _installed(copy: _Copy, copies: list[_Copy], *, active: bool) -> Installed:
    name, version = identity(copy.distribution)
    editable = _editable_source(copy.distribution)
    rows = tuple(_OURS[each.group](each) for each in copy.entry_points if each.group in _OURS)
    where = f"{name or 'unnamed distribution'}{f'=={version}' if version else ''}"
    findings = [*_path_findings(copy, where), *_group_findings(copy, where)]
    if not active:
        findings.extend(_shadow_findings(copy, copies, rows, where))
    orphaned = editable is not None and not editable.is_dir()
    if orphaned:
        findings.append(
            Finding(
                Kind.ORPHANED,
                where,
                f"it is an editable install of {editable}, which is not there any more",
                f"`pip uninstall {name}`, or `pip install -e` the directory where the source is now",
            )
        )
    for row in rows if active else ():
        findings.extend(_row_findings(row, orphaned=orphaned))
    return Installed(name, version, copy.path, editable, active, rows, tuple(findings))


def _read(distribution: Any) -> tuple[tuple[EntryPoint, ...], str | None]:
    try:
        return tuple(distribution.entry_points), None
    except Exception as error:
        return (), f"{type(error).__name__}: {error}"


def _failed_finder(where: str, says: str) -> Installed:
    fix = "whatever installed it on sys.meta_path has to be corrected or uninstalled; its distributions are not seen"
    return Installed(None, None, None, None, True, (), (Finding(Kind.UNREADABLE, where, says, fix),))


def _path_findings(copy: _Copy, where: str) -> Iterator[Finding]:
    if copy.error:
        yield Finding(
            Kind.UNREADABLE,
            f"{where} ({copy.path})" if copy.path else where,
            f"its entry points cannot be read: {copy.error}",
            f"`pip install --force-reinstall --no-deps {copy.key}`, or report it to its author",
        )
    for twin in copy.twins:
        yield Finding(
            Kind.TWIN, where, f"{twin} is {copy.path} by another path (a link); it counts once", harmless=True
        )


def _group_findings(copy: _Copy, where: str) -> Iterator[Finding]:
    for group in sorted({each.group for each in copy.entry_points if _is_unknown(each.group)}):
        names = tuple(sorted(each.name for each in copy.entry_points if each.group == group))
        yield Finding(
            Kind.UNKNOWN_GROUP,
            where,
            f"it offers {', '.join(map(repr, names))} in group {group!r}, which this torchplug does not read",
            f"{_version_hint(group)}: this torchplug reads {MODELS!r} and {WRAPPERS!r}",
            hides=names,
        )


def _version_hint(group: str) -> str:
    family, _, version = group.rpartition(".")
    if family in ("torchplug.models", "torchplug.plugins") and version[:1] == "v" and version[1:].isdigit():
        return "install a torchplug and a version of the plugin for the same hook API"
    return "its author has to register it under the right name"


def _shadow_findings(copy: _Copy, copies: list[_Copy], rows: tuple[PluginRow, ...], where: str) -> Iterator[Finding]:
    """Which copy Python uses instead, and what that costs."""
    others = [other for other in copies if other is not copy and other.key == copy.key]
    winner = next((other for other in others if has_metadata(other.distribution)), others[0] if others else None)
    if winner is None:
        return
    have = {(each.group, each.name) for each in winner.entry_points}
    hidden = tuple(sorted(row.name for row in rows if (row.entry_point.group, row.name) not in have))
    says = f"{winner.path} comes first on the import path and is used instead of {copy.path}"
    if not hidden:
        yield Finding(Kind.SHADOWED, where, f"{says}; both have the same plugins", harmless=True)
        return
    lost = f"{says}, so {', '.join(map(repr, hidden))} {'is' if len(hidden) == 1 else 'are'} not seen"
    if winner.path is not None and copy.path is not None and winner.path.parent == copy.path.parent:
        kind, fix = (
            Kind.DUPLICATE,
            f"an upgrade left two versions behind: `pip uninstall {copy.key}` twice, then install it again",
        )
    elif winner.path is not None and winner.path.suffix == ".egg-info":
        kind, fix = (
            Kind.STALE,
            f"delete {winner.path} (a left-over of an old build), or install from that directory again",
        )
    else:
        kind, fix = (
            Kind.SHADOWED,
            f"uninstall one of them, or take {winner.path.parent if winner.path else 'the other'} off the import path",
        )
    yield Finding(kind, where, lost, fix, hides=hidden)


def _row_findings(row: PluginRow, *, orphaned: bool) -> Iterator[Finding]:
    where = f"{row.name} of {row.origin}"
    if row.problem:
        yield Finding(
            Kind.MALFORMED, where, row.problem, f"its author has to write `name = value` with the value {row.form}"
        )
    if row.malformed_value or orphaned:
        # The module of an orphaned editable install cannot be there; one finding about it is enough.
        return
    if not locate.module_exists(row.module):
        hidden = locate.hiding(row.module)
        if hidden is not None:
            from torchplug.host.importing import hidden_module

            yield Finding(Kind.MISSING_MODULE, where, *hidden_module(row, *hidden))
            return
        yield Finding(
            Kind.MISSING_MODULE,
            where,
            f"there is no module {row.module!r} on the import path",
            f"`pip install --force-reinstall --no-deps {row.distribution}`; if that does not help, tell its author",
        )
        return
    file = locate.module_file(row.module)
    if file is not None and row.attribute:
        yield from _attribute_findings(row, where, file)


def _attribute_findings(row: PluginRow, where: str, file: Path) -> Iterator[Finding]:
    attribute = row.attribute.partition(".")[0]
    try:
        names = locate.defined_names(file)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        yield Finding(
            Kind.MISSING_ATTRIBUTE,
            where,
            f"{file}{line} does not parse under this Python: {error.msg}",
            f"install a version of {row.distribution} for this Python",
        )
        return
    except (OSError, UnicodeError) as error:
        yield Finding(Kind.MISSING_ATTRIBUTE, where, f"{file} cannot be read: {error}", "make the file readable")
        return
    if names is not None and attribute not in names:
        from torchplug.host.ownership import did_you_mean

        yield Finding(
            Kind.MISSING_ATTRIBUTE,
            where,
            f"{file} defines no {attribute!r} at its top level{did_you_mean(attribute, names)}",
            f"its author has to correct the entry point {row.name!r}, or install another version of {row.distribution}",
        )


def _editable_source(distribution: Any) -> Path | None:
    """The directory of an editable install, from direct_url.json (PEP 610), whether it is still there or not."""
    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not (isinstance(url, dict) and url.get("dir_info", {}).get("editable")):
            return None
        return _path_of(url["url"])
    except Exception:
        # Written by whatever installed it; a file that is not as PEP 610 says tells nothing.
        return None


def _path_of(url: str) -> Path | None:
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    if os.name == "nt":
        from urllib.request import url2pathname

        return Path(url2pathname(parts.path))
    return Path(unquote(parts.path))


def _groups_of_ours(copy: _Copy) -> bool:
    return any(each.group in _OURS or _is_unknown(each.group) for each in copy.entry_points)


def _is_unknown(group: str) -> bool:
    """A group that is meant for torchplug and that this version does not read."""
    return (group == "torchplug" or group.startswith("torchplug.")) and group not in _OURS


def _real(path: Any) -> str:
    return os.path.realpath(str(path))
