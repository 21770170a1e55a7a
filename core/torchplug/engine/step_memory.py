"""What the largest step that the engine's sizes allow would need, so that absurd sizes are refused with a figure.

A lower bound: what grows with the sizes whatever the model does. A real step needs more, for its layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchplug.engine.cache_memory import available_bytes
from torchplug.errors import DeviceError, Problem

if TYPE_CHECKING:
    from torchplug.config import VllmConfig

_TOKEN: Final = 3 * 8
"""Bytes of a token's id, position and cache slot."""

_SEQ: Final = 2 * 4
"""Bytes of a request's offset and length."""

_BLOCK: Final = 2 * 4
"""Bytes of a block's id, in the runner's table and in the step's."""


def check_step_memory(config: VllmConfig, vocab_size: int | None) -> None:
    """Refuse sizes whose largest step could never be taken on this machine.

    Args:
        config: Its scheduler_config, cache_config and model_config hold the sizes, its device_config the device.
        vocab_size: Width of the logits; None: unknown.

    Raises:
        DeviceError: Naming max_num_seqs or max_num_batched_tokens (or both), what they need, and what would fit.
    """
    sizes, model = config.scheduler_config, config.model_config
    hidden_size = model.hf_text_config.get("hidden_size")
    width = hidden_size if isinstance(hidden_size, int) else 0
    blocks = -(-model.max_model_len // config.cache_config.block_size)
    per_token = _TOKEN + width * model.dtype.itemsize
    per_seq = _SEQ + blocks * _BLOCK + 4 * (vocab_size or 0)
    available = available_bytes(config.device_config.device)
    problems = []
    for name, value, each, what in (
        ("max_num_seqs", sizes.max_num_seqs, per_seq, "block tables and logits"),
        ("max_num_batched_tokens", sizes.max_num_batched_tokens, per_token, "ids, positions and hidden states"),
    ):
        if value * each > available:
            shown = value if value < 10**18 else "a number of this size"
            says = f"{shown} needs at least {_gib(value * each)} for {what} of one step, and {_gib(available)} are free"
            problems.append(Problem(name, says, f"use at most {max(1, available // each)}; far less is usual"))
    if problems:
        raise DeviceError(f"device {str(config.device_config.device)!r}", problems)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes < 2**80 else "more than 2**80 bytes"
