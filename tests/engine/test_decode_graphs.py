"""Decode steps that are replayed: the tokens are those of an eager engine, whatever joins, leaves or waits.

On CPU the graphs are tapes (`fake_cuda.TapeDevice`) and attention is the kernel of that module. The last tests run
where there is a CUDA device.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_cuda import check_alike, float32_too, use_tapes, use_varlen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torchplug.config import CacheConfig, DeviceConfig, HfConfig, ModelConfig, SchedulerConfig, VllmConfig
from torchplug.engine.decode_graphs import DecodeGraphs, batch_sizes, graph_device, why_not_recorded
from torchplug.engine.llm_engine import LLMEngine
from torchplug.engine.sampling_params import SamplingParams
from torchplug.layers import Attention, RecurrentLayer

VOCAB, HIDDEN, HEADS, MAX_LEN = 48, 32, 4, 800


class Model(nn.Module):
    """Attention layers, one for each window, over learned positions; heads of a size that flash attention has."""

    def __init__(self, windows=(None, None), seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape, scale=1.0):
            return nn.Parameter(scale * torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        self.embed = matrix(VOCAB, HIDDEN, scale=HIDDEN**0.5)
        self.places = matrix(MAX_LEN, HIDDEN, scale=HIDDEN**0.5)
        self.qkv = nn.ParameterList([matrix(2 * HIDDEN, HIDDEN, scale=2.0) for _ in windows])
        self.out = nn.ParameterList([matrix(HIDDEN, HIDDEN, scale=2.0) for _ in windows])
        self.head = matrix(VOCAB, HIDDEN, scale=2.0)
        size = HIDDEN // HEADS
        self.attn = nn.ModuleList([Attention(HEADS, size, 0.5, HEADS // 2, sliding_window=w) for w in windows])
        self.num_forwards = 0

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        self.num_forwards += 1
        hidden = (self.embed[input_ids] if inputs_embeds is None else inputs_embeds) + self.places[positions]
        for qkv, out, attn in zip(self.qkv, self.out, self.attn, strict=True):
            query, key, value = (hidden @ qkv.T).split((HIDDEN, HIDDEN // 2, HIDDEN // 2), dim=-1)
            hidden = hidden + torch.tanh(attn(query, key, value) @ out.T)
        return hidden

    def compute_logits(self, hidden_states):
        return hidden_states @ self.head.T


class Loaded(SimpleNamespace):
    """What an engine needs of a loaded model, on any device."""

    def __init__(self, module, device, dtype, config):
        super().__init__(module=module.to(device, dtype), vllm_config=config, device=device, dtype=dtype, wrappers=())
        self.checkpoint = SimpleNamespace(generation_config={}, config={})
        self.subject = "model 'test'"
        self.hooks = SimpleNamespace(embed_input_ids=lambda ids: module.embed[ids] + 1.0)

    def wrappers_of(self, hook):
        return self.wrappers

    def close(self):
        pass


def engine_of(
    module=None,
    *,
    device="cpu",
    dtype=torch.float32,
    max_num_seqs=4,
    max_num_batched_tokens=600,
    max_model_len=MAX_LEN,
    enforce_eager=False,
    memory=None,
    **more,
):
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    config = VllmConfig(
        ModelConfig(
            "test",
            HfConfig({"vocab_size": VOCAB}, source="test/config.json"),
            dtype,
            max_model_len,
            enforce_eager=enforce_eager,
        ),
        DeviceConfig(where),
        cache_config=CacheConfig(kv_cache_memory_bytes=memory),
        scheduler_config=SchedulerConfig(max_num_seqs, max_num_batched_tokens),
    )
    module = Model() if module is None else module
    engine = LLMEngine(Loaded(module, where, dtype, config), **more)
    for layer in module.modules():
        if isinstance(layer, Attention):
            for half in layer.kv_cache:
                half.fill_(float("nan"))
    return engine


@pytest.fixture
def tapes(monkeypatch):
    """Engines attend by the fake kernel, float32 included, and record tapes; the device they record on."""
    use_varlen(monkeypatch)
    with float32_too():
        yield use_tapes(monkeypatch)


def params(count, **more):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **more)


def prompt(length, seed=0):
    return [(7 * i + seed * i * i + seed) % VOCAB for i in range(length)]


def run(engine, arrivals):
    """arrivals: {step: [(id, prompt, number of tokens)]}; each request's tokens."""
    step, tokens = 0, {}
    while engine.has_unfinished_requests() or any(at >= step for at in arrivals):
        for name, ids, count in arrivals.get(step, ()):
            engine.add_request(name, {"prompt_token_ids": ids}, params(count))
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return tokens


