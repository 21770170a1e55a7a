"""FusedMoE against the sum written out, and what must not change it: slots, replicas, ranks, the rest of the batch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchplug.config import EPLBConfig, ParallelConfig
from torchplug.errors import ContractError
from torchplug.forward_context import ForwardContext, set_forward_context
from torchplug.layers import FusedMoE, WeightsMismatch, load_weights
from torchplug.layers.cpu import kernels
from torchplug.layers.cpu.build import library
from torchplug.layers.moe_model import FusedMoEModel

HIDDEN, INNER = 24, 13


@pytest.fixture(scope="module", autouse=True, params=["native", "torch"])
def kernel(request):
    """With the kernel for all experts of a few tokens, where this machine can have it, and without."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(kernels, "experts", lambda w13, w2: None)
            patch.setattr(kernels, "linear", lambda weight: None)
        elif library() is None:
            pytest.skip("no native kernels here")
        yield request.param


def layer(
    num_experts=5, *, seed=0, dtype=torch.float32, redundant=0, ranks=1, rank=0, hidden=HIDDEN, inner=INNER, **options
):
    """A layer filled from the same logical experts whatever its slots and ranks are."""
    parallel = ParallelConfig(
        tensor_parallel_size=ranks,
        rank=rank,
        enable_expert_parallel=ranks > 1,
        eplb_config=EPLBConfig(redundant),
    )
    made = FusedMoE(num_experts, hidden, inner, parallel_config=parallel, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.fill_(float("nan"))
    weights = {
        "gate_up_proj": torch.randn(num_experts, 2 * inner, hidden, generator=generator) * 2 / hidden**0.5,
        "down_proj": torch.randn(num_experts, hidden, inner, generator=generator) * 2 / inner**0.5,
    }
    if made.w13_bias is not None:
        weights["gate_up_proj_bias"] = torch.randn(num_experts, 2 * inner, generator=generator)
        weights["down_proj_bias"] = torch.randn(num_experts, hidden, generator=generator)
    assert load_weights(made, weights.items()) == set(dict(made.named_parameters()))
    made.to(dtype).process_weights_after_loading()
    return made, weights


def batch(tokens, num_experts, top_k, *, seed=1, dtype=torch.float32, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]
    return x, torch.rand(tokens, top_k, generator=generator), ids


def summed_by_hand(weights, x, topk_weights, topk_ids, act=F.silu):
    result = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, shares, experts) in enumerate(zip(x.double(), topk_weights.double(), topk_ids, strict=True)):
        for share, expert in zip(shares, experts.tolist(), strict=True):
            gate_up = weights["gate_up_proj"][expert].double() @ row
            if "gate_up_proj_bias" in weights:
                gate_up = gate_up + weights["gate_up_proj_bias"][expert]
            gate, up = gate_up.chunk(2)
            out = weights["down_proj"][expert].double() @ (act(gate) * up)
            if "down_proj_bias" in weights:
                out = out + weights["down_proj_bias"][expert]
            result[token] += share * out
    return result.float()


def assert_close(ours, expected):
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def maps(experts_of_slots, num_logical, layers=1, width=None):
    """The balancer's tensors for slots that hold these experts: (load, slots of each expert, replicas)."""
    held = [[slot for slot, held in enumerate(experts_of_slots) if held == expert] for expert in range(num_logical)]
    most = max(map(len, held)) + 1
    rows = torch.tensor([[*slots, *[-1] * (most - len(slots))] for slots in held])
    count = torch.tensor([len(slots) for slots in held])
    return (
        torch.zeros(layers, width or len(experts_of_slots), dtype=torch.int32),
        rows.expand(layers, -1, -1).clone(),
        count.expand(layers, -1).clone(),
    )


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_the_result_is_the_weighted_sum_of_the_chosen_experts(tokens, top_k, bias):
    moe, weights = layer(bias=bias)
    inputs = batch(tokens, 5, top_k)
    assert_close(moe(*inputs), summed_by_hand(weights, *inputs))


