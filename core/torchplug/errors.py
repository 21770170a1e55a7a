"""One error format: what happened, where, what was expected, and the fix.

Every error that a user can act on is a `TorchplugError`. Its text is complete on its own, so the command line prints it
without a traceback, and its parts (`subject`, `problems`) are what `--json` prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: `where` (a hook, a file, an argument), what `says` it is, and the `fix`. Texts, each may
    span lines.
    """

    where: str
    says: str
    fix: str = ""


class TorchplugWarning(UserWarning):
    """Something that was left out or looks wrong, while everything that was asked for goes on."""


class TorchplugError(Exception):
    """Base of all errors that a user can act on. `subject` names what was worked on, e.g. "checkpoint 'models/x'"."""

    def __init__(self, subject: str, problems: Problem | Iterable[Problem]) -> None:
        self.subject = subject
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(subject, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            (only,) = self.problems
            text = ": ".join(part for part in (f"torchplug: {self.subject}", only.where, only.says) if part)
            return f"{text}\n  fix: {_indented(only.fix, 7)}" if only.fix else text
        lines = [f"torchplug: {len(self.problems)} problems in {self.subject}"]
        for number, problem in enumerate(self.problems, 1):
            lines.append(f"{number:>3}. {_indented(problem.where, 5)}")
            lines.append(f"     {_indented(problem.says, 5)}")
            if problem.fix:
                lines.append(f"     fix: {_indented(problem.fix, 10)}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The error as JSON-ready data: type, subject and a list of problems."""
        return {
            "error": type(self).__name__,
            "subject": self.subject,
            "problems": [asdict(problem) for problem in self.problems],
        }


class PluginError(TorchplugError):
    """A plugin could not be found, chosen, imported or registered."""


class ContractError(PluginError):
    """A plugin, or the caller of a hook, broke a promise of an interface."""


class HookNotProvided(TorchplugError, AttributeError):
    """A hook that this model does not have was asked for; the text says why and what would provide it."""


class CheckpointError(TorchplugError):
    """A checkpoint (config, weights, tokenizer) is missing, damaged, hostile or does not fit its model class."""


class MissingConfigKey(CheckpointError, AttributeError):
    """A model class read a key that its config.json does not have and for which it declares no default."""


class DeviceError(TorchplugError):
    """A device or dtype was asked for that this machine does not have."""


class ParallelConfigError(TorchplugError, ValueError):
    """A model cannot be spread over processes in the way that the parallel settings ask for."""


class DistributedError(TorchplugError):
    """A process of a distributed job died, did not answer in time or disagrees with the others."""


class PlanMismatch(DistributedError):
    """The plugins of this process are not those that its parent planned with."""


class RequestError(TorchplugError, ValueError):
    """One request (a prompt, its parameters, its inputs) is not acceptable; other requests go on."""


def note_origin(error: BaseException, hook: str) -> None:
    """Add to an exception that passes a hook which hook it started in: once, by the innermost hook that it passes."""
    prefix = "raised in torchplug hook "
    if isinstance(error, TorchplugError) or any(note.startswith(prefix) for note in getattr(error, "__notes__", ())):
        return
    error.add_note(prefix + hook)


def _indented(text: str, width: int) -> str:
    return text.replace("\n", "\n" + " " * width)
