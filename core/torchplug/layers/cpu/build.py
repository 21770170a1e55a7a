"""The C sources of this package, compiled for this processor once and kept on disk.

The object is compiled with OpenMP but linked to no OpenMP runtime: its calls are resolved to the one that torch has
loaded, so that there is one pool of threads in the process. Two pools on the same cores wait for each other at every
step. Where that is not possible, and wherever there is no compiler, layers compute with torch.

`TORCHPLUG_KERNELS=torch` leaves the kernels out; `TORCHPLUG_KERNELS=native` makes it an error if they cannot be had.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from torchplug.errors import DeviceError, Problem

_log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
_SECONDS = 60.0
"""What a compiler may take; 2 s are usual."""


class Unavailable(Exception):
    """Why there are no native kernels, in words."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where layers have to do without. Compiled, loaded and reported once.

    Raises DeviceError where `TORCHPLUG_KERNELS` asks for them and they cannot be had, or has another value.
    """
    wanted = os.environ.get("TORCHPLUG_KERNELS", "")
    if wanted not in ("", "torch", "native"):
        fix = "set it to torch or native, or leave it unset"
        raise DeviceError("CPU kernels", Problem("TORCHPLUG_KERNELS", f"is {wanted!r}", fix))
    if wanted == "torch":
        return None
    try:
        return _loaded()
    except Unavailable as reason:
        if wanted == "native":
            fix = "install gcc (or name a compiler in CC), or unset TORCHPLUG_KERNELS to compute with torch"
            raise DeviceError("CPU kernels", Problem("TORCHPLUG_KERNELS=native", str(reason), fix)) from reason
        _log.warning("layers compute with torch alone, which is slower on CPU: %s", reason)
        return None


def _loaded() -> ctypes.CDLL:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise Unavailable(f"there are no kernels for {sys.platform} on {platform.machine()}")
    _check_runtime()
    compiler = shlex.split(os.environ.get("CC", "")) or ["gcc"]
    path = shutil.which(compiler[0])
    if path is None:
        raise Unavailable(f"there is no compiler {compiler[0]!r} on PATH")
    command = [path, *compiler[1:], *_FLAGS]
    name = f"kernels-{_identity(command)}.so"
    _log.info("CPU kernels %s", name)
    directory = _cache_directory()
    if directory is None:
        # Nowhere to keep it: this process has one of its own, gone from the disk once it is loaded.
        with tempfile.TemporaryDirectory(prefix="torchplug-") as private:
            return _open(_compile(command, Path(private), name))
    found = directory / name
    if not found.exists():
        with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as private:
            os.replace(_compile(command, Path(private), name), found)
    if not _ours(found):
        raise Unavailable(f"{found} could have been written by another user; remove it")
    return _open(found)


def _check_runtime() -> None:
    """That OpenMP calls of a library loaded now go to torch's runtime."""
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        own = ctypes.CDLL(str(torch_library)).GOMP_parallel
        seen = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError):
        raise Unavailable("this build of torch does not share a GNU OpenMP runtime") from None
    if ctypes.cast(own, ctypes.c_void_p).value != ctypes.cast(seen, ctypes.c_void_p).value:
        raise Unavailable("another OpenMP runtime was loaded before torch's; import torch first")


def _identity(command: list[str]) -> str:
    """Everything that the object depends on: sources, flags, the compiler's file, the processor's features."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.[ch]")):
        digest.update(source.read_bytes())
    compiler = os.stat(command[0])
    digest.update(repr((command, compiler.st_size, compiler.st_mtime_ns)).encode())
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as processors:
        # Enough to name the model and its features; every core has the same.
        for line in processors:
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                digest.update(line.encode())
            elif line == "\n":
                break
    return digest.hexdigest()[:24]


def _cache_directory() -> Path | None:
    """A directory that only this user can write to, or None."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = root / "torchplug" / "kernels"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _ours(directory):
            _log.warning("%s is not used: others can write to it", directory)
            return None
        if not os.access(directory, os.W_OK):
            return None
    except (OSError, RuntimeError):  # no home, or one that cannot be written to
        return None
    return directory


def _ours(path: Path) -> bool:
    """Whether nobody else could have put it there or changed it."""
    found = path.lstat()
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not writable and not stat.S_ISLNK(found.st_mode)


def _compile(command: list[str], directory: Path, name: str) -> Path:
    """Compile every source at once, then link them."""
    sources = sorted(Path(__file__).parent.glob("*.c"))
    objects = [directory / f"{source.stem}.o" for source in sources]
    _run([[*command, "-c", str(source), "-o", str(to)] for source, to in zip(sources, objects, strict=True)])
    result = directory / name
    # Without -fopenmp, or it would be linked to the compiler's own runtime.
    linked = [part for part in command if part != "-fopenmp"]
    _run([[*linked, "-shared", *map(str, objects), "-lm", "-o", str(result)]])
    result.chmod(0o700)
    return result


def _run(commands: list[list[str]]) -> None:
    running = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            )
        for process in running:
            _, errors = process.communicate(timeout=_SECONDS)
            if process.returncode:
                first = next(iter(errors.splitlines()), f"exit status {process.returncode}")
                raise Unavailable(f"{commands[0][0]} failed: {first}")
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{commands[0][0]} took longer than {_SECONDS:.0f} s") from None
    except OSError as error:
        raise Unavailable(f"{commands[0][0]} cannot be run: {error}") from None
    finally:
        for process in running:
            if process.poll() is None:
                # With the processes that it started itself.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from None
