"""`torchplug doctor`: what is wrong with the installed plugins, each problem with its fix, and a text for bug reports.

Metadata and source text only: nothing is imported, so it works whatever is broken.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from torchplug import __version__
from torchplug.cli import rows
from torchplug.cli.options import json_option, print_json, selection_options
from torchplug.cli.tables import print_table, printable

if TYPE_CHECKING:
    from torchplug.host.catalogue import Catalogue
    from torchplug.host.metadata import Installed


class Diagnosis(NamedTuple):
    """One problem or note, ready to print. `kind` is a word to search for."""

    kind: str
    where: str
    says: str
    fix: str


@click.command()
@selection_options
@json_option
@click.pass_context
def doctor(context: click.Context, plugins: str | None, owners: dict[str, str], as_json: bool) -> None:
    """Find what is wrong with the installed plugins, and say how to fix it.

    Looks for names in the selection that match nothing, conflicts, shadowed, stale and duplicate metadata, editable
    installs whose source is gone, malformed entry points, and modules or classes that are not where an entry point
    says. Nothing is imported. Ends with a text to paste into a bug report. The exit code is 1 when there is a problem.
    """
    from torchplug.host.catalogue import Catalogue
    from torchplug.host.metadata import scan

    catalogue = Catalogue(selection=plugins, owners=owners)
    installed = scan()
    problems, notes = _diagnose(catalogue, installed)
    if as_json:
        print_json(_as_dict(catalogue, installed, problems, notes))
    else:
        _print_all(catalogue, installed, problems, notes)
    context.exit(1 if problems else 0)


def _diagnose(catalogue: Catalogue, installed: Sequence[Installed]) -> tuple[list[Diagnosis], list[Diagnosis]]:
    from torchplug.errors import PluginError
    from torchplug.host.ownership import unmet_choices

    problems = [
        Diagnosis("selection", "choice of plugins", text, "correct --plugins, --owner or TORCHPLUG_PLUGINS")
        for text in unmet_choices(catalogue)
    ]
    if _version_of("torch") is None:
        problems.append(Diagnosis("requirement", "torch", "it is not installed", "`pip install torch`"))
    if not any(each.name == "torchplug" for each in installed):
        problems.append(
            Diagnosis(
                "requirement",
                f"torchplug in {Path(__file__).parents[1]}",
                "it runs without being installed, so its own models are not offered",
                "install it: `pip install torchplug`, or `pip install -e .` in its source directory",
            )
        )
    for architecture, offers in catalogue.models.items():
        if len(offers) > 1:
            try:
                catalogue.owner(architecture)
            except PluginError as error:
                problems.extend(Diagnosis("conflict", error.subject, each.says, each.fix) for each in error.problems)
    found = [finding for each in installed for finding in each.findings]
    problems.extend(Diagnosis(each.kind, each.where, each.says, each.fix) for each in found if not each.harmless)
    notes = [Diagnosis(each.kind, each.where, each.says, each.fix) for each in found if each.harmless]
    return problems, notes


def _version_of(distribution: str) -> str | None:
    import importlib_metadata

    try:
        version: str = importlib_metadata.version(distribution)
    except Exception:
        # Not installed, or metadata that cannot be read: either way there is no version to report.
        return None
    return version


def _versions() -> dict[str, str | None]:
    return {
        "torchplug": __version__,
        "python": platform.python_version(),
        **{name: _version_of(name) for name in ("torch", "pluggy", "importlib-metadata")},
        "platform": f"{sys.platform} {platform.machine()}",
    }


def _install_kind(installed: Installed) -> str:
    if installed.editable is not None:
        return "editable"
    suffix = installed.path.suffix if installed.path is not None else ""
    return {".dist-info": "wheel", ".egg-info": "egg-info"}.get(suffix, "unknown")


def _location(installed: Installed) -> str:
    return str(installed.editable or installed.path or "")


def _as_dict(
    catalogue: Catalogue, installed: Sequence[Installed], problems: list[Diagnosis], notes: list[Diagnosis]
) -> dict[str, Any]:
    return {
        "versions": _versions(),
        "selection": str(catalogue.selection),
        "owners": dict(catalogue.owners),
        "distributions": [
            {
                "distribution": each.name,
                "version": each.version,
                "install": _install_kind(each),
                "in_use": each.active,
                "metadata": str(each.path) if each.path else None,
                "source": str(each.editable) if each.editable else None,
                "entry_points": [row.name for row in each.rows],
            }
            for each in installed
        ],
        "architectures": [row.as_dict("architecture") for row in rows.models(catalogue)],
        "wrappers": [row.as_dict("wrapper") for row in rows.wrappers(catalogue)],
        "problems": [each._asdict() for each in problems],
        "notes": [each._asdict() for each in notes],
    }


def _print_all(
    catalogue: Catalogue, installed: Sequence[Installed], problems: list[Diagnosis], notes: list[Diagnosis]
) -> None:
    from torchplug.errors import PluginError, Problem

    if installed:
        print_table(
            ("distribution", "version", "install", "in use", "plugins", "location"),
            [
                (
                    each.name or "",
                    each.version or "",
                    _install_kind(each),
                    "yes" if each.active else "no",
                    str(len(each.rows)),
                    _location(each),
                )
                for each in installed
            ],
        )
        click.echo()
    for kind, section in (("architecture", rows.models(catalogue)), ("wrapper", rows.wrappers(catalogue))):
        if section:
            rows.print_rows(kind, section)
            click.echo()
    for note in notes:
        click.echo(printable(f"note: {note.where}: {note.says}"))
    if problems:
        error = PluginError("the installed plugins", [Problem(each.where, each.says, each.fix) for each in problems])
        click.echo(printable(str(error)))
    else:
        click.echo("No problem found.")
    click.echo("\nFor a bug report, copy what is between the lines.")
    click.echo("-" * 72)
    click.echo(printable(_bug_report(catalogue, installed, problems)))
    click.echo("-" * 72)


def _bug_report(catalogue: Catalogue, installed: Sequence[Installed], problems: list[Diagnosis]) -> str:
    """One compact text. The home directory is written as ~: a bug report is public."""
    lines = [", ".join(f"{name} {version or 'not installed'}" for name, version in _versions().items())]
    lines.append(f"selection: {catalogue.selection}")
    lines.append(f"owners: {', '.join(f'{name}={value}' for name, value in catalogue.owners.items()) or 'none chosen'}")
    for each in installed:
        unused = "" if each.active else ", not in use"
        lines.append(f"{each.origin} ({_install_kind(each)}{unused}) {_location(each)}")
    for row in (*rows.models(catalogue), *rows.wrappers(catalogue)):
        lines.append(f"{row.name} = {row.entry_point} [{row.distribution or 'unnamed'}] {row.status}")
    lines.extend(
        f"problem {each.kind}: {': '.join(part for part in (each.where, each.says) if part)}" for each in problems
    )
    lines.append(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return "\n".join(lines).replace(str(Path.home()), "~")