def test_the_sizes_are_powers_of_two_up_to_the_largest_step():
    assert [batch_sizes(n) for n in (1, 2, 3, 8, 12)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 12)]


def test_every_size_is_warmed_up_and_recorded_largest_first_and_buffers_are_filled_before_each_replay(tapes):
    seen = []
    engine = engine_of(progress=lambda done, total: seen.append((done, total)))
    events = [entry for entry in tapes.journal if entry[0] != "copy"]
    assert events == [(what, size) for size in (4, 2, 1) for what in ("warm up", "capture")]
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert "CUDA graphs for decode steps of 1, 2, 4 requests" in engine.execution and "varlen_attn" in engine.execution
    calls = engine.model.module.num_forwards
    assert calls == 3 * 3  # for the logits, as a warm-up, and to be recorded
    tapes.journal.clear()
    run(engine, {0: [("a", prompt(5), 4), ("b", prompt(9, 1), 3), ("c", prompt(3, 2), 3)]})
    assert engine.model.module.num_forwards == calls + 1, "only the prompts ran the module"
    replays = [index for index, (what, _) in enumerate(tapes.journal) if what == "replay"]
    assert [tapes.journal[index] for index in replays] == [("replay", 4), ("replay", 4), ("replay", 1)]
    # Slots and tables of the one group, offsets, lengths, ids and positions, all of the size that is replayed.
    columns = engine._runner._layouts[0]._rows.shape[1]
    for index in replays:
        size = tapes.journal[index][1]
        copied = sorted(count for what, count in tapes.journal[index - 6 : index] if what == "copy")
        assert copied == sorted([size, size * columns, size + 1, size, size, size])


@pytest.mark.parametrize("windows", [(None, None), (None, 270), (30, 30)])
def test_tokens_are_those_of_an_eager_engine(tapes, windows):
    arrivals = {
        0: [("a", prompt(250), 20), ("b", prompt(3, 1), 12)],
        4: [("c", prompt(300, 2), 9)],
        6: [("d", prompt(1, 3), 7), ("e", prompt(255, 4), 12), ("f", prompt(257, 5), 3)],
    }
    recorded = run(engine_of(Model(windows)), arrivals)
    assert any(what == "replay" for what, _ in tapes.journal)
    tapes.journal.clear()
    eager = engine_of(Model(windows), enforce_eager=True)
    assert recorded == run(eager, arrivals) and not [what for what, _ in tapes.journal if what == "replay"]
    assert "no CUDA graphs (enforce_eager)" in eager.execution
    assert all(len(set(tokens)) > 2 for name, tokens in recorded.items() if name in "abe")


@pytest.fixture(scope="module")
def reference_tokens():
    """Greedy tokens by the reference backend, each request alone, of a model for each set of windows."""
    known = {}

    def tokens(windows, ids, count):
        key = windows, tuple(ids), count
        if key not in known:
            known[key] = run(engine_of(Model(windows)), {0: [("x", ids, count)]})["x"]
        return known[key]

    return tokens


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_the_batches_are_a_request_gets_its_own_tokens(reference_tokens, data):
    windows = data.draw(st.sampled_from([(None,), (None, 64)]))
    requests = data.draw(
        st.lists(
            st.tuples(st.sampled_from([1, 2, 30, 255, 256]), st.integers(1, 9), st.integers(0, 8)),
            min_size=1,
            max_size=6,
        )
    )
    arrivals, expected = {}, {}
    for index, (length, count, at) in enumerate(requests):
        ids = prompt(length, index % 3)
        arrivals.setdefault(at, []).append((str(index), ids, count))
        expected[str(index)] = reference_tokens(windows, ids, count)
    with pytest.MonkeyPatch.context() as patch, float32_too():
        use_varlen(patch)
        use_tapes(patch)
        engine = engine_of(
            Model(windows),
            max_num_seqs=data.draw(st.integers(1, 5)),
            max_num_batched_tokens=data.draw(st.sampled_from([64, 600])),
            memory=data.draw(st.sampled_from([None, 3 << 18])),
        )
        assert run(engine, arrivals) == expected
        assert engine.num_held_blocks == 0


