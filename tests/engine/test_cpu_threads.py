import os

import pytest
import torch
from torchplug.engine import cpu_threads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 8 hardware threads on 4 cores, of which this process may use all; `machine(path, text)` writes a
    file of its cgroup."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(cpu_threads, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(cpu_threads, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in cpu_threads._VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def write(path, text):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)

    return write


def test_two_threads_of_a_core_count_once(machine):
    assert cpu_threads.usable_cores() == 4


def test_only_cores_that_the_process_may_use(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
    assert cpu_threads.usable_cores() == 2


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", 4), ("200000 100000\n", 2), ("150000 100000\n", 2), ("1000 100000\n", 1), ("900000 100000\n", 4)],
)
def test_the_quota_of_a_cgroup(machine, text, cores):
    machine("cpu.max", text)
    assert cpu_threads.usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1\n", 4), ("300000\n", 3)])
def test_the_quota_of_a_version_1_cgroup(machine, quota, cores):
    machine("cpu/cpu.cfs_quota_us", quota)
    machine("cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_threads.usable_cores() == cores


def test_threads_are_lowered_never_raised_and_left_to_the_environment(machine, monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    cpu_threads.limit_threads()
    assert set_to == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    cpu_threads.limit_threads()
    assert set_to == [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    cpu_threads.limit_threads()
    assert set_to == [4]
