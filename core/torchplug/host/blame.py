"""What an author's method raises, as an error that names the plugin, the method and the line it came from."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Final, NamedTuple

import torch

from torchplug.errors import DeviceError, PluginError, Problem, TorchplugError
from torchplug.host.contracts import location

_NOT_THE_AUTHORS: Final = ("torch", "torchplug")


class Work(NamedTuple):
    """What was under way, and what helps where it fails: for lack of memory, and else before a report to the author."""

    name: str
    more_memory: str
    check: str


LOADING: Final = Work(
    "loading", "free memory, or choose a smaller dtype, a smaller model or another device", "check config.json, or "
)
RUNNING: Final = Work(
    "running", "free memory, or lower max_num_batched_tokens, max_num_seqs or the size of the KV cache", ""
)


class blamed:
    """Whatever a block that calls `method` of an author's class `owner` raises becomes a TorchplugError.

    It holds nothing of a call: one object, made at load, may be entered in every step.

    Raises:
        DeviceError: There was not enough memory.
        PluginError: Any other exception, with the author's own line that it passed last; it is chained as the cause.
    """

    __slots__ = ("_method", "_owner", "_subject", "_work")

    def __init__(self, subject: str, owner: type, method: str, work: Work) -> None:
        self._subject, self._owner, self._method, self._work = subject, owner, method, work

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, TorchplugError):
            return
        if lacks_memory(error):
            raise no_memory(self._subject, error, self._work) from error
        says = f"{type(error).__name__}: {_said(error)}"
        fix = f"see {_raised_at(error)}: {self._work.check}report it to the plugin's author"
        where = f"{self._method} ({location(getattr(self._owner, self._method, None))})"
        raise PluginError(self._subject, Problem(where, says, fix)) from error


def lacks_memory(error: BaseException) -> bool:
    """Whether an exception says that memory has run out."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def no_memory(subject: str, error: BaseException, work: Work) -> DeviceError:
    """The error for an exception that `lacks_memory`."""
    says = f"there is not enough memory: {_said(error)}"
    return DeviceError(f"{work.name} {subject}", Problem("", says, work.more_memory))


def _said(error: BaseException) -> str:
    return str(error).partition("\nException raised from")[0]  # torch appends its C++ frames


def _raised_at(error: BaseException) -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours; of the innermost one where all are."""
    frames = list(traceback.walk_tb(error.__traceback__))
    authors = [
        each for each in frames if str(each[0].f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_AUTHORS
    ]
    frame, line = (authors or frames)[-1]
    return f"{frame.f_code.co_filename}:{line}"
