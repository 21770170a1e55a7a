"""How many blocks there are: what fits the budget, and never more than the limits can use."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torchplug.engine import cache_memory
from torchplug.engine.kv_cache import PagedCache
from torchplug.errors import DeviceError
from torchplug.layers import Attention


class Layers(nn.Module):
    def __init__(self, *layers: tuple[int, int, int | None]) -> None:
        super().__init__()
        self.attn = nn.ModuleList(
            [Attention(heads, size, 1.0, heads, sliding_window=window) for heads, size, window in layers]
        )
        self.other = nn.Linear(2, 2)


def cache_of(*layers, **changes) -> PagedCache:
    limits = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 8,
        "max_model_len": 40,
    }
    return PagedCache(Layers(*layers), **limits | changes)


def test_enough_memory_gives_what_the_limits_can_use_and_no_more():
    cache = cache_of((2, 8, None), (1, 4, None))
    (group,) = cache.groups
    assert group.num_blocks == 3 * 10 and group.blocks_per_request == 10
    assert group.block_bytes == 4 * 2 * 4 * (2 * 8 + 1 * 4)  # tokens, key and value, float32, both layers
    assert cache.num_bytes == 30 * group.block_bytes
    assert cache.concurrency == 3 and cache.max_tokens == 40
    assert [half.shape for half in group.layers[1].kv_cache] == [(1, 1, 120, 4)] * 2


def test_a_budget_is_kept_and_says_how_many_requests_fit(caplog):
    caplog.set_level(logging.INFO, "torchplug")
    cache = cache_of((2, 8, None), memory_bytes=15 * 4 * 2 * 4 * 16 + 10)
    assert cache.groups[0].num_blocks == 15 and cache.max_tokens == 40
    assert cache.concurrency == pytest.approx(1.5, abs=0.01)
    assert "0.00 GiB in 15 blocks of 4 tokens, room for 1.5 requests of 40 tokens at once" in caplog.text


def test_a_budget_below_one_request_shortens_the_longest_request():
    cache = cache_of((2, 8, None), memory_bytes=5 * 4 * 2 * 4 * 16)
    assert cache.groups[0].num_blocks == 5 and cache.max_tokens == 20 and cache.concurrency == 1


def test_a_budget_below_one_block_is_an_error_with_the_numbers():
    with pytest.raises(DeviceError, match=r"511 bytes do not hold one block of 4 tokens in 1 layers \(512 bytes\)"):
        cache_of((2, 8, None), memory_bytes=511)


def test_layers_are_grouped_by_window_and_a_window_keeps_itself_and_a_chunk():
    cache = cache_of((2, 8, None), (2, 8, 6), (1, 8, 6), (2, 8, 40))
    full, sliding = cache.groups
    assert (full.window, len(full.layers), full.num_blocks) == (None, 2, 30)  # a window of all tokens is none
    # 5 tokens before a chunk of 8 touch at most 4 blocks of 4
    assert (sliding.window, len(sliding.layers), sliding.blocks_per_request, sliding.num_blocks) == (6, 2, 4, 12)


def test_memory_is_divided_so_that_every_group_holds_the_same_requests():
    whole = cache_of((2, 8, None), (2, 8, 6))
    half = cache_of((2, 8, None), (2, 8, 6), memory_bytes=whole.num_bytes // 2)
    assert [group.num_blocks for group in half.groups] == [15, 6]
    assert half.num_bytes <= whole.num_bytes // 2


def test_a_module_without_attention_has_no_cache():
    cache = PagedCache(
        nn.Linear(2, 2),
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_model_len=40,
    )
    assert cache.groups == () and cache.num_bytes == 0


def test_memory_is_not_touched_at_the_start():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    cache = cache_of((8, 64, None), max_model_len=8192, max_num_seqs=16)
    assert cache.num_bytes > 500 << 20
    assert resident() - before < 50 << 20


def test_the_default_is_a_share_of_what_is_left(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99 kB\nMemFree:  1 kB\nMemAvailable:    2048 kB\n")
    monkeypatch.setattr(cache_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(cache_memory, "_CGROUP", tmp_path)
    assert cache_memory.available_host_bytes() == 2 << 20
    assert cache_memory.default_cache_bytes(torch.device("cpu")) == 1 << 20
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    assert cache_memory.available_host_bytes() == 150000
    (tmp_path / "memory.max").write_text("max\n")
    assert cache_memory.available_host_bytes() == 2 << 20
    monkeypatch.setattr(cache_memory, "_MEMINFO", tmp_path / "absent")
    assert cache_memory.available_host_bytes() > 64 << 20
