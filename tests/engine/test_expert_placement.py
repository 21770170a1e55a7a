"""The counts of experts and ranks, the three maps, and the balance of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchplug.engine.expert_placement import ExpertLayout, Placement, balance, rank_loads
from torchplug.errors import ParallelConfigError


def test_the_initial_maps_begin_again_at_expert_0_in_the_redundant_slots():
    maps = Placement.initial(2, ExpertLayout(4, 6))
    assert maps.physical_to_logical.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert maps.logical_to_physical.tolist() == [[[0, 4, -1], [1, 5, -1], [2, -1, -1], [3, -1, -1]]] * 2
    assert maps.replica_count.tolist() == [[2, 2, 1, 1]] * 2


@given(st.data())
def test_the_three_maps_say_the_same(data):
    num_logical = data.draw(st.integers(1, 7))
    extra = data.draw(st.lists(st.integers(0, num_logical - 1), max_size=5))
    rows = [data.draw(st.permutations([*range(num_logical), *extra])) for _ in range(2)]
    layout = ExpertLayout(num_logical, num_logical + len(extra))
    maps = Placement.of(np.array(rows), layout)
    assert maps.logical_to_physical.shape == (2, num_logical, len(extra) + 1)
    for layer, row in enumerate(rows):
        for expert in range(num_logical):
            slots = [slot for slot, held in enumerate(row) if held == expert]
            padding = [-1] * (layout.most_replicas - len(slots))
            assert maps.logical_to_physical[layer, expert].tolist() == slots + padding
            assert maps.replica_count[layer, expert] == len(slots)


def test_rank_loads_spread_an_experts_tokens_over_its_replicas():
    layout = ExpertLayout(3, 4, num_ranks=2)
    maps = Placement.of(np.array([[0, 1, 2, 0]]), layout)
    assert rank_loads(np.array([[6, 1, 2]]), maps, layout).tolist() == [[4, 5]]
    assert rank_loads(np.array([[[6, 1, 2]], [[0, 0, 0]]]), maps, layout).tolist() == [[[4, 5]], [[0, 0]]]


def test_balance_is_mean_over_max_and_1_without_load():
    assert balance(np.array([[1.0, 3.0], [2.0, 2.0], [0.0, 0.0]])).tolist() == [2 / 3, 1, 1]


@pytest.mark.parametrize(
    ("counts", "says", "fix"),
    [
        (
            {"num_logical": 256, "num_physical": 256, "num_ranks": 3},
            "256 logical + 0 redundant = 256 physical experts do not divide over 3 ranks",
            "use 2 (86 slots a rank) or 5 (87 slots a rank) redundant experts",
        ),
        (
            {"num_logical": 8, "num_physical": 11, "num_ranks": 4},
            "8 logical + 3 redundant = 11 physical experts do not divide over 4 ranks",
            "use 0 (2 slots a rank) or 4 (3 slots a rank) redundant experts",
        ),
        (
            {"num_logical": 8, "num_physical": 6, "num_ranks": 3},
            "6 physical experts cannot hold 8 logical ones",
            "use 1 (3 slots a rank) or 4 (4 slots a rank) redundant experts",
        ),
        (
            {"num_logical": 10, "num_physical": 12, "num_groups": 4},
            "10 logical experts do not divide into 4 groups",
            "config",
        ),
        (
            {"num_logical": 12, "num_physical": 12, "num_ranks": 6, "num_nodes": 4},
            "6 ranks do not divide over 4 nodes",
            "same number of ranks",
        ),
        ({"num_logical": 0, "num_physical": 4, "num_ranks": 0}, "0 logical experts, 0 ranks", "correct the count"),
    ],
)
def test_counts_that_do_not_divide_are_named_with_the_redundancy_that_fits(counts, says, fix):
    with pytest.raises(ParallelConfigError) as caught:
        ExpertLayout(**counts)
    (problem,) = caught.value.problems
    assert says in problem.says and fix in problem.fix


def test_all_counts_that_do_not_divide_are_named_at_once():
    with pytest.raises(ParallelConfigError) as caught:
        ExpertLayout(10, 11, num_ranks=4, num_groups=3, num_nodes=3)
    assert [problem.where for problem in caught.value.problems] == [
        "num_redundant_experts",
        "num_expert_groups",
        "num_nodes",
    ]


def test_the_redundancy_that_is_proposed_fits():
    for logical in range(1, 20):
        for ranks in range(1, 9):
            for redundant in range(5):
                try:
                    ExpertLayout(logical, logical + redundant, ranks)
                except ParallelConfigError as error:
                    words = error.problems[0].fix.removeprefix("use ").split(" or ")
                    for word in words:
                        ExpertLayout(logical, logical + int(word.split()[0]), ranks)
