"""`torchplug list`: what the installed plugins offer, from metadata only."""

from __future__ import annotations

import click

from torchplug.cli import rows
from torchplug.cli.options import json_option, open_catalogue, print_json, selection_options
from torchplug.cli.tables import printable


@click.command("list")
@selection_options
@json_option
def list_command(plugins: str | None, owners: dict[str, str], as_json: bool) -> None:
    """List the architectures that installed plugins offer, and by whom.

    Reads package metadata only: neither a plugin nor torch is imported, so it works when a plugin is broken. The status
    is "ok"; "conflict" where several distributions offer an architecture and none was chosen, "owner" and "passed over"
    where one was; "blocked" where the selection disables it or an allowlist lacks it; "malformed" or "no module" where
    it could not be imported.
    """
    catalogue = open_catalogue(plugins, owners)
    models, wrappers = rows.models(catalogue), rows.wrappers(catalogue)
    if as_json:
        print_json(
            {
                "selection": str(catalogue.selection),
                "architectures": [row.as_dict("architecture") for row in models],
                "wrappers": [row.as_dict("wrapper") for row in wrappers],
                "warnings": catalogue.warnings,
            }
        )
        return
    if not models:
        click.echo("No installed plugin offers an architecture. `torchplug doctor` says why.", err=True)
    for kind, section in (("architecture", models), ("wrapper", wrappers)):
        if section:
            if section is wrappers and models:
                click.echo()
            rows.print_rows(kind, section)
    notes = [row for row in (*models, *wrappers) if row.note]
    if notes:
        click.echo()
    for row in notes:
        click.echo(printable(f"{row.name} of {row.distribution or 'unnamed distribution'}: {row.status}, {row.note}"))
