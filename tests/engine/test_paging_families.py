"""Paging under real model plugins: layers that slide, some or all, or keep a state, with every freed block and slot
poisoned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torchplug.config import CacheConfig, DeviceConfig, HfConfig, ModelConfig, SchedulerConfig, VllmConfig
from torchplug.engine.llm_engine import LLMEngine
from torchplug.engine.sampling_params import SamplingParams
from torchplug.host.contracts import inspect_class
from torchplug.host.model import LoadedModel
from torchplug.layers import Attention
from torchplug_models.bamba import BambaForCausalLM
from torchplug_models.granite_moe_hybrid import GraniteMoeHybridForCausalLM
from torchplug_models.jamba import JambaForCausalLM
from torchplug_models.lfm2 import Lfm2ForCausalLM
from torchplug_models.llama import LlamaForCausalLM
from torchplug_models.mistral import MistralForCausalLM
from torchplug_models.qwen2 import Qwen2ForCausalLM

torch.set_num_threads(1)

SLIDING = [LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM]
HYBRID = [Lfm2ForCausalLM, BambaForCausalLM, JambaForCausalLM, GraniteMoeHybridForCausalLM]


def build(cls):
    """A tiny model with weights that make every token count, and its engine's maker."""
    view = HfConfig(cls.tiny_config(), source="x/config.json", defaults=cls.config_defaults)
    device = torch.device("cpu")

    def config(**cache) -> VllmConfig:
        return VllmConfig(
            ModelConfig("x", view, torch.float32, 128),
            DeviceConfig(device),
            cache_config=CacheConfig(4, **cache),
            scheduler_config=SchedulerConfig(4, 12),
        )

    module = cls(vllm_config=config()).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        scale = 2 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.2
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1))

    def engine(**cache) -> LLMEngine:
        report = inspect_class(cls, subject="test model")
        checkpoint = SimpleNamespace(generation_config={}, config={})
        loaded = LoadedModel(module, report, config(**cache), checkpoint=checkpoint)
        return LLMEngine(loaded)

    return module, engine


def poison(engine: LLMEngine) -> None:
    """NaN in every block and state slot that is empty."""
    size = engine.kv_cache.block_size
    for pool, group in zip(engine._blocks.pools, engine.kv_cache.groups, strict=True):
        slots = [block * size + i for block in range(pool.num_blocks) if pool._empty[block] for i in range(size)]
        for layer in group.layers:
            for half in layer.kv_cache:
                half[:, :, slots] = float("nan")
    states, snapshots = engine.kv_cache.states, engine._blocks.snapshots
    if states is not None:
        empty = [row for row, owner in enumerate(engine._scheduler._owners) if owner is None]
        if snapshots is not None:
            kept = range(states.num_snapshots)
            empty += [states.num_requests + slot for slot in kept if snapshots.pool._empty[slot]]
        states.fill(empty, float("nan"))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("cls", [*SLIDING, *HYBRID])
def test_tokens_equal_the_models_own_forward_over_the_whole_text(cls, caching):
    module, make = build(cls)
    prompts = {str(n): [(7 * i + n) % 100 for i in range(n)] for n in (1, 3, 4, 5, 30)}
    prompts |= {"again": prompts["30"], "turn 2": [*prompts["30"][:20], 3, 1, 4]}
    count, answers = 24, {}
    with torch.inference_mode():
        for name, prompt in prompts.items():
            ids = list(prompt)
            for _ in range(count):
                logits = module.compute_logits(module(torch.tensor(ids), torch.arange(len(ids)))[-1:])[0]
                best = logits.topk(2).values
                assert best[0] - best[1] > 1e-4 * (logits.max() - logits.min()), "choose other weights: a near tie"
                ids.append(int(logits.argmax()))
            answers[name] = ids[len(prompt) :]
    assert len({token for answer in answers.values() for token in answer}) >= 12
    whole = make(enable_prefix_caching=caching).kv_cache.num_bytes
    engine = make(enable_prefix_caching=caching, kv_cache_memory_bytes=int(whole * 0.35))
    poison(engine)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    windows = {layer.sliding_window for layer in module.modules() if isinstance(layer, Attention)}
    assert len(engine.kv_cache.groups) == len(windows)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.outputs[0].token_ids == answers[output.request_id]
        poison(engine)
    assert engine.num_held_blocks == 0
    assert (engine.prefix_cache_stats.hits > 0) == caching
    if cls in HYBRID:
        assert engine.num_free_slots == engine.kv_cache.max_num_seqs
    engine.close()
