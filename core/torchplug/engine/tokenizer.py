"""Text to token ids and back: a checkpoint's tokenizer, which can also spell out one token at a time.

`Tokenizer.piece` gives the bytes that a token adds after the one before it. Everything that turns tokens into text
(whole outputs, streams, log-probabilities) concatenates these bytes and decodes them as UTF-8, so a stream and a whole
output cannot differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchplug.engine.chat_template import Message, render_chat_template
from torchplug.errors import Problem, RequestError

if TYPE_CHECKING:
    import tokenizers

    from torchplug.host.checkpoint import Checkpoint


class Tokenizer:
    """A `tokenizers.Tokenizer` with the checkpoint's special tokens and chat template.

    Args:
        backend: The tokenizer; its truncation and padding are switched off.
        special_tokens: "bos_token", "eos_token", ... as text; given to the chat template under these names.
        add_bos_token: Whether `encode` begins with the bos token; None: as the tokenizer's own post-processor does.
        chat_template: Jinja source; None where the model has none.
        source: Where it came from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        add_bos_token: bool | None = None,
        chat_template: str | None = None,
        source: str = "the tokenizer",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.source = source
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        decoders = _decoder_types(backend)
        self._byte_level = decoders == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in decoders
        self._pieces: dict[int, bytes] = {}
        # Which bos handling remains to be done by us is decided once, by asking the post-processor for an empty text.
        adds_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]
        self._prepend_bos = add_bos_token is True and not adds_bos and self.bos_token_id is not None
        self._drop_bos = add_bos_token is False and adds_bos

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of a checkpoint.

        Raises:
            CheckpointError: The checkpoint has none.
        """
        return cls(
            checkpoint.tokenizer(),
            special_tokens=checkpoint.special_tokens,
            add_bos_token=checkpoint.add_bos_token,
            chat_template=checkpoint.chat_template,
            source=checkpoint.name,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens (bos) that the checkpoint puts around a prompt.

        Raises:
            RequestError: `text` is not valid Unicode (it holds half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "prompt text",
                Problem(
                    f"character {error.start}",
                    f"{text[error.start]!a} is half of a surrogate pair, which no text can hold",
                    'pass valid Unicode, e.g. text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")',
                ),
            ) from None
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._prepend_bos:
            return [self.bos_token_id, *ids]  # type: ignore[list-item]
        return ids[1:] if add_special_tokens and self._drop_bos else ids

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; ids outside the vocabulary have none, bytes that are not UTF-8 become U+FFFD."""
        parts: list[bytes] = []
        previous: int | None = None
        for token_id in (token_ids,) if isinstance(token_ids, int) else token_ids:
            if self.is_textual(token_id, skip_special_tokens):
                parts.append(self.piece(token_id, previous))
                previous = token_id
        return b"".join(parts).decode("utf-8", "replace")

    def is_textual(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token takes part in a text: it is in the vocabulary, and not a special token that is skipped."""
        if token_id in self._special_ids:
            return not skip_special_tokens
        return token_id in self._pieces or self.backend.id_to_token(token_id) is not None

    def piece(self, token_id: int, previous: int | None) -> bytes:
        """The bytes that a token adds to a text after `previous`; None: at the start, where a space may be dropped.

        A character whose bytes are spread over several tokens comes as its single bytes.
        """
        known = self._pieces.get(token_id)
        if known is not None:
            return known
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            piece = _byte_level_bytes(token)
        elif self._byte_fallback and (value := _fallback_byte(token)) is not None:
            if previous is None and value < 0x80:
                return self._decode(token_id).encode()
            piece = bytes((value,))
            if value < 0x80:
                return piece
        else:
            if previous is None:
                return self._decode(token_id).encode()
            return self._decode(previous, token_id)[len(self._decode(previous)) :].encode()
        self._pieces[token_id] = piece
        return piece

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """A conversation as the model's chat template writes it: token ids, or with `tokenize=False` the text.

        Raises:
            RequestError: No template, a template that refuses the conversation, or messages that are not messages.
        """
        text = self.render_chat(
            conversation,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            tools=tools,
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(
        self,
        conversation: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """The text of `apply_chat_template`. It holds the special tokens already: encode it without adding any."""
        template = chat_template if chat_template is not None else self.chat_template
        if template is None:
            raise RequestError(
                f"chat with {self.source}",
                Problem("chat template", "the model has none", "pass chat_template=..., or generate from raw text"),
            )
        return render_chat_template(
            template,
            conversation,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **(self.special_tokens | variables),
        )

    def _decode(self, *token_ids: int) -> str:
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        found: int | None = None if token is None else self.backend.token_to_id(token)
        return found


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    """The parts of the tokenizer's decoder by type, in order; the library shows them only in its serialised state."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _printable_bytes() -> dict[str, int]:
    """GPT-2's alphabet for bytes: printable Latin-1 characters are themselves, the other bytes U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _printable_bytes()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. A token with a character outside the alphabet (an added one) is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _fallback_byte(token: str) -> int | None:
    """The byte of a SentencePiece byte token such as `<0xE5>`, else None."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None
