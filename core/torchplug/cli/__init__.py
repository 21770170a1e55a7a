"""The command line: `torchplug COMMAND`, a group that imports a command's module only when that command runs.

Exit codes: 0 all is well, 1 a problem that the output explains, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple, NoReturn

import click

from torchplug import __version__
from torchplug.cli.options import flush_output, print_error, print_json, print_warning

_CANNOT_BE_WRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""


class LazyCommand(NamedTuple):
    """Where a command is (`module:function`) and its line in the group's help, which must not cost an import."""

    target: str
    help: str


COMMANDS: Final[dict[str, LazyCommand]] = {
    "list": LazyCommand(
        "torchplug.cli.list_command:list_command", "Architectures that installed plugins offer, and by whom."
    ),
    "show": LazyCommand("torchplug.cli.show_command:show", "One architecture: its owner, where it is, what it can do."),
    "doctor": LazyCommand(
        "torchplug.cli.doctor_command:doctor", "What is wrong with the installed plugins, and the fix."
    ),
    "check": LazyCommand("torchplug.cli.check:check", "Whether a model class keeps its promises, and the fix."),
    "api": LazyCommand("torchplug.cli.api:api", "The hooks of this release, for authors and for comparing releases."),
    "generate": LazyCommand("torchplug.cli.generate:generate", "Answer prompts with a model."),
    "bench": LazyCommand("torchplug.cli.bench:bench", "How fast a model runs here: throughput, latency, startup."),
    "eplb": LazyCommand(
        "torchplug.cli.eplb:eplb", "Expert load balancing: simulate it on a trace or a synthetic load."
    ),
    "chat": LazyCommand("torchplug.cli.chat:chat", "Talk to a model in the terminal."),
    "convert": LazyCommand("torchplug.cli.convert:convert", "Write a GGUF file as a checkpoint directory."),
}


class CommandGroup(click.Group):
    """The group over `COMMANDS`; it also turns every end of a command into an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].target.partition(":")
        command: click.Command = getattr(import_module(module), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else f"The commands are: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command '{name}'. {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except Exception as error:
            from torchplug.errors import TorchplugError
            from torchplug.host.torch_import import explain_torch_import

            explained = error if isinstance(error, TorchplugError) else explain_torch_import(error)
            if explained is None:
                raise
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            print_error(ctx, explained)
            ctx.exit(1)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        name = prog_name or "torchplug"
        _replace_closed_streams()
        if not standalone_mode:
            return super().main(args, name, complete_var, standalone_mode=False, **extra)
        try:
            result = super().main(args, name, complete_var, standalone_mode=False, **extra)
            flush_output()
        except click.ClickException as error:
            if "--json" in (sys.argv[1:] if args is None else args):
                print_json(_as_dict(error, name))
            else:
                error.show()
            sys.exit(error.exit_code)
        except (KeyboardInterrupt, click.Abort) as error:
            # click turns the end of input at one of its prompts into Abort too; that is not an interrupt.
            sys.exit(1 if isinstance(error.__context__, EOFError) else INTERRUPTED)
        except BrokenPipeError:
            _leave_an_output_that_takes_no_more()
        except OSError as error:
            if error.errno not in _CANNOT_BE_WRITTEN or error.filename is not None:
                raise
            click.echo(f"torchplug: standard output cannot be written: {error.strerror}", err=True)
            _leave_an_output_that_takes_no_more()
        # A command's own exit code (`ctx.exit(1)`) comes back as an int; every other result of a command means success.
        sys.exit(result if type(result) is int else 0)


_python_warning = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
    """The host's own warnings as a user should meet them; every other one as Python shows it."""
    if category.__name__ == "TorchplugWarning":
        print_warning(str(message))
    else:
        _python_warning(message, category, *where, **options)


def _replace_closed_streams() -> None:
    """A stream that the caller closed (`>&-`) is None in Python; the null device stands in for it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (for as long as the process lives)


def _as_dict(error: click.ClickException, program: str) -> dict[str, Any]:
    """Wrong usage in the form of `TorchplugError.as_dict`."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = program if context is None else context.command_path
    problem = {"where": "", "says": error.format_message(), "fix": f"`{command} --help` shows the usage"}
    return {"error": "UsageError", "subject": command, "problems": [problem]}


def _leave_an_output_that_takes_no_more() -> NoReturn:
    """Exit at once. What is still buffered goes to the null device, or Python would complain at shutdown."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


@click.group(
    "torchplug",
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A plugin is a pip package. `torchplug COMMAND --help` says more about a command.",
)
@click.option(
    "--debug", is_flag=True, envvar="TORCHPLUG_DEBUG", help="Show an error's traceback too; also TORCHPLUG_DEBUG=1."
)
@click.version_option(__version__, prog_name="torchplug", message="%(prog)s %(version)s")
def main(debug: bool) -> None:
    """Find, check and run model architectures that are installed as pip packages."""
