"""The plugin plan: what the parent of a job found, frozen, so that every worker can prove that it finds the same.

The parent calls `Host.plan` and passes the JSON to each worker as an argument or a file, never through what the worker
happens to inherit. A worker calls `Plan.verify` before it imports a plugin: it looks everything up again under the
plan's selection, owners and allowlist, and any difference is one error that lists them all.

Code is compared by the SHA-256 of files, without importing them: the file of the entry point's module, every Python or
extension file of the package that it is in (up to the outermost directory with an `__init__.py`; of an editable
install, whose RECORD lists no sources, it is all there is), and those of the distribution's RECORD. Where an import
would find another copy than the RECORD's, that one counts. Paths may differ between machines and are told, not
compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchplug.errors import PlanMismatch, Problem
from torchplug.host.catalogue import ModelPlugin, PluginRow
from torchplug.host.selection import normalized

if TYPE_CHECKING:
    from torchplug.host import Host
    from torchplug.host.catalogue import Catalogue

FORMAT: Final = "torchplug.plan.v1"

_CODE: Final = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)
_MOST_FILES_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class PlannedPlugin:
    """One plugin as the parent found it.

    Attributes:
        kind: "model" or "wrapper".
        name: The architecture, or the wrapper's name.
        value: The entry point, `package.module:attribute`.
        distribution: Name of the distribution; None where its metadata does not tell.
        version: Its version.
        file: The module's file on the parent's machine.
        files: Every file of its code to the SHA-256 of the contents.
    """

    kind: str
    name: str
    value: str
    distribution: str | None
    version: str | None
    file: str | None
    files: Mapping[str, str]

    @classmethod
    def of(cls, row: PluginRow) -> PlannedPlugin:
        """What is found here, without importing it."""
        kind = "model" if isinstance(row, ModelPlugin) else "wrapper"
        file = row.file
        return cls(kind, row.name, row.value, row.distribution, row.version, str(file) if file else None, _hashes(row))

    @property
    def origin(self) -> str:
        """`name==version`, for people."""
        return f"{self.distribution or 'unnamed distribution'}{f'=={self.version}' if self.version else ''}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What every process of a job has to find.

    Attributes:
        torchplug: The version of torchplug.
        selection: Which distributions are enabled.
        owners: Architecture to distribution, for the planned architectures and what the user chose.
        allowlist: The distributions that are trusted, or None (open).
        plugins: The owners of the planned architectures, then the enabled wrapper plugins, innermost first.
    """

    torchplug: str
    selection: str
    owners: Mapping[str, str]
    allowlist: tuple[str, ...] | None
    plugins: tuple[PlannedPlugin, ...]

    @classmethod
    def of(cls, catalogue: Catalogue, architectures: Iterable[str]) -> Plan:
        """The plan for some architectures ("Arch" or "distribution:Arch") and the enabled wrapper plugins.

        Raises:
            PluginError: An architecture has no owner, or several and none was chosen.
        """
        models = [catalogue.owner(architecture) for architecture in dict.fromkeys(architectures)]
        pinned = {row.name: row.distribution for row in models if row.distribution is not None}
        return cls(
            _own_version(),
            "*" if catalogue.selection.text is None else catalogue.selection.text,
            {**catalogue.owners, **pinned},
            None if catalogue.allowlist is None else tuple(sorted(catalogue.allowlist.names)),
            tuple(PlannedPlugin.of(row) for row in (*models, *catalogue.wrappers)),
        )

    def to_json(self) -> str:
        """The plan as one line of text, to be passed to a worker."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanMismatch: It is not one.
        """
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT or set(values) != {field.name for field in fields(cls)}:
                raise ValueError(f"not of the format {FORMAT}")
            plugins = tuple(PlannedPlugin(**each) for each in values.pop("plugins"))
            allowlist = values.pop("allowlist")
            return cls(**values, plugins=plugins, allowlist=None if allowlist is None else tuple(allowlist))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            says = f"the text is not a plan that this torchplug can read: {type(error).__name__}: {error}"
            fix = "pass on what Plan.to_json returned, from a parent with the same torchplug"
            raise PlanMismatch("plugin plan", Problem("", says, fix)) from None

    @classmethod
    def verify(cls, text: str) -> Host:
        """In a worker: find everything again and compare.

        Args:
            text: What the parent's `to_json` returned.

        Returns:
            A host under the plan's selection, owners and allowlist. No plugin has been imported.

        Raises:
            PlanMismatch: What is found here differs; with every difference and what to do about it.
        """
        from torchplug.host import Host

        plan = cls.from_json(text)
        allowlist = None if plan.allowlist is None else ",".join(plan.allowlist)
        host = Host(plan.selection, plan.owners, allowlist)
        problems = list(_differences(plan, host.catalogue))
        if problems:
            process = f"process {os.getpid()} on {platform.node() or 'this machine'} ({sys.executable})"
            raise PlanMismatch(f"plugins of {process} against the plan of its parent", problems)
        return host


def _own_version() -> str:
    # Of the code that runs; the metadata of an editable install may be older.
    version: str = sys.modules["torchplug"].__version__
    return version


