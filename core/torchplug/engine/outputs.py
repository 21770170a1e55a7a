"""What a request gives back, in the field names of vLLM's results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchplug.engine.metrics import RequestStateStats


@dataclass(slots=True)
class Logprob:
    """One token's log-probability under the raw logits (before temperature, penalties and truncation).

    Attributes:
        logprob: Natural logarithm of the probability.
        rank: 1 for the most probable token of the vocabulary.
        decoded_token: The token's text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: Which answer of its request, from 0.
        text: The text, without stop strings and (by default) special tokens.
        token_ids: Every new token, the one that ended the output included.
        cumulative_logprob: Sum of the sampled tokens' log-probabilities; None where none were asked for.
        logprobs: For each new token the sampled one and the most probable ones by id; None where none were asked for.
        finish_reason: "stop" (end-of-sequence, a stop string or a stop id), "length", "abort", or "error" (a structured
            output that outgrew its matcher); None while running.
        stop_reason: The stop string or stop id, or what the error was; None for the end-of-sequence token and other
            reasons.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: its prompt and its answers so far.

    Attributes:
        request_id: The caller's name for the request.
        prompt: The prompt's text; None for a prompt given as token ids.
        prompt_token_ids: The prompt as the model read it.
        outputs: The answers: one, or with `n` several; while the request runs, the one that went on.
        finished: Whether every answer is complete.
        prompt_logprobs: For each token of the prompt None (the first one's: nothing comes before it) or its
            log-probability and those of the most probable tokens there, by id; None where none were asked for.
        metrics: The request's times; not compared by ==.
        num_cached_tokens: Tokens of the prompt that were found in the prefix cache; not compared by ==.
        cache_limited_by: Which cache ("attention", "attention (window 4096)", "state") kept that number below what
            another one of the model's offered; None where none did; not compared by ==.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestStateStats | None = field(default=None, compare=False)
    num_cached_tokens: int | None = field(default=None, compare=False)
    cache_limited_by: str | None = field(default=None, compare=False)
