"""Copy functions of recurrent states: which piece of a state tensor a snapshot must keep.

A model class returns one for each of its state tensors from `get_mamba_state_copy_func`. `block_ids` is the request's
row of slots, `cur_block_idx` the place in it that the last step wrote, and `num_accepted_tokens`, from 1 on, how many
of the step's tokens stand; more than 1 only after a step with draft tokens.
"""

from __future__ import annotations

from torch import Tensor

from torchplug.interfaces import MambaCopySpec


def get_conv_copy_spec(
    state: Tensor, block_ids: list[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Of a convolution state [slots, rows, channels]: the rows from the first that the accepted tokens leave.

    Each accepted draft moves the window of the last inputs one row on within the same slot.
    """
    kept = state[block_ids[cur_block_idx], num_accepted_tokens - 1 :]
    return MambaCopySpec(kept.data_ptr(), kept.numel())


def get_temporal_copy_spec(
    state: Tensor, block_ids: list[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Of a state-space state [slots, ...]: the whole state after the last accepted token, which each draft of a step
    leaves in a slot of its own."""
    kept = state[block_ids[cur_block_idx + num_accepted_tokens - 1]]
    return MambaCopySpec(kept.data_ptr(), kept.numel())
