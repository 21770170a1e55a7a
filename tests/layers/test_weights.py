"""load_weights: everything that fits is filled, everything that does not is in one error."""

import pytest
import torch
from torch import nn
from torchplug.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightsMismatch,
    load_weights,
)
from torchplug.layers.weights import grouped_names

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = QKVParallelLinear(8, 4, 3, 1, bias=True)
        self.gate_up_proj = MergedColumnParallelLinear(8, [5, 5])
        self.down_proj = RowParallelLinear(5, 8)
        self.norm = RMSNorm(8)


class Model(nn.Module):
    def __init__(self, layers=2, tied=False):
        super().__init__()
        self.embed = VocabParallelEmbedding(7, 8)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = ParallelLMHead(7, 8, tied_to=self.embed if tied else None)
        for parameter in self.parameters():
            parameter.fill_(float("nan"))


def checkpoint(layers=2, fused=False, tied=False):
    torch.manual_seed(0)
    weights = {"embed.weight": torch.randn(7, 8)}
    for index in range(layers):
        rows = {"qkv_proj": 20} if fused else {"q_proj": 12, "k_proj": 4, "v_proj": 4}
        for name, size in rows.items():
            weights[f"layers.{index}.{name}.weight"] = torch.randn(size, 8)
            weights[f"layers.{index}.{name}.bias"] = torch.randn(size)
        for name in ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]:
            weights[f"layers.{index}.{name}.weight"] = torch.randn(10 if fused else 5, 8)
        weights[f"layers.{index}.down_proj.weight"] = torch.randn(8, 5)
        weights[f"layers.{index}.norm.weight"] = torch.randn(8)
    if not tied:
        weights["lm_head.weight"] = torch.randn(7, 8)
    return weights


def mismatch(model, weights, **kwargs):
    with pytest.raises(WeightsMismatch) as caught:
        load_weights(model, weights, **({"packed": PACKED} | kwargs))
    return caught.value


def named(error):
    return {problem.where: problem.says for problem in error.problems}


def test_fused_parameters_are_filled_from_separate_tensors_in_any_order():
    model, weights = Model(), checkpoint()
    loaded = load_weights(model, reversed(weights.items()), packed=PACKED)
    assert loaded == set(dict(model.named_parameters()))
    for index, block in enumerate(model.layers):
        parts = [weights[f"layers.{index}.{name}.weight"] for name in PACKED["qkv_proj"]]
        assert torch.equal(block.qkv_proj.weight, torch.cat(parts))
        parts = [weights[f"layers.{index}.{name}.bias"] for name in PACKED["qkv_proj"]]
        assert torch.equal(block.qkv_proj.bias, torch.cat(parts))
        parts = [weights[f"layers.{index}.{name}.weight"] for name in PACKED["gate_up_proj"]]
        assert torch.equal(block.gate_up_proj.weight, torch.cat(parts))
        assert torch.equal(block.down_proj.weight, weights[f"layers.{index}.down_proj.weight"])


def test_a_checkpoint_may_hold_the_fused_tensors():
    model, weights = Model(), checkpoint(fused=True)
    assert load_weights(model, weights.items(), packed=PACKED) == set(weights)
    assert torch.equal(model.layers[1].qkv_proj.bias, weights["layers.1.qkv_proj.bias"])


def test_tensors_are_cast_to_the_parameters_dtype():
    model, weights = Model().to(torch.bfloat16), checkpoint()
    load_weights(model, weights.items(), packed=PACKED)
    assert torch.equal(model.embed.weight, weights["embed.weight"].to(torch.bfloat16))


def test_a_tied_head_in_the_checkpoint_is_ignored():
    model, weights = Model(tied=True), checkpoint(tied=True)
    extra = {"lm_head.weight": weights["embed.weight"].clone()}
    for order in (extra | weights, weights | extra):
        loaded = load_weights(model, order.items(), packed=PACKED)
        assert {"embed.weight", "lm_head.weight"} <= loaded
        assert torch.equal(model.lm_head.weight, weights["embed.weight"])


