"""What a check may find: a fault, something legal but probably not meant, or a figure worth telling."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torchplug.errors import Problem


class Advice(NamedTuple):
    """Legal, but probably not meant."""

    problem: Problem


Finding: TypeAlias = "Problem | Advice | str"
"""A Problem is a fault; a str is a figure for whoever reads the report."""
