"""One request from admission to its last token: its tokens, its text, and what ends it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Set
from typing import TYPE_CHECKING

from torchplug.engine.metrics import RequestStateStats
from torchplug.engine.outputs import CompletionOutput, Logprob, RequestOutput
from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams
from torchplug.engine.text_stream import TextStream

if TYPE_CHECKING:
    from torchplug.engine.block_manager import BlockTable
    from torchplug.engine.block_pool import BlockKey
    from torchplug.engine.prompts import TokenizedPrompt
    from torchplug.engine.sampler import SamplingState, TokenLogprobs
    from torchplug.engine.state_snapshots import Checkpoints
    from torchplug.engine.tokenizer import Tokenizer


class Request:
    """A request in the engine.

    Attributes:
        token_ids: Prompt and output, in one list.
        num_computed: How many of them have been through the model (their keys and values are in the cache).
        slot: Its row in the runner's tables while it runs, else None.
        blocks: Its cache blocks while it runs, a table for each cache group.
        block_keys: Keys of its full blocks, as far as they have been asked for.
        num_registered: Its first blocks that prefix caching knows already.
        checkpoints: Where its recurrent state is kept for others while it runs, where any is.
        num_cached_tokens: Tokens found in the prefix cache when it first ran; None before.
        cache_limited_by: The cache group that kept this number below what another one offered; None: none did.
        cache_extra: What changes its keys and values beside its tokens.
        finish_reason: None until it is finished.
        sampling: What the sampler remembers of it.
        stats: Its times.

    Args:
        request_id: The caller's name.
        prompt: Text and token ids.
        params: Sampling and stopping.
        sampling: Its sampling state.
        eos_token_ids: End-of-sequence ids of the model.
        max_model_len: Prompt and output together never exceed this many tokens.
        tokenizer: For the text; None: `text` stays empty.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_eos",
        "_logprobs",
        "_num_delivered",
        "_prompt_logprobs",
        "_stop_ids",
        "_text",
        "_tokenizer",
        "block_keys",
        "blocks",
        "cache_extra",
        "cache_limited_by",
        "checkpoints",
        "finish_reason",
        "max_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_prompt_tokens",
        "num_registered",
        "params",
        "prompt",
        "request_id",
        "sampling",
        "slot",
        "stats",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        sampling: SamplingState,
        *,
        eos_token_ids: Set[int],
        max_model_len: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.sampling = sampling
        self.stats = RequestStateStats()
        self.token_ids = list(prompt.token_ids)
        self.num_prompt_tokens = len(prompt.token_ids)
        self.num_computed = 0
        self.slot: int | None = None
        self.blocks: list[BlockTable] = []
        self.block_keys: list[BlockKey] = []
        self.num_registered = 0
        self.checkpoints: Checkpoints | None = None
        self.num_cached_tokens: int | None = None
        self.cache_limited_by: str | None = None
        self.cache_extra: Hashable = ()
        room = max_model_len - self.num_prompt_tokens
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._eos: Set[int] = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._tokenizer = tokenizer
        self._text: TextStream | None = None
        if tokenizer is not None and params.detokenize:
            self._text = TextStream(
                tokenizer,
                prompt_token_ids=prompt.token_ids,
                stop=params.stop,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
            )
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        # Nothing comes before the first token, so nothing is known of it.
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self._cumulative_logprob = 0.0
        self._num_delivered = 0

    @property
    def num_output_tokens(self) -> int:
        """New tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether tokens found in the prefix cache may stay uncomputed: not where all their logits are wanted."""
        return self.params.prompt_logprobs is None

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the model has not seen yet: the rest of the prompt, or the last new token."""
        return len(self.token_ids) - self.num_computed

    def prompt_rows(self, start: int, stop: int) -> range:
        """Which rows of a step over tokens [start, stop) have logits that `take_prompt_logprobs` still needs.

        Counted from the step's first row. The row of a token tells of the token after it.
        """
        if self._prompt_logprobs is None:
            return range(0)
        known = len(self._prompt_logprobs)
        return range(max(known - 1 - start, 0), min(stop, self.num_prompt_tokens - 1) - start)

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether `prompt_rows` may still have any."""
        return self._prompt_logprobs is not None and len(self._prompt_logprobs) < self.num_prompt_tokens

    def take_prompt_logprobs(self, entries: Iterable[TokenLogprobs]) -> None:
        """The next prompt tokens' log-probabilities, in order."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs += [self._named(entry) for entry in entries]

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take in the token just sampled; sets `finish_reason` when it ends the request."""
        self.token_ids.append(token_id)
        self.stats.token()
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(self._named(logprobs))
            self._cumulative_logprob += logprobs.logprob
        count = self.num_output_tokens
        ended = token_id in self._eos or token_id in self._stop_ids  # never before min_tokens: the sampler sees to that
        if self._text is not None:
            if not ended or self.params.include_stop_str_in_output:
                self._text.append(token_id)
            if self._text.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", self._text.stopped_by
        if self.sampling.error is not None:
            self.finish_reason, self.stop_reason = "error", self.sampling.error
        if self.finish_reason is None:
            if ended:
                self.finish_reason = "stop"
                self.stop_reason = None if token_id in self._eos else token_id
            elif count >= self.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None and self._text is not None:
            self._text.finish()

    def output(self) -> RequestOutput | None:
        """What to tell the caller after a step, as `params.output_kind` wants it; None: nothing now."""
        kind, finished = self.params.output_kind, self.finish_reason is not None
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        delta = kind is RequestOutputKind.DELTA
        first = self._num_delivered if delta else 0
        prompt_logprobs = None if delta and self._num_delivered else self._prompt_logprobs
        text = "" if self._text is None else self._text.take_new() if delta else self._text.text
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=self.token_ids[self.num_prompt_tokens + first :],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[first:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self._num_delivered = self.num_output_tokens
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            [completion],
            finished,
            prompt_logprobs,
            self.stats,
            self.num_cached_tokens,
            self.cache_limited_by,
        )

    def _named(self, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        """The sampled token first, then the most probable ones, each once."""
        entries = {logprobs.token_id: Logprob(logprobs.logprob, logprobs.rank, self._name(logprobs.token_id))}
        for rank, (token_id, logprob) in enumerate(logprobs.top, 1):
            if token_id not in entries:
                entries[token_id] = Logprob(logprob, rank, self._name(token_id))
        return entries

    def _name(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode(token_id)
