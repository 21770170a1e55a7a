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
    observer = torchplug.observer(before=lambda hook, model, arguments: seen.append((hook, len(arguments["input_ids"]))))
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
    assert len(set(blind)) == 1 and blind != plain, "every token embedded as zeros looks the same"
