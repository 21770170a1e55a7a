"""Linear layers, embedding and head against plain torch on odd shapes, and how fused ones are filled."""

import pytest
import torch
import torch.nn.functional as F
from torchplug.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    onednn,
)
from torchplug.layers.cpu import kernels

pytestmark = pytest.mark.usefixtures("kernels_or_torch")


def randomised(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


@pytest.mark.parametrize("cls", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_forward_is_one_tensor_equal_to_torch(cls, bias, rows):
    layer = randomised(cls(17, 13, bias))
    x = torch.randn(rows, 17)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert (layer.bias is not None) == bias
    assert set(dict(layer.named_parameters())) == ({"weight", "bias"} if bias else {"weight"})


def test_qkv_lays_query_key_and_value_side_by_side():
    # 5 query heads and 1 key head of 24 on a hidden size of 70: head_size is not hidden / heads.
    layer = QKVParallelLinear(70, 24, 5, 1, bias=True)
    parts = {name: (torch.randn(rows, 70), torch.randn(rows)) for name, rows in [("q", 120), ("k", 24), ("v", 24)]}
    for name, (weight, bias) in parts.items():
        layer.weight_loader(layer.weight, weight, name)
        layer.weight_loader(layer.bias, bias, name)
    x = torch.randn(3, 70)
    query, key, value = layer(x).split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
    for result, (weight, bias) in zip((query, key, value), parts.values(), strict=True):
        torch.testing.assert_close(result, F.linear(x, weight, bias))


def test_qkv_without_kv_heads_has_as_many_as_query_heads():
    layer = QKVParallelLinear(8, 4, 3)
    assert (layer.q_size, layer.kv_size, layer.weight.shape) == (12, 12, (36, 8))


def test_merged_columns_are_filled_by_place():
    layer = MergedColumnParallelLinear(6, [3, 5, 2])
    weights = [torch.randn(rows, 6) for rows in (3, 5, 2)]
    for place in (2, 0, 1):
        layer.weight_loader(layer.weight, weights[place], place)
    torch.testing.assert_close(layer.weight.data, torch.cat(weights))


@pytest.mark.parametrize(
    ("shape", "shard", "message"),
    [
        ((4, 6), 1, r"expected shape \[5, 6\], found \[4, 6\]"),
        ((1, 6), 0, r"expected shape \[3, 6\], found \[1, 6\]"),  # copy_ alone would broadcast it
        ((7, 6), None, r"expected shape \[8, 6\], found \[7, 6\]"),
        ((3, 6), 2, "expected a projection 0 to 1, found 2"),
        ((3, 6), -1, "expected a projection 0 to 1, found -1"),
        ((3, 6), "q", "expected a projection 0 to 1, found 'q'"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(shape, shard, message):
    layer = MergedColumnParallelLinear(6, [3, 5])
    with pytest.raises(ValueError, match=message):
        layer.weight_loader(layer.weight, torch.zeros(shape), shard)


def test_embedding_looks_rows_up():
    layer = randomised(VocabParallelEmbedding(11, 7))
    ids = torch.tensor([3, 0, 10, 3])
    assert torch.equal(layer(ids), layer.weight[ids])


def test_head_gives_logits_and_may_share_the_embedding():
    embedding = randomised(VocabParallelEmbedding(11, 7))
    tied, untied = ParallelLMHead(11, 7, tied_to=embedding), randomised(ParallelLMHead(11, 7, bias=True), seed=1)
    hidden = torch.randn(2, 7)
    assert tied.weight is embedding.weight
    torch.testing.assert_close(tied(hidden), hidden @ embedding.weight.T)
    torch.testing.assert_close(untied(hidden), hidden @ untied.weight.T + untied.bias)
    assert untied.weight is not embedding.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(13, 17), (1, 5), (192, 64), (64, 1)])
def test_finishing_the_load_changes_the_layout_but_not_the_result(dtype, bias, out_features, in_features):
    layer = randomised(RowParallelLinear(in_features, out_features, bias)).to(dtype)
    plain = layer.weight.clone()
    inputs = [torch.randn(*shape, in_features).to(dtype) for shape in [(1,), (2,), (7,), (40,), (3, 5), (0,), ()]]
    inputs.append(torch.randn(in_features, 6).to(dtype).T)
    layer.process_weights_after_loading()
    for x in inputs:
        exact = F.linear(x.double(), plain.double(), layer.bias.double() if bias else None)
        result = layer(x)
        assert result.dtype == dtype
        torch.testing.assert_close(
            result.double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * 150
        )
    assert (layer.weight.shape, layer.weight.dtype) == (plain.shape, dtype)
    assert torch.equal(layer.weight.to_dense() if layer.weight.is_mkldnn else layer.weight, plain)
    assert set(layer.state_dict()) == ({"weight", "bias"} if bias else {"weight"})


def test_a_weight_is_resident_in_one_layout_only():
    layer = randomised(ColumnParallelLinear(64, 32))
    weight = layer.weight
    packs = kernels.linear(weight) is None and onednn.packed(torch.zeros(2, 2)) is not None
    layer.process_weights_after_loading()
    assert layer.weight.is_mkldnn if packs else layer.weight is weight
    assert [name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)] == []


def test_without_onednn_the_weight_stays_plain(monkeypatch):
    monkeypatch.setattr(onednn, "packed", lambda weight: None)
    layer = randomised(ColumnParallelLinear(17, 13, bias=True))
    weight, x = layer.weight, torch.randn(3, 17)
    expected = layer(x)
    layer.process_weights_after_loading()
    assert layer.weight is weight
    torch.testing.assert_close(layer(x), expected)


def test_a_tied_head_keeps_the_embeddings_rows():
    embedding = randomised(VocabParallelEmbedding(11, 7))
    head, hidden = ParallelLMHead(11, 7, tied_to=embedding), torch.randn(2, 7)
    expected = head(hidden)
    head.process_weights_after_loading()
    assert head.weight is embedding.weight
    torch.testing.assert_close(head(hidden), expected)
    assert torch.equal(embedding(torch.tensor([4])), embedding.weight[4:5])
