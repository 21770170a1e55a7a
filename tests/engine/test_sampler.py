"""The sampler against a plain numpy reference: greedy, truncation, penalties, seeds, log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.engine.sampler import Sampler, SamplingState
from torchplug.engine.sampling_params import SamplingParams
from torchplug.errors import ContractError


def reference(logits, params: SamplingParams, prompt=(), output=(), barred=()) -> np.ndarray:
    """Probabilities of the next token, step by step as vLLM's documentation orders them."""
    x = np.array(logits, dtype=np.float64)
    if len(output) < params.min_tokens:
        x[list(barred)] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.greedy:
        return np.eye(len(x))[int(x.argmax())]
    x = x / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    kept = 0.0
    for token in order:
        if kept >= params.top_p and params.top_p < 1:
            p[token] = 0
        kept += p[token]
    return p / p.sum()


def state_of(params: SamplingParams, vocab: int, prompt=(), output=(), barred=()) -> SamplingState:
    """The state of a request that has sampled `output` so far."""
    state = SamplingState(params, list(prompt), list(barred))
    for token in output:
        if state.changes_logits:
            state.apply(torch.zeros(vocab))
        state.record(token)
    return state


class Grid:
    """Stands in for a generator: the numbers of an even grid over [0, 1), one for each draw."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def distribution(logits, params: SamplingParams, draws: int, **history) -> np.ndarray:
    """Share of each token over an even grid of uniform numbers: exact to 1 / draws per token."""
    states = [state_of(params, len(logits), **history) for _ in range(draws)]
    for index, state in enumerate(states):
        state.random = Grid((index + 0.5) / draws)
    rows = torch.tensor(np.array(logits), dtype=torch.float32).expand(draws, -1)
    tokens = Sampler(0).sample(rows, states).token_ids
    return np.bincount(tokens, minlength=len(logits)) / draws


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 0.05},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": 0.8, "frequency_penalty": -0.4},
    {"presence_penalty": 1.5, "top_p": 0.9},
    {"frequency_penalty": 0.9, "temperature": 0.8},
    {"min_tokens": 5},
    {"min_tokens": 3},
    {"min_tokens": 3, "presence_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 5.0},
    {"temperature": 0.0, "min_tokens": 9},
]
HISTORY = {"prompt": [0, 3, 3], "output": [1, 4, 4], "barred": [2, 6]}


@pytest.mark.parametrize("given_params", CASES, ids=str)
def test_the_distribution_is_the_references(given_params):
    params = SamplingParams(max_tokens=50, **given_params)
    logits = np.random.default_rng(5).normal(0, 2, 12)
    draws = 4000
    found = distribution(logits, params, draws, **HISTORY)
    assert np.abs(found - reference(logits, params, **HISTORY)).max() < 1.5 / draws


@pytest.mark.parametrize(
    "given_params",
    [
        {"top_p": 0.9, "temperature": 0.2},  # ends within the first candidates
        {"top_p": 0.99, "temperature": 3.0},  # reaches beyond them
        {"top_p": 0.6},  # ends within them, and the mass beyond them decides where
        {"min_p": 0.9},
        {"min_p": 0.001, "temperature": 2.0},
        {"top_k": 2000},
        {"top_k": 2000, "top_p": 0.6},
        {"top_k": 30, "top_p": 0.6},
    ],
    ids=str,
)
def test_a_large_vocabulary_is_truncated_as_a_small_one(given_params):
    params = SamplingParams(**given_params)
    logits = np.random.default_rng(6).normal(0, 1.5, 5000).astype(np.float32)
    draws = 500
    found, wanted = distribution(logits, params, draws), reference(logits, params)
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(wanted > 0))
    order = np.argsort(-wanted, kind="stable")
    gap = np.abs(found[order].cumsum() - wanted[order].cumsum()).max()
    # Rows without truncation are drawn in the order of the vocabulary, the others best first.
    assert gap < 1.5 / draws


def test_rows_that_truncate_differently_share_a_batch():
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 1.5, 4000).astype(np.float32)
    some = [{"top_k": 3}, {}, {"top_k": 1500, "top_p": 0.7}, {"top_p": 0.95}, {"temperature": 0.0}, {"min_p": 0.5}]
    numbers = rng.random(len(some) * 50)
    alone, states = [], []
    for index, number in enumerate(numbers):
        for collected in (alone, states):
            state = SamplingState(SamplingParams(**some[index % len(some)]), [], [])
            state.random = Grid(float(number))
            collected.append(state)
    row = torch.tensor(logits)
    singly = [Sampler(0).sample(row[None], [state]).token_ids[0] for state in alone]
    together = Sampler(0).sample(row.expand(len(states), -1), states).token_ids
    assert together == singly


def chi_square_quantile(freedom: int, z: float = 4.75) -> float:
    """Upper quantile of chi-square at one in a million (z), by Wilson and Hilferty."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("given_params", CASES[:10], ids=str)
