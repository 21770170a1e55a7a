"""M-RoPE: which pair turns by which row, equal rows, transformers' two layouts, a tower's two axes, position tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchplug.config import HfConfig
from torchplug.errors import CheckpointError, ContractError
from torchplug.layers import (
    GridSpan,
    MRotaryEmbedding,
    RotaryEmbedding,
    apply_rotary,
    axial_rotary,
    mrope_positions,
    mrope_rows,
    rope_from_config,
)
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLRotaryEmbedding,
    Qwen2VLVisionConfig,
    Qwen2VLVisionRotaryEmbedding,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_vision,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

ORACLES = {False: (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding), True: (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding)}


def rotary_of(parameters, head_dim=16, **more):
    return rope_from_config(HfConfig({"rope_parameters": parameters} | more, source="x/config.json"), head_dim, 128)


def turned_by_transformers(interleaved, parameters, head_dim, positions, x):
    config_class, rotary_class = ORACLES[interleaved]
    config = config_class(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters=dict(parameters),
        **({"head_dim": head_dim} if interleaved else {}),
    )
    cos, sin = rotary_class(config)(x, positions[:, None])
    heads = x.view(1, len(x), 2, head_dim).transpose(1, 2)
    return apply_rotary_pos_emb(heads, heads, cos, sin)[0].transpose(1, 2).reshape(len(x), -1)


@pytest.mark.parametrize(
    ("interleaved", "head_dim", "section"),
    [
        (False, 16, [2, 3, 3]),
        (False, 16, [8, 0, 0]),
        (False, 20, [1, 4, 5]),
        (True, 16, [4, 2, 2]),
        (True, 20, [4, 3, 3]),
        (True, 24, [4, 5, 3]),
        (True, 128, [24, 20, 20]),
    ],
)
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_the_rotation_equals_transformers(interleaved, head_dim, section, kind):
    parameters = {"rope_type": kind, "rope_theta": 5000.0, "mrope_section": section}
    if kind == "yarn":
        parameters |= {"factor": 4.0, "original_max_position_embeddings": 32}
    positions = torch.randint(0, 100, (3, 11))
    x = torch.randn(11, 2 * head_dim)
    expected = turned_by_transformers(interleaved, parameters, head_dim, positions, x)
    rotary = rotary_of(parameters | {"mrope_interleaved": interleaved}, head_dim)
    assert isinstance(rotary, MRotaryEmbedding)
    ours = apply_rotary(x, rotary(positions, torch.float32), head_dim)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@given(
    section=st.lists(st.integers(0, 4), min_size=2, max_size=5).filter(sum),
    interleaved=st.booleans(),
    data=st.data(),
)
def test_equal_rows_are_plain_rope_and_bit_for_bit_one_row(section, interleaved, data):
    head_dim = 2 * sum(section)
    theta = data.draw(st.floats(2, 1e6))
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 100_000), min_size=1, max_size=6)))
    plain = rotary_of({"rope_theta": theta}, head_dim)
    assert type(plain) is RotaryEmbedding
    by_rows = rotary_of({"rope_theta": theta, "mrope_section": section, "mrope_interleaved": interleaved}, head_dim)
    expected = plain(positions, torch.float32)  # perhaps by a kernel, whose sines have other last bits
    one_row = by_rows(positions, torch.float32)
    found = by_rows(positions.expand(len(section), -1), torch.float32)
    assert torch.equal(found.cos, one_row.cos) and torch.equal(found.sin, one_row.sin)
    torch.testing.assert_close(found.cos, expected.cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.sin, expected.sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_each_row_turns_its_own_pairs_and_no_others(row):
    rotary = rotary_of({"mrope_section": [2, 3, 3]})
    positions = torch.full((3, 1), 7)
    before = rotary(positions, torch.float32).cos.flatten()[:8]
    positions[row] = 9
    changed = rotary(positions, torch.float32).cos.flatten()[:8] != before
    assert changed.tolist() == [pair == row for pair in [0, 0, 1, 1, 1, 2, 2, 2]]


def test_rows_of_pairs():
    assert mrope_rows([1, 2, 3], interleaved=False) == [0, 1, 1, 2, 2, 2]
    assert mrope_rows([4, 2, 2], interleaved=True) == [0, 1, 2, 0, 1, 2, 0, 0]
    assert mrope_rows([2, 2], interleaved=True) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("parameters", "where", "says"),
    [
        ({"mrope_section": [2, 2, 2]}, "rope_parameters.mrope_section", "has 6 pairs in 3 rows, the head turns 8"),
        ({"mrope_section": [8]}, "rope_parameters.mrope_section", "8 pairs in 1 rows"),
        ({"mrope_section": 8}, "rope_parameters.mrope_section", "found 8"),
        ({"mrope_section": [4, 4.0]}, "rope_parameters.mrope_section", "expected a list of pairs per row"),
        ({"mrope_section": [9, -1]}, "rope_parameters.mrope_section", "expected a list of pairs per row"),
        (
            {"mrope_section": [4, 2, 2], "mrope_interleaved": "yes"},
            "rope_parameters.mrope_interleaved",
            "expected true or false",
        ),
        (
            {"mrope_section": [4, 2, 2], "rope_type": "dynamic", "factor": 2.0},
            "rope_parameters.rope_type",
            "dynamic type has no M-RoPE",
        ),
    ],
)
def test_a_section_that_does_not_fit_is_refused_by_key(parameters, where, says):
    with pytest.raises(CheckpointError) as caught:
        rotary_of(parameters)
    (problem,) = caught.value.problems
    assert problem.where == where and says in problem.says and problem.fix


def test_qwen2_vl_s_own_name_for_the_type_is_the_default_one():
    old = HfConfig({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6}, source="x")
    rotary = rope_from_config(old, 16, 128)
    assert isinstance(rotary, MRotaryEmbedding)
    assert torch.equal(rotary.inv_freq, rotary_of({"rope_theta": 1e6}).inv_freq)


def test_the_axes_of_a_tower_equal_transformers():
    head_dim, positions, x = 12, torch.randint(0, 9, (2, 7)), torch.randn(7, 3 * 12)
    config = Qwen2VLVisionConfig(embed_dim=36, num_heads=3, rope_parameters={"rope_type": "axial", "rope_theta": 700.0})
    cos, sin = Qwen2VLVisionRotaryEmbedding(config)(x, positions.T)
    heads = x.view(7, 3, head_dim)
    expected, _ = apply_rotary_pos_emb_vision(heads, heads, cos, sin)
    ours = apply_rotary(x, axial_rotary(head_dim, 700.0)(positions, torch.float32), head_dim)
    torch.testing.assert_close(ours, expected.reshape(7, -1), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="a head of 10 dimensions"):
        axial_rotary(10)


# Position tables


@given(
    texts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    grids=st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=4, max_size=4),
    steps=st.lists(st.floats(0, 5), min_size=4, max_size=4),
    order=st.randoms(),
)
def test_what_comes_after_an_item_exceeds_all_inside_and_the_delta_goes_on(texts, grids, steps, order):
    spans, index = [], 0
    for number, length in enumerate(texts):
        index += length
        if number < len(texts) - 1:
            spans.append(GridSpan(index, grids[number], steps[number]))
            index += spans[-1].num_tokens
    shuffled = list(spans)
    order.shuffle(shuffled)
    positions, delta = mrope_positions(index, shuffled)
    assert positions.shape == (3, index) and positions.dtype == torch.int64
    assert delta == (int(positions.max()) + 1 - index if index else 0)
    for span in spans:
        end = span.offset + span.num_tokens
        inside, after = positions[:, span.offset : end], positions[:, end:]
        assert int(inside.min()) == (int(positions[:, : span.offset].max()) + 1 if span.offset else 0)
        assert not after.numel() or int(after.min()) == int(inside.max()) + 1


def test_text_alone_counts_on():
    positions, delta = mrope_positions(5, [])
    assert torch.equal(positions, torch.arange(5).expand(3, 5)) and delta == 0
    assert mrope_positions(0, [])[0].shape == (3, 0)


def test_an_image_as_in_the_paper():
    positions, delta = mrope_positions(10, [GridSpan(2, (1, 2, 3))])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == -3


def test_time_is_rounded_down_after_it_is_multiplied():
    positions, _ = mrope_positions(4, [GridSpan(0, (4, 1, 1), 1.5)])
    assert positions[0].tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize(
    "spans", [[GridSpan(2, (1, 2, 2)), GridSpan(5, (1, 1, 1))], [GridSpan(8, (1, 2, 2))], [GridSpan(-1, (1, 1, 1))]]
)
def test_items_that_overlap_or_leave_the_prompt_are_refused(spans):
    with pytest.raises(ContractError, match="tokens from"):
        mrope_positions(10, spans)
