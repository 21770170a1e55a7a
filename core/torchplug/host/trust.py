"""Trust: whether any installed distribution may offer plugins (open), or only those that the operator named.

`TORCHPLUG_ALLOWLIST=a,b`, or `Host(allowlist="a,b")`, names distributions, compared as PEP 503 normalises them. Nothing
of another one is imported, whatever is asked for. Where both are given, a distribution has to be on both: what starts a
process can narrow the operator's list and cannot widen it. torchplug itself is always trusted, since its code runs
already. A name is a claim of the metadata; what the code is, a plan (`torchplug.host.plan`) pins by hashes.
"""

from __future__ import annotations

import os
from typing import Final

from torchplug.host.selection import normalized

VARIABLE: Final = "TORCHPLUG_ALLOWLIST"

_OWN: Final = "torchplug"


class Allowlist:
    """The distributions whose plugins may be imported.

    Attributes:
        names: Normalised names, torchplug among them.
        sources: Where the list was written: "TORCHPLUG_ALLOWLIST", or "allowlist" for an argument.

    Raises:
        PluginError: An entry is not the name of a distribution (a list names what is trusted: no `*`, no `-name`).
    """

    __slots__ = ("names", "sources")

    def __init__(self, names: frozenset[str], sources: tuple[str, ...]) -> None:
        self.names = names
        self.sources = sources

    @classmethod
    def in_force(cls, argument: str | None) -> Allowlist | None:
        """What the argument and the environment allow together; None where neither says anything (open)."""
        texts = {"allowlist": argument, VARIABLE: os.environ.get(VARIABLE)}
        lists = {source: _parsed(text, source) for source, text in texts.items() if text is not None}
        if not lists:
            return None
        return cls(frozenset.intersection(*lists.values()) | {_OWN}, tuple(lists))

    def trusts(self, distribution: str | None) -> bool:
        """Whether a distribution's plugins may be imported; one without a name is not trusted."""
        return distribution is not None and normalized(distribution) in self.names

    def __str__(self) -> str:
        return f"{','.join(sorted(self.names - {_OWN})) or 'torchplug only'!r} ({' and '.join(self.sources)})"


def _parsed(text: str, source: str) -> frozenset[str]:
    from torchplug.errors import PluginError, Problem

    if not isinstance(text, str):
        says = f"expected one text with commas, got {text!r}"
        raise PluginError(source, Problem("", says, 'for example allowlist="a,b"'))
    names = frozenset(normalized(entry) for entry in text.split(",") if entry.strip())
    for name in sorted(names):
        if not (name[0].isalnum() and name.replace("-", "").isalnum()):
            says = f"{name!r} is not the name of a distribution: a list names what is trusted"
            raise PluginError(source, Problem("", says, "write the names with commas between, or leave it unset"))
    return names
