"""The scheduler on its own: order, budget, preemption, and no block lost or owned twice, whatever happens."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from torchplug.engine.block_manager import BlockManager
from torchplug.engine.request import Request
from torchplug.engine.sampling_params import SamplingParams
from torchplug.engine.scheduler import Scheduler


def request_of(name: str, prompt: list[int], count: int = 4, max_model_len: int = 10_000) -> Request:
    return Request(
        name,
        SimpleNamespace(token_ids=prompt, text=None),
        SamplingParams(max_tokens=count),
        SimpleNamespace(error=None),
        eos_token_ids=frozenset(),
        max_model_len=max_model_len,
        tokenizer=None,
    )


def scheduler_of(groups, *, block_size=4, seqs=4, budget=16, **others) -> Scheduler:
    whole_above = others.get("whole_above")
    return Scheduler(BlockManager(groups, block_size, **others), seqs, budget, whole_above=whole_above)


def run_step(scheduler: Scheduler, batch) -> list[Request]:
    """What the engine does around a step of a model that always says 7; the requests that finished."""
    finished = []
    for item in batch:
        item.request.num_computed = item.stop
        if item.samples:
            item.request.append(7)
            if item.request.finish_reason is not None:
                scheduler.remove(item.request)
                finished.append(item.request)
    return finished


def parts(batch) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.stop) for item in batch]


def check(scheduler: Scheduler, alive: dict[str, Request]) -> None:
    """Every block is held by exactly those requests whose tables name it; slots and queues agree."""
    manager = scheduler._blocks
    for group, pool in enumerate(manager.pools):
        named: Counter[int] = Counter()
        for request in alive.values():
            if request.blocks:
                table = request.blocks[group]
                named.update(table.ids[table.first :])
        assert named == Counter({block: n for block, n in enumerate(pool._holders) if n})
        assert pool.num_held == len(named)
    if manager.snapshots is not None:
        own = [request.checkpoints for request in alive.values() if request.checkpoints is not None]
        named = Counter(slot for each in own for slot in (each.source, each.target) if slot is not None)
        pool = manager.snapshots.pool
        assert named == Counter({slot: n for slot, n in enumerate(pool._holders) if n})
        coming = {id(request) for request in manager.snapshots._coming.values()}
        assert coming <= {id(request) for request in alive.values() if request.slot is not None}
    running = [request for request in alive.values() if request.slot is not None]
    assert {id(request) for request in running} == {id(request) for request in scheduler._running}
    assert len(running) + scheduler.num_waiting == len(alive)
    assert sum(owner is not None for owner in scheduler._owners) == len(running)


@pytest.mark.parametrize("groups", [[(None, 12)], [(None, 12), (6, 8)], [(5, 8)], []], ids=str)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
def test_ten_thousand_random_additions_aborts_and_steps_lose_no_block(groups, caching, states):
    """16 times 700 sequences of up to 60 actions, each ending idle."""
    for seed in range(700):
        choose = random.Random(seed)
        scheduler = scheduler_of(
            groups,
            budget=choose.randint(1, 12),
            seqs=choose.randint(1, 4),
            prefix_caching=caching,
            state_snapshots=choose.randint(0, 6) if states else None,
        )
        alive: dict[str, Request] = {}
        arrived = 0
        for _ in range(choose.randint(1, 60)):
            action = choose.random()
            if action < 0.25:
                length = choose.randint(1, 30)
                prompt = [1] * length if choose.random() < 0.7 else [choose.randint(0, 2) for _ in range(length)]
                request = request_of(str(arrived), prompt, choose.randint(1, 20), max_model_len=48)
                alive[request.request_id] = request
                scheduler.add(request)
                arrived += 1
            elif action < 0.35 and alive:
                scheduler.remove(alive.pop(choose.choice(list(alive))))
            else:
                step(scheduler, alive)
        check(scheduler, alive)
        steps = 0
        while alive:
            step(scheduler, alive)
            steps += 1
            assert steps < 3000, "requests starve"
        check(scheduler, alive)
        assert scheduler._blocks.snapshots is None or not scheduler._blocks.snapshots._coming
        assert scheduler._blocks.num_held == 0 and scheduler.num_running == scheduler.num_waiting == 0


def step(scheduler: Scheduler, alive: dict[str, Request]) -> None:
    batch = scheduler.schedule()
    assert sum(item.stop - item.start for item in batch) <= scheduler._budget
    assert all(item.start < item.stop and item.request.slot == item.slot for item in batch)
    assert len({item.slot for item in batch}) == len(batch)
    assert batch or not alive
    for request in run_step(scheduler, batch):
        del alive[request.request_id]


def test_first_come_first_served_under_the_budget():
    scheduler = scheduler_of([(None, 100)], budget=10)
    for name, length in (("a", 12), ("b", 3), ("c", 30)):
        scheduler.add(request_of(name, [ord(name)] * length))
    steps = []
    for _ in range(4):
        batch = scheduler.schedule()
        steps.append(parts(batch))
        run_step(scheduler, batch)
    assert steps == [
        [("a", 0, 10)],
        [("a", 10, 12), ("b", 0, 3), ("c", 0, 5)],
        [("a", 12, 13), ("b", 3, 4), ("c", 5, 13)],
        [("a", 13, 14), ("b", 4, 5), ("c", 13, 21)],
    ]


def test_the_last_to_come_gives_way_and_comes_back_before_those_that_never_ran():
    scheduler = scheduler_of([(None, 6)], seqs=3, prefix_caching=False)
    requests = {name: request_of(name, [ord(name)] * 7, 12) for name in "abcd"}
    for request in requests.values():
        scheduler.add(request)
    order = []
    while scheduler.num_running or scheduler.num_waiting:
        batch = scheduler.schedule()
        names = [request.request_id for request in scheduler._waiting]
        assert names == sorted(names)
        order += [request.request_id for request in run_step(scheduler, batch)]
    assert order == list("abcd")
    assert scheduler.num_preemptions > 0
    assert all(len(request.token_ids) == 19 for request in requests.values())


def test_a_preempted_request_finds_its_own_blocks_again():
    scheduler = scheduler_of([(None, 8)], seqs=2, budget=64)
    one, two = request_of("1", [1] * 8, 16), request_of("2", [2] * 12, 16)
    scheduler.add(one)
    scheduler.add(two)
    starts = []
    while scheduler.num_running or scheduler.num_waiting:
        batch = scheduler.schedule()
        starts += [item.start for item in batch if item.request is two and item.stop - item.start > 1]
        run_step(scheduler, batch)
    assert scheduler.num_preemptions == 1
    assert starts[0] == 0 and starts[1] >= 4


def test_spare_blocks_are_given_back_before_anyone_is_preempted():
    scheduler = scheduler_of([(None, 16)], seqs=2, budget=64)
    scheduler.add(request_of("a", [1] * 8, 24))
    run_step(scheduler, scheduler.schedule())
    held = scheduler._blocks.num_held
    assert held > 2
    scheduler.add(request_of("b", [2] * 50, 4))
    assert [name for name, *_ in parts(scheduler.schedule())] == ["a", "b"]
    assert scheduler.num_preemptions == 0


def test_past_the_trained_length_a_prompt_is_whole_and_recomputed_as_it_was_computed():
    """Keys past `whole_above` depend on the length at that time: the prompt at once, then token by token."""

    def steps_of(prompt: list[int], again: bool) -> list[tuple[int, int]]:
        scheduler = scheduler_of([(None, 40)], budget=16, whole_above=8)
        request = request_of("a", prompt, 6)
        scheduler.add(request)
        seen = []
        while scheduler.num_running or scheduler.num_waiting:
            batch = scheduler.schedule()
            seen += [(item.start, item.stop) for item in batch]
            run_step(scheduler, batch)
            if again and request.num_output_tokens == 5:
                again = False
                scheduler._preempt(request)
                seen.clear()
        return seen

    long, short = [1] * 12, [1] * 6
    assert steps_of(long, False) == [(0, 12), (12, 13), (13, 14), (14, 15), (15, 16), (16, 17)]
    assert steps_of(long, True) == steps_of(long, False)
    assert steps_of(short, False) == [(0, 6), (6, 7), (7, 8), (8, 9), (9, 10), (10, 11)]
    assert steps_of(short, True) == [(8, 9), (9, 10), (10, 11)]  # two blocks from the prefix cache


def test_a_whole_prompt_waits_for_room_and_never_shares_its_blocks():
    scheduler = scheduler_of([(None, 40)], budget=16, whole_above=8)
    scheduler.add(request_of("a", [1] * 6))
    scheduler.add(request_of("long", [1] * 12))
    scheduler.add(request_of("again", [1] * 12))
    assert parts(scheduler.schedule()) == [("a", 0, 6)]
    run_step(scheduler, [])
    scheduler.remove(scheduler._running[0])
    assert parts(scheduler.schedule()) == [("long", 0, 12)]
    scheduler.remove(scheduler._running[0])
    assert parts(scheduler.schedule()) == [("again", 0, 12)]


def test_removing_is_harmless_for_one_that_is_not_here():
    scheduler = scheduler_of([(None, 10)])
    request = request_of("a", [1, 2, 3])
    scheduler.remove(request)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.remove(request)
    scheduler.remove(request)
    assert scheduler._blocks.num_held == 0 and scheduler.num_free_slots == 4
