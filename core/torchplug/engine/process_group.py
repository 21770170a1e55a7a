"""Doing something together: the ranks of a group meet first, so that one that is gone is named and not waited for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from torch import distributed as dist

from torchplug.errors import DistributedError, Problem

PATIENCE: Final = timedelta(seconds=60)
"""How long a rank waits for another one that is slow, if nothing else is said."""

_FIX: Final = "see that rank's own log, and start the job again; give a rank that is only slow more time"


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in `group` (None: the default group) and its size; (0, 1) without torch.distributed."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


@contextmanager
def meet(group: dist.ProcessGroup | None, doing: str, timeout: timedelta = PATIENCE) -> Iterator[None]:
    """Run a block that communicates once all ranks of `group` have come to it.

    A rank that died is noticed at once, one that does not come after `timeout`, and the error names it where the group
    can tell: gloo can, nccl has to abort the process itself.

    Args:
        group: The group; None for the default one.
        doing: What the block does, for the error.
        timeout: How long the slowest rank may take.

    Raises:
        DistributedError: A rank is gone, did not come in time, or broke off within the block.
    """
    try:
        if dist.get_backend(group) == "gloo":
            dist.monitored_barrier(group, timeout, wait_all_ranks=True)
        yield
    except RuntimeError as error:
        raise lost(group, doing, reason(error)) from error


def lost(group: dist.ProcessGroup | None, doing: str, says: str) -> DistributedError:
    """The error of a rank that cannot go on because of others."""
    rank, size = rank_and_size(group)
    return DistributedError(f"rank {rank} of {size}", Problem(doing, says, _FIX))


def reason(error: Exception) -> str:
    """What a backend says of a failure, without its own source line and advice."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\]:? *", "", line).partition(" This is typically")[0]
