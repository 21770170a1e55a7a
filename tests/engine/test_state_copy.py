"""Copy functions' addresses as pieces of blocks: right ones are read, and wrong ones are refused with what is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchplug.engine.state_copy import StateCopy, state_copy
from torchplug.errors import ContractError
from torchplug.interfaces import MambaCopySpec


def conv(state, block_ids, current, accepted):
    rows = state[block_ids[current], accepted - 1 :]
    return MambaCopySpec(rows.data_ptr(), rows.numel())


def temporal(state, block_ids, current, accepted):
    block = state[block_ids[current + accepted - 1]]
    return MambaCopySpec(block.data_ptr(), block.numel())


@given(
    st.permutations(range(7)),
    st.integers(0, 3),
    st.integers(1, 4),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
)
def test_a_piece_is_where_the_function_says_and_never_older_than_the_state(blocks, current, accepted, shape, dtype):
    state = torch.zeros(7, 6, *shape, dtype=dtype)
    assert state_copy(conv, state, blocks, current, accepted) == StateCopy(
        blocks[current], accepted - 1, 6 - accepted + 1
    )
    piece = state_copy(temporal, state, blocks, current, accepted)
    assert piece == StateCopy(blocks[current + accepted - 1], 0, 6)
    assert blocks.index(piece.block) >= current


def test_a_state_of_one_number_and_vllms_own_result_type():
    state = torch.zeros(3, 1)
    own = SimpleNamespace(start_addr=state[2].data_ptr(), num_elements=1)
    assert state_copy(lambda *_: own, state, [2], 0, 1) == StateCopy(2, 0, 1)


STATE = torch.zeros(4, 3, 5)
ADDRESS = STATE.data_ptr()
WRONG = {
    "before the tensor": (MambaCopySpec(ADDRESS - 4, 15), "named 15 elements from byte -4"),
    "behind it": (MambaCopySpec(ADDRESS + STATE.nbytes, 15), "which has 60 elements of 4 bytes"),
    "over its end": (MambaCopySpec(ADDRESS + 4 * 50, 15), "named 15 elements from byte 200"),
    "into the next block": (
        MambaCopySpec(ADDRESS + 4 * 20, 15),
        "named elements 5 to 20 of block 1, whose rows have 5",
    ),
    "between two elements": (MambaCopySpec(ADDRESS + 2, 15), "from byte 2"),
    "a part of a row": (MambaCopySpec(ADDRESS + 4 * 15, 7), "named elements 0 to 7 of block 1"),
    "nothing": (MambaCopySpec(ADDRESS, 0), "named 0 elements"),
    "another request's block": (MambaCopySpec(STATE[0].data_ptr(), 15), "named block 0 where 3 holds the state"),
    "an older block": (MambaCopySpec(STATE[1].data_ptr(), 15), "the copy goes backwards, to an older state"),
    "a tuple": ((ADDRESS, 15), r"returned tuple"),
    "an address that is a tensor": (SimpleNamespace(start_addr=STATE, num_elements=15), "namespace(start_addr=tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_anything_else_is_refused_by_name(case):
    result, says = WRONG[case]
    with pytest.raises(ContractError) as error:
        state_copy(lambda *_: result, STATE, [1, 3, 2], 1, 1, subject="plugin 'X'")
    assert says in str(error.value) and "plugin 'X'" in str(error.value) and "fix: " in str(error.value)
    assert "test_state_copy.py" in str(error.value)