def test_a_tied_head_that_differs_from_the_embedding_is_refused_and_not_dropped():
    weights = checkpoint(tied=True)
    for head in (torch.zeros(7, 8), torch.zeros(9, 8)):
        with pytest.raises(WeightsMismatch, match=r"lm_head.weight: differs from embed.weight") as raised:
            load_weights(Model(tied=True), {"lm_head.weight": head, **weights}.items(), packed=PACKED)
        assert '"tie_word_embeddings": false' in str(raised.value)


def test_a_tied_head_fills_an_embedding_that_never_comes():
    model, weights = Model(tied=True), checkpoint(tied=True)
    weights["lm_head.weight"] = weights.pop("embed.weight")
    assert load_weights(model, weights.items(), packed=PACKED) == set(dict(model.named_parameters())) | {
        "lm_head.weight"
    }
    assert torch.equal(model.embed.weight, weights["lm_head.weight"])


def test_everything_that_does_not_fit_is_one_error():
    weights = checkpoint()
    del weights["layers.1.k_proj.weight"]
    weights["layers.0.up_proj.weight"] = torch.zeros(1, 8)
    weights["layers.0.norm.weight"] = torch.zeros(9)
    weights["layers.1.norm.weight"] = torch.zeros(1)
    weights["layers.0.surprise"] = torch.zeros(2)
    weights["layers.1.surprise"] = torch.zeros(2)
    weights["layers.1.down_proj.weight"] = torch.zeros(8, 5, dtype=torch.int8)
    model = Model()
    error = mismatch(model, weights.items())
    assert named(error) == {
        "layers.1.k_proj.weight": "is missing; the other parts of qkv_proj came",
        "layers.0.up_proj.weight": "expected shape [5, 8], found [1, 8]",
        "layers.0.norm.weight": "expected shape [8], found [9]",
        "layers.1.norm.weight": "expected shape [8], found [1]",
        "layers.{0-1}.surprise": "is in the checkpoint, but the model class has no such parameter",
        "layers.1.down_proj.weight": "expected floating-point numbers, found int8",
    }
    assert all(problem.fix for problem in error.problems)
    assert error.subject == "weights for Model"
    # What a tensor came for is no longer missing, so that the host's own list does not name it twice.
    assert error.loaded == set(dict(model.named_parameters()))
    assert torch.equal(model.embed.weight, weights["embed.weight"])


def test_the_stream_is_read_to_its_end():
    read = []

    def stream():
        for name, tensor in ({"nonsense": torch.zeros(1)} | checkpoint()).items():
            yield name, tensor
            read.append(name)

    mismatch(Model(), stream())
    assert set(read) == {"nonsense", *checkpoint()}


def test_a_tensor_that_comes_twice_is_reported():
    weights = list(checkpoint().items())
    error = mismatch(Model(), [*weights, ("layers.0.q_proj.weight", torch.zeros(12, 8)), weights[0]])
    assert named(error) == {"layers.0.q_proj.weight": "came more than once", "embed.weight": "came more than once"}


def test_a_fused_tensor_besides_its_parts_is_reported():
    weights = list(checkpoint().items())
    error = mismatch(Model(), [*weights, ("layers.0.qkv_proj.weight", torch.zeros(20, 8))])
    assert named(error) == {"layers.0.qkv_proj.weight": "came more than once"}


def test_absent_tensors_are_left_to_the_host():
    weights = checkpoint()
    del weights["layers.0.norm.weight"]
    model = Model()
    assert set(dict(model.named_parameters())) - load_weights(model, weights.items(), packed=PACKED) == {
        "layers.0.norm.weight"
    }


def test_old_rotary_buffers_and_skipped_names_are_left_out():
    weights = checkpoint() | {
        "layers.0.rotary_emb.inv_freq": torch.zeros(2),
        "layers.0.attn.bias": torch.zeros(1, 1, 4, 4),
        "layers.1.attn.bias": torch.zeros(1, 1, 4, 4),
        "vision.a": torch.zeros(1),
    }
    load_weights(Model(), weights.items(), packed=PACKED, skip=["attn.bias", "vision.*"])
    error = mismatch(Model(), weights.items(), skip=["n.bias", "vision"])  # no whole component, no whole name
    assert set(named(error)) == {"layers.{0-1}.attn.bias", "vision.a"}


