"""The text of one request as its tokens arrive; nothing is shown that could change, and no part of a stop string.

Tokens become bytes, bytes become characters as soon as they are complete (an unfinished character waits), and
characters that could be the beginning of a stop string wait until they are not. What is shown is therefore final: the
shown parts, joined, are the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchplug.engine.tokenizer import Tokenizer


class StopMatcher:
    """Finds the stop string that is complete first, holding back what could be the start of one.

    The result does not depend on how the text is cut into calls: of two stop strings the one that ends first wins, and
    of two that end at the same character the longer one.

    Args:
        stop: Non-empty texts.
        include: Keep the stop string as the end of the text.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = sorted(stop, key=len, reverse=True)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What of the held and the new text may be shown now. Sets `found` when a stop string is complete."""
        pending = self._held + text
        first: tuple[int, str] | None = None
        for stop in self._stop:
            start = pending.find(stop)
            if start >= 0 and (first is None or start + len(stop) < first[0]):
                first = (start + len(stop), stop)
        if first is not None:
            end, self.found = first
            self._held = ""
            return pending[: end if self._include else end - len(self.found)]
        keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Text of one request.

    Args:
        tokenizer: Spells the tokens.
        prompt_token_ids: The prompt; the output's first token is spelt as its continuation (its leading space is kept).
        stop: Stop strings.
        min_tokens: The text of this many first tokens is never searched for stop strings.
        skip_special_tokens: Leave special tokens out.
        include_stop: Keep the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        # Special tokens have no text of their own around which a space could be kept or dropped.
        self._previous = next((i for i in reversed(prompt_token_ids) if tokenizer.is_textual(i, True)), None)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop, include=include_stop) if stop else None
        self._unsearched = min_tokens
        self._shown: list[str] = []
        self._taken = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return None if self._matcher is None else self._matcher.found

    @property
    def text(self) -> str:
        """Everything shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def take_new(self) -> str:
        """What was shown since the last call."""
        text = self.text
        new = text[self._taken :]
        self._taken = len(text)
        return new

    def append(self, token_id: int) -> None:
        """Take in the next token."""
        if self._tokenizer.is_textual(token_id, self._skip_special):
            piece = self._tokenizer.piece(token_id, self._previous)
            self._previous = token_id
            self._show(self._utf8.decode(piece))
        self._unsearched -= 1

    def finish(self) -> None:
        """Nothing follows: an unfinished character becomes U+FFFD, and what was held back is shown."""
        if self.stopped_by is None:
            self._show(self._utf8.decode(b"", final=True))
        if self._matcher is not None and self.stopped_by is None:
            self._shown.append(self._matcher.finish())

    def _show(self, text: str) -> None:
        if self._matcher is not None and self._unsearched <= 0:
            text = self._matcher.feed(text)
        if text:
            self._shown.append(text)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
