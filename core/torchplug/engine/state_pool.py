"""The memory of recurrent state: a slot for each running request, then slots for snapshots, in all layers alike.

A slot's content is undefined when it is given out; layers start a request from zero by themselves. What a snapshot must
keep of a slot, the model's copy functions say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torchplug.engine.state_copy import state_copy
from torchplug.host.recurrent_layers import StateSpec, copy_functions, declared_state, recurrent_layers

if TYPE_CHECKING:
    from torch import Tensor

    from torchplug.host.model import LoadedModel
    from torchplug.interfaces import MambaStateCopyFunc
    from torchplug.layers.recurrent import RecurrentLayer


class StatePool:
    """State tensors of a model's recurrent layers.

    Args:
        layers: The layers; each one's `state` is set here and nowhere else.
        spec: What one layer keeps for one request.
        copy_functions: One for each tensor of `spec`; None where state cannot be copied.
        subject: The plugin, for error messages.

    Attributes:
        num_requests: Slots of running requests, the first ones; 0 until `allocate`.
        num_snapshots: Slots after them.
        slot_bytes: What a slot costs in all layers.
    """

    def __init__(
        self,
        layers: Sequence[RecurrentLayer],
        spec: StateSpec,
        copy_functions: Sequence[MambaStateCopyFunc] | None = None,
        subject: str = "model",
    ) -> None:
        self.layers = tuple(layers)
        self.spec = spec
        self.num_requests = self.num_snapshots = 0
        self.slot_bytes = spec.num_bytes * len(self.layers)
        self._copy_functions = None if copy_functions is None else tuple(copy_functions)
        self._subject = subject
        self._tensors: list[Tensor] = []  # [num_layers, num_slots, *shape] for each tensor of a layer

    @classmethod
    def of(cls, model: LoadedModel) -> StatePool | None:
        """The pool of a model, without memory yet; None where it has no recurrent layers.

        Raises:
            ContractError: its hooks do not give as many dtypes or copy functions as shapes.
        """
        layers = recurrent_layers(model.module)
        if not layers:
            return None
        subject = model.subject
        spec = declared_state(model, model.vllm_config, subject)
        return cls(list(layers.values()), spec, copy_functions(model, spec, subject), subject)

    @property
    def copies(self) -> bool:
        """Whether a slot can be copied."""
        return self._copy_functions is not None

    @property
    def num_slots(self) -> int:
        """Of requests and of snapshots."""
        return self.num_requests + self.num_snapshots

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.slot_bytes

    def allocate(self, num_requests: int, num_snapshots: int, device: torch.device) -> None:
        """Make the tensors, with undefined content, and give each layer its part."""
        self.num_requests, self.num_snapshots = num_requests, num_snapshots
        self._tensors = [
            torch.empty(len(self.layers), self.num_slots, *shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.spec.shapes, self.spec.dtypes, strict=True)
        ]
        for index, layer in enumerate(self.layers):
            layer.state = tuple([tensor[index] for tensor in self._tensors])

    def clear(self) -> None:
        """Give the memory back."""
        for layer in self.layers:
            layer.state = None
        self._tensors.clear()

    def copy(self, source: int, target: int) -> None:
        """Copy a slot to another, in all layers: of it what the model's copy functions name.

        Raises:
            ContractError: a copy function names a piece that is not in the slot.
        """
        assert self._copy_functions is not None
        for function, tensor in zip(self._copy_functions, self._tensors, strict=True):
            # The request's blocks are `source`, then `target`: a copy from anywhere else would go backwards.
            piece = state_copy(function, tensor[0], [source, target], 0, 1, subject=self._subject)
            tensor[:, target, : piece.rows].copy_(tensor[:, source, piece.row : piece.row + piece.rows])

    def fill(self, slots: Sequence[int], value: float) -> None:
        """Overwrite slots with one value in every element: NaN, in a test, where nobody may read."""
        for tensor in self._tensors:
            tensor[:, list(slots)] = value if tensor.is_floating_point() else 0

    def __str__(self) -> str:
        size = self.slot_bytes
        shown = f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
        return (
            f"{self.num_bytes / 2**30:.2f} GiB in {self.num_requests} slots of {shown}"
            f" and {self.num_snapshots} for snapshots"
        )
