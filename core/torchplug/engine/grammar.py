"""Which tokens may come next in a structured output: one bitmask over the vocabulary per token, by llguidance.

The text that counts is the text that the caller gets: tokens are spelt by our own `Tokenizer.piece`. End-of-sequence
tokens are allowed exactly where the output may end.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from torchplug.engine.structured_outputs import StructuredOutputsParams, tag_of
from torchplug.errors import Problem, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from torchplug.engine.tokenizer import Tokenizer

INSTALL: Final = 'pip install "torchplug[structured]"'

_KEPT: Final = 64
"""Compiled structures that are kept: a server sees the same few schemas again and again."""


class Grammars:
    """Compiles the structures of requests against one tokenizer.

    The tokenizer's vocabulary is spelt out at the first structured request (0.4 s for 49,000 tokens).
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = sorted(eos_token_ids)
        self._vocabulary: Any = None
        self._lock = threading.Lock()  # requests may be built on several threads
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """A matcher at the start of an output.

        Raises:
            RequestError: The schema, expression or grammar is not sound or asks for what is not supported; the model
                has no tokenizer or no end-of-sequence token; or llguidance is not installed, with the pip line.
        """
        try:
            import llguidance
        except ImportError:
            raise _refusal("needs the package llguidance, which is not installed", INSTALL) from None
        if self._tokenizer is None:
            raise _refusal("needs a tokenizer, and there is none", "load without skip_tokenizer_init=True")
        if not self._eos:
            raise _refusal(
                "needs an end-of-sequence token, and the model has none", "name it in generation_config.json"
            )
        with self._lock:
            start = self._compiled.get(params.key)
            if start is None:
                start = self._compile(llguidance, self._tokenizer, params)
                self._compiled[params.key] = start
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(params.key)
            return Matcher(start.deep_copy(), self._eos)

    def _compile(self, llguidance: Any, tokenizer: Tokenizer, params: StructuredOutputsParams) -> Any:
        grammar = _grammar(llguidance, params)
        if self._vocabulary is None:
            self._vocabulary = _spelt_out(llguidance, tokenizer, self._eos)
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary)
        if failed:
            raise _refusal(f"{params.form}: {messages[0].strip()}", f"correct {params.form}")
        start = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if start.is_error():
            raise _refusal(f"{params.form}: {start.get_error().strip()}", f"correct {params.form}")
        return start


class Matcher:
    """One output's place in its structure."""

    __slots__ = ("_eos", "_matcher")

    def __init__(self, matcher: Any, eos_token_ids: list[int]) -> None:
        self._matcher = matcher
        self._eos = eos_token_ids

    def allowed(self, vocab_size: int) -> Tensor:
        """bool [vocab_size] on the host: the tokens that may come next; never none at all.

        Raises:
            RequestError: The structure outgrew the matcher's limits.
        """
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        width = min(vocab_size, len(bits))
        allowed[:width] = torch.from_numpy(bits[:width]).bool()
        if self._matcher.is_error():
            raise _refusal(
                self._matcher.get_error().strip().partition("\n")[0], "use a simpler schema, expression or grammar"
            )
        if self._matcher.is_stopped():
            allowed[[i for i in self._eos if i < vocab_size]] = True
        return allowed

    def advance(self, token_id: int) -> None:
        """Take in the token that was sampled, which was allowed."""
        self._matcher.consume_token(token_id)

    @property
    def complete(self) -> bool:
        """Whether the output so far is a whole one."""
        return bool(self._matcher.is_accepting())