def _hashes(row: PluginRow) -> dict[str, str]:
    found: dict[str, Path] = {}
    for name, file in _code_files(row):
        if file.is_file():
            found.setdefault(name, file)
    return {name: hashlib.sha256(found[name].read_bytes()).hexdigest() for name in sorted(found)}


def _code_files(row: PluginRow) -> Iterator[tuple[str, Path]]:
    """Every file of a plugin's code, with its path from where imports begin; what would be imported comes first."""
    file = row.file
    if file is not None:
        root = file.parent
        while (root / "__init__.py").is_file() and root != root.parent:
            root = root.parent
        yield file.relative_to(root).as_posix(), file
        if file.parent != root:
            package = root / file.relative_to(root).parts[0]
            for each in package.rglob("*"):
                if each.name.endswith(_CODE):
                    yield each.relative_to(root).as_posix(), each
    distribution = row.entry_point.dist
    for recorded in (distribution.files if distribution is not None else None) or ():
        if recorded.name.endswith(_CODE) and ".." not in recorded.parts:
            yield recorded.as_posix(), Path(str(distribution.locate_file(recorded)))


def _differences(plan: Plan, catalogue: Catalogue) -> Iterator[Problem]:
    if plan.torchplug != (here := _own_version()):
        says = f"the parent has torchplug {plan.torchplug}, this process has {here}"
        yield Problem("torchplug", says, f"pip install torchplug=={plan.torchplug}")
    for planned in plan.plugins:
        row = _found(planned, catalogue)
        problem = _absence(planned, catalogue) if row is None else _difference(planned, PlannedPlugin.of(row))
        if problem is not None:
            yield problem
    planned_wrappers = [(each.name, each.value) for each in plan.plugins if each.kind == "wrapper"]
    for row in catalogue.wrappers:
        if (row.name, row.value) in planned_wrappers:
            continue
        says = f"{row.origin} offers it here ({row.file or row.value}), and the parent has it not"
        fix = (
            f'uninstall it here, or leave it out of the selection in the parent: "{plan.selection},-{row.distribution}"'
        )
        yield Problem(f"wrapper plugin {row.name!r}", says, fix)


def _found(planned: PlannedPlugin, catalogue: Catalogue) -> PluginRow | None:
    """The row that would serve here: of the planned distribution, with the planned name."""
    rows: Iterable[PluginRow] = (
        catalogue.models.get(planned.name, ())
        if planned.kind == "model"
        else (row for row in catalogue.wrappers if row.name == planned.name)
    )
    wanted = normalized(planned.distribution or "")
    return next((row for row in rows if normalized(row.distribution or "") == wanted), None)


def _absence(planned: PlannedPlugin, catalogue: Catalogue) -> Problem:
    import importlib_metadata

    where, parent = _where(planned), f"the parent has it from {planned.origin} ({planned.file or planned.value})"
    for row in catalogue.blocked:
        if row.name == planned.name and normalized(row.distribution or "") == normalized(planned.distribution or ""):
            return Problem(
                where,
                f"{parent}, and here it is blocked: {catalogue.why_blocked(row)}",
                "start the worker with the settings of its parent",
            )
    try:
        version = importlib_metadata.version(planned.distribution or "")
    except Exception:
        return Problem(
            where,
            f"{parent}, and no distribution {planned.distribution!r} is installed here",
            f"`pip install {planned.distribution}=={planned.version}` where this process runs, or let it have the "
            "parent's environment (PYTHONPATH, container image)",
        )
    return Problem(
        where,
        f"{parent}; {planned.distribution}=={version} is installed here and does not offer it",
        f"`pip install {planned.distribution}=={planned.version}` where this process runs",
    )


def _difference(planned: PlannedPlugin, here: PlannedPlugin) -> Problem | None:
    parent, this = (f"{each.origin} ({each.file or 'file not found'})" for each in (planned, here))
    both = f"\n    parent:       {parent}\n    this process: {this}"
    where, install = _where(planned), f"`pip install {planned.distribution}=={planned.version}` where this process runs"
    if planned.version != here.version:
        return Problem(where, f"versions differ: {planned.version} in the parent, {here.version} here{both}", install)
    if planned.value != here.value:
        return Problem(where, f"entry points differ: {planned.value} in the parent, {here.value} here{both}", install)
    if planned.files == here.files:
        return None
    lines = list(_file_differences(planned.files, here.files))
    rest = f"\n    and {len(lines) - _MOST_FILES_NAMED} more" if len(lines) > _MOST_FILES_NAMED else ""
    shown = "".join(f"\n    {line}" for line in lines[:_MOST_FILES_NAMED])
    return Problem(
        where,
        f"the version is the same and the code is not: a copy was edited{both}{shown}{rest}",
        f"install the parent's copy here, or both anew: `pip install --force-reinstall --no-deps {here.distribution}`",
    )


def _file_differences(parent: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*parent, *here}):
        if name not in here:
            yield f"{name}: missing here"
        elif name not in parent:
            yield f"{name}: only here"
        elif parent[name] != here[name]:
            yield f"{name}: SHA-256 {parent[name][:12]}... in the parent, {here[name][:12]}... here"


def _where(planned: PlannedPlugin) -> str:
    return f"plugin {planned.name!r}" if planned.kind == "model" else f"wrapper plugin {planned.name!r}"
