"""The backend for CUDA equals the reference backend, over ragged steps and scattered blocks.

On CPU its kernel is `fake_cuda.varlen_attn`, which checks every argument; the same tests run with PyTorch's own where
there is a CUDA device.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import float32_too, varlen_attn
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.forward_context import VARYING, BlockLayout, ForwardContext, set_forward_context
from torchplug.layers import Attention, allocate_kv_cache, sdpa, varlen
from torchplug.layers.attention_backend import choose_backend

BLOCK = 256
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def backend_on(device):
    return varlen.VarlenBackend(varlen_attn if device == "cpu" else varlen.load_kernel())


class Twins:
    """One layer with each backend, given the same steps; every block that no request has is NaN."""

    def __init__(
        self, device, *, heads=6, kv_heads=2, size=8, window=None, dtype=torch.bfloat16, num_blocks=12, seed=0
    ):
        self.device, self.dtype = torch.device(device), dtype
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)
        self.lengths, self.blocks = {}, {}
        self.layers = []
        for backend in (sdpa, backend_on(device)):
            layer = Attention(heads, size, size**-0.5, kv_heads, sliding_window=window)
            layer.backend = backend
            layer.kv_cache = allocate_kv_cache(layer.kv_cache_spec(), num_blocks, BLOCK, dtype, device, backend)
            for half in layer.kv_cache:
                half.fill_(float("nan"))
            self.layers.append(layer)

    def context(self, plan, width=0):
        """plan: {request: new tokens}. `width`: least columns of the block tables."""
        starts, slots = [0], []
        for request, new in plan.items():
            before = self.lengths.get(request, 0)
            self.lengths[request] = before + new
            blocks = self.blocks.setdefault(request, [])
            while len(blocks) * BLOCK < before + new:
                blocks.append(self.free.pop())
            slots += [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(before, before + new)]
            starts.append(starts[-1] + new)
        tables = [self.blocks[request] for request in plan]
        width = max(width, *map(len, tables))
        lengths = [self.lengths[request] for request in plan]

        def tensor(values, dtype=torch.int32):
            return torch.tensor(values, dtype=dtype, device=self.device)

        return ForwardContext(
            tensor(starts),
            tensor(lengths),
            tensor(slots, torch.int64),
            tensor([table + [1 << 20] * (width - len(table)) for table in tables]),
            BLOCK,
            tuple(plan.values()),
            tuple(lengths),
            tuple(map(tuple, tables)),
        )

    def rows(self, count):
        """Query, key and value as a fused projection gives them: slices of wider rows."""
        layer = self.layers[0]
        widths = [heads * layer.head_size for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)]
        fused = torch.randn(count, sum(widths), generator=self.generator) * 1.5
        return fused.to(self.device, self.dtype).split(widths, dim=-1)

    def step(self, plan, width=0):
        context = self.context(plan, width)
        rows = self.rows(sum(plan.values()))
        with set_forward_context(context):
            expected, found = (layer(*rows) for layer in self.layers)
        assert found.dtype == self.dtype and found.device == expected.device and found.shape == expected.shape
        tolerance = 2e-5 if self.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(6, 2, 8), (3, 3, 64), (5, 1, 24), (4, 2, 128)])
@pytest.mark.parametrize("window", [None, 1, 70, 300])
def test_prompts_continuations_and_single_tokens_share_a_step(device, dtype, shape, window):
    heads, kv_heads, size = shape
    twins = Twins(device, heads=heads, kv_heads=kv_heads, size=size, window=window, dtype=dtype)
    twins.step({"a": 255, "b": 1})
    twins.step({"a": 1, "b": 3, "c": 260})
    twins.step({"c": 1, "a": 1, "b": 1})
    twins.step({"b": 300, "a": 1})
    twins.step({"a": 1})


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_without_a_new_token_is_passed_over(device):
    twins = Twins(device)
    twins.step({"a": 3, "b": 4, "c": 1})
    twins.step({"a": 1, "b": 0, "c": 1})
    twins.step({"a": 1, "b": 0, "c": 2})


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_may_be_wider_than_its_requests(device):
    twins = Twins(device)
    twins.step({"a": 3, "b": 257}, width=7)
    twins.step({"a": 1, "b": 1}, width=7)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_equals_the_reference_in_float32(data):
    window = data.draw(st.sampled_from([None, 1, 2, 100, 256, 257, 400]), label="window")
    with float32_too():
        twins = Twins("cpu", window=window, dtype=torch.float32, num_blocks=16, seed=data.draw(st.integers(0, 99)))
        names = "abcd"[: data.draw(st.integers(1, 4))]
        for _ in range(data.draw(st.integers(1, 5))):
            order = data.draw(st.permutations(names))
            new = st.sampled_from([0, 1, 1, 1, 2, 60, 127, 199])
            plan = {name: data.draw(new) for name in order}
            plan = {name: count or 1 if name not in twins.lengths else count for name, count in plan.items()}
            if any(plan.values()):
                twins.step(plan)


def test_layers_of_a_step_share_a_plan_and_groups_do_not():
    first, second = backend_on("cpu"), backend_on("cpu")
    twins = Twins("cpu")
    context = twins.context({"a": 3})
    other = BlockLayout(context.slot_mapping + 1, context.block_tables + 1, ())
    context = ForwardContext(*(getattr(context, name) for name in ForwardContext.__slots__[:8]), (other,))
    (query, key, value), cache = twins.rows(3), twins.layers[1].kv_cache
    plan = first.plan_step(context, query, key, value, cache, None, group=0)
    assert second.plan_step(context, query, key, value, cache, None, group=0) is plan
    assert plan.window == (-1, 0) and first.plan_step(context, query, key, value, cache, 5, group=0).window == (4, 0)
    grouped = first.plan_step(context, query, key, value, cache, None, group=1)
    assert grouped.write is other.slot_mapping and grouped.block_table is other.block_tables


def test_nothing_is_read_on_the_host_for_a_step_that_is_recorded():
    twins = Twins("cpu")
    twins.step({"a": 3, "b": 7})
    context = twins.context({"a": 1, "b": 1})
    names = ForwardContext.__slots__
    held = {name: getattr(context, name) for name in names} | {"seq_lens_host": VARYING, "block_tables_host": VARYING}
    rows = twins.rows(2)
    reference, layer = twins.layers
    with set_forward_context(context):
        expected = reference(*rows)
    with set_forward_context(ForwardContext(**held)):
        torch.testing.assert_close(layer(*rows).float(), expected.float(), rtol=0, atol=2e-2)
    for read in (
        len,
        list,
        max,
        bool,
        lambda values: values[0],
        lambda values: 1 in values,
        lambda values: values == (),
    ):
        with pytest.raises(RuntimeError, match="read on the host"):
            read(VARYING)


def test_without_a_step_or_a_cache_a_layer_attends_by_the_reference():
    twins = Twins("cpu")
    rows = twins.rows(5)
    reference, layer = twins.layers
    assert torch.equal(layer(*rows), reference(*rows))
    layer.kv_cache = None
    context = twins.context({"a": 3, "b": 2})
    with set_forward_context(context):
        found = layer(*rows)
        torch.testing.assert_close(found, reference(*rows))
    with pytest.raises(RuntimeError, match="without one"):
        layer.backend.plan_step(context, *rows, None, None, group=0)


# -- the choice ------------------------------------------------------------------------------------------


@pytest.fixture
def ampere(monkeypatch):
    """A machine with a CUDA device, as far as the choice looks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return torch.device("cuda:0")


