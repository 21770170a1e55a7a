"""`torchplug convert SRC DIR`: a GGUF file as a checkpoint directory."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import click

from torchplug.cli.options import json_option, print_json


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("directory", metavar="DIR")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Type of the written weights; auto keeps that of a file that is not quantised, and takes bfloat16 for others.",
)
@json_option
def convert(source: str, directory: str, dtype: str, as_json: bool) -> None:
    """Write the GGUF file SRC (or `demo`) as a checkpoint directory DIR.

    DIR gets config.json, safetensors weights, tokenizer.json and their companions, which transformers, vLLM and
    torchplug load. It must not exist yet, or be empty; a conversion that fails or is interrupted leaves nothing behind.

    Example: torchplug convert demo smollm2
    """
    from torchplug.host.checkpoint import open_checkpoint
    from torchplug.host.convert import convert as write

    checkpoint = open_checkpoint(source)
    with _terminable(), _progress_bar(f"converting {checkpoint.name}") as progress:
        written = write(checkpoint, directory, dtype=dtype, progress=progress)
    if as_json:
        print_json(
            {
                "source": str(checkpoint.path),
                "directory": str(written.path),
                "architecture": checkpoint.architecture,
                "dtype": written.dtype,
                "tensors": written.tensors,
                "parameters": written.parameters,
                "tokenizer": written.has_tokenizer,
                "files": [{"name": name, "bytes": size} for name, size in written.files],
            }
        )
        return
    click.echo(f"{written.path}: {checkpoint.architecture}, {written.parameters:,} parameters in {written.dtype}")
    for name, size in written.files:
        click.echo(f"  {name:<32} {size:>15,} bytes")
    if not written.has_tokenizer:
        click.echo("torchplug: warning: the file has no tokenizer, so neither has the directory", err=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM (a time limit, a container that stops) end the command as Ctrl-C does: with the clean-up."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A callback that draws on standard error, where that is a terminal; else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
