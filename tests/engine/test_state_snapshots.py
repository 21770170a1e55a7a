"""Where states are kept, and which prompts therefore hit."""

from __future__ import annotations

import logging

import pytest
import torch
from torchplug.engine.sampling_params import SamplingParams
from torchplug.errors import ContractError, DeviceError
from torchplug.interfaces import MambaCopySpec

torch.set_num_threads(1)


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


@pytest.fixture(scope="module", params=["r", "rar"])
def module(request, recurrent):
    return recurrent(request.param)()


@pytest.fixture
def engine(module, engine_of):
    return engine_of(module, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)


def run(engine, prompts, count=2):
    """Step to the end; the last output of each."""
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(count))
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
    return outputs


def hits(engine, prompts):
    return [output.num_cached_tokens for _, output in sorted(run(engine, prompts).items())]


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (23, 20), (24, 20), (25, 24)]
)
def test_the_same_prompt_hits_up_to_the_block_before_its_last_token(engine, length, cached):
    prompt = [(3 * n) % 48 for n in range(length)]
    assert hits(engine, {"a": prompt}) == [0]
    assert hits(engine, {"a": prompt}) == [cached]
    assert engine.prefix_cache_stats.limited == {}


def test_prefill_is_cut_at_the_checkpoint_and_nowhere_else(engine, module):
    module.calls.clear()
    run(engine, {"a": list(range(23))})
    assert [len(ids) for ids, _ in module.calls] == [20, 3, 1]


def test_a_prefix_that_others_share_hits_though_every_prompt_ends_in_its_own_tokens(engine):
    """vLLM issue 45238: a state after tokens that no other request has is worth nothing."""
    prefix = [(7 * n) % 48 for n in range(18)]
    own = {name: [*prefix, *[ord(name) % 48] * 9] for name in "abcd"}
    first = run(engine, {"a": own["a"]})["a"]
    assert (first.num_cached_tokens, first.cache_limited_by) == (0, None)
    # The second one finds out what they share, and pays for it; from then on it hits.
    second = run(engine, {"b": own["b"]})["b"]
    assert (second.num_cached_tokens, second.cache_limited_by) == (0, "state")
    assert hits(engine, {"c": own["c"], "d": own["d"]}) == [16, 16]
    assert engine.prefix_cache_stats.limited == {"state": 1}
    assert engine.metrics().prefix_cache_limited == {"state": 1}


def test_requests_that_wait_together_compute_what_they_share_once(engine, module):
    prefix = [(5 * n) % 48 for n in range(18)]
    module.calls.clear()
    prompts = {name: [*prefix, *[ord(name) % 48] * 3] for name in "abcd"}
    assert hits(engine, prompts) == [0, 16, 16, 16]
    assert len(module.calls[0][0]) == 16  # the others wait for it
    assert sum(len(ids) for ids, _ in module.calls) == 16 + 4 * 5 + 4


def test_who_waits_for_a_state_goes_on_when_it_does_not_come(engine):
    prompt = [(5 * n) % 48 for n in range(21)]
    engine.add_request("a", prompt, greedy(2))
    engine.add_request("b", prompt, greedy(2))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    engine.abort_request("a")
    assert {output.request_id: output.num_cached_tokens for output in run(engine, {}).values()} == {"b": 0}


def test_several_outputs_of_one_prompt_start_from_one_state(engine, module):
    module.calls.clear()
    engine.add_request("x", [(5 * n) % 48 for n in range(14)], SamplingParams(temperature=1, seed=3, n=3, max_tokens=4))
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.outputs[0].index] = output.outputs[0].token_ids
    assert len({tuple(tokens) for tokens in outputs.values()}) > 1
    prefill = [len(ids) for ids, positions in module.calls if positions[0] < 14]
    assert prefill[0] == 12 and sum(prefill) < 14 + 3 * 4


def test_the_next_turn_of_a_conversation_goes_on_from_the_last(engine):
    prompt = [(5 * n) % 48 for n in range(6)]
    answer = run(engine, {"turn 1": prompt}, 17)["turn 1"].outputs[0].token_ids
    assert hits(engine, {"turn 2": [*prompt, *answer, 1, 2, 3]}) == [20]
    # Of decoding only the latest state is kept, beside the prompt's own.
    assert engine._blocks.snapshots.pool.num_findable <= 4


