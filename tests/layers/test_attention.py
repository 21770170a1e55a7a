"""Attention over ragged batches against a plain softmax, one token at a time, in float64.

A `Batch` plays the runner: it owns requests, gives each its blocks, writes a ForwardContext per step and remembers
every query, key and value, from which the reference is computed.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.forward_context import ForwardContext, set_forward_context
from torchplug.layers import Attention, KVCacheSpec, allocate_kv_cache

pytestmark = pytest.mark.usefixtures("kernels_or_torch")

SHAPES = [(5, 1, 24), (6, 2, 8), (3, 3, 16), (9, 3, 64)]


def reference(layer, query, key, value):
    """Attention of one sequence: [tokens, heads * size] each, float64."""
    tokens, size = query.shape[0], layer.head_size
    group = layer.num_heads // layer.num_kv_heads
    query = query.double().view(tokens, layer.num_heads, size)
    key = key.double().view(tokens, layer.num_kv_heads, size)
    value = value.double().view(tokens, layer.num_kv_heads, size)
    result = torch.empty_like(query)
    for position in range(tokens):
        first = 0 if layer.sliding_window is None else max(0, position + 1 - layer.sliding_window)
        for head in range(layer.num_heads):
            seen = slice(first, position + 1)
            scores = key[seen, head // group] @ query[position, head] * layer.scale
            result[position, head] = scores.softmax(0) @ value[seen, head // group]
    return result.view(tokens, -1)


class Batch:
    def __init__(
        self, heads=6, kv_heads=2, size=8, *, window=None, block_size=64, num_blocks=16, dtype=torch.float32, seed=0
    ):
        self.layer = Attention(heads, size, size**-0.5, kv_heads, sliding_window=window)
        self.layer.kv_cache = allocate_kv_cache(self.layer.kv_cache_spec(), num_blocks, block_size, dtype, "cpu")
        for half in self.layer.kv_cache:
            half.fill_(float("nan"))  # what no request wrote must never be read
        self.block_size, self.dtype = block_size, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.blocks, self.tokens, self.results = {}, {}, {}

    def add(self, request, blocks=None):
        self.blocks[request] = list(blocks or [])
        self.tokens[request] = tuple(self._rows(0))
        self.results[request] = []

    def step(self, plan):
        """plan: {request: new tokens}, in batch order."""
        starts, lengths, slots = [0], [], []
        for request, new in plan.items():
            before = len(self.tokens[request][0])
            self.tokens[request] = tuple(
                torch.cat(pair) for pair in zip(self.tokens[request], self._rows(new), strict=True)
            )
            lengths.append(before + new)
            while len(self.blocks[request]) * self.block_size < before + new:
                self.blocks[request].append(self.free.pop())
            slots += [
                self.blocks[request][position // self.block_size] * self.block_size + position % self.block_size
                for position in range(before, before + new)
            ]
            starts.append(starts[-1] + new)
        tables = [self.blocks[request] for request in plan]
        widest = max(map(len, tables))
        context = ForwardContext(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(slots),
            torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32),
            self.block_size,
            tuple(plan.values()),
            tuple(lengths),
            tuple(map(tuple, tables)),
        )
        flat = [
            torch.cat([self.tokens[request][which][-new:] for request, new in plan.items() if new])
            for which in range(3)
        ]
        with set_forward_context(context):
            result = self.layer(*flat)
        assert result.shape == (starts[-1], self.layer.num_heads * self.layer.head_size)
        for request, start, stop in zip(plan, starts, starts[1:], strict=False):
            self.results[request].append(result[start:stop])

    def check(self, tolerance=2e-5):
        for request, tokens in self.tokens.items():
            got = torch.cat(self.results[request])
            torch.testing.assert_close(
                got.double(),
                reference(self.layer, *tokens),
                rtol=0,
                atol=tolerance,
                msg=lambda m, r=request: f"{r}: {m}",
            )

    def _rows(self, count):
        widths = (self.layer.num_heads, self.layer.num_kv_heads, self.layer.num_kv_heads)
        # Wide scores, so that a wrong scale, mask or neighbour changes the result.
        return [
            (torch.randn(count, width * self.layer.head_size, generator=self.generator) * 1.5).to(self.dtype)
            for width in widths
        ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_without_a_context_the_batch_is_one_causal_sequence(shape, tokens, window):
    batch = Batch(*shape, window=window)
    query, key, value = batch._rows(tokens)
    torch.testing.assert_close(
        batch.layer(query, key, value).double(), reference(batch.layer, query, key, value), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 6])
def test_prompt_continuation_and_single_tokens_of_one_request(shape, window):
    batch = Batch(*shape, window=window)
    batch.add("a")
    for new in (7, 1, 1, 12, 1, 2):
        batch.step({"a": new})
    batch.check()


@pytest.mark.parametrize("shape", SHAPES)
def test_prefills_continuations_and_decodes_share_a_step(shape):
    batch = Batch(*shape)
    for name in "abcd":
        batch.add(name)
    batch.step({"a": 9, "b": 1})
    batch.step({"b": 1, "c": 5, "a": 4})
    batch.step({"a": 1, "d": 1, "c": 6, "b": 1})
    batch.step({"d": 1, "c": 1, "b": 1, "a": 1})
    batch.check()


def test_a_request_with_no_new_token_is_passed_over():
    batch = Batch()
    for name in "abc":
        batch.add(name)
    batch.step({"a": 3, "b": 4, "c": 1})
    batch.step({"a": 1, "b": 0, "c": 2})
    batch.check()


@pytest.mark.parametrize("blocks", [[4, 5, 6], [6, 5, 4], [9, 2, 13], [2, 3, 9]])
@pytest.mark.parametrize("window", [None, 3, 8, 11])
def test_a_request_over_several_blocks_in_any_order(blocks, window):
    batch = Batch(window=window, block_size=4)
    batch.add("a", blocks)
    for new in (3, 1, 1, 4, 1, 1, 1):
        batch.step({"a": new})
    batch.check()


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 5, 6), (5, 6, 6), (3, 9, 4)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (3, 4, 9), (0, 2, 4)])
@pytest.mark.parametrize("window", [None, 2])
def test_decodes_of_equal_and_unequal_length_in_neighbouring_and_distant_slots(lengths, order, window):
    batch = Batch(window=window)
    for name, block, length in zip("abc", order, lengths, strict=True):
        batch.add(name, [block])
        batch.step({name: length})
    for _ in range(3):
        batch.step(dict.fromkeys("abc", 1))
    batch.check()


def test_decodes_that_fill_their_blocks_are_told_from_those_that_overflow_them():
    # Equal lengths in neighbouring runs of two blocks each: not one block per request.
    batch = Batch(block_size=4)
    batch.add("a", [0, 1])
    batch.add("b", [2, 3])
    batch.step({"a": 3, "b": 3})
    for _ in range(5):
        batch.step({"a": 1, "b": 1})
    batch.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 16)])
def test_half_precision_is_close(dtype, window, shape):
    batch = Batch(*shape, window=window, dtype=dtype)
    for name in "ab":
        batch.add(name)
    for plan in ({"a": 20}, {"a": 5, "b": 1}, {"b": 1, "a": 1}, {"a": 1}):
        batch.step(plan)
    batch.check(tolerance=0.06)


def test_a_context_without_a_cache_takes_new_requests_only():
    batch = Batch()
    batch.layer.kv_cache = None
    batch.add("a")
    batch.add("b")
    batch.step({"a": 5, "b": 3})
    batch.check()
    with pytest.raises(RuntimeError, match=r"without a kv_cache .* lengths \(6,\)"):
        batch.step({"a": 1})


def test_layers_with_different_windows_share_a_step():
    wide, narrow = Batch(), Batch(window=3, seed=0)
    query, key, value = wide._rows(9)
    starts, slots = torch.tensor([0, 9]).int(), torch.arange(9)
    context = ForwardContext(
        starts, starts[1:], slots, torch.zeros(1, 1).int(), 64, (9,), (9,), ((0,),)
    )  # fmt: skip
    with set_forward_context(context):
        for batch in (wide, narrow, wide):
            torch.testing.assert_close(
                batch.layer(query, key, value).double(),
                reference(batch.layer, query, key, value),
                rtol=0,
                atol=2e-5,
            )


STEPS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.one_of(st.just(1), st.integers(1, 9)), min_size=1),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    STEPS,
    st.sampled_from([(5, 1, 4), (4, 4, 4), (6, 2, 4)]),
    st.sampled_from([None, 1, 4, 10]),
    st.sampled_from([1, 3, 8, 64]),
    st.integers(0, 5),
)
def test_any_mix_of_steps_over_blocks_anywhere_equals_each_request_alone(steps, shape, window, block_size, seed):
    batch = Batch(*shape, window=window, block_size=block_size, num_blocks=4 * 72 // block_size + 4, seed=seed)
    for name in "abcd":
        batch.add(name)
    for plan in steps:
        batch.step(plan)
    batch.tokens = {name: tokens for name, tokens in batch.tokens.items() if len(tokens[0])}
    batch.check()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=6), st.sampled_from([None, 2, 9]), st.sampled_from([4, 64]))
def test_how_a_prompt_is_cut_never_changes_the_result(chunks, window, block_size):
    cut, whole = (Batch(window=window, block_size=block_size, num_blocks=32, seed=7) for _ in range(2))
    for batch in (cut, whole):
        batch.add("a")
        total = batch._rows(sum(chunks))
        pieces = [iter(zip(*(part.split(chunks if batch is cut else sum(chunks)) for part in total), strict=True))]
        batch._rows = lambda count, pieces=pieces: next(pieces[0])
        for chunk in chunks if batch is cut else [sum(chunks)]:
            batch.step({"a": chunk})
    torch.testing.assert_close(torch.cat(cut.results["a"]), torch.cat(whole.results["a"]), rtol=0, atol=1e-5)


def test_the_spec_says_what_a_token_costs():
    layer = Attention(6, 8, 1.0, 2, sliding_window=5)
    assert layer.kv_cache_spec() == KVCacheSpec(num_kv_heads=2, head_size=8, dtype=None, sliding_window=5)
    keys, values = allocate_kv_cache(layer.kv_cache_spec(), 3, 4, torch.bfloat16, "cpu")
    assert keys.numel() == values.numel() == 3 * 4 * 2 * 8
    assert keys.dtype == torch.bfloat16
    own = KVCacheSpec(2, 8, dtype=torch.float32)
    assert allocate_kv_cache(own, 1, 1, torch.bfloat16, "cpu")[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, "6 query heads cannot share 4 key heads"),
        ({"num_heads": 6, "num_kv_heads": 0}, "6 query heads cannot share 0 key heads"),
        ({"num_heads": 6, "sliding_window": 0}, "sliding_window 0 is below 1"),
    ],
)
def test_impossible_shapes_are_refused_with_the_layers_name(arguments, message):
    with pytest.raises(ValueError, match=f"'model.layers.3.attn': {message}"):
        Attention(head_size=8, scale=1.0, prefix="model.layers.3.attn", **arguments)
