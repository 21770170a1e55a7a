"""How an answer reaches the terminal: its text as it comes, then one line of figures on standard error."""

from __future__ import annotations

import io
import sys
import time

import click

# A model's text is not the terminal's owner: no escape sequences, no overwriting of a line.
_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {ord("\r"): None}


class AnswerWriter:
    """Writes parts of answers to standard output at once, and counts.

    A character that the output's encoding lacks becomes `?`; on a terminal, control characters become U+FFFD.
    """

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self._terminal = sys.stdout.isatty()
        self._at_line_start = True
        self._begin = time.perf_counter()
        self._first: float | None = None
        self._last = self._begin
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Note that so many tokens have just arrived."""
        if num_tokens:
            self._last = time.perf_counter()
            self._first = self._first or self._last
            self._num_tokens += num_tokens

    def write(self, text: str) -> None:
        """Show a part of an answer."""
        if text:
            sys.stdout.write(text.translate(_CONTROL) if self._terminal else text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        """Go to the start of a line, if the last text has not ended one."""
        if not self._at_line_start:
            self.write("\n")

    def print_figures(self) -> None:
        """Tokens, time to the first one, and tokens per second after it, in one line on standard error."""
        if self._first is None:
            return
        words = [f"{self._num_tokens} tokens", f"first after {self._first - self._begin:.2f} s"]
        if self._last > self._first:
            words.append(f"{(self._num_tokens - 1) / (self._last - self._first):.1f} tokens/s")
        click.secho(", ".join(words), dim=True, err=True)
