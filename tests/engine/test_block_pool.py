"""Blocks: each is in one state, content is found by what it is, and the least recently used goes first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.engine.block_pool import BlockKey, BlockPool


def constant(_: object) -> int:
    return 7


def states(pool: BlockPool) -> None:
    """Every block is held, cached or empty, and every counter says so."""
    held = {block for block in range(pool.num_blocks) if pool.is_held(block)}
    cached = set(pool._unheld)
    empty = {block for block in range(pool.num_blocks) if pool._empty[block]}
    assert held | cached | empty == set(range(pool.num_blocks))
    assert len(held) + len(cached) + len(empty) == pool.num_blocks
    assert pool.num_held == len(held) and pool.num_available == len(cached) + len(empty)
    for key, block in pool._findable.items():
        assert pool.key(block) is key
    assert pool.num_findable == sum(pool.key(block) is not None for block in range(pool.num_blocks))
    assert all(pool.key(block) is not None for block in cached)
    assert all(pool.key(block) is None for block in empty)


def test_a_key_is_the_whole_content_before_and_in_the_block():
    first, other = BlockKey(None, (1, 2)), BlockKey(None, (1, 3))
    assert BlockKey(first, (4, 5)) == BlockKey(BlockKey(None, (1, 2)), (4, 5))
    assert BlockKey(first, (4, 5)) != BlockKey(other, (4, 5))
    assert BlockKey(first, (4, 5)) != BlockKey(None, (4, 5))
    assert BlockKey(None, (1, 2), ("adapter", 1)) != BlockKey(None, (1, 2))
    assert BlockKey(BlockKey(None, (1, 2), "a"), (3, 4), "a") != BlockKey(first, (3, 4), "a")


def test_a_hash_that_always_collides_finds_the_right_content_only():
    pool = BlockPool(8)
    keys = [BlockKey(None, (n, n), hash_function=constant) for n in range(3)]
    keys += [BlockKey(keys[0], (1, 1), hash_function=constant), BlockKey(keys[2], (1, 1), hash_function=constant)]
    blocks = pool.allocate(5)
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    assert [pool.find(key) for key in keys] == blocks
    assert pool.find(BlockKey(keys[1], (1, 1), hash_function=constant)) is None
    assert pool.find(BlockKey(None, (1, 1), "adapter", hash_function=constant)) is None


def test_a_long_chain_is_compared_without_recursion():
    def chain(first: int) -> BlockKey:
        key = BlockKey(None, (first,), hash_function=constant)
        for number in range(5000):
            key = BlockKey(key, (number,), hash_function=constant)
        return key

    assert chain(0) == chain(0) and chain(0) != chain(1)


def test_released_content_is_found_until_its_place_is_needed_least_recently_used_first():
    pool = BlockPool(4)
    keys = [BlockKey(None, (n,)) for n in range(3)]
    blocks = pool.allocate(3)
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    pool.release(reversed(blocks))  # the last block goes first
    assert pool.num_held == 0 and [pool.find(key) for key in keys] == blocks
    assert pool.allocate(1) == [3]  # an empty one first
    pool.hold([blocks[2]])
    pool.release([blocks[2]])  # used again: now the most recent
    assert pool.allocate(1) == [blocks[1]]
    assert [pool.find(key) for key in keys] == [blocks[0], None, blocks[2]]
    assert pool.allocate(1) == [blocks[0]] and pool.allocate(1) == [blocks[2]]
    assert pool.num_findable == 0 and pool.num_available == 0
    states(pool)


def test_a_held_block_is_never_evicted_or_given_away():
    pool = BlockPool(2)
    shared = pool.allocate(1)
    pool.register(shared[0], BlockKey(None, (1,)))
    pool.hold(shared)
    pool.release(shared)
    assert pool.allocate(pool.num_available) == [1]
    pool.release(shared)
    assert pool.allocate(1) == shared


def test_equal_content_is_registered_once():
    pool = BlockPool(3)
    one, two = pool.allocate(2)
    pool.register(one, BlockKey(None, (1,)))
    pool.register(two, BlockKey(None, (1,)))
    assert pool.find(BlockKey(None, (1,))) == one
    pool.release([one, two])
    assert pool.num_available == 3 and pool._empty[two] and not pool._empty[one]
    states(pool)


def test_neighbours_are_preferred():
    pool = BlockPool(16)
    assert pool.allocate(2, spare=2) == [0, 1, 2, 3]
    assert pool.allocate(2) == [4, 5]
    assert pool.allocate(1, after=5, spare=1) == [6, 7]
    pool.release([1, 2])
    assert pool.allocate(3, after=3) == [8, 9, 10]  # [1, 2] is too short a run
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(2, after=10, spare=9) == [11, 12, 13, 14, 15]
    pool.release([1, 5, 9])
    assert pool.allocate(3) == [1, 5, 9]
    assert pool.num_available == 0


def test_releasing_twice_is_an_error():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="block 0 was released more often than it was held"):
        pool.release(blocks)


def test_forgetting_keeps_holders_and_reset_does_not():
    pool = BlockPool(3)
    one, two = pool.allocate(2)
    for block in (one, two):
        pool.register(block, BlockKey(None, (block,)))
    pool.release([two])
    pool.forget()
    states(pool)
    assert pool.num_findable == 0 and pool.is_held(one) and pool.num_available == 2
    pool.reset()
    states(pool)
    assert pool.num_held == 0


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "release", "register", "forget"]), st.integers(0, 9)), max_size=60
)


@given(ACTIONS, st.sampled_from([hash, constant]), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_any_order_of_operations_leaves_each_block_in_one_state(actions, hash_function, num_blocks):
    pool = BlockPool(num_blocks)
    holders: list[list[int]] = []
    for action, number in actions:
        if action == "allocate" and number <= pool.num_available:
            before = {block for held in holders for block in held}
            blocks = pool.allocate(number, after=number % num_blocks, spare=number % 3)
            assert number <= len(blocks) == len(set(blocks)) and not before & set(blocks)
            holders.append(blocks)
        elif action == "share":
            block = pool.find(BlockKey(None, (number,), hash_function=hash_function))
            if block is not None:
                assert pool.key(block).tokens == (number,)
                pool.hold([block])
                holders.append([block])
        elif action == "release" and holders:
            pool.release(reversed(holders.pop(number % len(holders))))
        elif action == "register" and holders and holders[number % len(holders)]:
            pool.register(holders[number % len(holders)][0], BlockKey(None, (number,), hash_function=hash_function))
        elif action == "forget":
            pool.forget()
        states(pool)
    for blocks in holders:
        pool.release(blocks)
    states(pool)
    assert pool.num_held == 0
