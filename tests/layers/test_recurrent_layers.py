"""Recurrent layers over ragged steps against the recurrences written out in float64, token by token.

Every layer is computed by the native kernels and by torch.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_cases import without_kernels
from state_steps import PADDING, Part, States, context_of
from torchplug.forward_context import set_forward_context
from torchplug.layers import CausalConv1d, GatedRMSNorm, MambaMixer, MambaMixer2, ShortConv, StateSettings
from torchplug.layers.cpu.build import library
from torchplug.layers.state_step import state_step

HIDDEN = 20


def conv_reference(conv, x):
    x = F.pad(x.double(), (0, 0, conv.kernel_size - 1, 0))
    weight = conv.weight.double().squeeze(1)
    out = sum(x[tap : len(x) - conv.kernel_size + 1 + tap] * weight[:, tap] for tap in range(conv.kernel_size))
    out = out if conv.bias is None else out + conv.bias.double()
    return out if conv.activation is None else conv.activation(out)


def linear(layer, x):
    return F.linear(x, layer.weight.double(), None if layer.bias is None else layer.bias.double())


def mamba_reference(layer, hidden):
    x, gate = linear(layer.in_proj, hidden.double()).chunk(2, dim=-1)
    x = conv_reference(layer.conv1d, x)
    dt, b, c = linear(layer.x_proj, x).split(list(layer._widths), dim=-1)
    if layer.norm_eps is not None:
        norms = ("dt_layernorm", "b_layernorm", "c_layernorm")
        weights = [getattr(layer, name).weight.double() if layer.norm_weights else None for name in norms]
        dt, b, c = (
            F.rms_norm(y, y.shape[-1:], weight, layer.norm_eps) for y, weight in zip((dt, b, c), weights, strict=True)
        )
    dt = F.softplus(linear(layer.dt_proj, dt))
    decay, state, out = -layer.A_log.double().exp(), 0, []
    for t in range(len(x)):
        state = state * (dt[t, :, None] * decay).exp() + dt[t, :, None] * x[t, :, None] * b[t]
        out.append((state * c[t]).sum(-1) + layer.D.double() * x[t])
    return linear(layer.out_proj, torch.stack(out) * F.silu(gate))


def mamba2_reference(layer, hidden):
    gate, xbc, dt = linear(layer.in_proj, hidden.double()).split(list(layer._widths), dim=-1)
    x, b, c = conv_reference(layer.conv1d, xbc).split(list(layer._conv_widths), dim=-1)
    tokens, group = len(x), layer.num_heads // layer.n_groups
    x = x.reshape(tokens, layer.num_heads, layer.head_dim)
    b, c = (y.reshape(tokens, layer.n_groups, -1).repeat_interleave(group, 1) for y in (b, c))
    dt = F.softplus(dt + layer.dt_bias.double()).clamp(*layer._limit)
    decay, state, out = -layer.A_log.double().exp(), 0, []
    for t in range(tokens):
        state = state * (dt[t] * decay).exp()[:, None, None] + (dt[t, :, None] * x[t])[..., None] * b[t][:, None]
        out.append((state * c[t][:, None]).sum(-1) + layer.D.double()[:, None] * x[t])
    y = torch.stack(out).flatten(1) * F.silu(gate)
    y = y.view(tokens, layer.norm.groups, -1)
    y = (y * (y.square().mean(-1, keepdim=True) + layer.norm.eps).rsqrt()).flatten(1) * layer.norm.weight.double()
    return linear(layer.out_proj, y)


def short_conv_reference(layer, hidden):
    b, c, x = linear(layer.in_proj, hidden.double()).chunk(3, dim=-1)
    return linear(layer.out_proj, c * conv_reference(layer.conv, b * x))


def mixer(**options):
    return MambaMixer(
        HIDDEN, 37, **{"state_size": 9, "time_step_rank": 3, "conv_kernel": 4, "settings": StateSettings()} | options
    )


def mixer2(**options):
    defaults = {"num_heads": 6, "head_dim": 7, "state_size": 9, "n_groups": 3, "settings": StateSettings()}
    options = defaults | options
    return MambaMixer2(HIDDEN, options["num_heads"] * options["head_dim"], **options)


LAYERS = {
    "mamba": (mixer, mamba_reference),
    "mamba, filter of 2, no bias of it": (lambda: mixer(conv_kernel=2, use_conv_bias=False), mamba_reference),
    "mamba, filter of 9": (lambda: mixer(conv_kernel=9), mamba_reference),
    "mamba, biases, gelu": (lambda: mixer(use_bias=True, activation=F.gelu), mamba_reference),
    "mamba, state of 16": (lambda: mixer(state_size=16), mamba_reference),
    "mamba, normed": (lambda: mixer(norm_eps=1e-3), mamba_reference),
    "mamba, normed with weights": (lambda: mixer(norm_eps=1e-3, norm_weights=True), mamba_reference),
    "mamba 2": (mixer2, mamba2_reference),
    "mamba 2, one group": (lambda: mixer2(n_groups=1), mamba2_reference),
    "mamba 2, a group for each head": (lambda: mixer2(n_groups=6), mamba2_reference),
    "mamba 2, norm in parts": (lambda: mixer2(norm_groups=3, norm_eps=1e-2), mamba2_reference),
    "mamba 2, steps limited": (lambda: mixer2(time_step_limit=(0.5, 1.0)), mamba2_reference),
    "mamba 2, heads of 16, state of 64": (
        lambda: mixer2(num_heads=2, n_groups=1, head_dim=16, state_size=64),
        mamba2_reference,
    ),
    "mamba 2, heads of 33, state of 128": (
        lambda: mixer2(num_heads=2, n_groups=2, head_dim=33, state_size=128),
        mamba2_reference,
    ),
    "mamba 2, filter of 3, no bias of it": (lambda: mixer2(conv_kernel=3, use_conv_bias=False), mamba2_reference),
    "mamba 2, biases, gelu": (lambda: mixer2(use_bias=True, activation=F.gelu), mamba2_reference),
    "mamba 2, rows for drafts": (lambda: mixer2(settings=StateSettings(num_spec=2)), mamba2_reference),
    "short convolution": (lambda: ShortConv(HIDDEN, 3, settings=StateSettings(), bias=True), short_conv_reference),
    "short convolution, rows for drafts": (
        lambda: ShortConv(HIDDEN, 4, settings=StateSettings(num_spec=3)),
        short_conv_reference,
    ),
}


def made(name, computed_by, dtype=torch.float32):
    if computed_by == "kernels" and library() is None:
        pytest.skip("there are no kernels here")
    generator = torch.Generator().manual_seed(0)
    layer = LAYERS[name][0]()
    with torch.no_grad():
        for _, parameter in sorted(layer.named_parameters()):
            if parameter.dim() == 1:
                parameter.uniform_(-0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 2 / math.sqrt(parameter[0].numel()), generator=generator)
        layer = layer.to(dtype)
        for part in layer.modules():
            if hasattr(part, "process_weights_after_loading"):
                part.process_weights_after_loading()
    if computed_by == "torch":
        without_kernels(layer)
    return layer, LAYERS[name][1]


def close(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape
    off = (found.double() - expected).abs().max() / expected.abs().max()
    assert off <= tolerance, off


def hidden(tokens, seed=0):
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


both = pytest.mark.parametrize("computed_by", ["kernels", "torch"])
every_layer = pytest.mark.parametrize("name", LAYERS)


@both
@every_layer
@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 16, 17, 64, 65, 150])
def test_without_a_context_a_batch_is_one_sequence(name, computed_by, tokens):
    layer, reference = made(name, computed_by)
    x = hidden(tokens)
    with torch.inference_mode():
        close(layer(x), reference(layer, x))


@both
@every_layer
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_steps_of_any_make_up_give_what_each_sequence_gives(name, computed_by, data):
    layer, reference = made(name, computed_by)
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=5))
    slots = data.draw(st.permutations(range(6)))
    texts = [hidden(length, seed) for seed, length in enumerate(lengths)]
    states, done, rows = States(layer, 6), [0] * len(texts), [[] for _ in texts]
    while left := [i for i, text in enumerate(texts) if done[i] < len(text)]:
        parts, owners = [], []
        for index in data.draw(st.lists(st.sampled_from([*left, PADDING]), min_size=1, unique=True)):
            if index == PADDING:
                parts.append(Part(PADDING, hidden(3), 0, data.draw(st.integers(0, 3))))
            else:
                stop = min(len(texts[index]), done[index] + data.draw(st.sampled_from([1, 1, 2, 5, 16, 70])))
                parts.append(Part(slots[index], texts[index], done[index], stop))
                done[index] = stop
            owners.append(index)
        for index, result in zip(owners, states.step(parts), strict=True):
            if index != PADDING:
                rows[index].append(result)
    for text, found in zip(texts, rows, strict=True):
        close(torch.cat(found), reference(layer, text))


@both
@every_layer
def test_a_context_without_states_keeps_nothing(name, computed_by):
    layer, reference = made(name, computed_by)
    texts = [hidden(length, length) for length in (5, 1, 20)]
    parts = [Part(slot, text, 0, len(text)) for slot, text in enumerate(texts)]
    with torch.inference_mode(), set_forward_context(context_of(parts)):
        found = layer(torch.cat(texts)).split([len(text) for text in texts])
    for ours, text in zip(found, texts, strict=True):
        close(ours, reference(layer, text))


@both
@every_layer
def test_no_tokens(name, computed_by):
    layer, _ = made(name, computed_by)
    with torch.inference_mode():
        assert layer(hidden(0)).shape == (0, HIDDEN)
        states = States(layer, 2)
        assert states.step([Part(1, hidden(3), 3, 3), Part(PADDING, hidden(1), 0, 0)])[0].shape == (0, HIDDEN)


@both
@every_layer
def test_a_step_of_padding_alone(name, computed_by):
    layer, _ = made(name, computed_by)
    for tokens in (1, 4):
        (rows,) = States(layer, 2).step([Part(PADDING, hidden(tokens), 0, tokens)])
        assert rows.isfinite().all()


@pytest.mark.parametrize("name", ["mamba", "mamba 2", "short convolution"])
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("computed_by", ["kernels", "torch"])
def test_bfloat16_with_states_of_any_dtype(name, state, computed_by):
    layer, reference = made(name, computed_by, torch.bfloat16)
    layer._settings = StateSettings(state, state)
    x = hidden(40).bfloat16()
    expected = reference(layer, x)
    with torch.inference_mode():
        close(layer(x), expected, 0.05)
    states = States(layer, 3)
    rows = states.step([Part(2, x, 0, 17)]) + [states.step([Part(2, x, at, at + 1)])[0] for at in range(17, 40)]
    close(torch.cat(rows), expected, 0.05)


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_serve_what_they_are_made_for(name):
    """That the cases above are not all computed by torch."""
    layer, _ = made(name, "kernels")
    missing = {"mamba, filter of 9": {"conv1d"}, "mamba, biases, gelu": {"conv1d"}, "mamba 2, biases, gelu": {"conv1d"}}
    own = (MambaMixer, MambaMixer2, CausalConv1d, GatedRMSNorm)
    without = {part for part, module in layer.named_modules() if isinstance(module, own) and module._native is None}
    assert without == missing.get(name, set())


def paged(shape, room):
    size = math.prod(shape)
    return torch.full((4, size + room), float("nan")).narrow(1, room // 2, size).view(4, *shape)


@pytest.mark.parametrize("room", [64, 200])
def test_states_may_lie_apart_in_pages(room):
    """As where several states of a layer are packed into one page per slot."""
    layer, reference = made("mamba 2", "kernels")
    text = hidden(30)
    for computed_by in ("kernels", "torch"):
        if computed_by == "torch":
            without_kernels(layer)
        layer.state = tuple(paged(shape, room) for shape in layer.state_shapes())
        rows = []
        for start, stop in ((0, 20), (20, 21), (21, 30)):
            with torch.inference_mode(), set_forward_context(context_of([Part(2, text, start, stop)])):
                rows.append(layer(text[start:stop]))
        close(torch.cat(rows), reference(layer, text))


def test_heads_that_do_not_make_up_the_channels_are_refused():
    with pytest.raises(ValueError, match="6 heads of size 7 do not make up 40 channels"):
        MambaMixer2(HIDDEN, 40, num_heads=6, head_dim=7, state_size=9, settings=StateSettings())
    with pytest.raises(ValueError, match="10 channels cannot be split into 3 groups"):
        GatedRMSNorm(10, groups=3)


def test_a_steep_decay_neither_overflows_nor_loses_what_follows():
    """Decays that fall below the smallest number within a chunk, next to tokens that matter."""
    for name in ("mamba", "mamba 2"):
        for computed_by in ("kernels", "torch"):
            layer, reference = made(name, computed_by)
            with torch.no_grad():
                layer.A_log.add_(6)
                layer.process_weights_after_loading()
                if computed_by == "torch":
                    without_kernels(layer)
                x = hidden(100) * 3
                close(layer(x), reference(layer, x), 1e-4)


@pytest.mark.parametrize(("tokens", "width"), [(3, 32), (3, 96)])
def test_inputs_of_another_width_are_refused_and_not_read_past_their_end(tokens, width):
    convolution, norm = CausalConv1d(64, 4), GatedRMSNorm(64)
    for layer in (convolution, norm):
        for parameter in layer.parameters():
            torch.nn.init.ones_(parameter)
        layer.process_weights_after_loading()
    with pytest.raises(RuntimeError, match="size"):
        convolution(torch.ones(tokens, width), None, state_step(torch.ones(tokens, width)))
    with pytest.raises(RuntimeError, match="size"):
        norm(torch.ones(tokens, width), torch.ones(tokens, 64))
    with pytest.raises(RuntimeError, match="size"):
        norm(torch.ones(tokens, 64), torch.ones(tokens, width))
