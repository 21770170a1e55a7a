"""A request's tokens are the same alone, in any batch, chunked or not, over blocks of any size, with a cold or warm
prefix cache, after preemption and after others were aborted; and every block comes back.

The reference is the module's own forward over the whole prefix. Caches start as NaN and blocks that nobody may read are
filled with NaN after every step, so a read of the wrong place shows.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.engine.sampling_params import SamplingParams
from torchplug.errors import PluginError, RequestError

torch.set_num_threads(1)

COUNTS: Counter[str] = Counter()
"""Requests compared, and those that parted from the reference where its two best logits were nearly equal."""

WINDOWS = [(None, None), (5, 5), (None, 7), (3, None, 12), (1, 1)]
_WANTED: dict[tuple, list[int]] = {}


@pytest.fixture(scope="module", autouse=True)
def near_ties_are_rare():
    COUNTS.clear()
    yield
    print(f"\n{COUNTS['compared']} requests compared, {COUNTS['ties']} parted at a near tie")
    assert COUNTS["ties"] * 1000 <= COUNTS["compared"]


@pytest.fixture(scope="module")
def models(tiny_model):
    return {windows: tiny_model(windows=windows) for windows in WINDOWS}


@pytest.fixture(scope="module")
def check(reference):
    """check(module, prompt, tokens): they are the reference's, but for a near tie, which is counted."""

    def wanted(module, prompt, count):
        key = (id(module), tuple(prompt))
        known = _WANTED.get(key, [])
        if len(known) < count:
            caches = [layer.kv_cache for layer in module.attn]
            for layer in module.attn:
                layer.kv_cache = None
            known = known + reference(module, [*prompt, *known], count - len(known))
            for layer, cache in zip(module.attn, caches, strict=True):
                layer.kv_cache = cache
            _WANTED[key] = known
        return known[:count]

    def compare(module, prompt, tokens):
        COUNTS["compared"] += 1
        want = wanted(module, prompt, len(tokens))
        if tokens == want:
            return
        at = next(i for i, (one, two) in enumerate(zip(tokens, want, strict=True)) if one != two)
        ids = torch.tensor([*prompt, *want[:at]])
        for layer in module.attn:
            layer.kv_cache = None
        logits = module.compute_logits(module(ids, torch.arange(len(ids)))[-1:])[0]
        best = logits.topk(2).values
        assert best[0] - best[1] < 1e-4 * (logits.max() - logits.min()), (prompt, tokens, want)
        COUNTS["ties"] += 1

    return compare


def poison(engine) -> None:
    """NaN in every block that is empty."""
    size = engine.kv_cache.block_size
    for pool, group in zip(engine._blocks.pools, engine.kv_cache.groups, strict=True):
        slots = [b * size + i for b in range(pool.num_blocks) if pool._empty[b] for i in range(size)]
        for layer in group.layers:
            for half in layer.kv_cache:
                half[:, :, slots] = float("nan")


def consistent(engine) -> None:
    """Every held block is held as often as requests' tables name it."""
    manager = engine._blocks
    for group, pool in enumerate(manager.pools):
        named: Counter[int] = Counter()
        for request in engine._requests.values():
            if request.blocks:
                table = request.blocks[group]
                own = table.ids[table.first :]
                assert len(own) == len(set(own))
                named.update(own)
        assert [named[block] for block in range(pool.num_blocks)] == pool._holders
        assert pool.num_held == len(named)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def memory_for(engine, share: float) -> int:
    least = 2 * sum(group.block_bytes for group in engine.kv_cache.groups)
    return max(least, int(engine.kv_cache.num_bytes * share))


PREFIXES = [[], list(range(20)), [7] * 33, [1, 2, 3, 4, 5, 6, 7, 8]]
PROMPT = st.tuples(
    st.sampled_from(PREFIXES), st.integers(0, 33), st.lists(st.integers(0, 47), min_size=1, max_size=12)
).map(lambda parts: [*parts[0][: parts[1]], *parts[2]])
REQUESTS = st.lists(st.tuples(PROMPT, st.integers(1, 12)), min_size=1, max_size=8)


