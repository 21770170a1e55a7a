"""Attention of packed sequences: each as if it were alone, whatever stands around it; patches as convolutions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchplug.layers import PatchEmbed, attend_packed, image_patches, load_weights, pack_sequences


def alone(query, key, value, head_size, scale):
    """One sequence, written out."""
    heads = [x.view(len(x), -1, head_size).transpose(0, 1) for x in (query, key, value)]
    scores = heads[0] @ heads[1].transpose(1, 2) * scale
    return (scores.softmax(-1) @ heads[2]).transpose(0, 1).reshape(len(query), -1)


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    heads=st.integers(1, 3),
    head_size=st.sampled_from([1, 4, 6]),
)
def test_each_sequence_is_attended_as_if_it_were_alone(lengths, heads, head_size):
    total = sum(lengths)
    query, key, value = (torch.randn(total, heads * head_size) for _ in range(3))
    found = attend_packed(query, key, value, pack_sequences(lengths, "cpu"), head_size, 0.3)
    start = 0
    for length in filter(None, lengths):
        part = slice(start, start + length)
        expected = alone(query[part], key[part], value[part], head_size, 0.3)
        torch.testing.assert_close(found[part], expected, rtol=1e-5, atol=1e-5)
        start += length
    assert found.shape == query.shape


def test_sequences_of_one_length_are_one_batch_without_copies():
    sequences = pack_sequences([4] * 5, "cpu")
    assert sequences.groups == ((4, None),) and sequences.num_tokens == 20
    mixed = pack_sequences([3, 1, 3], "cpu")
    assert [(length, rows.tolist()) for length, rows in mixed.groups] == [(3, [0, 1, 2, 4, 5, 6]), (1, [3])]


def test_a_plan_for_other_tokens_is_refused():
    x = torch.randn(5, 8)
    with pytest.raises(ValueError, match="5 tokens, and the sequences have 4"):
        attend_packed(x, x, x, pack_sequences([4], "cpu"), 8, 1.0)


@pytest.mark.parametrize("bias", [False, True])
def test_patches_of_an_image_equal_a_convolution(bias):
    images = torch.randn(2, 3, 11, 9)
    convolution = nn.Conv2d(3, 6, kernel_size=4, stride=4, bias=bias)
    embed = PatchEmbed((3, 4, 4), 6, bias)
    assert load_weights(embed, convolution.state_dict().items()) == set(dict(embed.named_parameters()))
    expected = convolution(images).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embed(image_patches(images, 4)), expected, rtol=1e-5, atol=1e-5)


def test_patches_of_a_video_equal_a_convolution():
    patches = torch.randn(7, 3 * 2 * 4 * 4)
    convolution = nn.Conv3d(3, 6, kernel_size=(2, 4, 4), stride=(2, 4, 4), bias=False)
    embed = PatchEmbed((3, 2, 4, 4), 6)
    load_weights(embed, convolution.state_dict().items())
    torch.testing.assert_close(embed(patches), F.conv3d(patches.view(7, 3, 2, 4, 4), convolution.weight).view(7, 6))


def test_a_matrix_is_taken_as_well_and_another_shape_is_refused():
    embed = PatchEmbed((3, 4, 4), 6)
    matrix = torch.randn(6, 48)
    load_weights(embed, [("weight", matrix)])
    assert torch.equal(embed.weight, matrix)
    with pytest.raises(Exception, match=r"expected shape \[6, 48\] or \[6, 3, 4, 4\], found \[6, 3, 2, 4, 4\]"):
        load_weights(embed, [("weight", torch.randn(6, 3, 2, 4, 4))])
