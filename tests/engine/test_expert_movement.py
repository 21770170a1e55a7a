"""Moving experts: plans for every pair of maps, one process, and several with gloo, slow and dead ones among them."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.engine import expert_balancer
from torchplug.engine.eplb_state import EplbState
from torchplug.engine.expert_balancer import ExpertBalancer
from torchplug.engine.expert_movement import check_expert_weights, move_layer, plan_of_rank, plan_transfers
from torchplug.engine.expert_placement import ExpertLayout, Placement
from torchplug.errors import ContractError, ParallelConfigError

WORKER = Path(__file__).parent / "expert_movement_worker.py"


def moved(old, new, layout):
    """The experts in all slots after every rank has done its part, each with what it had before."""
    transfers = plan_transfers(old, new, layout)
    size = layout.num_local_physical
    before = [old[rank * size : (rank + 1) * size].tolist() for rank in range(layout.num_ranks)]
    parts = [plan_of_rank(transfers, old, new, layout, rank) for rank in range(layout.num_ranks)]
    mail = {}
    for rank, part in enumerate(parts):
        for slot, target in part.sends:
            mail.setdefault((rank, target), []).append(before[rank][slot])
    after = []
    for rank, part in enumerate(parts):
        rows = [before[rank][slot] for slot in part.kept]
        rows += [mail[source, rank].pop(0) for source in part.receives]
        mine = list(before[rank])
        for slot, row in part.writes:
            mine[slot] = rows[row]
        after += mine
    assert not any(mail.values()), "a row was sent and nobody took it"
    return after, transfers


@st.composite
def maps(draw):
    nodes, per_node, size = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    slots = nodes * per_node * size
    logical = draw(st.integers(1, slots))
    layout = ExpertLayout(logical, slots, nodes * per_node, 1, nodes)
    rows = []
    for _ in range(2):
        extra = draw(st.lists(st.integers(0, logical - 1), min_size=slots - logical, max_size=slots - logical))
        rows.append(np.array(draw(st.permutations([*range(logical), *extra]))))
    return *rows, layout


@given(maps())
@settings(max_examples=300, deadline=None)
def test_every_change_of_maps_puts_every_expert_where_the_new_one_says(case):
    old, new, layout = case
    after, transfers = moved(old, new, layout)
    assert after == new.tolist()
    size = layout.num_local_physical
    held = [set(row.tolist()) for row in old.reshape(layout.num_ranks, size)]
    assert len({(each.expert, each.target) for each in transfers}) == len(transfers), "a rank gets an expert once"
    for each in transfers:
        assert each.expert not in held[each.target], "what a rank has is copied, not sent"
        assert old[each.source * size + each.slot] == each.expert
        near = [rank for rank in range(layout.num_ranks) if rank // layout.ranks_per_node == _node(each.target, layout)]
        assert _node(each.source, layout) == _node(each.target, layout) or not any(
            each.expert in held[rank] for rank in near
        ), "a row crosses nodes only where its own node has it not"


def _node(rank, layout):
    return rank // layout.ranks_per_node


def test_senders_take_turns():
    layout = ExpertLayout(2, 12, num_ranks=6)
    old = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    transfers = plan_transfers(old, np.array([1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]), layout)
    assert sorted(each.source for each in transfers) == [0, 1, 2, 3, 4, 5]


def test_all_permutations_of_four_slots_in_one_process():
    layout = ExpertLayout(4, 4)
    for old, new in itertools.product(map(np.array, itertools.permutations(range(4))), repeat=2):
        weight, scale = torch.from_numpy(old)[:, None] * torch.ones(1, 3), torch.from_numpy(old).to(torch.bfloat16)
        pointer = weight.data_ptr()
        move_layer([weight, scale], plan_of_rank((), old, new, layout, 0))
        assert (weight == torch.from_numpy(new)[:, None]).all() and scale.tolist() == new.tolist()
        assert weight.data_ptr() == pointer


def test_a_balancer_moves_a_layer_a_step_and_commits_it_then(monkeypatch):
    layout = ExpertLayout(4, 6)
    state = EplbState(layout, 3, "cpu", step_interval=8, window_size=4)
    experts = [torch.randn(4, 2, 3) for _ in range(3)]
    weights = [[expert[state.placement.physical_to_logical[0]].contiguous()] for expert in experts]
    target = Placement.of(np.array([[3, 2, 1, 0, 3, 3], [0, 1, 2, 3, 0, 1], [1, 1, 0, 2, 3, 2]]), layout)
    monkeypatch.setattr(expert_balancer, "rebalance", lambda load, layout, current: target)
    balancer = ExpertBalancer(state, weights)
    moved = []
    for _ in range(6):
        balancer.end_step()
        held = state.placement.physical_to_logical
        assert all((weights[layer][0] == experts[layer][held[layer]]).all() for layer in range(3))
        moved.append([layer for layer in (0, 2) if (held[layer] == target.physical_to_logical[layer]).all()])
    # Decided after the second step, when a quarter of the interval is over; layer 1 stays as it is.
    assert moved == [[], [], [0], [0, 2], [0, 2], [0, 2]]
    assert state.logical_replica_count.tolist() == [[1, 1, 1, 3], [2, 2, 1, 1], [1, 2, 2, 1]]
    assert (balancer.last.num_layers, balancer.last.num_slots, balancer.last.done) == (2, 11, True)
    assert balancer.last.bytes_sent == balancer.last.bytes_received == 0


def test_all_that_is_left_of_a_rebalance_can_be_moved_at_once(monkeypatch):
    layout = ExpertLayout(2, 2)
    state = EplbState(layout, 3, "cpu")
    weights = [[torch.tensor([[0.0], [1.0]])] for _ in range(3)]
    target = Placement.of(np.array([[1, 0]] * 3), layout)
    monkeypatch.setattr(expert_balancer, "rebalance", lambda load, layout, current: target)
    balancer = ExpertBalancer(state, weights)
    balancer.start()
    assert not balancer.last.done
    balancer.finish()
    assert balancer.last.done and [each[0].tolist() for each in weights] == [[[1], [0]]] * 3


def test_one_rank_has_nothing_to_balance():
    state = EplbState(ExpertLayout(4, 6), 1, "cpu", step_interval=1)
    balancer = ExpertBalancer(state, [[torch.zeros(6, 2)]])
    state.expert_load_view[0, 3] = 90
    balancer.end_step()
    assert balancer.last.done and balancer.last.num_slots == 0


def test_rows_that_are_not_local_slots_are_refused_by_name():
    layout = ExpertLayout(4, 4, num_ranks=2)
    with pytest.raises(ContractError) as caught:
        check_expert_weights([[torch.zeros(2, 3)], [torch.zeros(4, 3), torch.zeros(3, 2).T]], layout)
    assert [problem.where for problem in caught.value.problems] == ["expert_weights[1][0]", "expert_weights[1][1]"]
    assert "expected [2, ...]" in caught.value.problems[0].says and "contiguous" in caught.value.problems[1].says


def test_a_balancer_needs_the_ranks_of_its_layout():
    state = EplbState(ExpertLayout(4, 4, num_ranks=2), 1, "cpu")
    with pytest.raises(ParallelConfigError, match="the layout is for 2 ranks, the group has 1"):
        ExpertBalancer(state, [[torch.zeros(2, 1)]])


def run_workers(tmp_path, scenario, num_ranks, timeout=500):
    """Start the ranks and wait for all; returns (exit code, last line of standard output as JSON, stderr) of each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(WORKER), scenario, str(num_ranks), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(num_ranks)
    ]
    results = []
    for rank in ranks:
        try:
            out, err = rank.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for each in ranks:
                each.kill()
            raise
        lines = out.decode().splitlines()
        results.append((rank.returncode, json.loads(lines[-1]) if lines else None, err.decode()))
    return results


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return run_workers(tmp_path_factory.mktemp("four"), "move", 4)


