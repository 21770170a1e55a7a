"""`torchplug check TARGET`: the conformance checks on one model class, with what is wrong and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from torchplug.cli.options import json_option, print_json, print_warning, print_warnings, selection_options
from torchplug.cli.tables import printable

if TYPE_CHECKING:
    from torchplug.testing import Result


@click.command()
@click.argument("target", metavar="TARGET")
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="DEVICE",
    help="Check behaviour on this device. May be repeated. Default: the CPU, and the accelerator if there is one.",
)
@selection_options
@json_option
@click.pass_context
def check(
    context: click.Context,
    target: str,
    devices: tuple[str, ...],
    plugins: str | None,
    owners: dict[str, str],
    as_json: bool,
) -> None:
    """Check that a model class keeps its promises.

    TARGET is an installed architecture (Arch or DIST:Arch), package.module:Class, or a checkpoint (a directory, a GGUF
    file, demo). A class is built from its tiny_config() with random weights, a checkpoint from its own. Exit code 1
    when a check fails.
    """
    from torchplug.testing.probe_server import start_probe

    start_probe()  # it imports torch while we do

    from torchplug.testing import Outcome, Specimen
    from torchplug.testing.checks import CHECKS, run_checks

    specimen = Specimen(target, plugins=plugins, owners=owners, devices=devices or None)
    print_warnings(specimen.catalogue)
    width = max(len(each.name) for each in CHECKS)
    results: list[Result] = []
    if not as_json:
        click.echo(printable(f"checking {specimen.subject}"))
    for result in run_checks(specimen):
        results.append(result)
        if not as_json:
            click.echo(_line(result, width))
    specimen.close()
    failed = [result for result in results if result.outcome is Outcome.FAILED]
    if as_json:
        print_json(
            {
                "target": target,
                "subject": specimen.subject,
                "outcome": "failed" if failed else "ok",
                "checks": [result.as_dict() for result in results],
            }
        )
    else:
        _print_findings(results, failed)
    if failed:
        context.exit(1)


def _line(result: Result, width: int) -> str:
    said = "; ".join(filter(None, (result.reason, *result.notes)))
    line = f"{result.outcome:<8} {result.check.name:<{width}} {result.milliseconds:7.0f} ms  {said}"
    return printable(line.rstrip())


def _print_findings(results: list[Result], failed: list[Result]) -> None:
    for result in results:
        for problem in result.warnings:
            print_warning(f"{problem.where}: {problem.says}\n  fix: {problem.fix}")
    for result in failed:
        click.echo(printable(f"\n{result.error()}"), err=True)
    counts = ", ".join(
        f"{sum(result.outcome is outcome for result in results)} {word}"
        for outcome, word in zip(type(results[0].outcome), ("ok", "failed", "skipped"), strict=True)
    )
    click.echo(f"\n{len(results)} checks: {counts}")
