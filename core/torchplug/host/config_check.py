"""What a config.json must hold, whatever the model: sizes are whole numbers, flags true or false.

A model class computes with these values at once. Without this check a text where a number belongs ends deep inside
torch, or runs: "tie_word_embeddings": "false" is true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torchplug.errors import CheckpointError, Problem
from torchplug.host.untrusted import first_of, shown

_NEEDED: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_embd",
    "n_layer",
    "n_head",
)
_NULLABLE: Final = (
    *("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("n_inner", "n_positions", "n_ctx"),
)
_LAYERS: Final = ("num_hidden_layers", "n_layer")
_MOST: Final = 2**31 - 1
_MOST_LAYERS: Final = 10_000
"""Building a layer costs time and memory before any weight is looked at; no model comes near this number."""


def check_config(config: Mapping[str, Any], defaults: Mapping[str, Any], *, name: str, source: str) -> None:
    """Check the well-known keys of a config.json, and those whose kind the class declares by a default.

    Args:
        config: The mapping of config.json; its `text_config` is checked as well.
        defaults: The class's `config_defaults`. Where a default is a flag or a number, so must the file's value be.
        name: The checkpoint, for the message.
        source: The file that `config` comes from, for the message.

    Raises:
        CheckpointError: with every value that is of the wrong kind or out of range.
    """
    problems = [
        Problem(
            f"{source}, {key}",
            f"expected {expected}, found {_json(value)}",
            "correct it as the model's authors have it",
        )
        for key, value, expected in _wrong_values(config, defaults, "")
    ]
    if problems:
        raise CheckpointError(f"checkpoint {name!r}", first_of(problems))


def _wrong_values(config: Mapping[str, Any], defaults: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, what was expected)."""
    for key, value in config.items():
        expected = _expected(key, value, defaults.get(key))
        if expected:
            yield f"{path}{key}", value, expected
    nested, nested_defaults = config.get("text_config"), defaults.get("text_config")
    if isinstance(nested, Mapping):
        yield from _wrong_values(
            nested, nested_defaults if isinstance(nested_defaults, Mapping) else {}, f"{path}text_config."
        )


def _expected(key: str, value: Any, default: Any) -> str:
    """What `key` should hold instead of `value`, or "" where it is fine."""
    if key in _NEEDED or key in _NULLABLE:
        most = _MOST_LAYERS if key in _LAYERS else _MOST
        # A few architectures give a size for each layer, as a list.
        sizes = value if isinstance(value, list) and value else [value]
        fits = all(type(size) is int and 1 <= size <= most for size in sizes) or (value is None and key in _NULLABLE)
        return "" if fits else f"a whole number from 1 to {most:,}"
    if value is None:
        return ""
    if isinstance(default, bool) or key == "tie_word_embeddings":
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return "" if type(value) is int else "a whole number"
    if isinstance(default, float):
        return "" if type(value) in (int, float) and math.isfinite(value) else "a number"
    return ""


def _json(value: Any) -> str:
    """The value as it stands in the file, cut to a readable length."""
    import json

    return shown(json.dumps(value))[1:-1] if not isinstance(value, str) else f"the text {shown(value)}"
