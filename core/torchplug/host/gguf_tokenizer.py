"""The tokenizer that a GGUF file's metadata describes, as a `tokenizers.Tokenizer`.

Two kinds: byte-level BPE (`tokenizer.ggml.model` "gpt2"), whose way of splitting text before the merges is one name in
`tokenizer.ggml.pre`; and SentencePiece BPE ("llama"), which has scores instead of merges and spells unknown characters
in bytes. The names and their regular expressions are llama.cpp's (src/llama-vocab.cpp); ids are held to those of
transformers for the same file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torchplug.errors import CheckpointError, Problem
from torchplug.host.gguf_file import GgufFile
from torchplug.host.untrusted import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

_PREFIX = "tokenizer.ggml"
# tokenizer.ggml.token_type: 1 is an ordinary token.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
# Known vocabularies stay below 300; the work for a SentencePiece token grows with the square of its length.
_LONGEST_TOKEN = 4096
_SPACE = "\u2581"  # SentencePiece writes a space as this


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before byte-level merges apply.

    Attributes:
        regex: Each match is a piece, and so is what lies between; None: GPT-2's own expression.
        digits: Every digit is a piece of its own, cut before anything else.
        whole_words: A piece that is a token is that token, whether or not merges lead to it.
        bos: Whether a prompt starts with the bos token where the file does not say.
    """

    regex: str | None = None
    digits: bool = False
    whole_words: bool = False
    bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = _Split()
_DIGITS = _Split(digits=True)
_LLAMA3 = _Split(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}",
    whole_words=True,
    bos=True,
)
_QWEN2 = _Split(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_TEKKEN = _Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}",
    whole_words=True,
    bos=True,
)
_GPT4O = _Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)

SPLITS: dict[str, _Split] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    # SmolLM was trained with `_DIGITS`, and llama.cpp splits so; transformers reads such a file with GPT-2's split,
    # and our ids are held to transformers'. The two differ where a digit follows two or more white spaces ("  1") and
    # at a few signs that are numbers (" ½").
    "smollm": _GPT2,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "tekken": _TEKKEN,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}


