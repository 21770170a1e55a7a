"""Doing something together: the ranks of a group meet first, so that one that is gone is named and not waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist

from torchplug.errors import DistributedError, Problem

_FIX = "see the log of that rank; the job has to be started again. A rank that is only slow needs a longer timeout"


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in `group` (None: the default group) and its size; (0, 1) without torch.distributed."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


@contextmanager
def meet(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """Run a block that communicates once all ranks of `group` have come to it.

    A rank that died is noticed at once, one that does not come after the group's timeout, and the error names it where
    the group can tell: gloo can, nccl has to abort the process itself.

    Args:
        group: The group; None for the default one.
        doing: What the block does, for the error.

    Raises:
        DistributedError: A rank is gone, did not come in time, or broke off within the block.
    """
    try:
        if dist.get_backend(group) == "gloo":
            dist.monitored_barrier(group, wait_all_ranks=True)
        yield
    except RuntimeError as error:
        raise lost(group, doing, f"{_first_line(error)}") from error


def lost(group: dist.ProcessGroup | None, doing: str, says: str) -> DistributedError:
    """The error of a rank that cannot go on because of others."""
    rank, size = rank_and_size(group)
    return DistributedError(f"rank {rank} of {size}", Problem(doing, says, _FIX))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