def test_drawn_tokens_follow_the_reference(given_params):
    params = SamplingParams(**given_params)
    logits = np.random.default_rng(8).normal(0, 1.5, 12)
    draws = 20_000
    sampler = Sampler(123)
    states = [SamplingState(params, [], []) for _ in range(draws)]
    tokens = sampler.sample(torch.tensor(logits).expand(draws, -1), states).token_ids
    observed = np.bincount(tokens, minlength=12)
    wanted = reference(logits, params) * draws
    assert observed[wanted == 0].sum() == 0
    possible = wanted > 0
    statistic = ((observed[possible] - wanted[possible]) ** 2 / wanted[possible]).sum()
    assert statistic < chi_square_quantile(max(int(possible.sum()) - 1, 1))


@given(
    st.lists(st.floats(-9, 9, width=16), min_size=2, max_size=20), st.sampled_from(["float32", "bfloat16", "float16"])
)
@settings(max_examples=200, deadline=None)
def test_greedy_is_the_first_index_of_the_maximum(values, dtype):
    row = torch.tensor([values], dtype=getattr(torch, dtype))
    expected = row[0].tolist().index(max(row[0].tolist()))
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=1),
        SamplingParams(temperature=1e-6),
    ):
        assert Sampler(0).sample(row, [SamplingState(params, [], [])]).token_ids == [expected]


def draw_many(sampler: Sampler, seed: int, company: list[SamplingParams], steps: int = 30) -> list[int]:
    """Tokens of one seeded request over several steps, with other requests around it in the batch."""
    rows = torch.randn(steps, 40, generator=torch.Generator().manual_seed(0))
    mine = SamplingState(SamplingParams(seed=seed, top_p=0.98), [], [])
    others = [SamplingState(params, [], []) for params in company]
    states = [*others[::2], mine, *others[1::2]]
    place = states.index(mine)
    return [sampler.sample(row.expand(len(states), -1), states).token_ids[place] for row in rows]


def test_a_seeded_request_draws_the_same_whatever_is_beside_it():
    company = [SamplingParams(), SamplingParams(seed=5), SamplingParams(temperature=0), SamplingParams(top_k=2, seed=9)]
    alone = draw_many(Sampler(0), 5, [])
    assert len(set(alone)) > 5
    assert draw_many(Sampler(77), 5, company) == alone
    assert draw_many(Sampler(0), 6, []) != alone


def test_the_samplers_seed_repeats_requests_without_one():
    row = torch.zeros(1, 500)

    def run(seed):
        sampler = Sampler(seed)
        return [sampler.sample(row, [SamplingState(SamplingParams(), [], [])]).token_ids[0] for _ in range(20)]

    assert run(3) == run(3) != run(4)


def test_logprobs_are_of_the_raw_logits():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    params = SamplingParams(temperature=0, logprobs=2, repetition_penalty=100.0)
    found = Sampler(0).sample(logits, [SamplingState(params, [1, 2], [])]).logprobs[0]
    expected = torch.log_softmax(logits[0], -1)
    assert found.token_id == 0 and found.rank == 3
    assert found.logprob == pytest.approx(float(expected[0]))
    assert [token for token, _ in found.top] == [1, 2]
    assert [value for _, value in found.top] == pytest.approx([float(expected[1]), float(expected[2])])


