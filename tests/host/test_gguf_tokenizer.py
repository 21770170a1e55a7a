"""Tokenizers from GGUF metadata: the ids and texts that transformers' tokenizer of the same file gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer
from torchplug.errors import CheckpointError
from torchplug.host.checkpoint import open_checkpoint
from torchplug.host.demo import find_demo_model
from torchplug.host.gguf_tokenizer import SPLITS
from transformers import AutoTokenizer

PIECES = {
    "latin": ["the", "Quick", "BROWN", "naïve", "façade", "œuvre", "I'm", "we'll", "DON'T", "it's", "l'été", "x̂", "ﬁ"],
    "scripts": [
        "Привет",
        "мир",
        "שלום",
        "العربية",
        "हिन्दी",
        "ไทย",
        "日本語",
        "漢字",
        "한국어",
        "ελληνικά",
        "ქართული",
        "𝔘𝔫𝔦",
        "ⵣ",
    ],
    "emoji": ["😀", "👩‍👩‍👧‍👦", "🇫🇷", "👍🏽", "❤️", "☃", "🏴‍☠️"],
    "digits": ["0", "7", "42", "1999", "3.14159", "1,000,000", "0x1F", "1e-5", "٣٤", "½", "²", "Ⅷ", "१२३"],
    "white space": [
        " ",
        "  ",
        "    ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        " \n ",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\x0b",
        "        ",
    ],
    "code": [
        "def f(x):\n    return x",
        "{'a': [1, 2]}",
        "<b>&amp;</b>",
        "a->b",
        "!=",
        "::",
        "/* */",
        "C:\\x",
        "//",
        "#!",
        "__init__",
    ],
    "special": [
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<repo_name>",
        "<|im_start",
        "|>",
        "<|a|>",
        "<|b|>",
        "<think>",
    ],
    "odd": [
        "\x00",
        "\x7f",
        "\ufffd",
        "\ufeff",
        "�",
        "…",
        "—",
        "'",
        '"',
        "``",
        "…",
        "a\u0301",
        "\u202eabc",
        "ſ",
        "ΐ",
        "İ",
    ],
}


def varied_strings(count: int = 200, seed: int = 0) -> list[str]:
    """The empty string, each kind of piece by itself, then mixtures of all kinds, up to `count` different strings."""

    def candidates() -> Iterator[str]:
        chooser = random.Random(seed)
        yield from ("", " ", "\n", "user\nWhat is the capital of France?", "<|im_start|>user\nhi<|im_end|>\n")
        for pieces in PIECES.values():
            yield from ("".join(pieces), " ".join(pieces), *pieces[:7])
        every = [piece for pieces in PIECES.values() for piece in pieces]
        while True:
            glue = chooser.choice(["", " ", " ", "\n"])
            yield glue.join(chooser.choice(every) for _ in range(chooser.randint(2, 24)))

    found: dict[str, None] = {}
    for text in candidates():
        found[text] = None
        if len(found) == count:
            return list(found)
    raise AssertionError


def test_the_strings_are_200_and_varied() -> None:
    texts = varied_strings()
    assert len(set(texts)) == 200
    together = "\0".join(texts)
    for pieces in PIECES.values():
        assert all(piece in together for piece in pieces)


def assert_same(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    """Ids without and with special tokens put around, and both ways of decoding."""
    for text in texts:
        expected = theirs(text, add_special_tokens=False).input_ids
        found = ours.encode(text, add_special_tokens=False).ids
        assert found == expected, text
        for skip in (False, True):
            assert ours.decode(found, skip_special_tokens=skip) == theirs.decode(expected, skip_special_tokens=skip), (
                text
            )
    assert ours.get_vocab_size() == len(theirs)


@pytest.mark.oracle
def test_ids_of_200_strings_equal_transformers_for_the_demo_model() -> None:
    path = find_demo_model()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    checkpoint = open_checkpoint("demo")
    ours = checkpoint.tokenizer()
    assert_same(ours, theirs, varied_strings())
    for text in varied_strings():
        assert ours.encode(text).ids == theirs(text).input_ids
    assert checkpoint.chat_template == theirs.chat_template
    assert checkpoint.special_tokens == theirs.special_tokens_map
    assert checkpoint.add_bos_token is False


def transformers_tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


# Splits that transformers has too. It takes no word whole that merges do not lead to; this vocabulary has none such.
SAME_SPLITS = ["gpt-2", "default", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"]


@pytest.mark.parametrize("pre", SAME_SPLITS)
def test_byte_level_splits_equal_transformers(tmp_path: Path, write_gguf: Callable[..., Any], pre: str) -> None:
    write_gguf(tmp_path / "x.gguf", pre=pre)
    theirs = transformers_tokenizer(tmp_path / "x.gguf")
    ours = open_checkpoint(tmp_path / "x.gguf").tokenizer()
    texts = [*varied_strings(), "hello world", " hello  world12 hello's HELLO'S\n\n12  1234", "    hello"]
    for text in texts:
        if "<|endoftext|>" in text:
            continue  # transformers adds this token, one beyond the vocabulary, to every byte-level file that lacks it
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False).input_ids, text
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(
            text
        )
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_every_split_is_a_legal_expression(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    for pre in SPLITS:
        write_gguf(tmp_path / "x.gguf", pre=pre)
        ours = open_checkpoint(tmp_path / "x.gguf").tokenizer()
        for text in varied_strings(40):
            assert ours.decode(ours.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_digits_are_pieces_of_their_own_where_the_model_was_trained_so(
    tmp_path: Path, write_gguf: Callable[..., Any]
) -> None:
    write_gguf(tmp_path / "x.gguf", pre="starcoder")
    assert open_checkpoint(tmp_path / "x.gguf").tokenizer().encode("  12").tokens == ["ĠĠ", "1", "2"]
    write_gguf(tmp_path / "x.gguf", pre="gpt-2")
    assert open_checkpoint(tmp_path / "x.gguf").tokenizer().encode("  12").tokens == ["Ġ", "Ġ", "12"]


def test_special_tokens_typed_in_text_are_those_tokens(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    write_gguf(tmp_path / "x.gguf")
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    ours = checkpoint.tokenizer()
    encoded = ours.encode("hello<|a|><think> x<|b|><|c|>")
    assert encoded.tokens == ["hello", "<|a|>", "<think>", "Ġ", "x", "<|b|>", "<|c|>"]
    # Control tokens are special and left out on request; a user-defined one is ordinary text.
    assert ours.decode(encoded.ids, skip_special_tokens=True) == "hello<think> x"
    assert checkpoint.special_tokens == {"bos_token": "<|a|>", "eos_token": "<|b|>"}
    assert checkpoint.chat_template is not None and "message" in checkpoint.chat_template


@pytest.mark.parametrize(
    "pre, add_bos, add_eos, expected",
    [
        ("gpt-2", None, None, ["hello"]),
        ("llama-bpe", None, None, ["<|a|>", "hello"]),
        ("gpt-2", True, None, ["<|a|>", "hello"]),
        ("llama-bpe", False, True, ["hello", "<|b|>"]),
        ("gpt-2", True, True, ["<|a|>", "hello", "<|b|>"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path,
    write_gguf: Callable[..., Any],
    pre: str,
    add_bos: bool | None,
    add_eos: bool | None,
    expected: list[str],
) -> None:
    def edit(writer: GGUFWriter) -> None:
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        if add_eos is not None:
            writer.add_add_eos_token(add_eos)

    write_gguf(tmp_path / "x.gguf", pre=pre, edit=edit)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    ours = checkpoint.tokenizer()
    assert ours.encode("hello").tokens == expected
    assert ours.encode("hello", add_special_tokens=False).tokens == ["hello"]
    assert checkpoint.add_bos_token is (expected[0] == "<|a|>")
    pair = ours.encode("hello", "hello")
    assert pair.type_ids == [0] * len(expected) + [1] * len(expected)


PLAIN = [
    "\u2581",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "t",
    "n",
    "a",
    "i",
    "s",
    "1",
    "2",
    ".",
    "é",
    "日",
    "\u2581h",
    "\u2581w",
]
WORDS = [
    "or",
    "he",
    "ll",
    "hell",
    "hello",
    "\u2581he",
    "\u2581hello",
    "wor",
    "ld",
    "\u2581wor",
    "\u2581world",
    "\u2581\u2581",
]
MORE = ["an", "in", "\u2581a", "\u2581an", "is", "th", "\u2581th", "the", "\u2581the", "lo", "ello", "12", "ow", "low"]


def add_sentencepiece_tokenizer(writer: GGUFWriter, _pre: str, size: int) -> None:
    """<unk>, <s>, </s>, the 256 bytes, characters, words with scores (some equal), padding."""
    words = [*WORDS, *MORE]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PLAIN, *words]
    scores = (
        [0.0] * 259 + [-1000.0 - rank for rank in range(len(PLAIN))] + [-float(rank // 2) for rank in range(len(words))]
    )
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))
    for number in range(len(tokens), size):
        tokens.append(f"[PAD{number}]")
        scores.append(-10000.0)
        kinds.append(TokenType.UNUSED)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


SPM_TEXTS = [
    "hello world",
    "hello  world",
    " hello",
    "the low hello12 is an island",
    "日本 héllo",
    "x😀y",
    "\n\tthe",
    "",
    "an",
]


def test_sentencepiece_equals_transformers(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    write_gguf(tmp_path / "x.gguf", tokenizer=add_sentencepiece_tokenizer, vocab_size=320)
    theirs = transformers_tokenizer(tmp_path / "x.gguf")
    ours = open_checkpoint(tmp_path / "x.gguf").tokenizer()
    texts = [*SPM_TEXTS, *(text for text in varied_strings() if "<" not in text)]
    assert_same(ours, theirs, texts)
    tokens = {token for text in SPM_TEXTS for token in ours.encode(text).tokens}
    assert {"\u2581hello", "\u2581world", "\u2581the", "<0xF0>", "<0x0A>", "12", "日"} <= tokens


def test_sentencepiece_starts_with_bos_and_a_space_unless_the_file_says_otherwise(
    tmp_path: Path, write_gguf: Callable[..., Any]
) -> None:
    def plain(writer: GGUFWriter) -> None:
        writer.add_add_bos_token(False)
        writer.add_add_space_prefix(False)

    write_gguf(tmp_path / "x.gguf", tokenizer=add_sentencepiece_tokenizer, vocab_size=320)
    ours = open_checkpoint(tmp_path / "x.gguf").tokenizer()
    assert ours.encode("hello").tokens == ["<s>", "\u2581hello"]
    assert ours.decode(ours.encode("hello").ids) == "hello"
    write_gguf(tmp_path / "y.gguf", tokenizer=add_sentencepiece_tokenizer, vocab_size=320, edit=plain)
    ours = open_checkpoint(tmp_path / "y.gguf").tokenizer()
    assert ours.encode("hello").tokens == ["hello"]
    assert ours.decode(ours.encode(" hello").ids) == " hello"


def tokenizer_error(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.tokenizer()
    assert str(path) in str(caught.value) and all(problem.fix for problem in caught.value.problems)
    return str(caught.value)


Edit = Callable[[GGUFWriter], Any]


def replacing(key: str, value: Any) -> Edit:
    def edit(writer: GGUFWriter) -> None:
        name = f"tokenizer.ggml.{key}"
        if value is None:
            del writer.kv_data[0][name]
        else:
            writer.kv_data[0][name].value = value

    return edit


BROKEN: dict[str, tuple[Edit, str]] = {
    "kind": (replacing("model", "bert"), "kind 'bert'"),
    "no tokenizer": (replacing("model", "none"), "has no tokenizer"),
    "unknown split": (replacing("pre", "klingon"), "'klingon'"),
    "no merges": (replacing("merges", None), "has no merges"),
    "merge of unknown tokens": (replacing("merges", ["q zz"]), "cannot be built"),
    "merge without a space": (replacing("merges", ["abc"]), "cannot be built"),
    "merge to an unknown token": (replacing("merges", ["q q"]), "cannot be built"),
    "types": (replacing("token_type", [1, 2]), "2 token types"),
    "token twice": (replacing("tokens", ["a"] * 300), "'a' twice"),
    "bos": (replacing("bos_token_id", 300), "bos token id 300, but 300 tokens"),
    "long token": (replacing("tokens", ["x" * 5000, *(str(number) for number in range(299))]), "5,000 characters"),
}


@pytest.mark.parametrize("edit, says", BROKEN.values(), ids=BROKEN)
def test_a_tokenizer_that_does_not_fit_together_is_refused(
    tmp_path: Path, write_gguf: Callable[..., Any], edit: Edit, says: str
) -> None:
    write_gguf(tmp_path / "x.gguf", edit=edit)
    assert says in tokenizer_error(tmp_path / "x.gguf")


def test_a_file_without_a_tokenizer_opens_and_says_so_when_asked(
    tmp_path: Path, write_gguf: Callable[..., Any]
) -> None:
    write_gguf(tmp_path / "x.gguf", tokenizer=None)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    assert (checkpoint.special_tokens, checkpoint.add_bos_token, checkpoint.chat_template) == ({}, None, None)
    assert "skip_tokenizer_init" in tokenizer_error(tmp_path / "x.gguf")