def test_the_activation_is_the_named_one():
    moe, weights = layer(activation="gelu")
    inputs = batch(7, 5, 2)
    assert_close(moe(*inputs), summed_by_hand(weights, *inputs, act=F.gelu))
    with pytest.raises(AssertionError):
        assert_close(moe(*inputs), summed_by_hand(weights, *inputs))


def test_the_kernel_is_used_where_there_is_one(kernel):
    assert (layer()[0]._native is not None) == (kernel == "native")
    assert layer(activation="gelu")[0]._native is None


def test_more_tokens_than_the_kernel_takes():
    moe, weights = layer()
    inputs = batch(kernels.MOST_ROWS + 1, 5, 5)
    assert_close(moe(*inputs), summed_by_hand(weights, *inputs))


def test_ids_of_another_integer_type_and_weights_of_another_float_are_taken():
    moe, weights = layer()
    x, shares, ids = batch(6, 5, 2)
    expected = summed_by_hand(weights, x, shares, ids)
    assert_close(moe(x, shares, ids.int()), expected)
    assert_close(moe(x, shares.double(), ids), expected)


@pytest.mark.parametrize("tokens", [1, 4])
def test_tensors_that_do_not_fit_each_other_are_an_error(tokens):
    moe, _ = layer()
    x, shares, ids = batch(tokens, 5, 2)
    with pytest.raises(RuntimeError):
        moe(x[:, :-1], shares, ids)
    with pytest.raises(RuntimeError):
        moe(x, torch.rand(tokens, 3), ids)
    with pytest.raises((RuntimeError, IndexError)):
        moe(x, torch.rand(tokens + 5, 2), torch.zeros(tokens + 5, 2, dtype=torch.int64))


def test_no_token_gives_no_row():
    moe, _ = layer()
    assert moe(*batch(0, 5, 2)).shape == (0, HIDDEN)


def test_an_expert_that_nobody_chose_is_never_multiplied():
    moe, weights = layer()
    moe._native = None
    inputs = batch(30, 3, 2)  # experts 3 and 4 are not chosen
    multiplied = []

    def counted(x, weight, bias):
        multiplied.append(len(x))
        return F.linear(x, weight, bias)

    moe._gate_up_product = moe._down_product = counted
    moe.w13_weight[3:] = float("nan")
    assert_close(moe(*inputs), summed_by_hand(weights, *inputs))
    assert len(multiplied) == 6 and sum(multiplied) == 2 * 60
    moe(*batch(1, 3, 2))
    assert len(multiplied) == 10


def test_an_expert_that_nobody_chose_does_not_reach_the_result():
    moe, weights = layer()
    inputs = batch(30, 3, 2)
    for tensor in moe.get_expert_weights():
        tensor[3:] = float("nan")
    assert_close(moe(*inputs), summed_by_hand(weights, *inputs))


def test_what_all_tokens_go_through_is_added():
    moe, weights = layer()
    shared = nn.Linear(HIDDEN, HIDDEN)
    x, shares, ids = batch(6, 5, 2)
    with torch.no_grad():
        assert_close(moe(x, shares, ids, shared), summed_by_hand(weights, x, shares, ids) + shared(x))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_rest_of_the_batch_does_not_matter(data):
    moe, _ = layer(6)
    tokens = data.draw(st.integers(1, 20))
    x, shares, ids = batch(tokens, 6, data.draw(st.integers(1, 6)), seed=data.draw(st.integers(0, 9)))
    whole = moe(x, shares, ids)
    some = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=tokens))
    torch.testing.assert_close(moe(x[some], shares[some], ids[some]), whole[some], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("hidden", "inner"), [(32, 16), (64, 48), (33, 17)])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 17), top_k=st.integers(1, 5), bias=st.booleans())
