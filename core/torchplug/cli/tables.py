"""How rows are printed: a rich table on a terminal, aligned plain text everywhere else, so that a pipe can be grepped.

Plain text is one line per row, never wrapped, cut or coloured. rich is imported only to draw.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click


def printable(text: str) -> str:
    """`text` with characters that could move a cursor or change a colour escaped: strangers write metadata."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A header and one line per row; a row has one text per column. An empty text is shown as `-`."""
    cells = [[printable(cell).replace("\n", " ") or "-" for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, cells)
        return
    lines = [[column.upper() for column in columns], *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_rich(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in cells:
        # Text, not str: rich would read markup in square brackets, which an entry point's extras have.
        table.add_row(*(Text(cell) for cell in line))
    Console().print(table)
