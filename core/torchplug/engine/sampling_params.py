"""How one request is sampled and when it stops: the names, defaults and meaning of vLLM's `SamplingParams`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from numbers import Integral, Real
from typing import Any, Final

from torchplug.engine.structured_outputs import StructuredOutputsParams, is_unicode
from torchplug.errors import Problem, RequestError

GREEDY_BELOW: Final = 1e-5
"""A temperature under this is greedy, as in vLLM: dividing by it would only overflow."""

MOST_OUTPUTS: Final = 16384
"""Of one prompt, as in vLLM: each output is a request."""

_NOT_SERVED: Final[dict[str, Any]] = {
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "watermarking": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "stream_interval": None,
    "output_text_buffer_length": 0,
    "logits_processors": None,
    "extra_args": None,
    "flat_logprobs": False,
    "thinking_token_budget": None,
    "logprob_token_ids": None,
    "skip_clone": False,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "skip_reading_prefix_cache": None,
    "trace_decode_token_ids": None,
}
"""vLLM's other arguments, with the value that means "off": that value is accepted, any other is an error."""


class RequestOutputKind(Enum):
    """What each `RequestOutput` of a running request holds: all so far, only what is new, or nothing until the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """Sampling and stopping of one request. Immutable; `dataclasses.replace(params, max_tokens=64)` changes a copy.

    Args:
        n: How many outputs of the prompt are drawn, at most 16384. With a seed, output i has a stream of its own,
            derived from the seed and i; output 0 is the one that n=1 gives.
        temperature: Divides the logits; 0 is greedy.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        min_p: Drop tokens less probable than this share of the most probable one, in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the prompt or the output;
            above 0.
        presence_penalty: Subtracted from the logits of tokens already in the output, in [-2, 2].
        frequency_penalty: Subtracted once per occurrence in the output, in [-2, 2].
        seed: Makes this request's draws its own: they depend on nothing else in the batch. None or -1: the engine's
            draws.
        stop: Text, or texts, that end the output; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the output; part of `token_ids`, not of `text`.
        ignore_eos: Go on after the end-of-sequence token.
        max_tokens: Most new tokens; None: as many as the model's length allows.
        min_tokens: The end-of-sequence token, `stop_token_ids` and `stop` wait until there are this many new tokens.
        logprobs: Log-probabilities of this many most probable tokens and of the sampled one; -1: of the whole
            vocabulary.
        prompt_logprobs: As `logprobs`, for each token of the prompt after the first, into
            `RequestOutput.prompt_logprobs`.
        logit_bias: Added to the logits of these token ids, each in [-100, 100].
        allowed_token_ids: Only these tokens are sampled; the output ends early only where an end token is among them.
        bad_words: Texts that the output does not contain: of the tokens of each (with a space before it and without),
            the last one is not sampled after the others.
        structured_outputs: What the output must be: a JSON schema, a regular expression, one of some texts.
        detokenize: False: `text` stays empty.
        skip_special_tokens: Leave special tokens out of `text`.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token, at the end of `text`.
        output_kind: What `LLMEngine.step` returns for a request that is still running.

    Raises:
        RequestError: Listing everything that is wrong: values out of range, unknown names, and arguments of vLLM that
            this version does not serve (accepted at the value that switches them off).
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: dict[int, float] | None
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[str, ...]
    structured_outputs: StructuredOutputsParams | None
    detokenize: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    output_kind: RequestOutputKind

    def __init__(
        self,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        stop: str | Iterable[str] | None = None,
        stop_token_ids: Iterable[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Iterable[int] | None = None,
        bad_words: str | Iterable[str] | None = None,
        structured_outputs: StructuredOutputsParams | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        **others: Any,
    ) -> None:
        values = dict(locals())
        for name in ("self", "others", "__class__"):
            values.pop(name, None)
        check = _Check(values)
        check.integer("n", f"an integer from 1 to {MOST_OUTPUTS}", lambda x: 1 <= x <= MOST_OUTPUTS)
        check.number("temperature", "a number of at least 0", lambda x: x >= 0)
        check.number("top_p", "a number in (0, 1]", lambda x: 0 < x <= 1)
        check.integer("top_k", "an integer of at least 1, or 0 or -1 for all tokens", lambda x: x >= -1)
        check.number("min_p", "a number in [0, 1]", lambda x: 0 <= x <= 1)
        check.number("repetition_penalty", "a number above 0", lambda x: x > 0)
        check.number("presence_penalty", "a number in [-2, 2]", lambda x: -2 <= x <= 2)
        check.number("frequency_penalty", "a number in [-2, 2]", lambda x: -2 <= x <= 2)
        check.integer("seed", "an integer of 64 bits, or None", lambda x: -(2**63) <= x < 2**63, none=True)
        check.integer("max_tokens", "an integer of at least 1, or None for no limit", lambda x: x >= 1, none=True)
        check.integer("min_tokens", "an integer of at least 0", lambda x: x >= 0)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(values[name], bool):
                values[name] = 1 if values[name] else None
            check.integer(
                name, "an integer of at least 0, or -1 for the whole vocabulary", lambda x: x >= -1, none=True
            )
        check.biases("logit_bias")
        if values["structured_outputs"] is not None:
            check.member("structured_outputs", StructuredOutputsParams, "a StructuredOutputsParams")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            check.member(name, bool, "True or False")
        check.member("output_kind", RequestOutputKind, "a RequestOutputKind")
        for name in ("stop", "bad_words"):
            check.sequence(name, str, "a text or a list of texts of valid Unicode, none of them empty", _is_text)
        check.sequence("stop_token_ids", Integral, "a list of token ids", lambda x: x >= 0)
        if allowed_token_ids is not None:
            check.sequence(
                "allowed_token_ids", Integral, "a list of token ids, at least one", lambda x: x >= 0, least=1
            )
        check.together()
        check.others(others)
        if check.problems:
            raise RequestError("sampling parameters", check.problems)
        if values["seed"] == -1:
            values["seed"] = None
        values["top_k"] = max(values["top_k"], 0)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash((self.n, self.temperature, self.top_p, self.top_k, self.seed, self.stop, self.max_tokens))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of a drawn one."""
        return self.temperature < GREEDY_BELOW

    @property
    def restricted(self) -> bool:
        """Whether some tokens can never, or not always, be sampled."""
        return self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def penalized(self) -> bool:
        """Whether any of the three penalties changes logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class _Check:
    """Collects every problem of one set of arguments; replaces accepted values by their plain Python form."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.problems: list[Problem] = []

    def number(self, name: str, expected: str, accepts: Callable[[Any], bool]) -> None:
        value = self.values[name]
        if isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value) and accepts(value):
            self.values[name] = float(value)
        else:
            self._refuse(name, expected)

    def integer(self, name: str, expected: str, accepts: Callable[[Any], bool], none: bool = False) -> None:
        value = self.values[name]
        if value is None and none:
            return
        if isinstance(value, Integral) and not isinstance(value, bool) and accepts(value):
            self.values[name] = int(value)
        else:
            self._refuse(name, expected)

    def member(self, name: str, kind: type, expected: str) -> None:
        if not isinstance(self.values[name], kind):
            self._refuse(name, expected)

    def biases(self, name: str) -> None:
        """A mapping of token ids to numbers in [-100, 100]; text ids, as JSON has them, become integers."""
        value = self.values[name]
        if value is None:
            return
        accepted: dict[int, float] = {}
        for token_id, bias in value.items() if isinstance(value, Mapping) else [(None, None)]:
            if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit():
                token_id = int(token_id)
            if (
                not isinstance(token_id, Integral)
                or isinstance(token_id, bool)
                or token_id < 0
                or not isinstance(bias, Real)
                or isinstance(bias, bool)
                or not -100 <= bias <= 100  # type: ignore[operator]
            ):
                self._refuse(name, "a dict of token ids to numbers in [-100, 100]")
                return
            accepted[int(token_id)] = float(bias)
        self.values[name] = accepted or None

    def sequence(self, name: str, kind: type, expected: str, accepts: Callable[[Any], bool], *, least: int = 0) -> None:
        value = self.values[name]
        if value is None:
            items: tuple[Any, ...] = ()
        elif isinstance(value, str) or not isinstance(value, Iterable):
            items = (value,)
        else:
            items = tuple(value)
        if len(items) >= least and all(
            isinstance(item, kind) and not isinstance(item, bool) and accepts(item) for item in items
        ):
            self.values[name] = items if kind is str else tuple(int(item) for item in items)
        else:
            self._refuse(name, expected)

    def together(self) -> None:
        """What only the values together can break; silent about a value that is already refused."""
        wrong = {problem.where for problem in self.problems}
        max_tokens, min_tokens = self.values["max_tokens"], self.values["min_tokens"]
        if not wrong & {"max_tokens", "min_tokens"} and max_tokens is not None and min_tokens > max_tokens:
            self.problems.append(
                Problem("min_tokens", f"{min_tokens} is above max_tokens={max_tokens}", "lower it or raise max_tokens")
            )
        if not wrong & {"n", "temperature"} and self.values["n"] > 1 and self.values["temperature"] < GREEDY_BELOW:
            self.problems.append(
                Problem(
                    "n",
                    f"{self.values['n']} greedy outputs would all be the same",
                    "use n=1, or a temperature above 0",
                )
            )
        if self.values["structured_outputs"] is not None and self.values["ignore_eos"] is True:
            self.problems.append(
                Problem(
                    "ignore_eos",
                    "a structured output ends where its structure is complete",
                    "leave out ignore_eos, or structured_outputs",
                )
            )
        if "stop" not in wrong and self.values["stop"] and self.values["detokenize"] is False:
            self.problems.append(
                Problem(
                    "stop",
                    "stop texts need the output's text, but detokenize is False",
                    "use stop_token_ids, or detokenize=True",
                )
            )

    def others(self, others: dict[str, Any]) -> None:
        """Arguments of vLLM that are not served, and names that nobody knows."""
        for name, value in others.items():
            if name in _NOT_SERVED:
                off = _NOT_SERVED[name]
                if type(value) is not type(off) or value != off:
                    self.problems.append(
                        Problem(
                            name,
                            f"not served by this version, got {_shown(value)}",
                            f"leave it out (only {off!r} is accepted)",
                        )
                    )
                continue
            close = difflib.get_close_matches(name, [*self.values, *_NOT_SERVED], n=1)
            fix = f"did you mean {close[0]!r}?" if close else f"the names are {', '.join(self.values)}"
            self.problems.append(Problem(name, "no such sampling parameter", fix))

    def _refuse(self, name: str, expected: str) -> None:
        self.problems.append(
            Problem(name, f"expected {expected}, got {_shown(self.values[name])}", f"set {name} to {expected}")
        )


def _is_finite(number: Any) -> bool:
    try:
        return isfinite(number)
    except OverflowError:  # an integer that no float can hold
        return False


def _is_text(text: str) -> bool:
    """Not empty, and without half of a surrogate pair."""
    return bool(text) and is_unicode(text)


def _shown(value: Any) -> str:
    """A value in a message, cut to a readable length."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes out
        return f"an integer of {value.bit_length():,} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
