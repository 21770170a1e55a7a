"""Several outputs of one prompt (`n`): one request for each, and their results as one.

The children are ordinary requests, so they share a step with everything else, and their prompt's cached blocks with
each other where prefix caching is on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchplug.engine.outputs import CompletionOutput, Logprob, RequestOutput
from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from torchplug.engine.request import Request


def child_params(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each output of a request: n=1, a seed of its own; the first one alone reports on the prompt."""
    return [
        replace(
            params, n=1, seed=child_seed(params.seed, index), prompt_logprobs=None if index else params.prompt_logprobs
        )
        for index in range(params.n)
    ]


def child_seed(seed: int | None, index: int) -> int | None:
    """The seed of output `index`: that of output 0 is the request's own, the others are unrelated to any near seed."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class ParallelRequest:
    """A request for several outputs.

    Attributes:
        request_id: The caller's name.
        children: The request of each output, in order.
    """

    __slots__ = ("_held", "_kind", "_prompt_logprobs", "_unfinished", "children", "request_id")

    def __init__(self, request_id: str, params: SamplingParams, children: Sequence[Request]) -> None:
        self.request_id = request_id
        self.children = list(children)
        self._kind = params.output_kind
        self._unfinished = len(self.children)
        self._held: dict[int, CompletionOutput] = {}
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def take(self, index: int, output: RequestOutput) -> RequestOutput | None:
        """What child `index` just said, as said by the whole request; None: nothing now.

        A running request's output holds the one answer that went on; `finished` is that of the whole request. With
        FINAL_ONLY there is one output, with all answers in order.
        """
        (completion,) = output.outputs
        completion.index = index
        self._unfinished -= output.finished
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        whole = replace(output, request_id=self.request_id, finished=not self._unfinished)
        if self._kind is not RequestOutputKind.FINAL_ONLY:
            return whole
        self._held[index] = completion
        if self._unfinished:
            return None
        completions = [self._held[each] for each in range(len(self.children))]
        return replace(whole, outputs=completions, prompt_logprobs=self._prompt_logprobs)