def test_padding_rows_touch_no_block_that_a_request_may_get(tapes):
    module = Model()
    engine = engine_of(module, max_num_seqs=4)
    (group,) = engine.kv_cache.groups
    assert group.padding_block == group.num_blocks == engine._blocks.pools[0].num_blocks
    assert engine.kv_cache.num_bytes == (group.num_blocks + 1) * group.block_bytes
    held = {}
    for number in range(3):
        engine.add_request(str(number), {"prompt_token_ids": prompt(5, number)}, params(9))
    engine.step()
    for request in engine._requests.values():
        held[request.request_id] = (request.blocks[0].ids[0], len(request.token_ids))
    before = [half.clone() for layer in module.attn for half in layer.kv_cache]
    engine.step()
    layout = engine._runner._layouts[0]
    columns = layout._rows.shape[1]
    assert set(layout._block_tables.host[3 * columns : 4 * columns]) == {group.padding_block}
    assert layout._slot_mapping.host[3] == group.padding_block * 256
    slots = {block * 256 + length - 1 for block, length in held.values()} | {group.padding_block * 256}
    for old, half in zip(before, (half for layer in module.attn for half in layer.kv_cache), strict=True):
        changed = (~torch.isclose(old, half, equal_nan=True)).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) == slots


def test_while_a_wrapper_is_attached_the_module_is_called_with_its_embeddings(tapes):
    plain, wrapped = engine_of(), engine_of(enforce_eager=True)
    for engine in (plain, wrapped):
        engine.add_request("a", {"prompt_token_ids": prompt(5)}, params(9))
    wrapper, tokens = object(), {}
    for number in range(9):
        for engine in (plain, wrapped):
            engine.model.wrappers = (wrapper,) if 3 <= number < 6 else ()
        tapes.journal.clear()
        for engine in (plain, wrapped):
            for output in engine.step():
                tokens.setdefault(id(engine), []).append(list(output.outputs[0].token_ids))
        assert any(what == "replay" for what, _ in tapes.journal) == (number in (1, 2, 6, 7, 8))
    assert tokens[id(plain)] == tokens[id(wrapped)]


class Recurrent(RecurrentLayer):
    def state_shapes(self):
        return ((1,),)

    def state_dtypes(self):
        return (torch.float32,)


def test_what_is_known_not_to_be_replayable_is_not_recorded(tapes):
    module = Model()
    module.scan = Recurrent()
    assert why_not_recorded(module) == "layer 'scan' is recurrent"
    hooked = Model()
    hooked.attn[1].register_forward_hook(lambda *_: None)
    engine = engine_of(hooked)
    assert "no CUDA graphs (layer 'attn.1' has forward hooks" in engine.execution
    assert not tapes.journal and not engine.kv_cache.padding_block


class ReadsLengths(Model):
    """As dynamic rotary scaling does: Python decides by the lengths of a step."""

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        from torchplug.forward_context import get_forward_context

        hidden = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        return -hidden if max(get_forward_context().seq_lens_host) > 8 else hidden


class WaitsForTheDevice(Model):
    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        return -hidden if positions.max().item() > 8 else hidden


@pytest.mark.parametrize(
    ("cls", "why"), [(ReadsLengths, "read on the host"), (WaitsForTheDevice, "not permitted when stream is capturing")]
)
def test_a_model_that_decides_on_the_host_runs_eagerly_and_right(tapes, cls, why, caplog):
    arrivals = {0: [("a", prompt(5), 9), ("b", prompt(2, 1), 9)]}
    engine = engine_of(cls())
    assert why in engine.execution and "no CUDA graphs (RuntimeError: " in engine.execution
    assert why in caplog.text and engine._graphs.size_for(2) is None
    found = run(engine, arrivals)
    assert not any(what in ("capture", "replay") for what, _ in tapes.journal)
    assert found == run(engine_of(cls(), enforce_eager=True), arrivals)