class GgufTokenizer:
    """What the file's metadata says about text and tokens. CheckpointError where it does not fit together.

    Attributes:
        tokens: Text of every token by id, spelled as in the file.
        special_tokens: Texts of bos_token, eos_token, unk_token, pad_token where the file names them.
        add_bos, add_eos: Whether a prompt starts with bos and ends with eos.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.model = file.text(f"{_PREFIX}.model")
        if self.model not in ("gpt2", "llama"):
            says = (
                "has no tokenizer" if self.model in (None, "none") else f"has a tokenizer of kind {shown(self.model)}"
            )
            self._refuse(
                says, 'kinds "gpt2" and "llama" can be built; for others give token ids and set skip_tokenizer_init'
            )
        self.tokens = file.texts(f"{_PREFIX}.tokens") or []
        self._kinds: Sequence[int] = file.numbers(f"{_PREFIX}.token_type") or [1] * len(self.tokens)
        if not self.tokens or len(self._kinds) != len(self.tokens):
            self._refuse(f"has {len(self.tokens)} tokens and {len(self._kinds)} token types")
        longest = max(map(len, self.tokens))
        if longest > _LONGEST_TOKEN:
            self._refuse(f"has a token of {longest:,} characters; at most {_LONGEST_TOKEN:,} are accepted")
        self._ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens):
            twice = next(token for number, token in enumerate(self.tokens) if self._ids[token] != number)
            self._refuse(f"has the token {shown(twice)} twice")
        self.special_tokens = {
            name: self.tokens[number]
            for name, key in (
                ("bos_token", "bos"),
                ("eos_token", "eos"),
                ("unk_token", "unknown"),
                ("pad_token", "padding"),
            )
            if (number := self._special_id(key)) is not None
        }
        self._split = self._split_of_file() if self.model == "gpt2" else _Split(bos=True)
        add_bos, add_eos = file.flag(f"{_PREFIX}.add_bos_token"), file.flag(f"{_PREFIX}.add_eos_token")
        self.add_bos = "bos_token" in self.special_tokens and (self._split.bos if add_bos is None else add_bos)
        self.add_eos = "eos_token" in self.special_tokens and bool(add_eos)

    def build(self) -> Tokenizer:
        """The tokenizer, with special and added tokens, and bos and eos put around a prompt as the file says."""
        from tokenizers import AddedToken, processors

        try:
            tokenizer = self._byte_level() if self.model == "gpt2" else self._sentencepiece()
        except CheckpointError:
            raise
        except Exception as error:  # the library raises plain Exception, e.g. for a merge of unknown tokens
            self._refuse(f"has a tokenizer that cannot be built: {error}")
        special = set(self.special_tokens.values())
        tokenizer.add_special_tokens(
            [
                AddedToken(token, normalized=False, special=True)
                for token, kind in zip(self.tokens, self._kinds, strict=True)
                if token and (kind == _CONTROL or token in special)
            ]
        )
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=False)
                for token, kind in zip(self.tokens, self._kinds, strict=True)
                if token and kind == _USER_DEFINED and token not in special
            ]
        )
        if self.add_bos or self.add_eos:
            bos = [self.special_tokens["bos_token"]] if self.add_bos else []
            eos = [self.special_tokens["eos_token"]] if self.add_eos else []
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*bos, "$A", *eos],
                pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
                special_tokens=[(token, self._ids[token]) for token in {*bos, *eos}],
            )
        return tokenizer

    def _byte_level(self) -> Tokenizer:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        merges = [_pair(merge) for merge in self._file.texts(f"{_PREFIX}.merges") or []]
        if not merges:
            self._refuse("has no merges, which its kind of tokenizer needs")
        split = self._split
        tokenizer = Tokenizer(models.BPE(vocab=self._ids, merges=merges, ignore_merges=split.whole_words))
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
        if split.regex is not None:
            steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        scores = self._file.numbers(f"{_PREFIX}.scores")
        if scores is None or len(scores) != len(self.tokens):
            self._refuse(f"has {len(self.tokens)} tokens and {0 if scores is None else len(scores)} scores")
        model = models.BPE(
            vocab=self._ids,
            merges=self._merges_by_score(scores),
            unk_token=self.special_tokens.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        prefix = self._file.flag(f"{_PREFIX}.add_space_prefix") is not False
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
        steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            steps.append(decoders.Strip(content=" ", left=1, right=0))
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _merges_by_score(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        """Merges that act as SentencePiece does with scores: of all neighbours that form a token, join the best scored.

        Every way to cut a token into two tokens is a merge, the better the token's score the earlier; among equals the
        longer left part first, then the longer right part, then the order of the vocabulary, which is how Hugging
        Face's converters order them.
        """
        joinable = (
            (number, token)
            for number, token in enumerate(self.tokens)
            if self._kinds[number] not in (_UNKNOWN, _CONTROL, _BYTE)
        )
        found: list[tuple[float, int, int, int, str, str]] = []
        for number, token in joinable:
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in self._ids and right in self._ids:
                    found.append((-scores[number], -len(left), -len(right), number, left, right))
        found.sort(key=lambda merge: merge[:4])
        return [merge[4:] for merge in found]

    def _special_id(self, key: str) -> int | None:
        number = self._file.integer(f"{_PREFIX}.{key}_token_id")
        if number is not None and not 0 <= number < len(self.tokens):
            self._refuse(f"has {key} token id {number}, but {len(self.tokens)} tokens")
        return number

    def _split_of_file(self) -> _Split:
        name = self._file.text(f"{_PREFIX}.pre") or "default"
        if name not in SPLITS:
            fix = (
                f"known are {', '.join(SPLITS)}; use the safetensors checkpoint or give token ids (skip_tokenizer_init)"
            )
            self._refuse(f"splits text in the way {shown(name)}, which is not known here", fix)
        return SPLITS[name]

    def _refuse(self, says: str, fix: str = "convert the model to GGUF again with a current tool") -> NoReturn:
        raise CheckpointError(f"GGUF file {str(self._file.path)!r}", Problem("tokenizer", says, fix))


def _pair(merge: str) -> tuple[str, str]:
    """The two parts of a merge. The first character always belongs to the left part, even where it is the separator."""
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")
