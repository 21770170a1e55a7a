"""A wrapper on embed_input_ids sees, and may change, what the engine embeds; without one the model embeds itself."""

from __future__ import annotations

import torch
import torchplug
from torchplug import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}


def test_the_engine_calls_the_hook_while_a_wrapper_is_attached(tiny_checkpoint):
    llm = LLM(str(tiny_checkpoint), dtype="float32", max_num_batched_tokens=3, skip_tokenizer_init=True)
    model = llm.llm_engine.model

    def tokens():
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    plain, seen = tokens(), []
    observer = torchplug.observer(
        before=lambda hook, model, arguments: seen.append((hook, len(arguments["input_ids"])))
    )
    with model.attached(observer):
        assert tokens() == plain
    assert seen == [("embed_input_ids", n) for n in (3, 1, 1, 1, 1, 1, 1)], "a chunk of three, the rest, five decodes"
    assert tokens() == plain and len(seen) == 7

    class Zero:
        @torchplug.hookimpl(wrapper=True)
        def embed_input_ids(self):
            return torch.zeros_like((yield))

    with model.attached(Zero()):
        blind = tokens()
        assert tokens() == blind, "and again, from the cache"
    assert len(set(blind)) == 1 and blind != plain, "every token embedded as zeros looks the same"


def test_blocks_are_shared_only_under_the_same_wrappers(tiny_checkpoint):
    llm = LLM(str(tiny_checkpoint), dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=True)
    model = llm.llm_engine.model
    prompt = {"prompt_token_ids": list(range(5, 105))}

    class Reverse:
        @torchplug.hookimpl(wrapper=True)
        def embed_input_ids(self):
            return (yield).flip(-1)

    def answer():
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        return output.outputs[0].token_ids, output.num_cached_tokens > 0

    plain, hit = answer()
    assert not hit and answer() == (plain, True)
    with model.attached(Reverse()):
        turned, hit = answer()
        assert not hit and turned != plain
        assert answer() == (turned, True)
    assert answer() == (plain, True)

    engine = llm.llm_engine
    engine.add_request("running", prompt | {"prompt_token_ids": list(range(7, 107))}, GREEDY)
    engine.step()
    wrapper = Reverse()
    model.attach(wrapper)
    while engine.has_unfinished_requests():
        engine.step()
    fresh = llm.generate({"prompt_token_ids": list(range(7, 107))}, GREEDY, use_tqdm=False)[0]
    assert fresh.num_cached_tokens == 0, "what a request computed under both is nobody else's"
    model.detach(wrapper)