def test_each_row_gets_the_logprobs_it_asked_for():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    states = [SamplingState(SamplingParams(logprobs=n, temperature=0), [], []) for n in (None, 0, 3, -1)]
    found = Sampler(0).sample(logits, states).logprobs
    assert found[0] is None
    assert [len(entry.top) for entry in found[1:]] == [0, 3, 9]
    assert all(entry.rank == 1 for entry in found[1:])
    assert sum(math.exp(value) for _, value in found[3].top) == pytest.approx(1)


def test_the_callers_logits_are_not_changed():
    logits = torch.randn(2, 9)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, min_tokens=2, top_k=2)
    Sampler(0).sample(logits, [SamplingState(params, [1], [2]), SamplingState(SamplingParams(), [], [])])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "given_params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"temperature": 0, "logprobs": 1}], ids=str
)
def test_nan_logits_are_an_error_not_a_token(given_params):
    logits = torch.zeros(2, 9)
    logits[1, 3] = float("nan")
    states = [SamplingState(SamplingParams(**given_params), [], []) for _ in range(2)]
    with pytest.raises(ContractError, match="compute_logits"):
        Sampler(0).sample(logits, states)


@given(st.integers(0, 2**32 - 1), st.sets(st.integers(0, 19), min_size=1), st.floats(0, 2))
@settings(max_examples=60, deadline=None)
def test_only_allowed_tokens_are_sampled(seed, allowed, temperature):
    params = SamplingParams(temperature=temperature, allowed_token_ids=sorted(allowed), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    state, other = SamplingState(params, [], []), SamplingState(SamplingParams(temperature=0), [], [])
    for _ in range(5):
        rows = 3 * torch.randn(2, 20, generator=generator)
        token, free = Sampler().sample(rows, [state, other]).token_ids
        assert token in allowed and free == int(rows[1].argmax())
        if params.greedy:
            assert token == max(sorted(allowed), key=lambda i: float(rows[0, i]))


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=100, deadline=None)
def test_a_bad_word_is_never_completed(seed, words, temperature):
    """A vocabulary of 5 in which token 4 is always allowed."""
    params = SamplingParams(temperature=temperature, bad_words=["x"], seed=seed)
    state = SamplingState(params, [], [], bad_words=words)
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    for _ in range(30):
        row = 3 * torch.randn(1, 5, generator=generator)
        barred = {word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1] or len(word) == 1}
        output += Sampler().sample(row, [state]).token_ids
        if not temperature:
            best = max((i for i in range(5) if i not in barred), key=lambda i: float(row[0, i]))
            assert output[-1] == best
    for word in words:
        assert not any(output[at : at + len(word)] == word for at in range(len(output)))


def test_ids_and_numbers_beyond_the_vocabulary_do_no_harm():
    huge = SamplingParams(top_k=10**400, logit_bias={10**12: 5.0, 1: 50.0}, allowed_token_ids=[1, 10**12], logprobs=9)
    assert Sampler().sample(torch.zeros(1, 5), [SamplingState(huge, [], [10**12])]).token_ids == [1]


def test_where_nothing_may_be_sampled_the_request_ends_alone():
    nothing = SamplingState(SamplingParams(temperature=0, allowed_token_ids=[2], min_tokens=1), [], [2])
    fine = SamplingState(SamplingParams(temperature=0), [], [])
    assert Sampler().sample(torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]), [nothing, fine]).token_ids[1] == 2
    assert nothing.error == "no token is left that may be sampled here" and fine.error is None
    with pytest.raises(ContractError, match="NaN"):
        Sampler().sample(
            torch.full((1, 3), float("nan")), [SamplingState(SamplingParams(allowed_token_ids=[2]), [], [])]
        )
