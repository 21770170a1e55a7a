"""How many threads are worth having on CPU: one for each core that this process may use.

Torch counts cores without the quota of a container, and threads beyond it take turns on what they have: with two cores'
worth of a machine of 64, 64 threads wait for each other at every step.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_TOPOLOGY: Final = Path("/sys/devices/system/cpu")
_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

_log = logging.getLogger(__name__)


def limit_threads() -> None:
    """Lower torch's number of threads to `usable_cores`, unless the environment says how many there should be."""
    import torch

    if any(os.environ.get(name) for name in _VARIABLES):
        return
    cores, threads = usable_cores(), torch.get_num_threads()
    if cores < threads:
        torch.set_num_threads(cores)
        _log.info("%d threads instead of %d: so many cores may be used", cores, threads)


def usable_cores() -> int:
    """Physical cores that this process is allowed on, at most as many as its cgroup's quota pays for, at least 1."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not on this system
        allowed = set(range(os.cpu_count() or 1))
    cores = len({_siblings(cpu) for cpu in allowed})
    quota = _quota()
    return max(1, cores if quota is None else min(cores, quota))


def _siblings(cpu: int) -> str:
    """The hardware threads of the core that `cpu` is one of, as the system writes them."""
    try:
        return (_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int | None:
    """Cores' worth of time that the cgroup (version 2, then 1) grants, rounded up; None without a limit."""
    try:
        granted, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            granted = (_CGROUP / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (_CGROUP / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        return math.ceil(int(granted) / int(period)) if int(granted) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return None