def _grammar(llguidance: Any, params: StructuredOutputsParams) -> str:
    """The structure in llguidance's own notation."""
    form = params.form
    try:
        if form in ("json", "json_object"):
            schema: Any = {"type": "object"} if form == "json_object" else params.json
            if isinstance(schema, str):
                schema = json.loads(schema)
            if params.disable_additional_properties:
                schema = _closed(schema)
            options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
            if params.whitespace_pattern is not None:
                options["whitespace_pattern"] = params.whitespace_pattern
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options))
        if form == "choice":
            assert params.choice is not None
            return str(llguidance.grammar_from("choice", json.dumps(params.choice)))
        if form == "structural_tag":
            return _tagged(llguidance, params)
        return str(llguidance.grammar_from(form, getattr(params, form)))
    except ValueError as error:
        raise _refusal(f"{form}: {error}", f"correct {form}") from None


def _tagged(llguidance: Any, params: StructuredOutputsParams) -> str:
    """Free text with tagged parts. A trigger is text here also where it looks like a special token's name."""
    assert params.structural_tag is not None
    tag = tag_of(params.structural_tag)
    closed = _closed if params.disable_additional_properties else (lambda schema: schema)
    tags = [
        llguidance.StructTag(
            trigger=next(trigger for trigger in tag["triggers"] if each["begin"].startswith(trigger)),
            begin=each["begin"],
            grammar=closed(each["schema"]),
            end=each["end"],
        )
        for each in tag["structures"]
    ]
    return str(llguidance.StructTag.to_grammar(tags, assume_special=False))


def _closed(schema: Any) -> Any:
    """The schema with additionalProperties false wherever an object does not say."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, part in schema.items():
        if key in ("enum", "const", "default", "examples"):  # data, not schemas
            closed[key] = part
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(part, dict):
            closed[key] = {name: _closed(each) for name, each in part.items()}
        else:
            closed[key] = _closed(part)
    if schema.get("type") == "object" or isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _spelt_out(llguidance: Any, tokenizer: Tokenizer, eos_token_ids: list[int]) -> Any:
    """The vocabulary as llguidance takes it: each token's bytes inside a text; special tokens have none."""
    size = max(tokenizer.vocab_size, *(i + 1 for i in eos_token_ids))
    textual = [tokenizer.is_textual(i, True) for i in range(size)]
    previous = next((i for i, is_text in enumerate(textual) if is_text), None)

    class Spelling:
        eos_token_id = eos_token_ids[0]
        bos_token_id = tokenizer.bos_token_id
        tokens = [tokenizer.piece(i, previous) if textual[i] else b"" for i in range(size)]
        special_token_ids = [i for i in range(size) if not textual[i]]

        def __call__(self, text: str) -> list[int]:
            if isinstance(text, bytes):  # the wrapper asks so once, to find out that only texts are taken
                raise TypeError("expected a text")
            return _tokens_inside_a_text(tokenizer, text, self.tokens)

    wrapper = llguidance.TokenizerWrapper(Spelling())
    return llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=eos_token_ids)


def _tokens_inside_a_text(tokenizer: Tokenizer, text: str, spelling: Sequence[bytes]) -> list[int]:
    """Tokens whose bytes are exactly the text's, where the structure leaves only this text.

    The tokenizer's own where it can say them: some put a space before a text, so it is asked about the text as an end
    of a longer one too. Else the longest token first.
    """
    wanted = text.encode()
    for before in ("", "\n", "x"):
        ids = tokenizer.encode(before + text, add_special_tokens=False)
        size, first = 0, len(ids)
        while size < len(wanted) and first:
            first -= 1
            size += len(spelling[ids[first]])
        if b"".join(spelling[i] for i in ids[first:]) == wanted:
            return ids[first:]
    by_bytes = {piece: i for i, piece in reversed(list(enumerate(spelling))) if piece}
    longest = max(map(len, by_bytes))
    found: list[int] = []
    at = 0
    while at < len(wanted):
        size = next((n for n in range(longest, 0, -1) if wanted[at : at + n] in by_bytes), 0)
        if not size:
            break  # no token has this byte; the structure cannot be followed here
        found.append(by_bytes[wanted[at : at + size]])
        at += size
    return found


def _refusal(says: str, fix: str) -> RequestError:
    return RequestError("request", Problem("structured_outputs", says, fix))
