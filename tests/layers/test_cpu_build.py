"""Compiling, keeping and loading the kernels, and everything that can go wrong meanwhile."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torchplug.errors import DeviceError
from torchplug.layers import ColumnParallelLinear
from torchplug.layers.cpu import build, kernels

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="kernels are compiled with gcc on Linux"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of compiled kernels, and a `library` that forgets what it answered before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHPLUG_KERNELS", raising=False)
    build.library.cache_clear()
    yield tmp_path / "torchplug" / "kernels"
    build.library.cache_clear()


def script(directory, text):
    """An executable that plays the compiler."""
    path = directory / "cc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_compiled_once_and_kept_private(cache):
    assert isinstance(build.library(), ctypes.CDLL)
    (kept,) = cache.iterdir()
    before = kept.stat()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700 and not before.st_mode & 0o077
    build.library.cache_clear()
    assert build.library() is not None
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before.st_mtime_ns]


def test_other_flags_are_another_file(cache, monkeypatch):
    build.library()
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DANOTHER"))
    build.library.cache_clear()
    build.library()
    assert len(list(cache.iterdir())) == 2


def test_torch_alone_where_asked_for(cache, monkeypatch):
    monkeypatch.setenv("TORCHPLUG_KERNELS", "torch")
    assert build.library() is None
    assert not cache.exists()


def test_another_value_is_an_error(cache, monkeypatch):
    monkeypatch.setenv("TORCHPLUG_KERNELS", "fast")
    with pytest.raises(DeviceError, match=r"(?s)'fast'.*torch or native"):
        build.library()


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        (lambda directory: "no-such-compiler", "no compiler 'no-such-compiler'"),
        (lambda directory: script(directory, "echo 'sorry, broken' >&2; exit 1"), "sorry, broken"),
        (lambda directory: script(directory, "sleep 60 & sleep 60"), "longer than"),
        (lambda directory: script(directory, 'for last; do :; done; echo no library > "$last"'), "cannot be loaded"),
    ],
    ids=["absent", "fails", "hangs", "makes something else"],
)
def test_a_compiler_that_does_not_work_leaves_torch_and_one_line(cache, tmp_path, monkeypatch, caplog, compiler, says):
    monkeypatch.setattr(build, "_SECONDS", 0.5)
    monkeypatch.setenv("CC", compiler(tmp_path))
    assert build.library() is None and build.library() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert says in line
    build.library.cache_clear()
    monkeypatch.setenv("TORCHPLUG_KERNELS", "native")
    with pytest.raises(DeviceError, match=says):
        build.library()


def test_a_layer_without_a_compiler_computes_with_torch(cache, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    kernels._function.cache_clear()
    try:
        layer = ColumnParallelLinear(17, 13)
        layer.weight.data.normal_()
        x, plain = torch.randn(3, 17), layer.weight.clone()
        layer.process_weights_after_loading()
        torch.testing.assert_close(layer(x), F.linear(x, plain))
    finally:
        kernels._function.cache_clear()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_cache_that_cannot_be_written_is_done_without(cache, tmp_path):
    tmp_path.chmod(0o500)
    assert build.library() is not None
    assert not cache.exists()


def test_a_home_that_is_no_directory_is_done_without(cache, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert build.library() is not None


def test_a_cache_that_others_can_write_to_is_not_used(cache, caplog):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert build.library() is not None
    assert list(cache.iterdir()) == []
    assert "others can write to it" in caplog.text


def test_an_object_that_others_can_write_to_is_not_loaded(cache, caplog):
    build.library()
    (kept,) = cache.iterdir()
    kept.chmod(0o666)
    build.library.cache_clear()
    assert build.library() is None
    assert "another user" in caplog.text


def test_a_linked_cache_is_not_used(cache, tmp_path):
    real = tmp_path / "elsewhere"
    real.mkdir(mode=0o700)
    cache.parent.mkdir()
    cache.symlink_to(real)
    assert build.library() is not None
    assert list(real.iterdir()) == []


def test_two_processes_that_compile_at_once(tmp_path):
    code = "from torchplug.layers.cpu import build; print(build.library() is not None)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == ["True", "True"]
    assert len(list((tmp_path / "torchplug" / "kernels").iterdir())) == 1


def test_one_openmp_runtime_and_its_threads():
    """The kernels run on torch's threads: no second runtime is mapped, and no thread is added to torch's pool."""
    code = """
        import os, torch
        torch.set_num_threads(2)
        x = torch.randn(512, 512)
        x @ x.exp()
        threads = len(os.listdir("/proc/self/task"))
        from torchplug.layers.cpu import kernels
        product = kernels.linear(x)
        product(x[:4], x, None)
        with open("/proc/self/maps") as maps:
            runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "iomp" in line}
        print(len(runtimes), len(os.listdir("/proc/self/task")) - threads)
    """
    assert run(code, OMP_NUM_THREADS="2", OMP_DYNAMIC="false") == ["1", "0"]


def test_set_num_threads_is_followed():
    code = """
        import os, torch
        torch.set_num_threads(1)
        before = len(os.listdir("/proc/self/task"))
        from torchplug.layers.cpu import kernels
        x = torch.randn(64, 64)
        product = kernels.linear(x)
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            product(x, x, None)
            print(len(os.listdir("/proc/self/task")) - before)
    """
    assert run(code)[:2] == ["0", "2"]
