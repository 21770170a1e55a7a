"""What layers see of a step: the forward context that the runner publishes."""

from __future__ import annotations

import torch
from torchplug.engine.sampling_params import SamplingParams
from torchplug.forward_context import get_forward_context


def test_the_context_describes_the_flat_batch(tiny_model, engine_of):
    module = tiny_model()
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append(get_forward_context()))
    engine = engine_of(module, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=512)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    engine.add_request("b", [4] * 10, SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    context = seen[1]
    assert context.block_size == 16
    assert context.query_lens_host == (1, 7) and context.seq_lens_host == (4, 7)
    assert context.block_tables_host == ((0,), (1, 2))
    assert context.query_start_loc.tolist() == [0, 1, 8] and context.query_start_loc.dtype == torch.int32
    assert context.seq_lens.tolist() == [4, 7] and context.seq_lens.dtype == torch.int32
    assert context.block_tables.tolist() == [[0], [1]] and context.block_tables.dtype == torch.int32
    assert context.slot_mapping.tolist() == [3, *range(16, 23)] and context.slot_mapping.dtype == torch.int64
    engine.step()
    assert seen[2].query_lens_host == (1, 3) and seen[2].slot_mapping.tolist() == [4, 23, 24, 25]
    assert get_forward_context() is None


def test_logits_are_computed_only_for_tokens_that_need_them(tiny_model, engine_of):
    module = tiny_model()
    rows = []
    compute = module.compute_logits
    module.compute_logits = lambda hidden: (rows.append(len(hidden)), compute(hidden))[1]
    engine = engine_of(module, max_num_seqs=3, max_num_batched_tokens=8)
    engine.add_request("a", [1] * 10, SamplingParams(temperature=0, max_tokens=3))
    engine.add_request("b", [2] * 3, SamplingParams(temperature=0, max_tokens=3))
    while engine.has_unfinished_requests():
        engine.step()
    assert len(module.calls) == 4
    assert rows == [2, 2, 2]  # none in the first step, which ends inside a prompt


def test_steps_run_in_inference_mode_and_leave_it(tiny_model, engine_of):
    module = tiny_model()
    modes = []
    module.register_forward_pre_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    engine = engine_of(module)
    engine.add_request("a", [1], SamplingParams(temperature=0, max_tokens=2))
    engine.step()
    assert modes == [True] and not torch.is_inference_mode_enabled()


def test_closing_frees_the_cache(tiny_model, engine_of):
    module = tiny_model()
    engine = engine_of(module)
    engine.add_request("a", [1], SamplingParams(temperature=0, max_tokens=20))
    engine.step()
    assert all(layer.kv_cache is not None for layer in module.attn)
    engine.close()
    assert all(layer.kv_cache is None for layer in module.attn) and not engine.has_unfinished_requests()