def test_memory_that_runs_out_while_recording_leaves_an_eager_engine(tapes):
    tapes.fail_at = 1
    engine = engine_of()
    assert "no CUDA graphs (OutOfMemoryError: CUDA out of memory)" in engine.execution
    assert len(run(engine, {0: [("a", prompt(5), 9)]})["a"]) == 9


def test_what_the_graphs_take_is_counted_and_given_back(tapes):
    engine = engine_of()
    graphs = engine._graphs
    assert graphs.num_bytes == 3000 and graphs.size_for(3) == 4
    engine.close()
    assert graphs.size_for(3) is None and all(layer.kv_cache is None for layer in engine.model.module.attn)


def test_a_recording_that_is_interrupted_leaves_no_cache_behind(tapes, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(DecodeGraphs, "capture", interrupt)
    module = Model()
    with pytest.raises(KeyboardInterrupt):
        engine_of(module)
    assert all(layer.kv_cache is None for layer in module.attn)


def test_a_step_that_is_no_larger_than_its_tokens_allow(tapes):
    engine = engine_of(max_num_seqs=8, max_num_batched_tokens=3)
    assert tuple(engine._graphs.sizes) == (1, 2, 3)
    arrivals = {0: [(str(n), prompt(2, n), 4) for n in range(5)]}
    assert run(engine, arrivals) == run(engine_of(enforce_eager=True), arrivals)


def test_the_cpu_records_nothing_and_says_nothing_of_it():
    assert graph_device(torch.device("cpu")) is None
    engine = engine_of()
    assert engine.execution == "attention by scaled_dot_product_attention; eager"
    assert engine.kv_cache.block_size == 16 and not engine.kv_cache.padding_block


# -- on CUDA ---------------------------------------------------------------------------------------------

LATER = {
    0: [("a", prompt(250), 40), ("b", prompt(3, 1), 12)],
    4: [("c", prompt(300, 2), 9)],
    6: [("d", prompt(1, 3), 7), ("e", prompt(255, 4), 12), ("f", prompt(257, 5), 3)],
}


@pytest.mark.cuda
@pytest.mark.parametrize("windows", [(None, None), (None, 270)])
def test_on_cuda_float32_gives_the_tokens_of_the_cpu(windows):
    engine = engine_of(Model(windows), device="cuda")
    assert "not float32" in engine.execution and "no CUDA graphs" in engine.execution
    assert run(engine, LATER) == run(engine_of(Model(windows)), LATER)


def logprobs(engine, arrivals):
    """Each request's tokens with the log-probabilities of the two most probable ones at each."""
    found, step = {}, 0
    while engine.has_unfinished_requests() or any(at >= step for at in arrivals):
        for name, ids, count in arrivals.get(step, ()):
            engine.add_request(name, {"prompt_token_ids": ids}, params(count, logprobs=2))
        for output in engine.step():
            (answer,) = output.outputs
            found[output.request_id] = list(zip(answer.token_ids, answer.logprobs, strict=True))
        step += 1
    return found


def test_the_comparison_of_the_cuda_tests_notices_what_rounding_does_not_explain(tapes):
    expected = logprobs(engine_of(enforce_eager=True), LATER)
    check_alike(logprobs(engine_of(), LATER), expected, 1e-3)
    with pytest.raises(AssertionError):
        check_alike(logprobs(engine_of(Model((20, 20))), LATER), expected, 0.5)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("windows", [(None, None), (None, 270)])
def test_on_cuda_replayed_steps_equal_eager_ones(windows, dtype):
    recorded = engine_of(Model(windows), device="cuda", dtype=dtype)
    assert "CUDA graphs for decode steps of 1, 2, 4 requests" in recorded.execution, recorded.execution
    eager = engine_of(Model(windows), device="cuda", dtype=dtype, enforce_eager=True)
    check_alike(logprobs(recorded, LATER), logprobs(eager, LATER), 0.5)


@pytest.mark.cuda
def test_on_cuda_a_model_that_waits_for_the_device_is_left_eager_and_the_device_usable():
    engine = engine_of(WaitsForTheDevice(), device="cuda", dtype=torch.bfloat16)
    assert "no CUDA graphs (" in engine.execution
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert len(run(engine, {0: [("a", prompt(5), 9)]})["a"]) == 9