@given(
    st.data(),
    REQUESTS,
    st.sampled_from(WINDOWS),
    st.sampled_from([1, 2, 4, 16, 64]),
    st.integers(1, 5),
    st.sampled_from([1, 3, 8, 40]),
    st.booleans(),
    st.sampled_from([0.15, 0.25, 0.5, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_nothing_changes_a_requests_tokens(
    models, engine_of, check, data, requests, windows, block_size, seqs, budget, caching, share
):
    module = models[windows]
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "block_size": block_size}
    roomy = engine_of(module, **limits)
    engine = engine_of(module, **limits, enable_prefix_caching=caching, kv_cache_memory_bytes=memory_for(roomy, share))
    prompts, outputs = {}, {}
    waiting = list(enumerate(requests))
    while waiting or engine.has_unfinished_requests():
        if waiting and (not engine.has_unfinished_requests() or data.draw(st.booleans())):
            name, (prompt, count) = waiting.pop(0)
            try:
                engine.add_request(str(name), prompt, greedy(count))
                prompts[str(name)] = prompt
            except RequestError as error:
                assert len(prompt) >= engine.kv_cache.max_tokens and "KV cache" in str(error)
        elif prompts and data.draw(st.integers(0, 9)) == 0:
            engine.abort_request(data.draw(st.sampled_from(sorted(prompts))))
        for output in engine.step():
            outputs[output.request_id] = output
        consistent(engine)
        poison(engine)
    assert engine.num_held_blocks == 0 and engine.num_free_slots == seqs
    for name, output in outputs.items():
        check(module, prompts[name], output.outputs[0].token_ids)
    engine.close()


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_prompts_around_a_block_alone_and_together_cold_and_warm(models, engine_of, check, windows, block_size):
    module = models[windows]
    prompts = [[5], *([(3 * i + n) % 48 for i in range(n)] for n in (block_size - 1, block_size, block_size + 1))]
    prompts += [prompts[-1][:-1], [*prompts[-1], 9]]
    engine = engine_of(module, block_size=block_size, max_num_seqs=8)
    for together in (False, True, True):
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, greedy(2 * block_size + 1))
            if not together:
                run(engine, module, {str(index): prompt}, check)
        if together:
            run(engine, module, {str(index): prompt for index, prompt in enumerate(prompts)}, check)
    assert engine.prefix_cache_stats.hits > 0
    engine.close()


def run(engine, module, prompts, check):
    """Step to the end; the last output of each request, all checked."""
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        consistent(engine)
        poison(engine)
    assert engine.num_held_blocks == 0
    for name, prompt in prompts.items():
        check(module, prompt, outputs[name].outputs[0].token_ids)
    return outputs


def test_a_shared_prefix_that_ends_inside_a_block_is_shared_up_to_the_block(models, engine_of, check):
    module = models[None, None]
    engine = engine_of(module, block_size=4)
    prefix = list(range(10))
    engine.add_request("a", [*prefix, 40], greedy(3))
    run(engine, module, {"a": [*prefix, 40]}, check)
    module.calls.clear()
    engine.add_request("b", [*prefix, 41, 42], greedy(3))
    run(engine, module, {}, check)
    assert module.calls[0] == ([8, 9, 41, 42], [8, 9, 10, 11])
    assert (engine.prefix_cache_stats.queries, engine.prefix_cache_stats.hits) == (23, 8)
    assert engine.prefix_cache_stats.hit_rate == pytest.approx(8 / 23)


def test_the_last_token_is_always_computed(models, engine_of, check):
    module = models[None, None]
    engine = engine_of(module, block_size=4)
    for name in "ab":
        module.calls.clear()
        engine.add_request(name, [1, 2, 3, 4, 5, 6, 7, 8], greedy(2))
        run(engine, module, {name: [1, 2, 3, 4, 5, 6, 7, 8]}, check)
    engine = engine_of(module, block_size=4)
    for name, first in (("a", list(range(1, 9))), ("b", [5, 6, 7, 8])):
        module.calls.clear()
        engine.add_request(name, [1, 2, 3, 4, 5, 6, 7, 8], greedy(2))
        engine.step()
        assert module.calls[0][0] == first
        while engine.has_unfinished_requests():
            engine.step()


def test_requests_admitted_in_one_step_share_their_prefix_at_once(models, engine_of, check):
    module = models[None, None]
    engine = engine_of(module, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    prompts = {name: [*range(12), index] for index, name in enumerate("abc")}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(4))
    module.calls.clear()
    engine.step()
    assert [len(ids) for ids, _ in module.calls] == [13 + 1 + 1]
    assert engine.num_held_blocks < 3 * 4
    run(engine, module, {}, check)


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation(models, engine_of, check):
    module = models[None, None]
    engine = engine_of(module, block_size=4)
    engine.add_request("turn 1", [1, 2, 3], greedy(10))
    first = run(engine, module, {"turn 1": [1, 2, 3]}, check)["turn 1"].outputs[0].token_ids
    prompt = [1, 2, 3, *first, 9]
    module.calls.clear()
    engine.add_request("turn 2", prompt, greedy(2))
    engine.step()
    assert module.calls[0] == (prompt[12:], [12, 13])  # the last token of turn 1 was never computed


def test_collisions_of_every_hash_serve_the_right_content(models, engine_of, check):
    module = models[None, None]
    engine = engine_of(module, block_size=4, max_num_seqs=3)
    engine._blocks._hash = lambda _: 1
    prompts = {f"{n} {turn}": [n] * (9 + n % 3) for turn in range(2) for n in range(5)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(6))
    run(engine, module, prompts, check)
    assert engine.prefix_cache_stats.hits >= 5 * 8


def test_what_changes_the_keys_beside_the_tokens_is_part_of_the_content(models, engine_of):
    module = models[None, None]
    engine = engine_of(module, block_size=4)
    hits = []
    for extra in ((), ("adapter", 1), ("adapter", 2), ("adapter", 1), ()):
        request = engine.build_request("x", list(range(9)), greedy(1))
        request.cache_extra = extra
        engine.submit(request)
        engine.step()
        hits.append(request.num_cached_tokens)
    assert hits == [0, 0, 0, 8, 8]


def test_prefix_caching_can_be_switched_off(models, engine_of, check):
    module = models[None, None]
    engine = engine_of(module, block_size=4, enable_prefix_caching=False)
    for name in "ab":
        engine.add_request(name, list(range(9)), greedy(2))
        module.calls.clear()
        engine.step()
        assert len(module.calls[0][0]) == 9
        run(engine, module, {name: list(range(9))} if name == "x" else {}, check)
    assert engine.prefix_cache_stats.queries == 0 == engine._blocks.pools[0].num_findable


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_when_blocks_run_out_the_last_to_come_is_computed_again_and_nothing_is_lost(
    models, engine_of, check, windows, caching
):
    module = models[windows]
    limits = {"block_size": 4, "max_num_seqs": 4, "enable_prefix_caching": caching}
    roomy = engine_of(module, **limits)
    engine = engine_of(module, **limits, kv_cache_memory_bytes=memory_for(roomy, 0.27))
    prompts = {name: [10 + index] * 9 for index, name in enumerate("abcd")}
    finished = []
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(40))
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
            if output.finished:
                finished.append(output.request_id)
        consistent(engine)
        poison(engine)
    if None in windows:
        assert engine.num_preemptions > 0
    assert finished == list("abcd")  # who came first ends first
    for name, prompt in prompts.items():
        check(module, prompt, outputs[name].outputs[0].token_ids)
        assert len(outputs[name].outputs[0].token_ids) == 40


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(models, engine_of):
    module = models[None, None]
    full = engine_of(module, block_size=4, max_num_seqs=1).kv_cache.num_bytes
    engine = engine_of(module, block_size=4, max_num_seqs=1, kv_cache_memory_bytes=full // 4)
    with pytest.raises(RequestError, match=r"16 tokens and needs room for a new one; the KV cache of 3072 bytes holds"):
        engine.add_request("a", [1] * 16, greedy(4))
    engine.add_request("b", [1] * 15, greedy(40))
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "length"


def test_a_sliding_window_gives_back_what_it_has_left_behind(models, engine_of):
    module = models[5, 5]
    engine = engine_of(module, block_size=2, max_num_batched_tokens=4, enable_prefix_caching=False)
    engine.add_request("a", list(range(30)), greedy(25))
    held = []
    while engine.has_unfinished_requests():
        engine.step()
        held.append(sum(len(t.ids[t.first : t.needed]) for r in engine._requests.values() for t in r.blocks))
        poison(engine)
    assert max(held) <= 5  # 4 tokens before a chunk of 4, wherever blocks begin
    assert engine.num_held_blocks == 0


def test_a_window_needs_only_its_last_blocks_in_the_prefix_cache(models, engine_of, check):
    module = models[None, 7]
    engine = engine_of(module, block_size=4, max_num_batched_tokens=8)
    prompt = [(5 * n) % 48 for n in range(33)]
    engine.add_request("a", prompt, greedy(2))
    run(engine, module, {"a": prompt}, check)
    sliding = engine._blocks.pools[1]
    # Evict what the window had left behind long ago.
    keys = [engine._blocks._key(engine.build_request("x", prompt, greedy(1)), index) for index in range(4)]
    for key in keys:
        block = sliding.find(key)
        if block is not None:
            sliding._evict(block)
            sliding._empty[block] = 1
            sliding._num_empty += 1
    poison(engine)
    module.calls.clear()
    engine.add_request("b", prompt, greedy(6))
    engine.step()
    assert module.calls[0][0] == prompt[32:]
    run(engine, module, {"b": prompt}, check)


def test_a_failed_step_leaves_nothing_in_the_cache(tiny_model, engine_of, check):
    module = tiny_model()
    engine = engine_of(module, block_size=4)
    engine.add_request("a", list(range(9)), greedy(3))
    engine.add_request("b", list(range(9)), greedy(3))
    module.fail_at = 1
    with pytest.raises(PluginError, match="RuntimeError: planted"):
        engine.step()
    module.fail_at = None
    assert engine.num_held_blocks == 0 and engine._blocks.pools[0].num_findable == 0
    engine.add_request("c", list(range(9)), greedy(3))
    run(engine, module, {"c": list(range(9))}, check)


def test_blocks_leaked_by_an_interrupt_come_back_when_nothing_runs(models, engine_of, check, monkeypatch):
    module = models[None, None]
    engine = engine_of(module, block_size=4)
    for name in "ab":
        engine.add_request(name, list(range(9)), greedy(9))
    engine.step()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._blocks.pools[0], "release", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.abort_request("a")
    monkeypatch.undo()
    engine.abort_request(["a", "b"])
    assert engine.num_held_blocks > 0
    engine.add_request("c", list(range(9)), greedy(3))
    run(engine, module, {"c": list(range(9))}, check)