def test_renaming_replaces_whole_components_in_order():
    weights = {
        f"transformer.{name}".replace("layers", "h").replace("embed", "wte"): tensor
        for name, tensor in checkpoint().items()
        if name != "lm_head.weight"
    }
    model = Model(tied=True)
    loaded = load_weights(
        model, weights.items(), packed=PACKED, rename={"transformer": "", "h": "layers", "wte": "embed"}
    )
    assert loaded == set(dict(model.named_parameters())) | {"lm_head.weight"}


def test_matrices_stored_as_in_out_are_turned():
    weights = checkpoint(fused=True)
    model = Model()
    turned = {
        name: tensor.t().contiguous() if name.endswith(("qkv_proj.weight", "down_proj.weight")) else tensor
        for name, tensor in weights.items()
    }
    load_weights(model, turned.items(), packed=PACKED, transposed=["qkv_proj.weight", "down_proj.weight"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
    assert len(mismatch(Model(), turned.items()).problems) == 2


def test_a_parameters_own_weight_loader_is_used():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))
            self.weight.weight_loader = lambda parameter, tensor: parameter.copy_(tensor * 2)

    module = Doubled()
    assert load_weights(module, [("weight", torch.ones(3))]) == {"weight"}
    assert module.weight.tolist() == [2, 2, 2]


def test_plain_modules_and_persistent_buffers_are_filled():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    source = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    source[1].running_mean.normal_()
    source[1].num_batches_tracked.fill_(5)
    assert load_weights(module, source.state_dict().items()) == set(source.state_dict())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name])


def test_a_part_without_a_loader_says_so():
    module = nn.ModuleDict({"qkv_proj": nn.Linear(2, 6, bias=False)})
    error = mismatch(module, [("q_proj.weight", torch.zeros(2, 2))])
    assert "has no weight_loader" in named(error)["q_proj.weight"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], ["a.{0-2}.b"]),
        (["a.0.b", "a.2.b", "a.3.b", "c"], ["a.{0,2-3}.b", "c"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.0", "a.1.e.1"], ["a.{0-1}.e.{0-1}"]),
        (["a.0.e.0", "a.1.e.1"], ["a.0.e.0", "a.1.e.1"]),
        (["a.7.b"], ["a.7.b"]),
        (["x", "x"], ["x"]),
    ],
)
def test_names_that_differ_in_numbers_are_one_line(names, expected):
    assert grouped_names(names) == expected


def test_tensors_of_a_stage_that_was_left_out_are_skipped():
    from torchplug.layers.stages import StageMissingLayer

    module = nn.Module()
    module.head = nn.Linear(2, 2, bias=False)
    module.tower = StageMissingLayer("vision_tower", nn.Linear(3, 3))
    weights = {"head.weight": torch.ones(2, 2), "tower.weight": torch.ones(3, 3), "tower.bias": torch.ones(3)}
    assert load_weights(module, weights.items()) == {"head.weight"}
    with pytest.raises(WeightsMismatch, match=r"towers\.weight"):
        load_weights(module, {**weights, "towers.weight": torch.ones(1)}.items())


def test_a_name_s_beginning_is_replaced_by_the_first_that_fits_and_never_twice():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.visual = nn.Linear(2, 2, bias=False)
            self.language_model = nn.ModuleDict({"model": nn.Linear(2, 2, bias=False)})

    inner = "language_model.model."
    prefixes = {"model.visual.": "visual.", "model.language_model.": inner, "model.": inner}
    for names in (
        ("visual.weight", "model.weight"),
        ("model.visual.weight", "model.language_model.weight"),
        ("visual.weight", "language_model.model.weight"),
    ):
        module = Both()
        tensors = [torch.randn(2, 2), torch.randn(2, 2)]
        loaded = load_weights(module, zip(names, tensors, strict=True), prefixes=prefixes)
        assert loaded == {"visual.weight", "language_model.model.weight"}
        assert torch.equal(module.visual.weight, tensors[0])
        assert torch.equal(module.language_model["model"].weight, tensors[1])
    with pytest.raises(WeightsMismatch) as caught:
        load_weights(Both(), [("model.nothing", torch.ones(1))], prefixes=prefixes)
    assert "model.nothing" in [problem.where for problem in caught.value.problems]
