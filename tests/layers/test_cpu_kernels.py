"""Every kernel against torch in float64, on the sizes where vectors and tiles end; compiled for this processor and for
older ones, whose code paths would otherwise never run here."""

import math
import platform
import random
import shutil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.layers import RotaryEmbedding, Rotation, apply_rotary
from torchplug.layers.cpu import build, kernels

DTYPES = [torch.float32, torch.bfloat16]
TARGETS = ["native", *(["x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else [])]


@pytest.fixture(scope="module", params=TARGETS, autouse=True)
def compiled(request, tmp_path_factory):
    """The kernels for a processor, in place of those that layers use."""
    if shutil.which("gcc") is None or kernels._function("torchplug_linear") is None:
        pytest.skip("no kernels can be compiled here")
    with pytest.MonkeyPatch.context() as patch:
        flags = [f"-march={request.param}" if flag == "-march=native" else flag for flag in build._FLAGS]
        patch.setattr(build, "_FLAGS", tuple(flags))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        library = build._loaded()
        patch.setattr(kernels, "library", lambda: library)
        patch.setattr(kernels, "_function", kernels._function.__wrapped__)
        yield


def close(found, exact, factor=4.0):
    """Within rounding of `found`'s dtype, relative to the largest number."""
    assert found.shape == exact.shape
    error = (found.double() - exact).abs().max().item() if found.numel() else 0.0
    largest = exact.abs().max().item() if exact.numel() else 0.0
    assert error <= factor * torch.finfo(found.dtype).eps * (largest + 1e-3), (error, largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [
        (0, 8, 8), (1, 1, 1), (1, 31, 7), (1, 64, 17), (2, 33, 8), (3, 100, 9), (4, 896, 24), (5, 37, 100), (7, 16, 3),
        (8, 128, 130), (9, 1030, 16), (16, 2600, 11), (33, 512, 64), (130, 1408, 20), (256, 4864, 19), (1, 64, 3000),
        (256, 4, 40),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
def test_linear(rows, in_features, out_features, bias, dtype):
    x, w = torch.randn(rows, in_features).to(dtype), torch.randn(out_features, in_features).to(dtype)
    b = torch.randn(out_features).to(dtype) if bias else None
    found = kernels.linear(w)(x, w, b)
    close(found, F.linear(x.double(), w.double(), None if b is None else b.double()), 8.0)


def test_sums_that_are_not_rounded():
    x, w = torch.randn(300, 200).bfloat16(), torch.randn(21, 200).bfloat16()
    exact = F.linear(x.double(), w.double())
    product = kernels.linear(w, result=torch.float32)
    found = product(x[:9], w, None)
    assert found.dtype is torch.float32
    close(found, exact[:9], 32.0)
    assert product(x, w, None).dtype is torch.float32  # so many rows are left to torch


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_result_does_not_depend_on_its_batch(dtype):
    x, w = torch.randn(41, 300).to(dtype), torch.randn(50, 300).to(dtype)
    product = kernels.linear(w)
    whole = product(x, w, None)
    for rows in (1, 2, 3, 4, 5, 8, 17):
        assert torch.equal(product(x[:rows], w, None), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_linear_passes_on_what_is_not_finite(value, dtype):
    x, w = torch.ones(5, 70).to(dtype), torch.ones(20, 70).to(dtype)
    x[2, 69] = value
    found = kernels.linear(w)(x, w, None)
    assert torch.equal(found.isfinite().all(1), torch.tensor([True, True, False, True, True]))
    assert bool(found[2].isnan().all()) == math.isnan(value)


def test_the_weight_is_read_where_it_is_now():
    w = torch.randn(8, 16)
    product, x = kernels.linear(w), torch.randn(2, 16)
    for other in (torch.randn(8, 16), torch.randn(16, 8).T):
        torch.testing.assert_close(product(x, other, None), F.linear(x, other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (1, 16), (3, 37), (2, 5, 64), (40, 500), (4, 3, 24)])
def test_rms_norm(shape, dtype):
    weight, eps = torch.randn(shape[-1]).to(dtype), 1e-5
    norm = kernels.rms_norm(weight)
    wide = torch.randn(*shape[:-1], shape[-1] + 7).to(dtype)
    x, residual = wide[..., : shape[-1]], torch.randn(shape).to(dtype)

    def exact(x):
        return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    close(norm(x, weight, None, eps)[0], exact(x))
    normalised, total = norm(x, weight, residual, eps)
    assert torch.equal(total, x + residual)
    close(normalised, exact(total))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 74), (1, 9728), (70, 600)])
def test_silu_and_mul(shape, dtype):
    x = (torch.randn(shape) * 20).to(dtype)
    gate, up = x.double().chunk(2, -1)
    close(kernels.silu_and_mul(x), F.silu(gate) * up)


def test_silu_of_the_very_large_and_of_nan():
    x = torch.tensor([[200.0, -200.0, math.nan, 0.0, 1.0, 1.0, 1.0, 1.0]])
    found = kernels.silu_and_mul(x)[0]
    assert found[0] == 200.0 and abs(found[1]) < 1e-30 and found[2].isnan() and found[3] == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(16, 16), (64, 64), (64, 24), (80, 20), (6, 2)])
def test_rotary(head_size, rotary_dim, interleaved, dtype, monkeypatch):
    x = torch.randn(5, 3 * head_size + 4).to(dtype)[:, : 3 * head_size]
    cos, sin = torch.randn(2, 5, 1, rotary_dim).to(dtype)
    rotation = Rotation(cos, sin, interleaved)
    found = kernels.rotary(x, cos, sin, head_size, interleaved)
    monkeypatch.setattr(kernels, "_function", lambda name: None)
    exact = Rotation(cos.double(), sin.double(), interleaved)
    close(found, apply_rotary(x.double(), exact, head_size))
    assert not torch.equal(apply_rotary(x, rotation, head_size), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rows", "pairs"), [(0, 4), (1, 1), (3, 12), (500, 64)])
def test_rotation(rows, pairs, interleaved, dtype, monkeypatch):
    embedding = RotaryEmbedding(torch.rand(pairs), attention_scaling=1.3, interleaved=interleaved)
    positions = torch.arange(rows) * 97
    found = embedding(positions, dtype)
    monkeypatch.setattr(kernels, "_function", lambda name: None)
    exact = embedding(positions, torch.float32)
    assert found.interleaved == interleaved
    close(found.cos, exact.cos.double())
    close(found.sin, exact.sin.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 16, 63, 8192, 20000])
def test_argmax(size, dtype):
    x = torch.randint(-50, 50, (6, size)).to(dtype)  # ties, of which the first counts
    x[1] = -math.inf
    x[2, size // 2] = math.inf
    found = kernels.argmax(x)
    best = x.amax(-1, keepdim=True)
    assert found.tolist() == [row.tolist().index(True) for row in x == best]
    x[3, size - 1] = math.nan
    assert kernels.argmax(x).tolist() == [*found[:3].tolist(), -1, *found[4:].tolist()]


@st.composite
def steps(draw):
    lengths = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16, 127, 128, 129, 257])
    return {
        "lengths": draw(st.lists(lengths, min_size=1, max_size=5)),
        "block_size": draw(st.sampled_from([1, 4, 16])),
        "window": draw(st.sampled_from([None, 1, 3, 8, 130])),
        "num_kv_heads": draw(st.sampled_from([1, 2, 3])),
        "group": draw(st.sampled_from([1, 2, 3, 4, 7, 9])),
        "head_size": draw(st.sampled_from([16, 40, 64, 80, 128])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=60, deadline=None)
@given(steps())
def test_paged_attention(step):
    lengths, size, dtype = step["lengths"], step["block_size"], step["dtype"]
    kv_heads, group, head_size = step["num_kv_heads"], step["group"], step["head_size"]
    torch.manual_seed(step["seed"])
    needed = [-(-length // size) for length in lengths]
    free = list(range(sum(needed) + 3))
    random.Random(step["seed"]).shuffle(free)
    tables = torch.full((len(lengths), max(needed)), 2**30, dtype=torch.int32)  # an id that must not be followed
    slots = (sum(needed) + 3) * size
    keys, values = torch.full((2, slots, kv_heads, head_size), math.nan).to(dtype)  # slots that must not be read
    history = []
    for request, count in enumerate(needed):
        tables[request, :count] = torch.tensor([free.pop() for _ in range(count)])
    new = torch.randn(len(lengths), (group + 2) * kv_heads * head_size).to(dtype)
    query, key, value = new.split([group * kv_heads * head_size, kv_heads * head_size, kv_heads * head_size], -1)
    where = []
    for request, length in enumerate(lengths):
        places = torch.arange(length)
        at = tables[request][places // size].long() * size + places % size
        past = torch.randn(2, length, kv_heads, head_size).to(dtype)
        past[0, -1], past[1, -1] = (part[request].view(kv_heads, head_size) for part in (key, value))
        keys[at[:-1]], values[at[:-1]] = past[0, :-1], past[1, :-1]
        first = 0 if step["window"] is None else max(0, length - step["window"])
        keys[at[:first]], values[at[:first]] = math.nan, math.nan  # behind the window
        history.append(past[:, first:].double())
        where.append(int(at[-1]))
    paged = kernels.PagedStep(
        tables, torch.tensor(lengths, dtype=torch.int32), torch.tensor(where), size, step["window"]
    )
    found = kernels.paged_attention(paged, query, key, value, keys, values, kv_heads, head_size, 0.2)
    exact = []
    for request, (past_keys, past_values) in enumerate(history):
        heads = query[request].double().view(kv_heads, group, head_size)
        scores = torch.einsum("hgd,thd->hgt", heads, past_keys) * 0.2
        exact.append(torch.einsum("hgt,thd->hgd", scores.softmax(-1), past_values).flatten())
    close(found, torch.stack(exact), 8.0)
    assert torch.equal(keys[where].flatten(1), key) and torch.equal(values[where].flatten(1), value)


def test_a_request_is_attended_alike_alone_and_in_company():
    lengths, size, width = [300, 5, 129], 16, 19
    tables = torch.arange(3 * width, dtype=torch.int32).view(3, width)
    keys, values = torch.randn(2, 3 * width * size, 2, 64)
    query, key, value = torch.randn(3, 256), torch.randn(3, 128), torch.randn(3, 128)
    slots = torch.tensor([(index * width + (n - 1) // size) * size + (n - 1) % size for index, n in enumerate(lengths)])

    def attend(rows):
        step = kernels.PagedStep(tables[rows], torch.tensor(lengths, dtype=torch.int32)[rows], slots[rows], size, None)
        return kernels.paged_attention(step, query[rows], key[rows], value[rows], keys, values, 2, 64, 0.125)

    together = attend([0, 1, 2])
    for row in range(3):
        assert torch.equal(attend([row])[0], together[row])


def test_tensors_that_no_kernel_can_read_go_to_torch():
    w = torch.randn(8, 16)
    product = kernels.linear(w)
    meta = product(torch.empty(2, 16, device="meta"), w.to("meta"), None)
    assert meta.is_meta and meta.shape == (2, 8)
    x = torch.randn(2, 16, requires_grad=True)
    product(x, w, None).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(2, 16))
    strided = torch.randn(16, 2).T
    torch.testing.assert_close(product(strided, w, None), F.linear(strided, w))
    assert product(torch.randn(2, 16).double(), w.double(), None).dtype is torch.float64
    with pytest.raises(RuntimeError):
        product(torch.randn(2, 15), w, None)
    assert kernels.linear(w.half()) is None
    assert kernels.silu_and_mul(torch.randn(2, 16, requires_grad=True)) is None
    assert kernels.argmax(torch.empty(2, 16, device="meta")) is None


def test_fake_tensors_and_compiled_models_go_to_torch():
    from torch._subclasses import FakeTensorMode

    w = torch.randn(8, 16)
    product = kernels.linear(w)
    with FakeTensorMode() as mode:
        fake = product(mode.from_tensor(torch.randn(2, 16)), mode.from_tensor(w), None)
    assert fake.shape == (2, 8)
    whole = torch.compile(lambda x: product(x, w, None) * 2, backend="eager", fullgraph=True)
    x = torch.randn(2, 16)
    torch.testing.assert_close(whole(x), F.linear(x, w) * 2)


def test_tensors_of_another_width_are_not_read_past_their_end():
    x, cos = torch.randn(3, 256), torch.randn(3, 1, 128)
    assert kernels.rotary(x, cos, cos, 64, False) is None
    with pytest.raises(RuntimeError, match="size"):
        apply_rotary(x, Rotation(cos, cos, False), 64)
    keys = torch.zeros(1, 4, 8, 16)
    assert kernels.pages(torch.zeros(2, 64), torch.zeros(2, 64), torch.zeros(2, 64), keys)
    for query, key, value in ((64, 32, 32), (64, 64, 32), (96, 64, 64), (32, 64, 64)):
        assert not kernels.pages(torch.zeros(2, query), torch.zeros(2, key), torch.zeros(2, value), keys)
    assert not kernels.pages(torch.zeros(3, 64), torch.zeros(2, 64), torch.zeros(2, 64), keys)
