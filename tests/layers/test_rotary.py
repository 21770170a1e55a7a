"""Rotary embedding against transformers: every scaling type, both config spellings, and how a dynamic base grows."""

import pytest
import torch
from torchplug.config import HfConfig
from torchplug.errors import CheckpointError
from torchplug.forward_context import ForwardContext, set_forward_context
from torchplug.layers import apply_rotary, rope_from_config
from transformers import LlamaConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_gptj
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

pytestmark = pytest.mark.usefixtures("kernels_or_torch")

MAX = 96
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3, narrow blend": {
        "factor": 4.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 2.5,
        "original_max_position_embeddings": 40,
    },
    "llama3, trained length from max_position_embeddings": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 24},
    "yarn, whole": {"factor": 4.0, "original_max_position_embeddings": 24, "truncate": False},
    "yarn, temperature": {"factor": 4.0, "original_max_position_embeddings": 24, "attention_factor": 0.7},
    "yarn, betas": {"factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 8, "beta_slow": 2},
    "yarn, mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 24,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn, ramp past the last pair": {
        "factor": 4.0,
        "original_max_position_embeddings": 10_000_000,
        "beta_fast": 100_000,
    },
    "yarn, trained length from max_position_embeddings": {"factor": 4.0},
}
SHAPES = [(5, 24, 10000.0), (3, 64, 500000.0), (2, 10, 300.0)]


def configs(kind, heads, head_dim, theta):
    """(spelling, config dict) pairs that mean the same to transformers."""
    base = {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX,
    }
    name, scaling = kind.split(",")[0], SCALINGS[kind]
    yield "new", base | {"rope_parameters": {"rope_type": name, "rope_theta": theta} | scaling}
    if name == "default":
        yield "old, null", base | {"rope_theta": theta, "rope_scaling": None}
    else:
        yield "old", base | {"rope_theta": theta, "rope_scaling": {"rope_type": name} | scaling}
        yield "older", base | {"rope_theta": theta, "rope_scaling": {"type": name} | scaling}


def ours(config, **kwargs):
    view = HfConfig(config, source="x/config.json")
    return rope_from_config(view, config["head_dim"], config["max_position_embeddings"], **kwargs)


def rotated_by_transformers(config, positions, query, key):
    """query, key: [tokens, heads * head_dim] -> the same, rotated."""
    rotary = LlamaRotaryEmbedding(LlamaConfig(**config))
    cos, sin = rotary(query[None], positions[None])
    heads = [x.view(1, len(positions), -1, config["head_dim"]).transpose(1, 2) for x in (query, key)]
    return [x.transpose(1, 2).reshape(len(positions), -1) for x in apply_rotary_pos_emb(*heads, cos, sin)]


@pytest.mark.parametrize(("heads", "head_dim", "theta"), SHAPES)
@pytest.mark.parametrize("kind", SCALINGS)
def test_rotation_equals_transformers_in_every_spelling(kind, heads, head_dim, theta):
    positions = torch.tensor([0, 1, 2, 17, 63, 64, MAX - 1])
    query, key = torch.randn(len(positions), heads * head_dim), torch.randn(len(positions), head_dim)
    for spelling, config in configs(kind, heads, head_dim, theta):
        expected = rotated_by_transformers(config, positions, query, key)
        rotary = ours(config)
        rotation = rotary(positions, torch.float32)
        for x, theirs in zip((query, key), expected, strict=True):
            torch.testing.assert_close(apply_rotary(x, rotation, head_dim), theirs, rtol=1e-5, atol=1e-5, msg=spelling)
        together = apply_rotary(torch.cat((query, key), dim=-1), rotation, head_dim)
        torch.testing.assert_close(together, torch.cat(expected, dim=-1), rtol=1e-5, atol=1e-5)


def test_cos_and_sin_are_computed_in_float32_then_cast():
    # In bfloat16 arithmetic position 4097 would not even be representable.
    config = dict(configs("default", 2, 16, 10000.0))["new"] | {"max_position_embeddings": 8192}
    positions = torch.tensor([4097])
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**config))(torch.empty(1, dtype=torch.bfloat16), positions[None])
    rotation = ours(config)(positions, torch.bfloat16)
    assert torch.equal(rotation.cos.flatten(), cos.flatten())
    assert torch.equal(rotation.sin.flatten().abs(), sin.flatten().abs())


