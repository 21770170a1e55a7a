"""The selection: which distributions' plugins are enabled, in one grammar for environment, Python and command line.

It is a comma separated list of distribution names, compared as PEP 503 normalises them (`My_Plug` is `my-plug`):

* `a,b`: these and no others; the order is the order in which wrapper plugins are attached (the first is innermost).
* `*` or `all`: everything that is installed; beside names, it says where in the order the unnamed ones come.
* `none`, or a text without any entry (the empty string): nothing at all, torchplug's own models included.
* `-a`: without `a`. A removal wins wherever it stands. A list of removals only starts from everything: `-a` is `*,-a`.

No selection at all (`TORCHPLUG_PLUGINS` not set and no argument) enables everything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

VARIABLE: Final = "TORCHPLUG_PLUGINS"

_EVERYTHING: Final = frozenset({"*", "all"})
_NOTHING: Final = "none"


def normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


class Selection:
    """One selection, parsed.

    Attributes:
        text: What the user wrote; None where nobody selected, which enables everything.
        source: Where it was written: "TORCHPLUG_PLUGINS", or "" for an argument.
        everything: Distributions that are not named are enabled.
    """

    __slots__ = ("_positions", "_removed", "everything", "source", "text")

    def __init__(self, text: str | None, source: str = "") -> None:
        if text is not None and not isinstance(text, str):
            from torchplug.errors import PluginError, Problem

            says = f"expected one text with commas, got {text!r}"
            raise PluginError("plugins", Problem("", says, 'for example plugins="a,b" or plugins="*,-a"'))
        self.text = text
        self.source = source
        self._positions: dict[str, int] = {}
        self._removed: frozenset[str] = frozenset()
        self.everything = text is None
        if text is not None:
            self._parse(text)

    @classmethod
    def in_force(cls, argument: str | None) -> Selection:
        """The argument's selection, or where it is None the environment's."""
        if argument is not None:
            return cls(argument)
        return cls(os.environ.get(VARIABLE), VARIABLE)

    def _parse(self, text: str) -> None:
        entries = _entries(text)
        removed = {normalized(entry[1:]) for entry in entries if entry.startswith("-")}
        kept = [normalized(entry) for entry in entries if not entry.startswith("-")]
        if removed and not kept:
            kept = ["*"]
        for position, name in enumerate(kept):
            if name in _EVERYTHING:
                self.everything = True
                name = "*"
            if name != _NOTHING:
                self._positions.setdefault(name, position)
        if removed & _EVERYTHING:
            self.everything = False
            self._positions.clear()
        self._removed = frozenset(removed) - _EVERYTHING - {_NOTHING}

    def enables(self, distribution: str | None) -> bool:
        """Whether a distribution's plugins are enabled. None is one whose name its metadata does not tell."""
        if self.text is None:
            return True
        if distribution is None:
            return self.everything
        name = normalized(distribution)
        return name not in self._removed and (self.everything or name in self._positions)

    def position(self, distribution: str | None) -> int:
        """Where in the order of the selection an enabled distribution comes; unnamed ones come where `*` stands."""
        everything = self._positions.get("*", 0)
        return everything if distribution is None else self._positions.get(normalized(distribution), everything)

    def names(self) -> tuple[str, ...]:
        """Every distribution that is named, to keep or to remove, normalised."""
        return tuple(name for name in (*self._positions, *sorted(self._removed)) if name != "*")

    def including(self, distribution: str) -> str:
        """The text of this selection, changed as little as needed to enable a distribution."""
        if not self.everything and not self._positions:
            return distribution
        undone = {normalized(distribution), *_EVERYTHING}
        kept = [
            entry
            for entry in _entries(self.text or "")
            if normalized(entry) != _NOTHING and not (entry.startswith("-") and normalized(entry[1:]) in undone)
        ]
        text = ",".join(kept) or "*"
        return text if Selection(text).enables(distribution) else f"{text},{distribution}"

    def excluding(self, distribution: str) -> str:
        """The text of this selection without a distribution that it enables."""
        return f"{self.text or '*'},-{distribution}"

    def unknown(self, installed: Iterable[str]) -> tuple[str, ...]:
        """Names that no plugin distribution in `installed` has."""
        known = {normalized(name) for name in installed}
        return tuple(name for name in self.names() if name not in known)

    def __str__(self) -> str:
        if self.text is None:
            return f"everything ({VARIABLE} is not set)"
        remarks = [self.source] if self.source else []
        if not self.everything and self._removed.issuperset(self._positions):
            remarks.append("nothing is enabled")
        return f"{self.text!r} ({', '.join(remarks)})" if remarks else repr(self.text)


def _entries(text: str) -> list[str]:
    return [entry for part in text.split(",") if (entry := part.strip())]
