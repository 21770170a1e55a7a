"""Logits to tokens for a whole batch: penalties, temperature, truncation, one draw per request, log-probabilities.

Every request draws by inverting its own cumulative distribution at one uniform number per token. The number comes from
a generator on the host: the request's own where it has a seed, else the sampler's, so a seeded request repeats itself
whatever else is in the batch, on any device. The order of operations is vLLM's: structure, allowed tokens, logit bias,
bad words, minimum tokens, penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from torchplug.engine.sampling_params import SamplingParams
from torchplug.errors import ContractError, Problem, RequestError
from torchplug.layers.cpu import kernels

if TYPE_CHECKING:
    from torchplug.engine.grammar import Matcher

_CANDIDATES: Final = 1024
"""Most probable tokens, sorted where only top-p or min-p truncates: sorting a vocabulary costs 10 times more."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the sampled token's, its rank, and the most probable tokens', best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One new token per row of logits; `logprobs` has an entry per row, None where the request wants none."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class SamplingState:
    """What sampling must remember of one request between its tokens.

    Args:
        params: The request's parameters.
        prompt_token_ids: The prompt, for the repetition penalty.
        stop_token_ids: End-of-sequence and stop ids, impossible before `params.min_tokens` tokens.
        grammar: The output's place in its structure, for `params.structured_outputs`.
        bad_words: The tokens of each spelling of `params.bad_words`.

    Attributes:
        error: Why no token could follow (the structure outgrew its matcher, or nothing is allowed); the output has to
            end there.
    """

    __slots__ = (
        "_bad_words",
        "_bias",
        "_counts",
        "_forbidden",
        "_grammar",
        "_output",
        "_prompt",
        "_seen",
        "error",
        "num_sampled",
        "params",
        "plain",
        "random",
        "stop_token_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        grammar: Matcher | None = None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self.params = params
        self.error: str | None = None
        self.stop_token_ids = list(stop_token_ids)
        self.num_sampled = 0
        self.random = None if params.seed is None else random.Random(params.seed)
        # Greedy with nothing that changes or reports logits: a batch of these takes the short way.
        self.plain = (
            params.greedy
            and not params.penalized
            and params.logprobs is None
            and not params.min_tokens
            and params.logit_bias is None
            and not params.restricted
            and grammar is None
        )
        self._forbidden: Tensor | None = None
        self._bad_words = [tuple(word) for word in bad_words]
        self._output: list[int] = []  # kept for bad words only
        self._grammar = grammar
        self._bias: tuple[Tensor, Tensor] | None = None
        self._prompt = list(prompt_token_ids) if params.repetition_penalty != 1.0 else []
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether `apply` would do anything at this token."""
        return (
            self.params.penalized
            or self.params.logit_bias is not None
            or self.params.restricted
            or self._grammar is not None
            or self.num_sampled < self.params.min_tokens
        )

    def apply(self, logits: Tensor) -> None:
        """Change this request's row in place: structure, bias, min_tokens, penalties. logits: float32 [vocab]."""
        params = self.params
        vocab, device = logits.shape[0], logits.device
        barred = [i for i in self.stop_token_ids if i < vocab] if self.num_sampled < params.min_tokens else []
        if self._grammar is not None:
            barred = self._keep_to_grammar(logits, barred)
        if params.allowed_token_ids is not None:
            if self._forbidden is None:
                self._forbidden = torch.ones(vocab, dtype=torch.bool, device=device)
                self._forbidden[torch.tensor([i for i in params.allowed_token_ids if i < vocab], device=device)] = False
            logits.masked_fill_(self._forbidden, -math.inf)
        if params.logit_bias is not None:
            if self._bias is None:
                known = {i: bias for i, bias in params.logit_bias.items() if i < vocab}
                ids = torch.tensor(list(known), dtype=torch.int64, device=device)
                self._bias = ids, torch.tensor(list(known.values()), dtype=torch.float32, device=device)
            logits[self._bias[0]] += self._bias[1]
        barred = [*barred, *(i for i in self._ends_of_bad_words() if i < vocab)]
        if barred:
            logits[torch.tensor(barred, device=device)] = -math.inf
        if params.restricted and self.error is None and bool((logits == -math.inf).all()):
            self.error = "no token is left that may be sampled here"
            logits.zero_()
        if not params.penalized:
            return
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
            self._seen = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
            if self._prompt:
                self._seen[torch.tensor(sorted(set(self._prompt)), device=logits.device)] = True
        if params.repetition_penalty != 1.0:
            penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(self._seen, penalized, logits))
        if params.frequency_penalty:
            logits.sub_(self._counts, alpha=params.frequency_penalty)
        if params.presence_penalty:
            logits.sub_((self._counts > 0).to(logits.dtype), alpha=params.presence_penalty)

    def _keep_to_grammar(self, logits: Tensor, barred: list[int]) -> list[int]:
        """Bar what the structure does not allow; returns what of `barred` may still be barred.

        Where a complete output can only end, min_tokens gives way: the structure is what was promised.
        """
        assert self._grammar is not None
        try:
            allowed = self._grammar.allowed(logits.shape[0])
        except RequestError as error:
            self.error = error.problems[0].says
            return []
        logits.masked_fill_(~allowed.to(logits.device), -math.inf)
        allowed[barred] = False
        return barred if bool(allowed.any()) else []

    def _ends_of_bad_words(self) -> list[int]:
        return [
            word[-1] for word in self._bad_words if len(word) == 1 or tuple(self._output[1 - len(word) :]) == word[:-1]
        ]

    def record(self, token_id: int) -> None:
        """Count the token that was just sampled."""
        self.num_sampled += 1
        if self._bad_words:
            self._output.append(token_id)
        if self._grammar is not None and self.error is None:
            self._grammar.advance(token_id)
        if self._counts is not None and self._seen is not None:
            self._counts[token_id] += 1
            self._seen[token_id] = True


