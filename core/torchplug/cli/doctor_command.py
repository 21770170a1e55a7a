"""`torchplug doctor`: what is wrong with the installed plugins, each problem with its fix, and a text for bug reports.

Metadata and source text only: nothing is imported, so it works whatever is broken. With `--deep` every plugin is
imported too, in a process of its own.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from torchplug import __version__
from torchplug.cli import rows
from torchplug.cli.options import json_option, print_json, selection_options
from torchplug.cli.tables import print_table, printable

if TYPE_CHECKING:
    from torchplug.host.catalogue import Catalogue
    from torchplug.host.import_trials import Trial
    from torchplug.host.metadata import Installed


class Diagnosis(NamedTuple):
    """One problem or note, ready to print. `kind` is a word to search for."""

    kind: str
    where: str
    says: str
    fix: str


class Examined(NamedTuple):
    """Everything that was found; `trials` is None where nothing was imported."""

    catalogue: Catalogue
    installed: Sequence[Installed]
    trials: Sequence[Trial] | None
    problems: list[Diagnosis]
    warnings: list[Diagnosis]
    notes: list[Diagnosis]


@click.command()
@click.option(
    "--deep",
    is_flag=True,
    help="Import every plugin too, each module in a process of its own (this runs the plugins' code), and check it.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="With --deep: how long one module may take.  [default: 120]",
)
@selection_options
@json_option
@click.pass_context
def doctor(
    context: click.Context,
    deep: bool,
    timeout: float | None,
    plugins: str | None,
    owners: dict[str, str],
    as_json: bool,
) -> None:
    """Find what is wrong with the installed plugins, and say how to fix it.

    Looks for names in the selection that match nothing, conflicts, shadowed, stale and duplicate metadata, editable
    installs whose source is gone, malformed entry points, and modules or classes that are not where an entry point
    says. Nothing is imported unless --deep is given: then each enabled plugin is, and its import time, what the import
    did besides (printed, started threads, used a device, changed the environment) and the checks of its class are told.
    Ends with a text to paste into a bug report. The exit code is 1 when there is a problem.
    """
    from torchplug.host.catalogue import Catalogue
    from torchplug.host.metadata import scan

    if timeout is not None and not deep:
        raise click.UsageError("--timeout is of use with --deep only")
    catalogue = Catalogue(selection=plugins, owners=owners)
    installed = scan()
    trials = _tried(catalogue, timeout) if deep else None
    found = _diagnose(catalogue, installed, trials)
    if as_json:
        print_json(_as_dict(found))
    else:
        _print_all(found)
    context.exit(1 if found.problems else 0)


def _tried(catalogue: Catalogue, timeout: float | None) -> list[Trial]:
    """Import what is enabled and can be found, with progress on a terminal."""
    from torchplug.host import locate
    from torchplug.host.import_trials import TIMEOUT, run_trials

    models = sorted((row for offers in catalogue.models.values() for row in offers), key=lambda row: row.name)
    enabled = (*models, *catalogue.wrappers)
    found = [row for row in enabled if not row.malformed_value and locate.module_exists(row.module)]

    def show(done: int, total: int) -> None:
        click.echo(f"\rimporting plugins: {done} of {total}", nl=False, err=True)

    if not sys.stderr.isatty():
        return run_trials(found, timeout=timeout or TIMEOUT)
    try:
        return run_trials(found, timeout=timeout or TIMEOUT, progress=show)
    finally:
        click.echo("\r\x1b[K", nl=False, err=True)


def _diagnose(catalogue: Catalogue, installed: Sequence[Installed], trials: Sequence[Trial] | None = None) -> Examined:
    from torchplug.errors import PluginError
    from torchplug.host.metadata import Kind
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
    # What the source text seems to lack, an import knows better.
    tried = {f"{each.row.name} of {each.row.origin}" for each in trials or ()}
    found = [
        finding
        for each in installed
        for finding in each.findings
        if not (finding.kind is Kind.MISSING_ATTRIBUTE and finding.where in tried)
    ]
    problems.extend(Diagnosis(each.kind, each.where, each.says, each.fix) for each in found if not each.harmless)
    notes = [Diagnosis(each.kind, each.where, each.says, each.fix) for each in found if each.harmless]
    warnings: list[Diagnosis] = []
    for trial in trials or ():
        plugin = f"{trial.row.name} of {trial.row.origin}: "
        problems.extend(Diagnosis(trial.kind, plugin + each.where, each.says, each.fix) for each in trial.problems)
        warnings.extend(Diagnosis("class", plugin + each.where, each.says, each.fix) for each in trial.warnings)
        warnings.extend(Diagnosis("import", plugin + each.where, each.says, each.fix) for each in trial.side_effects())
    return Examined(catalogue, installed, trials, problems, warnings, notes)


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


def _as_dict(found: Examined) -> dict[str, Any]:
    catalogue, installed, trials, problems, warnings, notes = found
    imports = None if trials is None else [_trial_as_dict(each) for each in trials]
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
        "imports": imports,
        "problems": [each._asdict() for each in problems],
        "warnings": [each._asdict() for each in warnings],
        "notes": [each._asdict() for each in notes],
    }


def _trial_as_dict(trial: Trial) -> dict[str, Any]:
    from torchplug.host.catalogue import ModelPlugin

    return {
        "architecture" if isinstance(trial.row, ModelPlugin) else "wrapper": trial.row.name,
        "distribution": trial.row.distribution,
        "version": trial.row.version,
        "entry_point": trial.row.value,
        "result": _result(trial),
        "seconds": trial.seconds,
        "torch_seconds": trial.torch_seconds,
        "imported_torch": trial.torch_seconds is not None,
        "printed": trial.output,
        "threads": list(trial.threads),
        "devices": list(trial.devices),
        "environment": list(trial.environment),
        "offers": list(trial.offers),
        "problems": [asdict(each) for each in trial.problems],
        "warnings": [asdict(each) for each in (*trial.warnings, *trial.side_effects())],
    }


def _result(trial: Trial) -> str:
    """One word or two: whether the plugin can be used, and what its import does besides."""
    if trial.problems:
        return {"import": "not importable", "timeout": "too slow", "contract": "refused"}[trial.kind]
    done = {
        "prints": trial.output,
        "threads": trial.threads,
        "device": trial.devices,
        "environment": trial.environment,
        "warnings": trial.warnings,
    }
    return ", ".join(["ok", *(word for word, found in done.items() if found)])


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _print_all(found: Examined) -> None:
    from torchplug.errors import PluginError, Problem

    catalogue, installed, trials, problems, warnings, notes = found
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
    if trials:
        columns = ("imported", "distribution", "version", "time", "of it torch", "result", "offers")
        print_table(
            columns,
            [
                (
                    each.row.name,
                    each.row.distribution or "",
                    each.row.version or "",
                    _seconds(each.seconds),
                    _seconds(each.torch_seconds),
                    _result(each),
                    ", ".join(each.offers),
                )
                for each in trials
            ],
        )
        click.echo()
    for note in notes:
        click.echo(printable(f"note: {note.where}: {note.says}"))
    for warning in warnings:
        click.echo(printable(f"warning: {warning.where}: {warning.says}\n  fix: {warning.fix}"))
    if problems:
        error = PluginError("the installed plugins", [Problem(each.where, each.says, each.fix) for each in problems])
        click.echo(printable(str(error)))
    else:
        click.echo("No problem found.")
    click.echo("\nFor a bug report, copy what is between the lines.")
    click.echo("-" * 72)
    click.echo(printable(_bug_report(found)))
    click.echo("-" * 72)


def _bug_report(found: Examined) -> str:
    """One compact text. The home directory is written as ~: a bug report is public."""
    catalogue, installed, trials, problems, warnings, _ = found
    lines = [", ".join(f"{name} {version or 'not installed'}" for name, version in _versions().items())]
    lines.append(f"selection: {catalogue.selection}")
    lines.append(f"owners: {', '.join(f'{name}={value}' for name, value in catalogue.owners.items()) or 'none chosen'}")
    for each in installed:
        unused = "" if each.active else ", not in use"
        lines.append(f"{each.origin} ({_install_kind(each)}{unused}) {_location(each)}")
    for row in (*rows.models(catalogue), *rows.wrappers(catalogue)):
        lines.append(f"{row.name} = {row.entry_point} [{row.distribution or 'unnamed'}] {row.status}")
    for trial in trials or ():
        time = ", torch ".join(filter(None, (_seconds(trial.seconds), _seconds(trial.torch_seconds))))
        lines.append(f"imported {trial.row.name} [{trial.row.distribution or 'unnamed'}] {time}: {_result(trial)}")
    lines.extend(f"warning {each.kind}: {each.where}: {each.says}" for each in warnings)
    lines.extend(
        f"problem {each.kind}: {': '.join(part for part in (each.where, each.says) if part)}" for each in problems
    )
    lines.append(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return "\n".join(lines).replace(str(Path.home()), "~")
