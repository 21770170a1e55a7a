"""The balancer's maps and load statistics in one process: windows, steps, commits in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchplug.engine.eplb_state import EplbState
from torchplug.engine.expert_placement import ExpertLayout, Placement
from torchplug.errors import ParallelConfigError

LAYOUT = ExpertLayout(3, 5)


def a_state(**options):
    return EplbState(LAYOUT, 2, "cpu", **{"window_size": 3, "step_interval": 4} | options)


def count(state, rows):
    state.expert_load_view += torch.tensor(rows, dtype=torch.int32)
    return state.end_step()


def test_the_tensors_that_layers_get():
    state = a_state()
    assert (state.expert_load_view.dtype, state.expert_load_view.shape) == (torch.int32, (2, 5))
    assert (state.logical_to_physical_map.dtype, state.logical_to_physical_map.shape) == (torch.int64, (2, 3, 3))
    assert state.logical_to_physical_map[1].tolist() == [[0, 3, -1], [1, 4, -1], [2, -1, -1]]
    assert state.logical_replica_count.tolist() == [[2, 2, 1]] * 2


def test_the_load_of_slots_is_that_of_their_experts_over_the_window():
    state = a_state()
    count(state, [[1, 2, 3, 4, 5], [0, 0, 1, 0, 0]])
    assert state.expert_load_view.tolist() == [[0] * 5] * 2
    assert state.logical_load().tolist() == [[5, 7, 3], [0, 0, 1]]
    for _ in range(2):
        count(state, [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    assert state.logical_load().tolist() == [[9, 7, 3], [0, 0, 1]]
    count(state, [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])  # the window has three steps: the first one has left it
    assert state.logical_load().tolist() == [[4, 1, 0], [0, 0, 0]]
    assert state.local_loads()[:, 0].tolist() == [[2, 0, 0], [2, 0, 0], [0, 1, 0]]


def test_a_rebalance_is_due_after_a_quarter_of_the_interval_and_then_after_each():
    state = a_state(step_interval=8)
    due = [state.end_step() for _ in range(20)]
    assert [step for step, each in enumerate(due, 1) if each] == [2, 10, 18]
    assert a_state(step_interval=1).end_step()


def test_a_dummy_step_counts_no_load_and_still_advances():
    state = a_state(step_interval=8)
    count(state, [[1, 0, 0, 0, 0]] * 2)
    state.expert_load_view += 7
    assert state.end_step(counts=False)
    assert state.expert_load_view.sum() == 0
    assert state.logical_load().tolist() == [[1, 0, 0]] * 2 and len(state.local_loads()) == 1


def test_a_commit_is_in_place_for_its_layers_and_keeps_what_the_window_says_of_experts():
    state = a_state()
    views = (state.expert_load_view, state.logical_to_physical_map, state.logical_replica_count)
    pointers = [view.data_ptr() for view in views]
    count(state, [[1, 2, 3, 4, 5], [10, 20, 30, 40, 50]])
    count(state, [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    before = state.local_loads().clone()
    new = Placement.of(np.array([[2, 2, 0, 1, 0], [2, 2, 0, 1, 2]]), LAYOUT)
    state.commit(new, [1])
    assert state.logical_to_physical_map[0].tolist() == [[0, 3, -1], [1, 4, -1], [2, -1, -1]]
    assert state.logical_to_physical_map[1].tolist() == [[2, -1, -1], [3, -1, -1], [0, 1, 4]]
    assert state.logical_replica_count.tolist() == [[2, 2, 1], [1, 1, 3]]
    assert state.placement.physical_to_logical.tolist() == [[0, 1, 2, 0, 1], [2, 2, 0, 1, 2]]
    assert state.local_loads().tolist() == before.tolist()
    count(state, [[0, 0, 0, 0, 0], [1, 2, 0, 0, 4]])  # counted in the slots of the new map
    assert state.logical_load()[1].tolist() == [50, 71, 37]
    assert (state.expert_load_view, state.logical_to_physical_map, state.logical_replica_count) == views
    assert [view.data_ptr() for view in views] == pointers


@pytest.mark.parametrize("option", ["window_size", "step_interval"])
def test_a_window_and_an_interval_have_at_least_one_step(option):
    with pytest.raises(ParallelConfigError, match=f"{option}: 0 steps"):
        a_state(**{option: 0})
