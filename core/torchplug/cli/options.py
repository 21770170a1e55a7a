"""Options that several commands share, and the one place that decides how an error, a warning or JSON reaches the user.

Nothing here imports torch, rich or a plugin: every command pays for this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from torchplug.cli.tables import printable

if TYPE_CHECKING:
    from torchplug.errors import TorchplugError
    from torchplug.host.catalogue import Catalogue

Function = TypeVar("Function", bound=Callable[..., Any])

_JSON: Final = "torchplug.json"
"""Key in click's `Context.meta`, which a command shares with its group: standard output, where JSON was asked for."""


def _remember_json(context: click.Context, _parameter: click.Parameter, value: bool) -> bool:
    if value and _JSON not in context.meta:
        # What a plugin prints while it is imported or runs must not come between the lines of the JSON.
        context.meta[_JSON] = sys.stdout
        context.find_root().with_resource(redirect_stdout(sys.stderr))
    return value


def _parse_owners(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    owners: dict[str, str] = {}
    for value in values:
        architecture, equals, distribution = (part.strip() for part in value.partition("="))
        if not (architecture and equals and distribution):
            raise click.BadParameter(f"{value!r} is not Arch=dist, for example LlamaForCausalLM=torchplug")
        if owners.get(architecture, distribution) != distribution:
            raise click.BadParameter(f"{architecture} has two owners, {owners[architecture]} and {distribution}")
        owners[architecture] = distribution
    return owners


_plugins = click.option(
    "--plugins",
    metavar="NAMES",
    help=(
        "Distributions whose plugins are enabled: 'a,b' only these, '*' all, '*,-a' all but a, 'none' no plugin. "
        "Default: $TORCHPLUG_PLUGINS, and all where that is not set."
    ),
)
_owner = click.option(
    "--owner",
    "owners",
    multiple=True,
    metavar="ARCH=DIST",
    callback=_parse_owners,
    help="Which distribution serves an architecture that several offer. May be repeated.",
)
_device = click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="DEVICE",
    help="cpu, cuda, cuda:1, mps, ...; auto takes the accelerator that PyTorch finds. A missing device is an error.",
)
_dtype = click.option(
    "--dtype",
    default="auto",
    show_default=True,
    metavar="DTYPE",
    help="float32, bfloat16 or float16; auto takes the checkpoint's.",
)


def selection_options(function: Function) -> Function:
    """Adds `--plugins` (parameter `plugins: str | None`) and `--owner` (parameter `owners: dict[str, str]`)."""
    return _plugins(_owner(function))


def device_options(function: Function) -> Function:
    """Adds `--device` (parameter `device: str`) and `--dtype` (parameter `dtype: str`)."""
    return _device(_dtype(function))


def json_option(function: Function) -> Function:
    """Adds `--json` (parameter `as_json: bool`). With it, an error too is printed as JSON, on standard output."""
    return click.option(
        "--json", "as_json", is_flag=True, callback=_remember_json, is_eager=True, help="Print JSON instead of a table."
    )(function)


def open_catalogue(plugins: str | None, owners: dict[str, str]) -> Catalogue:
    """The catalogue under the user's selection; its warnings are printed."""
    from torchplug.host.catalogue import Catalogue

    catalogue = Catalogue(selection=plugins, owners=owners)
    print_warnings(catalogue)
    return catalogue


def print_warnings(catalogue: Catalogue) -> None:
    """The catalogue's warnings (unknown names in a selection, unreadable metadata), one a line on standard error."""
    for warning in catalogue.warnings:
        print_warning(warning)


def print_warning(text: str) -> None:
    """One warning, on standard error."""
    click.echo(printable(f"torchplug: warning: {text}"), err=True)


def print_json(value: Any) -> None:
    """`value` as indented JSON on standard output, in ASCII, so that any terminal and locale can carry it."""
    import json

    context = click.get_current_context(silent=True)
    click.echo(json.dumps(value, indent=2), file=None if context is None else context.meta.get(_JSON))


def print_error(context: click.Context, error: TorchplugError) -> None:
    """The error's own text on standard error; with `--json`, its parts on standard output."""
    if context.meta.get(_JSON):
        print_json(error.as_dict())
    else:
        click.echo(printable(str(error)), err=True)


def flush_output() -> None:
    """Write out what is buffered while a closed pipe can still be told from a fault; at exit Python would complain."""
    sys.stdout.flush()
    sys.stderr.flush()