def test_frequencies_are_float32_whatever_the_default_dtype():
    config = dict(configs("yarn", 2, 16, 10000.0))["new"]
    expected = ours(config).inv_freq
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = ours(config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(built.inv_freq, expected)


def test_no_rotary_key_at_all_means_the_default():
    config = {"head_dim": 16, "max_position_embeddings": 64}
    expected = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(ours(config).inv_freq, expected)
    torch.testing.assert_close(ours(config, theta=50.0).inv_freq, 1.0 / 50.0 ** (torch.arange(0, 16, 2) / 16))


def test_neighbouring_pairs_equal_gptj():
    head_dim, positions = 12, torch.arange(30)
    sin, cos = create_sinusoidal_positions(30, head_dim).split(head_dim // 2, dim=-1)
    x = torch.randn(30, 5 * head_dim)
    expected = apply_gptj(x.view(1, 30, 5, head_dim), sin[None], cos[None]).reshape(30, -1)
    rotation = ours({"head_dim": head_dim, "max_position_embeddings": 30}, interleaved=True)(positions, torch.float32)
    torch.testing.assert_close(apply_rotary(x, rotation, head_dim), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_partial_rotation_turns_the_first_dimensions_of_each_head_only(interleaved, inside):
    config = {"head_dim": 20, "max_position_embeddings": 64, "rope_theta": 700.0}
    config |= (
        {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.4}}
        if inside
        else {"partial_rotary_factor": 0.4}
    )
    x, positions = torch.randn(9, 3 * 20), torch.arange(9) + 3
    whole = ours({"head_dim": 8, "max_position_embeddings": 64, "rope_theta": 700.0}, interleaved=interleaved)
    turned = apply_rotary(x, ours(config, interleaved=interleaved)(positions, torch.float32), 20).view(9, 3, 20)
    heads = x.view(9, 3, 20)
    assert torch.equal(turned[..., 8:], heads[..., 8:])
    expected = apply_rotary(heads[..., :8].reshape(9, 24), whole(positions, torch.float32), 8).view(9, 3, 8)
    torch.testing.assert_close(turned[..., :8], expected)


def test_applying_keeps_the_input():
    x = torch.randn(3, 32)
    before = x.clone()
    apply_rotary(x, ours({"head_dim": 16, "max_position_embeddings": 8})(torch.arange(3), torch.float32), 16)
    assert torch.equal(x, before)


def dynamic():
    return dict(configs("dynamic", 2, 16, 10000.0))["new"]


def context_of(lengths, new):
    starts = torch.tensor([0, *new]).cumsum(0).int()
    tables = torch.arange(len(new), dtype=torch.int32)[:, None]
    return ForwardContext(
        starts, torch.tensor(lengths).int(), torch.zeros(sum(new)).long(), tables, 512, tuple(new), tuple(lengths),
        tuple((i,) for i in range(len(new))),
    )  # fmt: skip


def test_a_dynamic_base_follows_generate_token_by_token():
    # One prompt past the trained length, then single tokens, as generate() feeds transformers.
    theirs, rotary = LlamaRotaryEmbedding(LlamaConfig(**dynamic())), ours(dynamic())
    start = 0
    for new in (MAX + 20, 1, 1, 1, 30):
        positions = torch.arange(start, start + new)
        cos, _ = theirs(torch.empty(1), positions[None])
        alone = rotary(positions, torch.float32)
        with set_forward_context(context_of([start + new], [new])):
            served = rotary(positions, torch.float32)
        torch.testing.assert_close(alone.cos[:, 0], cos[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(served.cos[:, 0], cos[0], rtol=1e-5, atol=1e-5)
        start += new
    assert (rotary.inv_freq != theirs.inv_freq).any(), "the base never grew: the test shows nothing"


def test_a_dynamic_base_depends_on_the_request_alone():
    rotary = ours(dynamic())
    requests = [(MAX + 50, 3), (10, 4), (MAX + 1, 1), (MAX, 1)]
    alone = []
    for length, new in requests:
        with set_forward_context(context_of([length], [new])):
            alone.append(rotary(torch.arange(length - new, length), torch.float32).cos)
    with set_forward_context(context_of([length for length, _ in requests], [new for _, new in requests])):
        positions = torch.cat([torch.arange(length - new, length) for length, new in requests])
        batched = rotary(positions, torch.float32).cos
    torch.testing.assert_close(batched, torch.cat(alone), rtol=1e-6, atol=1e-6)
    assert rotary.depends_on_length


@pytest.mark.parametrize(
    ("config", "where", "says"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type", "'longrope' is not a known type"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_parameters.rope_type", "'su' is not a known type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor", "found '2'"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "rope_scaling.factor", "found True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0}}, "rope_scaling.factor", "found 0"),
        ({"rope_theta": -1}, "rope_theta", "found -1"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_parameters.rope_theta", "found nan"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor", "turns 3 of 16 dimensions"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor", "turns 24 of 16 dimensions"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention", "layer type"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "rope_scaling.low_freq_factor",
            "not below",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1}, "rope_theta", "above 1, found 1"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.type", "more than 2"),
        ({"rope_scaling": "yarn"}, "rope_scaling", "found 'yarn'"),
    ],
)
def test_a_config_that_makes_no_rotation_is_refused_by_key(config, where, says):
    with pytest.raises(CheckpointError) as caught:
        ours({"head_dim": 16, "max_position_embeddings": 64} | config)
    (problem,) = caught.value.problems
    assert caught.value.subject == "checkpoint config x/config.json"
    assert problem.where == where
    assert says in problem.says
    assert problem.fix


def test_an_unknown_type_lists_the_known_ones():
    with pytest.raises(CheckpointError, match="default, dynamic, linear, llama3, yarn"):
        ours({"head_dim": 16, "max_position_embeddings": 64, "rope_scaling": {"type": "ntk"}})