class Sampler:
    """Samples one token for every row of logits. `seed` is for the requests that have none of their own."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> Sampled:
        """One token per row, recorded in its state.

        Args:
            logits: [len(states), vocab], any float dtype, any device; not changed.
            states: The rows' requests.

        Raises:
            ContractError: A row is NaN: the model computed nothing that could be sampled from.
        """
        logprobs: list[TokenLogprobs | None] = [None] * len(states)
        if all(state.plain for state in states):
            tokens = _most_probable(logits)
        else:
            logits = logits.to(torch.float32)
            changed = [row for row, state in enumerate(states) if state.changes_logits]
            raw, logits = logits, logits.clone() if changed else logits
            for row in changed:
                states[row].apply(logits[row])
            tokens = self._choose(logits, states)
            wanted = [row for row, state in enumerate(states) if state.params.logprobs is not None]
            if wanted:
                numbers = [states[row].params.logprobs or 0 for row in wanted]
                found = token_logprobs(_rows(raw, wanted), [tokens[row] for row in wanted], numbers)
                for row, entry in zip(wanted, found, strict=True):
                    logprobs[row] = entry
        for state, token in zip(states, tokens, strict=True):
            state.record(token)
        return Sampled(tokens, logprobs)

    def _choose(self, logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
        drawn = [row for row, state in enumerate(states) if not state.params.greedy]
        if not drawn:
            return _most_probable(logits)
        tokens = [0] * len(states)
        greedy = [row for row, state in enumerate(states) if state.params.greedy]
        whole: list[int] = []
        truncated: list[int] = []
        for row in drawn:
            params = states[row].params
            (truncated if params.top_k or params.top_p < 1.0 or params.min_p > 0.0 else whole).append(row)
        # One number per request and token, taken in row order, whichever way its row goes.
        uniform = {row: (states[row].random or self._random).random() for row in drawn}
        for rows, choose in ((whole, _draw), (truncated, _draw_truncated)):
            if rows:
                temperatures = _column([states[row].params.temperature for row in rows], logits)
                scaled = _rows(logits, rows) / temperatures
                chosen = choose(scaled, [states[row].params for row in rows], [uniform[row] for row in rows])
                for row, token in zip(rows, chosen, strict=True):
                    tokens[row] = token
        if greedy:
            for row, token in zip(greedy, _most_probable(_rows(logits, greedy)), strict=True):
                tokens[row] = token
        return tokens


def _most_probable(logits: Tensor) -> list[int]:
    """The first index of each row's maximum."""
    indices = kernels.argmax(logits)
    if indices is None:
        # `max` costs what `argmax` costs and shows a NaN; in bfloat16 it costs twice what it does in float32.
        values, indices = logits.to(torch.float32).max(dim=-1)
        _refuse_nan(values)
    tokens: list[int] = indices.tolist()
    if min(tokens, default=0) < 0:
        raise _nothing_to_sample()
    return tokens