def choice(device, size=64, dtype=torch.bfloat16, cache_dtype=None):
    return choose_backend(size, cache_dtype or dtype, dtype, device)


def test_cuda_attends_half_precision_by_varlen_attn(ampere):
    from torch.nn.attention.varlen import varlen_attn as real

    for dtype in (torch.bfloat16, torch.float16):
        for size in (8, 64, 80, 256):
            chosen = choice(ampere, size, dtype)
            assert isinstance(chosen.backend, varlen.VarlenBackend) and not chosen.why
            assert chosen.backend._kernel is real and chosen.backend._takes_key_offsets


def test_the_cpu_attends_by_the_reference_and_says_nothing():
    assert choice(torch.device("cpu")).backend is sdpa and not choice(torch.device("cpu")).why


@pytest.mark.parametrize(
    ("change", "arguments", "why"),
    [
        (None, {"dtype": torch.float32}, "not float32"),
        (None, {"size": 20}, "no heads of size 20"),
        (None, {"size": 264}, "no heads of size 264"),
        (None, {"cache_dtype": torch.float16}, "the cache holds torch.float16"),
        ((torch.cuda, "get_device_capability", lambda device: (7, 5)), {}, "the device has 7.5"),
        ((torch.backends.cuda, "is_flash_attention_available", lambda: False), {}, "no flash attention"),
        ((torch, "__version__", "2.12.1+cu130"), {}, "this is 2.12.1"),
        ((torch.version, "hip", "7.0"), {}, "ROCm"),
        ((torch.nn.attention, "current_flash_attention_impl", lambda: "FA4"), {}, "'FA4' is active"),
    ],
)
def test_what_varlen_attn_cannot_do_goes_to_the_reference_with_a_reason(ampere, monkeypatch, change, arguments, why):
    if change is not None:
        monkeypatch.setattr(*change)
    chosen = choice(ampere, **arguments)
    assert chosen.backend is sdpa and why in chosen.why


def test_flash_attention_3_is_given_no_key_offsets(ampere, monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    backend = choice(ampere).backend
    twins = Twins("cpu")
    plan = backend.plan_step(twins.context({"a": 3}), *twins.rows(3), twins.layers[1].kv_cache, None, group=0)
    assert plan.cu_seq_k is None


def test_the_kernel_is_called_as_pytorch_declares_it():
    """The arguments that we pass exist in this PyTorch, under these names and in this order."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn as real

    names = list(inspect.signature(real).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"} < set(names)
    calls = []
    layer = SimpleNamespace(backend=varlen.VarlenBackend(lambda *args, **more: calls.append((args, more)) or args[0]))
    twins = Twins("cpu")
    context = twins.context({"a": 2})
    (query, key, value), cache = twins.rows(2), twins.layers[1].kv_cache
    plan = layer.backend.plan_step(context, query, key, value, cache, None, group=0)
    layer.backend.attend(query, key, value, twins.layers[1].kv_cache, plan, 2, 8, 0.5)
    ((args, more),) = calls
    inspect.signature(real).bind(*args, **more)