def test_slots_may_change_places_and_no_bit_of_the_result_changes(dtype, hidden, inner, seed, tokens, top_k, bias):
    moe, _ = layer(5, redundant=3, dtype=dtype, bias=bias, hidden=hidden, inner=inner)
    inputs = batch(tokens, 5, top_k, seed=seed, dtype=dtype, hidden=hidden)
    load, slots, replicas = maps(moe.placement.initial_experts, 5)
    moe.set_eplb_state(0, load, slots, replicas)
    before = moe(*inputs)
    counted = load.clone()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    for tensor in moe.get_expert_weights():
        tensor.copy_(tensor[order].clone())
    place = order.argsort()  # where each old slot went
    slots.copy_(torch.where(slots >= 0, place[slots.clamp(min=0)], -1))
    after = moe(*inputs)
    if hidden == 33 and moe._native is None:
        # A slot's rows begin at other offsets from a cache line then, where MKL sums in another order.
        assert_close(after.float(), before.float())
    else:
        assert torch.equal(after, before)
    assert torch.equal(load - counted, counted[:, order])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_replicas_give_the_result_of_one_slot_each_and_every_pick_is_counted_once(data):
    plain, _ = layer()
    redundant = data.draw(st.integers(0, 7))
    moe, _ = layer(redundant=redundant)
    tokens, top_k = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 5))
    inputs = batch(tokens, 5, top_k, seed=data.draw(st.integers(0, 99)))
    load, slots, replicas = maps(moe.placement.initial_experts, 5, width=20)
    moe.set_eplb_state(0, load, slots, replicas)
    torch.testing.assert_close(moe(*inputs), plain(*inputs), rtol=1e-5, atol=1e-5)
    assert load.sum() == tokens * top_k
    by_expert = [load[0, held[held >= 0]].sum().item() for held in slots[0]]
    assert by_expert == inputs[2].flatten().bincount(minlength=5).tolist()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_the_ranks_results_add_up_to_the_whole(ranks, balanced, tokens):
    plain, _ = layer()
    inputs = batch(tokens, 5, 3)
    total = torch.zeros(tokens, HIDDEN)
    for rank in range(ranks):
        moe, _ = layer(redundant=3, ranks=ranks, rank=rank)
        assert [len(tensor) for tensor in moe.get_expert_weights()] == [8 // ranks] * 2
        if balanced:
            moe.set_eplb_state(0, *maps(moe.placement.initial_experts, 5))
        total += moe(*inputs)
    torch.testing.assert_close(total, plain(*inputs), rtol=1e-5, atol=1e-5)


def test_maps_are_read_in_place_at_every_step():
    moe, _ = layer()
    inputs = batch(4, 5, 2)
    load, slots, replicas = maps(moe.placement.initial_experts, 5, layers=2)
    moe.set_eplb_state(1, load, slots, replicas)
    before = moe(*inputs)
    for tensor in moe.get_expert_weights():
        tensor.copy_(tensor.flip(0).clone())
    assert not torch.equal(moe(*inputs), before)
    slots[1].copy_(torch.where(slots[1] >= 0, 4 - slots[1], -1))
    assert torch.equal(moe(*inputs), before)
    assert load[0].sum() == 0 and load[1].sum() == 3 * 8


def context(tokens, **options):
    """A step of one new request; only what the layer reads matters."""
    empty = torch.zeros(1, dtype=torch.int32)
    return ForwardContext(empty, empty, empty, empty, 4, (tokens,), (tokens,), ((0,),), **options)


def test_padding_and_dummy_steps_are_computed_but_not_counted():
    moe, _ = layer()
    x, shares, ids = batch(6, 5, 2)
    load, slots, replicas = maps(moe.placement.initial_experts, 5)
    moe.set_eplb_state(0, load, slots, replicas)
    with set_forward_context(context(6, record_expert_load=False)):
        expected = moe(x, shares, ids)
    assert load.sum() == 0
    with set_forward_context(context(6, num_padding_tokens=2)):
        assert torch.equal(moe(x, shares, ids), expected)
    assert load[0].tolist() == ids[:4].flatten().bincount(minlength=5).tolist()
    with set_forward_context(context(6)):
        moe(x, shares, ids)
    assert load.sum() == 8 + 12


def test_expert_weights_are_one_contiguous_row_for_each_slot():
    moe, _ = layer(redundant=2, bias=True)
    tensors = moe.get_expert_weights()
    assert [tuple(tensor.shape) for tensor in tensors] == [
        (7, 2 * INNER, HIDDEN),
        (7, HIDDEN, INNER),
        (7, 2 * INNER),
        (7, HIDDEN),
    ]
    assert all(tensor.is_contiguous() and tensor[0].is_contiguous() for tensor in tensors)
    assert {tensor.data_ptr() for tensor in tensors} == {parameter.data_ptr() for parameter in moe.parameters()}


# -- checkpoints ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = FusedMoE(3, HIDDEN, INNER, **options)
        for parameter in self.parameters():
            parameter.fill_(float("nan"))


FUSED = {
    "mlp.experts.gate_up_proj": torch.randn(3, 2 * INNER, HIDDEN),
    "mlp.experts.down_proj": torch.randn(3, HIDDEN, INNER),
    "mlp.experts.gate_up_proj_bias": torch.randn(3, 2 * INNER),
    "mlp.experts.down_proj_bias": torch.randn(3, HIDDEN),
}


def per_expert(gate, up, down):
    found = {}
    for expert in range(3):
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            both = FUSED[f"mlp.experts.gate_up_proj{suffix}"][expert]
            found[f"mlp.experts.{expert}.{gate}.{kind}"] = both[:INNER]
            found[f"mlp.experts.{expert}.{up}.{kind}"] = both[INNER:]
            found[f"mlp.experts.{expert}.{down}.{kind}"] = FUSED[f"mlp.experts.down_proj{suffix}"][expert]
    return found


SPELLINGS = {
    "fused": FUSED,
    "gate_proj": per_expert("gate_proj", "up_proj", "down_proj"),
    "w1": per_expert("w1", "w3", "w2"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("redundant", [0, 4])
def test_every_spelling_fills_every_slot_of_an_expert(spelling, redundant):
    model = Model(bias=True, parallel_config=ParallelConfig(eplb_config=EPLBConfig(redundant)))
    loaded = load_weights(model, reversed(SPELLINGS[spelling].items()))
    assert loaded == set(dict(model.named_parameters()))
    experts = model.mlp.experts
    held = [slot % 3 for slot in range(3 + redundant)]
    assert torch.equal(experts.w13_weight, FUSED["mlp.experts.gate_up_proj"][held])
    assert torch.equal(experts.w2_weight, FUSED["mlp.experts.down_proj"][held])
    assert torch.equal(experts.w13_bias, FUSED["mlp.experts.gate_up_proj_bias"][held])
    assert torch.equal(experts.w2_bias, FUSED["mlp.experts.down_proj_bias"][held])


def refused(weights, **options):
    with pytest.raises(WeightsMismatch) as caught:
        load_weights(Model(**options), weights.items())
    return {problem.where: problem.says for problem in caught.value.problems}


@pytest.mark.parametrize("spelling", ["gate_proj", "w1"])
def test_experts_that_are_missing_are_named_in_the_checkpoints_spelling(spelling):
    gone = {"gate_proj": ("mlp.experts.1.up_proj.weight", "mlp.experts.2.down_proj.bias")}.get(
        spelling, ("mlp.experts.1.w3.weight", "mlp.experts.2.w2.bias")
    )
    left = {name: tensor for name, tensor in SPELLINGS[spelling].items() if name not in gone}
    assert refused(left, bias=True) == {
        gone[0]: "is missing; the other parts of w13_weight came",
        gone[1]: "is missing; the other parts of w2_bias came",
    }


def test_a_whole_expert_that_is_missing_is_named_once_for_each_projection():
    left = {name: tensor for name, tensor in SPELLINGS["w1"].items() if ".1." not in name and "weight" in name}
    assert set(refused(left)) == {f"mlp.experts.1.{name}.weight" for name in ("w1", "w2", "w3")}


def test_experts_of_another_shape_are_named():
    weights = dict(SPELLINGS["gate_proj"])
    weights["mlp.experts.0.gate_proj.weight"] = torch.zeros(INNER + 1, HIDDEN)
    weights["mlp.experts.2.down_proj.weight"] = torch.zeros(INNER, HIDDEN)
    assert refused(weights, bias=True) == {
        "mlp.experts.0.gate_proj.weight": f"expected shape [{INNER}, {HIDDEN}], found [{INNER + 1}, {HIDDEN}]",
        "mlp.experts.2.down_proj.weight": f"expected shape [{HIDDEN}, {INNER}], found [{INNER}, {HIDDEN}]",
    }
    says = refused(FUSED | {"mlp.experts.down_proj": torch.zeros(4, HIDDEN, INNER)}, bias=True)
    assert says == {"mlp.experts.down_proj": f"expected shape [3, {HIDDEN}, {INNER}], found [4, {HIDDEN}, {INNER}]"}


def test_experts_that_come_twice_or_do_not_exist_are_named():
    weights = SPELLINGS["gate_proj"]
    again = {"mlp.experts.1.w1.weight": weights["mlp.experts.1.gate_proj.weight"]}
    assert refused(weights | again, bias=True) == {"mlp.experts.1.w1.weight": "came more than once"}
    fused = {"mlp.experts.down_proj": FUSED["mlp.experts.down_proj"]}
    assert refused(weights | fused, bias=True) == {"mlp.experts.down_proj": "came more than once"}
    fourth = {"mlp.experts.3.up_proj.weight": weights["mlp.experts.1.up_proj.weight"]}
    (says,) = refused(weights | fourth, bias=True).values()
    assert says == "is in the checkpoint, but the model class has no such parameter"
    assert len(refused(weights)) == 3  # biases that the class does not have: one line for each projection


# -- the model's attributes ----------------------------------------------------------------------------------


class Mixture(nn.Module, FusedMoEModel):
    def __init__(self, *sizes, redundant=0, ranks=1):
        super().__init__()
        parallel = ParallelConfig(
            tensor_parallel_size=ranks, enable_expert_parallel=ranks > 1, eplb_config=EPLBConfig(redundant)
        )
        self.layers = nn.ModuleList(FusedMoE(size, HIDDEN, INNER, parallel_config=parallel) for size in sizes)
        self.set_moe_attributes(num_shared_experts=2)


def numbers(model):
    return (
        model.num_logical_experts,
        model.num_redundant_experts,
        model.num_physical_experts,
        model.num_local_physical_experts,
        model.num_routed_experts,
    )


def test_attributes_follow_from_the_layers():
    model = Mixture(6, 6, redundant=2, ranks=4)
    assert numbers(model) == (6, 2, 8, 2, 6)
    assert (model.num_moe_layers, model.num_expert_groups, model.num_shared_experts) == (2, 1, 2)
    assert list(model.moe_layers) == list(model.layers)
    assert numbers(Mixture()) == (0, 0, 0, 0, 0) and Mixture().num_moe_layers == 0


def test_registering_twice_collects_the_weights_once():
    model = Mixture(5, 5)
    tensors = maps(model.layers[0].placement.initial_experts, 5, layers=2)
    for _ in range(2):
        model.set_eplb_state(*tensors)
    assert [len(list(tensors)) for tensors in model.expert_weights] == [2, 2]
    assert model.expert_weights[1][0] is model.layers[1].w13_weight


def test_an_elastic_change_keeps_the_slots_of_a_process():
    model = Mixture(6, redundant=2, ranks=4)
    model.update_physical_experts_metadata(12, 2)
    assert numbers(model) == (6, 6, 12, 2, 6)
    assert model.layers[0].placement.ep_size == 6
    with pytest.raises(ContractError, match="expected 2, as before, found 3"):
        model.update_physical_experts_metadata(12, 3)


def test_layers_of_different_numbers_of_experts_are_refused():
    with pytest.raises(ContractError, match="layers of 4 and 6 experts"):
        Mixture(6, 4, 6)
