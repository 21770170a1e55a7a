"""The table of conformance checks, and how one is run.

A check is a function of a `Specimen` that yields what it finds: a `Problem` is a fault, an `Advice` is legal but
probably not meant, a text is worth telling. It raises `Skip` where it does not apply. What a check needs is named in
its row; there is no code for a particular model or hook.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from torchplug.errors import ContractError, Problem
from torchplug.testing.behaviour import (
    alone_equals_in_a_batch,
    cached_equals_uncached,
    chunk_split,
    dtype_and_device,
)
from torchplug.testing.experts import expert_layers, expert_swap
from torchplug.testing.findings import Advice, Finding
from torchplug.testing.multimodal import mrope_positions, multimodal_counts, multimodal_order
from torchplug.testing.processes import discovery_in_a_new_process, import_contract
from torchplug.testing.promises import claims, registration, signatures, stubs
from torchplug.testing.recurrence import fresh_state, layer_kinds, state_shapes, state_snapshots
from torchplug.testing.specimen import Skip, Specimen, problems_of
from torchplug.testing.weights import weights_round_trip


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table.

    Attributes:
        function: Finds what is wrong with a specimen; its name is the check's.
        proves: What holds when it finds nothing, as one clause.
        needs: Checks without whose success this one cannot tell anything; it is skipped when one of them fails.
    """

    function: Callable[[Specimen], Iterable[Finding]]
    proves: str
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.function.__name__


class Outcome(StrEnum):
    """How a check ended."""

    OK = "ok"
    FAILED = "FAIL"
    SKIPPED = "skipped"


