"""What a model's copy function says, as a piece of one block of a state tensor: (block, row offset, rows).

vLLM's copy functions give a raw address and a number of elements. A piece can be checked, and copied on any device and
in any layout of memory; an address that leads elsewhere is an error instead of a corrupted state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchplug.errors import ContractError, Problem
from torchplug.host.contracts import location
from torchplug.interfaces import MambaCopySpec
from torchplug.results import describe

if TYPE_CHECKING:
    from torch import Tensor

    from torchplug.interfaces import MambaStateCopyFunc


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Rows [row, row + rows) of a block, along the first dimension of its shape; they become rows [0, rows) of another.

    A copy never goes backwards: `block` is the block of the state that is asked for, or one after it.
    """

    block: int
    row: int
    rows: int


def state_copy(
    function: MambaStateCopyFunc,
    state: Tensor,
    block_ids: Sequence[int],
    current: int,
    num_accepted: int,
    *,
    subject: str = "model",
) -> StateCopy:
    """Ask a copy function for the piece that continues a request.

    Args:
        function: One of `get_mamba_state_copy_func`.
        state: [blocks, *shape], contiguous.
        block_ids: Blocks of the request in the order of its tokens.
        current: Which of them the request's last step began in.
        num_accepted: Tokens of that step that stay, from 1 up to one more than there are draft tokens; the state after
            token n of a step is in block `current + n - 1`, or n - 1 rows further on in a convolution's.
        subject: The plugin, for error messages.

    Raises:
        ContractError: the piece is not in a block of this request, not made of whole rows, or of an older state.
    """

    def refuse(says: str, fix: str) -> ContractError:
        where = f"get_mamba_state_copy_func ({location(function)})"
        return ContractError(subject, Problem(where, says, fix))

    found = function(state, list(block_ids), current, num_accepted)
    # By its parts: a class written for vLLM returns vLLM's own type.
    address, count = getattr(found, "start_addr", None), getattr(found, "num_elements", None)
    if type(address) is not int or type(count) is not int:
        raise refuse(f"returned {describe(found)}", f"return {MambaCopySpec.__name__}(start_addr, num_elements)")
    block_size, row_size = state[0].numel(), state[0, 0].numel()
    start, rest = divmod(address - state.data_ptr(), state.element_size())
    fix = "let start_addr be state[block_ids[...], ...].data_ptr() and num_elements a number of whole rows"
    if rest or count < 1 or not 0 <= start <= start + count <= state.numel():
        says = (
            f"named {count} elements from byte {address - state.data_ptr()} of the state tensor on, which has "
            f"{state.numel()} elements of {state.element_size()} bytes"
        )
        raise refuse(says, fix)
    block, first = divmod(start, block_size)
    if first + count > block_size or first % row_size or count % row_size:
        says = f"named elements {first} to {first + count} of block {block}, whose rows have {row_size} elements"
        raise refuse(says + f" and which has {block_size}", fix)
    allowed = block_ids[current : current + num_accepted]
    if block not in allowed:
        older = block in block_ids[:current]
        says = f"named block {block} where {' or '.join(map(str, allowed))} holds the state" + (
            ": the copy goes backwards, to an older state" if older else ""
        )
        raise refuse(says, "read block_ids[cur_block_idx], or for a state per token [cur_block_idx + num_accepted - 1]")
    return StateCopy(block, first // row_size, count // row_size)
