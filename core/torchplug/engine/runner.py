"""Runs the model over one step: lays the batch out flat, publishes its layout, returns the logits that are needed.

A module without torchplug's attention layers keeps nothing between steps, so it is called once per request with the
whole prefix (`cache: none`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from torchplug.engine.kv_cache import SlotCache
from torchplug.errors import ContractError, Problem
from torchplug.forward_context import ForwardContext, set_forward_context

if TYPE_CHECKING:
    from torchplug.engine.scheduler import Scheduled


class Runner:
    """Executes the steps of one module.

    Args:
        module: Of the model class convention, in eval mode on `device`.
        dtype: Of the cache.
        device: Of the module and of every tensor that it is given.
        max_num_seqs: Most requests in a step.
        max_num_batched_tokens: Most tokens in a step.
        max_model_len: Most tokens of a request.
        embedding: Gives the hook `embed_input_ids` where a wrapper is attached to it, else None: then the module embeds
            its tokens itself, which is the same and one call less.

    Attributes:
        cached: Whether the module keeps keys and values between steps.
        whole_above: Prompts of more tokens must not be cut into steps; None where all may be.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        embedding: Callable[[], Callable[[Tensor], Tensor] | None] = lambda: None,
    ) -> None:
        self._module = module
        self._embedding = embedding
        self._device = device
        self._cache = SlotCache(module, dtype=dtype, device=device, max_slots=max_num_seqs, max_tokens=max_model_len)
        self.cached = bool(self._cache.layers)
        parts = [part for part in module.modules() if getattr(part, "depends_on_length", False)]
        self.whole_above: int | None = min((int(part.max_positions) for part in parts), default=None)  # type: ignore[arg-type]
        # Buffers are made once: at batch 1 building tensors would be most of what a step costs without the model.
        self._input_ids = _Staged(max_num_batched_tokens, torch.int64, device)
        self._positions = _Staged(max_num_batched_tokens, torch.int64, device)
        self._slot_mapping = _Staged(max_num_batched_tokens, torch.int64, device)
        self._query_start_loc = _Staged(max_num_seqs + 1, torch.int32, device)
        self._seq_lens = _Staged(max_num_seqs, torch.int32, device)
        self._block_tables = _Staged(max_num_seqs, torch.int32, device)

    def run(self, batch: Sequence[Scheduled]) -> Tensor | None:
        """Logits [n, vocab] of the `n` requests of the batch that sample, in batch order; None where none does.

        Call it under `torch.inference_mode()`.

        Raises:
            ContractError: The model returned another number of rows than it was given.
            DeviceError: There is no memory for the cache.
        """
        if not self.cached:
            return self._run_alone(batch)
        self._cache.reserve(max(item.slot for item in batch) + 1, max(item.stop for item in batch))
        context, input_ids, positions, rows = self._lay_out(batch)
        with set_forward_context(context):
            hidden_states = self._forward(input_ids, positions)
            if not rows:
                return None
            if len(rows) < len(input_ids):
                hidden_states = hidden_states[torch.tensor(rows, device=self._device)]
            return self._logits(hidden_states)

    def close(self) -> None:
        """Free the cache."""
        self._cache.clear()

    def _run_alone(self, batch: Sequence[Scheduled]) -> Tensor:
        logits = []
        for item in batch:
            input_ids = torch.tensor(item.request.token_ids[item.start : item.stop], device=self._device)
            hidden_states = self._forward(input_ids, torch.arange(item.start, item.stop, device=self._device))
            logits.append(self._logits(hidden_states[-1:]))
        return torch.cat(logits)

    def _lay_out(self, batch: Sequence[Scheduled]) -> tuple[ForwardContext, Tensor, Tensor, list[int]]:
        """The step's context, input ids, positions, and the flat rows whose logits are needed."""
        block_size = self._cache.block_size
        ids, positions, slots = self._input_ids.host, self._positions.host, self._slot_mapping.host
        starts, lengths, tables = self._query_start_loc.host, self._seq_lens.host, self._block_tables.host
        rows: list[int] = []
        num_tokens = 0
        starts[0] = 0
        for index, item in enumerate(batch):
            start, stop = item.start, item.stop
            first_slot = item.slot * block_size
            if stop - start == 1:
                ids[num_tokens] = item.request.token_ids[start]
                positions[num_tokens] = start
                slots[num_tokens] = first_slot + start
                num_tokens += 1
            else:
                end = num_tokens + stop - start
                ids[num_tokens:end] = item.request.token_ids[start:stop]
                positions[num_tokens:end] = np.arange(start, stop)
                slots[num_tokens:end] = np.arange(first_slot + start, first_slot + stop)
                num_tokens = end
            starts[index + 1] = num_tokens
            lengths[index] = stop
            tables[index] = item.slot
            if item.samples:
                rows.append(num_tokens - 1)
        num_requests = len(batch)
        context = ForwardContext(
            query_start_loc=self._query_start_loc.on_device(num_requests + 1),
            seq_lens=self._seq_lens.on_device(num_requests),
            slot_mapping=self._slot_mapping.on_device(num_tokens),
            block_tables=self._block_tables.on_device(num_requests).unsqueeze(1),
            block_size=block_size,
            query_lens_host=tuple([item.stop - item.start for item in batch]),
            seq_lens_host=tuple([item.stop for item in batch]),
            block_tables_host=tuple([(item.slot,) for item in batch]),
        )
        return context, self._input_ids.on_device(num_tokens), self._positions.on_device(num_tokens), rows

    def _forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        embed = self._embedding()
        if embed is None:
            hidden_states = self._module(input_ids, positions)
        else:
            hidden_states = self._module(None, positions, inputs_embeds=embed(input_ids))
        self._check_rows("forward", hidden_states, len(input_ids))
        return hidden_states  # type: ignore[no-any-return]

    def _logits(self, hidden_states: Tensor) -> Tensor:
        logits = self._module.compute_logits(hidden_states)  # type: ignore[operator]
        self._check_rows("compute_logits", logits, len(hidden_states))
        return logits  # type: ignore[no-any-return]

    def _check_rows(self, method: str, result: object, expected: int) -> None:
        if not isinstance(result, Tensor) or result.ndim != 2 or result.shape[0] != expected:
            found = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ContractError(
                f"model {type(self._module).__name__!r}",
                Problem(
                    method,
                    f"expected a tensor with one row for each of {expected} tokens, found {found}",
                    "return one row per token",
                ),
            )


class _Staged:
    """A buffer on the host, filled through numpy, and its copy on the device; one and the same on CPU."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        tensor = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self._tensor = tensor
        self._copy = tensor if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)
        self.host = tensor.numpy()

    def on_device(self, size: int) -> Tensor:
        """The first `size` entries on the device. Valid until the next step fills the buffer."""
        if self._copy is not self._tensor:
            # The host waits for the step's tokens before it fills the buffer again, so the copy may overlap.
            self._copy[:size].copy_(self._tensor[:size], non_blocking=True)
        return self._copy[:size]
