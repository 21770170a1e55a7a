"""Copy functions of recurrent states: the addresses and sizes that a snapshot keeps."""

import ctypes

import pytest
import torch
from torchplug.layers import get_conv_copy_spec, get_temporal_copy_spec


def copied(state, spec):
    """The elements that a spec names, read from memory as the caller of a copy function does."""
    floats = (ctypes.c_float * spec.num_elements).from_address(spec.start_addr)
    return torch.tensor(list(floats), dtype=state.dtype)


@pytest.mark.parametrize(("accepted", "elements"), [(1, 20), (2, 16), (3, 12)])
def test_a_convolution_keeps_the_rows_from_the_last_accepted_draft_on(accepted, elements):
    state = torch.rand(6, 5, 4)
    spec = get_conv_copy_spec(state, [3, 5, 1], 1, accepted)
    assert spec.num_elements == elements
    assert torch.equal(copied(state, spec), state[5, accepted - 1 :].flatten())


@pytest.mark.parametrize(("accepted", "block"), [(1, 3), (2, 5), (3, 1)])
def test_a_state_space_state_is_kept_whole_from_the_block_of_the_last_accepted_draft(accepted, block):
    state = torch.rand(6, 2, 3, 4)
    spec = get_temporal_copy_spec(state, [3, 5, 1], 0, accepted)
    assert spec.num_elements == 24
    assert torch.equal(copied(state, spec), state[block].flatten())


def test_slots_may_lie_apart():
    pages = torch.rand(4, 64)
    state = pages[:, 8:32].view(4, 6, 4)
    spec = get_conv_copy_spec(state, [2], 0, 1)
    assert torch.equal(copied(state, spec), pages[2, 8:32])