def test_four_processes_and_two_of_them_move_experts_as_planned(four_ranks):
    """Each compared its weights after every move with those of the experts that its slots should hold."""
    assert [code for code, _, _ in four_ranks] == [0] * 4, four_ranks
    for _, found, _ in four_ranks:
        assert found["moves"] > 20 and found["wrong"] == 0
        assert found["pair_moves"] == (24 * 24 if found["rank"] < 2 else 0)


def test_a_slow_rank_changes_nothing(four_ranks):
    for _, found, _ in four_ranks:
        assert found["slow_seconds"] > 0.5 and found["slow_wrong"] == 0


def test_the_bytes_that_moved_are_reported(four_ranks):
    reports = [found["report"] for _, found, _ in four_ranks]
    assert sum(report["bytes_sent"] for report in reports) == sum(report["bytes_received"] for report in reports) > 0
    for _, found, _ in four_ranks:
        assert found["report"]["bytes_received"] == found["expected_bytes"]
        assert found["report"]["done"] and found["report"]["balance_after"] > found["report"]["balance_before"]


def test_all_ranks_end_with_the_same_maps(four_ranks):
    assert len({json.dumps(found["maps"]) for _, found, _ in four_ranks}) == 1


def test_the_load_of_all_ranks_is_added_up(four_ranks):
    for _, found, _ in four_ranks:
        assert found["load"] == found["expected_load"]


@pytest.mark.parametrize("scenario", ["dies_before", "dies_within", "never_comes"])
def test_a_rank_that_is_gone_ends_the_others_with_an_error_that_names_it(tmp_path, scenario):
    first, second, gone = run_workers(tmp_path, scenario, 3)
    assert gone[0] == (7 if scenario.startswith("dies") else 0)
    texts = [found["error"] for _, found, _ in (first, second)]
    assert all(re.match(r"torchplug: rank [01] of 3: (adding up|moving)", text) for text in texts), texts
    assert any(re.search(r"[Rr]anks? 2\b", text) for text in texts), texts
    for _, found, _ in (first, second):
        assert found["unchanged"], "a layer is as it was where its move failed"
        assert found["seconds"] < 20, "the group's own timeout is half an hour"
