"""TopKRouter against routing written out token by token, in every combination, and its refusals."""

import itertools

import pytest
import torch
from torchplug.errors import CheckpointError
from torchplug.layers import GroupScore, TopKRouter

HIDDEN = 17


def router(num_experts, top_k, *, seed=0, **options):
    made = TopKRouter(HIDDEN, num_experts, top_k, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def routed_by_hand(gate, x):
    """For one token: {expert: weight}."""
    logits = (x.double() @ gate.weight.double().T).tolist()
    if gate.scoring_func == "softmax":
        exp = [torch.tensor(logit).double().exp().item() for logit in logits]
        scores = [value / sum(exp) for value in exp]
    else:
        scores = torch.tensor(logits).double().sigmoid().tolist()
    bias = [0.0] * len(scores) if gate.e_score_correction_bias is None else gate.e_score_correction_bias.tolist()
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    allowed = range(gate.num_experts)
    if gate.num_expert_group > 1:
        size = gate.num_experts // gate.num_expert_group
        groups = [range(group * size, (group + 1) * size) for group in range(gate.num_expert_group)]

        def worth(group):
            best = sorted((choice[expert] for expert in group), reverse=True)
            return best[0] if gate.group_score is GroupScore.MAX else best[0] + best[1]

        chosen = sorted(groups, key=worth, reverse=True)[: gate.topk_group]
        allowed = [expert for group in chosen for expert in group]
    best = sorted(allowed, key=lambda expert: choice[expert], reverse=True)[: gate.top_k]
    total = sum(scores[expert] for expert in best) if gate.renormalize else 1.0
    return {expert: scores[expert] / total * gate.routed_scaling_factor for expert in best}


@pytest.mark.parametrize(
    "scoring, renormalize, scaling, bias, groups",
    [*itertools.product(["softmax", "sigmoid"], [False, True], [1.0, 2.5], [False, True], [None, *GroupScore])],
)
def test_every_combination_equals_routing_by_hand(scoring, renormalize, scaling, bias, groups):
    grouped = {} if groups is None else {"num_expert_group": 4, "topk_group": 2, "group_score": groups}
    gate = router(
        12,
        3,
        scoring_func=scoring,
        renormalize=renormalize,
        routed_scaling_factor=scaling,
        correction_bias=bias,
        **grouped,
    )
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights, experts = gate.route(x)
    assert (weights.dtype, experts.dtype, tuple(weights.shape)) == (torch.float32, torch.int64, (20, 3))
    for token in range(20):
        expected = routed_by_hand(gate, x[token])
        found = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_bias_changes_the_choice_and_not_the_weights():
    gate = router(6, 2, scoring_func="sigmoid", renormalize=False, correction_bias=True)
    gate.e_score_correction_bias.zero_()
    x = torch.randn(9, HIDDEN)
    plain = gate(x).sigmoid()
    gate.e_score_correction_bias[4] = 10.0
    weights, experts = gate.route(x)
    assert (experts == 4).any(dim=1).all()
    torch.testing.assert_close(weights, plain.gather(1, experts))


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(tokens):
    gate = router(6, 6, num_expert_group=3, topk_group=3, correction_bias=True)
    weights, experts = gate.route(torch.randn(tokens, HIDDEN))
    assert weights.shape == experts.shape == (tokens, 6)
    assert sorted(experts.flatten().tolist()) == list(range(6)) * tokens


def test_logits_of_a_bfloat16_model_are_float32_where_asked_for():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        exact, plain = router(6, 2, float32_logits=True), router(6, 2)
    finally:
        torch.set_default_dtype(before)
    x = torch.randn(5, HIDDEN).bfloat16()
    assert (exact.weight.dtype, exact(x).dtype) == (torch.float32, torch.float32)
    assert (plain.weight.dtype, plain(x).dtype) == (torch.bfloat16, torch.bfloat16)
    assert plain.route(x)[0].dtype is torch.float32


def test_sigmoid_scores_that_are_all_zero_give_no_nan():
    gate = router(4, 2, scoring_func="sigmoid")
    gate.weight.fill_(-1e4)
    weights, _ = gate.route(torch.ones(1, HIDDEN))
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_expert_group": 5, "topk_group": 2}, "12 experts do not make 5 groups of equal size"),
        ({"num_expert_group": 4, "topk_group": 5}, "a token cannot choose 5 of 4 groups"),
        ({"num_expert_group": 4, "topk_group": 0}, "a token cannot choose 0 of 4 groups"),
        ({"num_expert_group": 4, "topk_group": 1, "top_k": 4}, "cannot choose 4 experts of 1 groups of 3 experts"),
        ({"top_k": 13}, "a token cannot choose 13 experts of 12 experts"),
        ({"top_k": 0}, "a token cannot choose 0 experts of 12 experts"),
        ({"num_expert_group": 12, "topk_group": 4, "group_score": "top2_sum"}, "have no best two"),
        ({"scoring_func": "tanh"}, "'tanh' is not one of softmax, sigmoid"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(options, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        TopKRouter(HIDDEN, 12, **({"top_k": 2, "prefix": "model.layers.3.mlp.gate"} | options))
    assert "model.layers.3.mlp.gate" in str(caught.value)
