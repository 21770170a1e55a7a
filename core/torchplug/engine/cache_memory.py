"""How much memory the KV cache may take where nobody said: a share of what the machine has left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

HOST_SHARE: Final = 0.5
"""Of main memory that is left after the weights: other programs live there too."""

DEVICE_SHARE: Final = 0.9
"""Of an accelerator's free memory; the rest is for activations."""

_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")


def default_cache_bytes(device: torch.device) -> int:
    """Bytes for the KV cache on `device`: HOST_SHARE of available main memory, or DEVICE_SHARE of the device's free
    memory."""
    share = DEVICE_SHARE if device.type == "cuda" else HOST_SHARE
    return int(available_bytes(device) * share)


def available_bytes(device: torch.device) -> int:
    """Bytes that are free on `device` now. Devices that cannot tell are taken to share main memory."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_host_bytes()


def available_host_bytes() -> int:
    """Main memory that can be taken without swapping: the kernel's MemAvailable, or what this process's cgroup leaves,
    whichever is less. Half of all memory where the system does not tell."""
    available = _mem_available()
    left = _cgroup_left()
    return available if left is None else min(available, left)


def _mem_available() -> int:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def _cgroup_left() -> int | None:
    """Bytes below the limit of the container's cgroup (version 2, then 1); None without a limit. Page cache that the
    kernel would drop (inactive_file) counts as left."""
    for limit, used, stat, inactive in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            most = int((_CGROUP / limit).read_text())
            now = int((_CGROUP / used).read_text())
            fields = dict(line.split() for line in (_CGROUP / stat).read_text().splitlines())
            return max(0, most - now + int(fields.get(inactive, 0)))
        except (OSError, ValueError):  # "max": no limit
            continue
    return None
