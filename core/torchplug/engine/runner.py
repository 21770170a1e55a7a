"""Runs the model over one step: lays the batch out flat, publishes its layout, returns the logits that are needed.

A module without torchplug's attention or recurrent layers keeps nothing between steps, so it is called once per request
with the whole prefix (`cache: none`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from torchplug.engine.decode_graphs import DecodeGraphs
from torchplug.engine.kv_cache import PagedCache
from torchplug.errors import ContractError, Problem
from torchplug.forward_context import VARYING, BlockLayout, ForwardContext, set_forward_context
from torchplug.host.blame import RUNNING, blamed

if TYPE_CHECKING:
    from torchplug.engine.scheduler import Scheduled


class Runner:
    """Executes the steps of one module.

    Args:
        module: Of the model class convention, in eval mode on `device`.
        cache: Of the module's attention and recurrent layers.
        device: Of the module and of every tensor that it is given.
        max_num_seqs: Most requests in a step.
        max_num_batched_tokens: Most tokens in a step.
        embedding: Gives the hook `embed_input_ids` where a wrapper is attached to it, else None: then the module embeds
            its tokens itself, which is the same and one call less.
        forward: Called instead of the module, e.g. its compiled forward pass.
        graphs: Replayed in steps with one new token for each request, once `record` was called; needs the cache's
            padding block. While a wrapper is attached to the embedding it is called, and nothing is replayed.
        subject: How errors name the model; None: by its class.

    Attributes:
        cached: Whether the module keeps keys and values, or states, between steps.
        whole_above: Prompts of more tokens must not be cut into steps; None where all may be.
    """

    def __init__(
        self,
        module: nn.Module,
        cache: PagedCache,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        embedding: Callable[[], Callable[[Tensor], Tensor] | None] = lambda: None,
        forward: Callable[..., Tensor] | None = None,
        graphs: DecodeGraphs | None = None,
        subject: str | None = None,
    ) -> None:
        self._module = module
        self._call: Callable[..., Tensor] = module if forward is None else forward
        self._graphs = graphs
        subject = subject or f"model {type(module).__name__!r}"
        self._subject = subject
        self._in_forward = blamed(subject, type(module), "forward", RUNNING)
        self._in_logits = blamed(subject, type(module), "compute_logits", RUNNING)
        self._embedding = embedding
        self._device = device
        self._cache = cache
        self.cached = bool(cache.groups) or cache.states is not None
        parts = [part for part in module.modules() if getattr(part, "depends_on_length", False)]
        self.whole_above: int | None = min((int(part.max_positions) for part in parts), default=None)  # type: ignore[arg-type]
        # Buffers are made once: at batch 1 building tensors would be most of what a step costs without the model.
        self._input_ids = _Staged(max_num_batched_tokens, torch.int64, device)
        self._positions = _Staged(max_num_batched_tokens, torch.int64, device)
        self._query_start_loc = _Staged(max_num_seqs + 1, torch.int32, device)
        self._seq_lens = _Staged(max_num_seqs, torch.int32, device)
        max_blocks = -(-cache.max_tokens // cache.block_size)
        self._layouts = [
            _GroupLayout(
                max_num_seqs, max_num_batched_tokens, max_blocks, cache.block_size, device, group.padding_block
            )
            for group in cache.groups
        ]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # What a model without attention layers is told of blocks.
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self._no_blocks = BlockLayout(nothing, nothing.to(torch.int32).view(0, 0), ())
        self._state_slots = _Staged(max_num_seqs, torch.int64, device)

    def run(self, batch: Sequence[Scheduled]) -> Tensor | None:
        """Logits [n, vocab] that the step is for; None where there are none.

        In batch order, each request's `prompt_rows` and then, where it samples, its last row.

        Call it under `torch.inference_mode()`.

        Raises:
            ContractError: The model returned another number of rows than it was given, or a copy function of its
                states named a piece that is not there.
            PluginError: A method of the model failed; its exception is the cause.
            DeviceError: There was not enough memory.
        """
        if not self.cached:
            return self._run_alone(batch)
        self._copy_states(batch)
        size = self._recorded_size(batch)
        context, input_ids, positions, rows = self._lay_out(batch, size)
        with set_forward_context(context):
            if size is None or self._graphs is None:
                hidden_states = self._forward(input_ids, positions)
            else:
                hidden_states = self._graphs.replay(size)[: len(batch)]
            if not rows:
                return None
            if len(rows) < len(hidden_states):
                hidden_states = hidden_states[torch.tensor(rows, device=self._device)]
            return self._logits(hidden_states)

    def step_inputs(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Ids and positions of so many tokens, as a step would give them to the module; their values mean nothing."""
        num_tokens = min(num_tokens, len(self._input_ids.host))
        return self._input_ids.on_device(num_tokens), self._positions.on_device(num_tokens)

    def record(self, progress: Callable[[int, int], None]) -> None:
        """Record the graphs; call it once, under `torch.inference_mode()`, before the first step."""
        if self._graphs is not None:
            self._graphs.capture(self._padding_step, progress)

    def _recorded_size(self, batch: Sequence[Scheduled]) -> int | None:
        """The rows of the graph that this step is a replay of; None for a step to be run."""
        if self._graphs is None or any(item.stop - item.start != 1 for item in batch):
            return None
        return None if self._embedding() is not None else self._graphs.size_for(len(batch))

    def _padding_step(self, size: int) -> Callable[[], Tensor]:
        """The forward pass over a step of padding rows, in the buffers that every step of that size will be in."""
        context, input_ids, positions, _ = self._lay_out((), size)

        def run() -> Tensor:
            # A context of its own, since layers keep what they have derived from one: a graph must derive it itself.
            with set_forward_context(replace(context)):
                return self._call(input_ids, positions)

        with set_forward_context(context):
            self._logits(run())  # computed after each replay, in this context
        return run

    def close(self) -> None:
        """Free the cache and what is recorded."""
        if self._graphs is not None:
            self._graphs.close()
        self._cache.clear()

    def _run_alone(self, batch: Sequence[Scheduled]) -> Tensor:
        logits = []
        for item in batch:
            rows = [*item.request.prompt_rows(item.start, item.stop), -1]
            input_ids = torch.tensor(item.request.token_ids[item.start : item.stop], device=self._device)
            hidden_states = self._forward(input_ids, torch.arange(item.start, item.stop, device=self._device))
            logits.append(self._logits(hidden_states[rows]))
        return torch.cat(logits)

    def _lay_out(
        self, batch: Sequence[Scheduled], size: int | None = None
    ) -> tuple[ForwardContext, Tensor, Tensor, list[int]]:
        """The step's context, input ids, positions, and the flat rows whose logits are needed.

        `size`: Requests with one token each are filled up to so many rows with padding, block tables to their full
        width, so that every step of this size lies in the same memory in the same shapes.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the copies of the last step still read the host's buffers
        ids, positions = self._input_ids.host, self._positions.host
        starts, lengths = self._query_start_loc.host, self._seq_lens.host
        rows: list[int] = []
        num_tokens = 0
        starts[0] = 0
        for index, item in enumerate(batch):
            start, stop = item.start, item.stop
            if item.request.wants_prompt_logits:
                rows.extend([num_tokens + row for row in item.request.prompt_rows(start, stop)])
            if stop - start == 1:
                ids[num_tokens] = item.request.token_ids[start]
                positions[num_tokens] = start
                num_tokens += 1
            else:
                end = num_tokens + stop - start
                ids[num_tokens:end] = item.request.token_ids[start:stop]
                positions[num_tokens:end] = np.arange(start, stop)
                num_tokens = end
            starts[index + 1] = num_tokens
            lengths[index] = stop
            if item.samples:
                rows.append(num_tokens - 1)
        num_requests = len(batch)
        if size is not None:
            ids[num_tokens:size] = positions[num_tokens:size] = 0
            starts[num_requests + 1 : size + 1] = np.arange(num_requests + 1, size + 1)
            lengths[num_requests:size] = 1
            num_tokens = num_requests = size
        layouts = [layout.lay_out(batch, group, num_tokens, size) for group, layout in enumerate(self._layouts)]
        first = layouts[0] if layouts else self._no_blocks
        slots = self._own_slots(batch)
        context = ForwardContext(
            query_start_loc=self._query_start_loc.on_device(num_requests + 1),
            seq_lens=self._seq_lens.on_device(num_requests),
            slot_mapping=first.slot_mapping,
            block_tables=first.block_tables,
            block_size=self._cache.block_size,
            query_lens_host=tuple([item.stop - item.start for item in batch]) if size is None else (1,) * size,
            seq_lens_host=tuple([item.stop for item in batch]) if size is None else VARYING,
            block_tables_host=first.block_tables_host,
            more_groups=tuple(layouts[1:]),
            state_slots=self._state_slots.on_device(num_requests) if slots else None,
            state_slots_host=slots,
        )
        on_device = self._input_ids.on_device(num_tokens), self._positions.on_device(num_tokens)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return context, *on_device, rows

    def _copy_states(self, batch: Sequence[Scheduled]) -> None:
        """Copy out the states that are kept, and in those from which requests start: in the order of the batch, since
        a request may start from what one before it leaves now."""
        states = self._cache.states
        if states is None or not states.num_snapshots:
            return
        first = states.num_requests
        for item in batch:
            own = item.request.checkpoints
            if own is not None and own.target is not None:
                states.copy(item.slot, first + own.target)
            if own is not None and own.source is not None:
                states.copy(first + own.source, item.slot)

    def _own_slots(self, batch: Sequence[Scheduled]) -> tuple[int, ...]:
        """The state slot of each request, which is its row; empty for a model without recurrent layers."""
        if self._cache.states is None:
            return ()
        slots = tuple([item.slot for item in batch])
        self._state_slots.host[: len(slots)] = slots
        return slots

    def _forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        embed = self._embedding()
        embeds = None if embed is None else embed(input_ids)
        with self._in_forward:
            if embeds is None:
                hidden_states = self._call(input_ids, positions)
            else:
                hidden_states = self._call(None, positions, inputs_embeds=embeds)
        self._check_rows("forward", hidden_states, len(input_ids))
        return hidden_states

    def _logits(self, hidden_states: Tensor) -> Tensor:
        with self._in_logits:
            logits = self._module.compute_logits(hidden_states)  # type: ignore[operator]
        self._check_rows("compute_logits", logits, len(hidden_states))
        return logits  # type: ignore[no-any-return]

    def _check_rows(self, method: str, result: object, expected: int) -> None:
        if not isinstance(result, Tensor) or result.ndim != 2 or result.shape[0] != expected:
            found = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ContractError(
                self._subject,
                Problem(
                    method,
                    f"expected a tensor with one row for each of {expected} tokens, found {found}",
                    "return one row per token",
                ),
            )


class _GroupLayout:
    """Where one cache group keeps a step's tokens."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        padding_block: int,
    ) -> None:
        self._block_size = block_size
        self._padding_block = padding_block
        # A row for each slot, in which a request's block ids are written once, as it gets them.
        self._rows = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._slot_mapping = _Staged(max_num_batched_tokens, torch.int64, device)
        self._block_tables = _Staged(max_num_seqs * max_blocks, torch.int32, device)

    def lay_out(self, batch: Sequence[Scheduled], group: int, num_tokens: int, size: int | None = None) -> BlockLayout:
        """The layout of a step of `num_tokens` tokens, `group` being this group's place among a request's tables;
        with `size`, filled up to so many rows of full width."""
        block_size, slots = self._block_size, self._slot_mapping.host
        tables = [item.request.blocks[group] for item in batch]
        token = 0
        for item, table in zip(batch, tables, strict=True):
            if table.copied < len(table.ids):
                self._rows[item.slot, table.copied : len(table.ids)] = table.ids[table.copied :]
                table.copied = len(table.ids)
            start, stop = item.start, item.stop
            if stop - start == 1:
                slots[token] = table.ids[start // block_size] * block_size + start % block_size
                token += 1
            else:
                places = np.arange(start, stop)
                blocks = self._rows[item.slot][places // block_size]
                slots[token : token + stop - start] = blocks * block_size + places % block_size
                token += stop - start
        num_rows = len(batch)
        if size is None:
            width = -(-max([item.stop for item in batch]) // block_size)
        else:
            width = self._rows.shape[1]
            slots[num_rows:size] = self._padding_block * block_size
            num_rows = size
        used = num_rows * width
        rows = self._block_tables.host[:used].reshape(num_rows, width)
        taken = rows
        if size is not None:
            taken = rows[: len(batch)]
            rows[len(batch) :] = self._padding_block
        np.take(self._rows[:, :width], [item.slot for item in batch], axis=0, out=taken)
        return BlockLayout(
            self._slot_mapping.on_device(num_tokens),
            self._block_tables.on_device(used).view(num_rows, width),
            tuple([table.frozen for table in tables]) if size is None else VARYING,
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
            # The runner waits for its copies before it fills the buffers again, so they may overlap.
            self._copy[:size].copy_(self._tensor[:size], non_blocking=True)
        return self._copy[:size]