def _draw(logits: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> list[int]:
    """One draw per row of scaled logits [n, vocab]."""
    return _invert(logits.softmax(dim=-1), uniform).tolist()


def _draw_truncated(logits: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> list[int]:
    """One draw per row among the tokens that min-p, top-k and top-p leave.

    Works on the most probable candidates, best first, and on the whole vocabulary only where top-p reaches further
    than these.
    """
    vocab = logits.shape[1]
    top_k = [min(p.top_k or vocab, vocab) for p in params]
    largest = max(top_k)
    width = min(vocab, largest if largest < vocab else _CANDIDATES)
    values, indices = logits.topk(width, dim=-1)
    _refuse_nan(values[:, 0])
    floor = values[:, :1] + _column([math.log(p.min_p) if p.min_p else -math.inf for p in params], logits)
    k = torch.tensor(top_k, device=logits.device).unsqueeze(1)
    top_p = _column([p.top_p for p in params], logits)

    def keep(values: Tensor) -> Tensor:
        """Probabilities, up to a factor per row, of what min-p and top-k leave among the sorted candidates."""
        dropped = (values < floor) | (torch.arange(values.shape[1], device=values.device) >= k)
        return (values - values[:, :1]).exp().masked_fill(dropped, 0.0)

    weights = keep(values)
    total = weights.sum(dim=-1, keepdim=True)
    if width < vocab:
        # A row ends within the candidates by top-k, by min-p, or because they hold enough of the mass that min-p
        # leaves.
        rest = (logits - values[:, :1]).exp().masked_fill(logits < floor, 0.0).sum(dim=-1, keepdim=True)
        unlimited = k == vocab
        enough = unlimited & (top_p < 1.0) & (total >= rest * top_p)
        if bool(((k <= width) | (values[:, -1:] < floor) | enough).all()):
            total = torch.where(unlimited, rest, total)
        else:
            values, indices = logits.sort(dim=-1, descending=True, stable=True)
            weights = keep(values)
            total = weights.sum(dim=-1, keepdim=True)
    # The smallest set that reaches top_p: a token stays while the mass before it has not.
    before = weights.cumsum(dim=-1) - weights
    weights = weights.masked_fill((before >= total * top_p) & (top_p < 1.0), 0.0)
    picked = _invert(weights, uniform)
    return indices.gather(1, picked.unsqueeze(1)).squeeze(1).tolist()


def _invert(weights: Tensor, uniform: Sequence[float]) -> Tensor:
    """Draw an index from each row of weights (probabilities up to a factor) by `uniform` in [0, 1): int64 [n].

    An index of weight 0 is never drawn.
    """
    # A vocabulary's tail is lost in a float32 sum; MPS has no float64.
    precise = torch.float32 if weights.device.type == "mps" else torch.float64
    cumulative = weights.cumsum(dim=-1, dtype=precise)
    total = cumulative[:, -1:].contiguous()
    _refuse_nan(total)
    at = torch.tensor(uniform, dtype=precise, device=weights.device).unsqueeze(1) * total
    index = torch.searchsorted(cumulative, at, right=True)
    # `at` may round up to the total; the last index that can be drawn is the first that reaches it.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(index, last).squeeze(1)


def token_logprobs(logits: Tensor, tokens: Sequence[int], numbers: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of one token per row, and of the row's most probable ones.

    Args:
        logits: [n, vocab], any float dtype, as the model gave them.
        tokens: The token of each row.
        numbers: How many of the most probable tokens to give with it; -1: all.
    """
    vocab = logits.shape[1]
    chosen = logits.log_softmax(dim=-1, dtype=torch.float32)
    own = chosen.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = ((chosen > own).sum(dim=-1) + 1).tolist()
    numbers = [vocab if number < 0 else min(number, vocab) for number in numbers]
    values, indices = chosen.topk(max(numbers, default=0), dim=-1)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids[:number], best[:number], strict=True)))
        for token, number, logprob, rank, best, ids in zip(
            tokens, numbers, own.squeeze(1).tolist(), ranks, values.tolist(), indices.tolist(), strict=True
        )
    ]


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits if len(rows) == logits.shape[0] else logits[torch.tensor(rows, device=logits.device)]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _refuse_nan(values: Tensor) -> None:
    """One number per row decides for the row."""
    if any(value != value for value in values.flatten().tolist()):
        raise _nothing_to_sample()


def _nothing_to_sample() -> ContractError:
    return ContractError(
        "sampling",
        Problem(
            "compute_logits",
            "gave NaN or infinite logits, from which nothing can be sampled",
            "check the weights and the dtype (float16 overflows where bfloat16 and float32 do not)",
        ),
    )