def test_a_long_prompt_keeps_states_on_its_way(recurrent, engine_of, module):
    engine = engine_of(module, block_size=16, max_num_seqs=2, max_num_batched_tokens=2048, max_model_len=2000)
    prompt = [(n * n) % 48 for n in range(1100)]
    run(engine, {"a": prompt}, 1)
    assert hits(engine, {"b": [*prompt[:600], 1, 2, 3]}) == [512]


def test_many_branches_do_not_cut_a_prompt_to_pieces(engine, module):
    prompt = [(5 * n) % 48 for n in range(40)]
    for index in range(9):
        engine.build_request("x", prompt, greedy(1))
        run(engine, {"x": [*prompt[: 4 * index + 4], 47 - index]}, 1)
    module.calls.clear()
    run(engine, {"y": [*prompt, 1]}, 1)
    assert len(module.calls) <= 5


def test_a_state_goes_with_the_block_that_ends_where_it_was_taken(recurrent, engine_of):
    engine = engine_of(recurrent("rar")(), block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
    run(engine, {"a": list(range(13))}, 1)
    snapshots, (pool,) = engine._blocks.snapshots, engine._blocks.pools
    (slot,) = [slot for slot in range(snapshots.pool.num_blocks) if snapshots.pool.key(slot)]
    key = snapshots.pool.key(slot)
    assert pool.find(key) is not None
    pool.allocate(pool.num_available)
    assert snapshots.find(key) is None and snapshots.pool.num_available == snapshots.pool.num_blocks


def test_states_are_evicted_least_recently_used_first(module, engine_of):
    engine = engine_of(module, block_size=4, max_num_seqs=1, max_num_batched_tokens=64)  # 3 snapshots
    prompts = {name: [ord(name) % 48] * 6 for name in "abcd"}
    for name in "abc":
        run(engine, {name: prompts[name]}, 1)
    assert hits(engine, {"a": prompts["a"]}) == [4]
    run(engine, {"d": prompts["d"]}, 1)
    assert hits(engine, {"a": prompts["a"]}) == [4]
    assert hits(engine, {"b": prompts["b"]}) == [0]


def test_the_group_that_limits_a_hit_is_named(recurrent, engine_of):
    engine = engine_of(recurrent("rar")(), block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    prompt = [(5 * n) % 48 for n in range(21)]
    run(engine, {"a": prompt}, 1)
    engine._blocks.snapshots.pool.forget()
    output = run(engine, {"b": prompt}, 1)["b"]
    assert (output.num_cached_tokens, output.cache_limited_by) == (0, "state")
    (pool,) = engine._blocks.pools
    pool.unregister(pool.find(engine._blocks._key(engine.build_request("x", prompt, greedy(1)), 2)))
    output = run(engine, {"c": prompt}, 1)["c"]
    assert (output.num_cached_tokens, output.cache_limited_by) == (0, "attention")


@pytest.mark.parametrize("kinds", ["r", "rar"])
def test_without_the_claim_nothing_is_cached_and_that_is_said_once(recurrent, engine_of, caplog, kinds):
    module = recurrent(kinds, supports_mamba_prefix_caching=False)()
    caplog.set_level(logging.WARNING, "torchplug")
    engine = engine_of(module, block_size=4)
    prompt = list(range(13))
    for _ in range(3):
        assert hits(engine, {"a": prompt}) == [0]
    assert engine.prefix_cache_stats.queries == 0 and engine.kv_cache.states.num_snapshots == 0
    assert caplog.text.count("does not claim SupportsMambaPrefixCaching: it runs without prefix caching") == 1


def test_prefix_caching_that_is_off_keeps_nothing_and_says_nothing(module, engine_of, caplog):
    engine = engine_of(module, block_size=4, enable_prefix_caching=False)
    assert hits(engine, {"a": list(range(13)), "b": list(range(13))}) == [0, 0]
    assert engine.kv_cache.states.num_snapshots == 0 and "prefix caching" not in caplog.text


def test_a_copy_function_that_reads_elsewhere_is_an_error_and_other_requests_are_told(recurrent, engine_of):
    def astray(state, block_ids, cur_block_idx, num_accepted_tokens):
        return MambaCopySpec(state.data_ptr() - 64, state[0].numel())

    def functions(cls):
        return astray, astray

    module = recurrent("r", get_mamba_state_copy_func=classmethod(functions))()
    engine = engine_of(module, block_size=4)
    engine.add_request("a", list(range(6)), greedy(2))
    with pytest.raises(ContractError, match="from byte -64"):
        run(engine, {})
    assert not engine.has_unfinished_requests() and engine.num_held_blocks == 0


def test_prompt_logprobs_are_those_of_the_whole_prompt_cold_and_warm(engine, module):
    prompt = [(5 * n) % 48 for n in range(14)]
    run(engine, {"a": prompt})
    found = []
    for name in "bc":
        engine.add_request(name, prompt, greedy(1, prompt_logprobs=0))
        output = run(engine, {})[name]
        found.append([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])
        assert output.num_cached_tokens == 0
    for layer in module.mixers:
        layer.kv_cache = layer.state = None
    with torch.inference_mode():
        logits = module.compute_logits(module(torch.tensor(prompt), torch.arange(14)))
    wanted = logits.log_softmax(-1)[torch.arange(13), torch.tensor(prompt[1:])]
    for each in found:
        torch.testing.assert_close(torch.tensor(each), wanted, atol=1e-4, rtol=1e-4)


# -- memory -----------------------------------------------------------------------------------------------------


def test_without_attention_memory_does_not_depend_on_length(recurrent, engine_of):
    module = recurrent("rr")()
    caches = [engine_of(module, max_model_len=length).kv_cache for length in (16, 4096)]
    assert caches[0].num_bytes == caches[1].num_bytes == 2 * 4 * 4 * (2 * 24 + 24) * 4  # layers, slots, floats, bytes
    assert caches[1].groups == () and caches[1].max_tokens == 4096 and caches[1].concurrency == 4
    assert str(caches[1]).startswith(
        "State: 0.00 GiB in 4 slots of 0.6 KiB and 12 for snapshots, room for 4.0 requests"
    )


def test_without_attention_slots_alone_bound_who_runs(recurrent, engine_of):
    module = recurrent("rr")()
    slot = engine_of(module).kv_cache.states.slot_bytes
    engine = engine_of(module, kv_cache_memory_bytes=5 * slot, max_num_seqs=8, max_model_len=4096)
    states = engine.kv_cache.states
    assert (states.num_requests, states.num_snapshots) == (2, 3)
    for name in "abc":
        engine.add_request(name, [ord(name) % 48] * 3, greedy(9))
    engine.step()
    assert (engine.num_running, engine.num_waiting, engine.cache_usage) == (2, 1, 1.0)
    run(engine, {})
    assert engine.num_free_slots == 2 and engine.cache_usage == 0
    alone = engine_of(module, kv_cache_memory_bytes=slot, max_num_seqs=8)
    assert (alone.kv_cache.states.num_requests, alone.kv_cache.states.num_snapshots) == (1, 0)
    assert hits(alone, {"a": list(range(9)), "b": list(range(9))}) == [0, 0]
    with pytest.raises(DeviceError, match="bytes do not hold the state of one request"):
        engine_of(module, kv_cache_memory_bytes=slot - 1)


def test_blocks_and_states_share_the_memory(recurrent, engine_of):
    module = recurrent("rar")()
    roomy = engine_of(module, max_num_seqs=4, block_size=4).kv_cache
    (group,) = roomy.groups
    assert roomy.num_bytes == 4 * 16 * group.block_bytes + 16 * roomy.states.slot_bytes
    half = engine_of(module, max_num_seqs=4, block_size=4, kv_cache_memory_bytes=roomy.num_bytes // 2).kv_cache
    assert half.groups[0].num_blocks == 32 and half.states.num_slots == 8 and half.num_bytes <= roomy.num_bytes // 2
    assert half.states.num_requests == 4 and half.concurrency == 2
    least = engine_of(
        module, max_num_seqs=4, block_size=4, kv_cache_memory_bytes=group.block_bytes + roomy.states.slot_bytes
    )
    assert least.kv_cache.max_tokens == 4 and least.kv_cache.states.num_slots == 1
    assert "blocks of 4 tokens; state: 0.00 GiB in 4 slots" in str(half)


def test_closing_takes_the_states_away(module, engine_of):
    engine = engine_of(module)
    assert all(layer.state is not None for layer in engine.kv_cache.states.layers)
    engine.close()
    assert all(layer.state is None for layer in engine.kv_cache.states.layers)