class ConformanceError(ContractError):
    """A conformance check failed; the text says what it proves, what was expected, what was found and the fix."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found.

    Attributes:
        check: The row.
        subject: The class examined, for messages.
        outcome: How it ended.
        problems: Why it failed.
        warnings: What is legal but probably not meant.
        notes: What it measured.
        reason: Why it was skipped.
        milliseconds: How long it took.
    """

    check: Check
    subject: str
    outcome: Outcome
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    milliseconds: float = 0.0

    def error(self) -> ConformanceError:
        """The failure as an error."""
        return ConformanceError(f"{self.subject}, check {self.check.name} ({self.check.proves})", self.problems)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-ready data."""
        return {
            "check": self.check.name,
            "proves": self.check.proves,
            "outcome": "failed" if self.outcome is Outcome.FAILED else str(self.outcome),
            "milliseconds": round(self.milliseconds, 1),
            "problems": [_parts(problem) for problem in self.problems],
            "warnings": [_parts(problem) for problem in self.warnings],
            "notes": list(self.notes),
            "reason": self.reason or None,
        }


_SOUND: Final = ("registration", "claims", "signatures", "stubs")
_BUILDS: Final = (*_SOUND, "layer_kinds", "state_shapes")
_LOADS: Final = (*_BUILDS, "weights_round_trip")

CHECKS: Final[tuple[Check, ...]] = (
    Check(registration, "one installed distribution offers the architecture, and its entry point leads to a class"),
    Check(import_contract, "importing the class does nothing but define it", needs=("registration",)),
    Check(
        discovery_in_a_new_process,
        "a process that is started later finds the same plugin",
        needs=("registration",),
    ),
    Check(claims, "every interface is claimed by a literal flag, and what it needs is there", needs=("registration",)),
    Check(signatures, "every method can be called as the host and the hooks call it", needs=("registration",)),
    Check(stubs, "no claim rests on the empty method of an interface", needs=("registration",)),
    Check(
        layer_kinds, "its flags, its config and the layers that it builds say the same of attention and state", _SOUND
    ),
    Check(
        state_shapes,
        "the state that the class names before it is built is the one that every recurrent layer keeps",
        needs=(*_SOUND, "layer_kinds"),
    ),
    Check(
        weights_round_trip,
        "load_weights fills every parameter, each from its own tensor, names what it filled, and reports what is "
        "missing or too much",
        needs=_BUILDS,
    ),
    Check(
        dtype_and_device,
        "the model computes in the dtype and on the device that it was given",
        needs=_LOADS,
    ),
    Check(
        cached_equals_uncached,
        "decoding with the cache gives what one forward over the whole text gives",
        needs=_LOADS,
    ),
    Check(
        alone_equals_in_a_batch,
        "a request's result does not depend on the requests that share its steps",
        needs=_LOADS,
    ),
    Check(
        chunk_split,
        "a prompt read in two steps, cut anywhere, gives what reading it at once gives",
        needs=_LOADS,
    ),
    Check(fresh_state, "a new request starts from no state at all, whatever its slot held before", needs=_LOADS),
    Check(
        state_snapshots,
        "a prompt that goes on from a kept state gives what computing it from its beginning gives",
        needs=_LOADS,
    ),
    Check(
        expert_layers,
        "the counts of experts fit each other, in one process and in two, and every expert layer can be balanced",
        needs=_SOUND,
    ),
    Check(
        expert_swap,
        "moving experts between slots, weights and maps, changes no logits, and the loads follow",
        needs=(*_LOADS, "expert_layers"),
    ),
    Check(
        multimodal_counts,
        "every item gives one embedding for each of its places in the prompt, and they arrive there unchanged",
        needs=_LOADS,
    ),
    Check(
        multimodal_order,
        "embeddings come in the order of the items, each as if it were alone",
        needs=(*_LOADS, "multimodal_counts"),
    ),
    Check(
        mrope_positions,
        "M-RoPE positions cover the prompt, exceed after an item all inside it, and go on by the delta",
        needs=_LOADS,
    ),
)
"""Every check, in the order in which they are run."""

_BY_NAME: Final[Mapping[str, Check]] = {check.name: check for check in CHECKS}


def check_model(
    target: Specimen | str | os.PathLike[str] | type,
    *,
    skip: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Result]:
    """Run every check on a model class.

    Args:
        target: As for `Specimen`, or a Specimen.
        skip: Names of checks to leave out, and why.
        options: `config`, `weights`, `plugins`, `owners`, `devices`, as for `Specimen`.

    Raises:
        CheckpointError, DeviceError: the target or a device cannot be opened.
        KeyError: `skip` names no check.
    """
    specimen = target if isinstance(target, Specimen) else Specimen(target, **options)
    try:
        return list(run_checks(specimen, skip))
    finally:
        specimen.close()


def run_checks(specimen: Specimen, skip: Mapping[str, str] | None = None) -> Iterator[Result]:
    """The result of every check of the table, each as soon as it is there."""
    for name in skip or {}:
        if name not in _BY_NAME:
            raise KeyError(f"no check is called {name!r}; the checks are {', '.join(_BY_NAME)}")
    for check in CHECKS:
        yield run_check(check, specimen, (skip or {}).get(check.name, ""))


def run_check(check: Check, specimen: Specimen, skip: str = "") -> Result:
    """Run one check and, before it, the checks that it needs; a specimen is not asked twice.

    Args:
        check: A row of the table.
        specimen: The class.
        skip: Why the check is left out; empty to run it.
    """
    if check.name not in specimen.results:
        began = time.perf_counter()
        failed = [
            need for need in check.needs if not skip and run_check(_BY_NAME[need], specimen).outcome is Outcome.FAILED
        ]
        if failed:
            skip = f"{failed[0]} failed"
        began = time.perf_counter() if check.needs else began
        result = Result(check, specimen.subject, Outcome.SKIPPED, reason=skip) if skip else _found(check, specimen)
        specimen.results[check.name] = _timed(result, began)
    return specimen.results[check.name]


def _found(check: Check, specimen: Specimen) -> Result:
    problems: list[Problem] = []
    warnings: list[Problem] = []
    notes: list[str] = []
    try:
        for finding in check.function(specimen):
            if isinstance(finding, Problem):
                problems.append(finding)
            elif isinstance(finding, Advice):
                warnings.append(finding.problem)
            else:
                notes.append(finding)
    except Skip as skip:
        if not problems:
            return Result(check, specimen.subject, Outcome.SKIPPED, reason=str(skip))
    except (Exception, SystemExit) as error:
        # The author's code runs here: whatever it raises is a finding about it.
        problems += problems_of(error, specimen.subject, f"the check {check.name} to run the class")
    outcome = Outcome.FAILED if problems else Outcome.OK
    return Result(check, specimen.subject, outcome, tuple(problems), tuple(warnings), tuple(notes))


def _timed(result: Result, began: float) -> Result:
    from dataclasses import replace

    return replace(result, milliseconds=1000 * (time.perf_counter() - began))


def _parts(problem: Problem) -> dict[str, str]:
    return {"where": problem.where, "says": problem.says, "fix": problem.fix}
