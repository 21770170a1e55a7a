"""Traces of expert load, and what the simulation says of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torchplug.engine.eplb_simulation import simulate
from torchplug.engine.eplb_state import EplbState
from torchplug.engine.expert_placement import ExpertLayout
from torchplug.engine.load_trace import RecordedTrace, SyntheticTrace, save_load_trace
from torchplug.engine.moe_config import moe_shape
from torchplug.errors import CheckpointError, RequestError


class Given:
    def __init__(self, load):
        self.load = np.asarray(load)
        self.shape = self.load.shape

    def chunks(self, size):
        for start in range(0, len(self.load), size):
            yield self.load[start : start + size]


def test_a_recorded_trace_comes_back_in_chunks(tmp_path):
    load = np.arange(5 * 2 * 3).reshape(5, 2, 3)
    save_load_trace(tmp_path / "trace.safetensors", load)
    trace = RecordedTrace(tmp_path / "trace.safetensors")
    assert trace.shape == (5, 2, 3)
    parts = list(trace.chunks(2))
    assert [len(part) for part in parts] == [2, 2, 1]
    assert np.concatenate(parts).tolist() == load.tolist()


def test_a_running_balancer_can_be_recorded(tmp_path):
    state = EplbState(ExpertLayout(3, 4), 1, "cpu", window_size=2)
    for _ in range(3):
        state.expert_load_view += torch.tensor([[1, 2, 3, 4]])
        state.end_step()
    save_load_trace(tmp_path / "run.safetensors", state.local_loads().numpy())
    assert next(RecordedTrace(tmp_path / "run.safetensors").chunks(9)).tolist() == [[[5, 2, 3]], [[5, 2, 3]]]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"other": np.zeros((1, 1, 1), np.int32)}, "has no tensor 'expert_load'"),
        ({"expert_load": np.zeros((2, 3), np.int32)}, r"expected integers \[steps, layers, experts\]"),
        ({"expert_load": np.zeros((2, 3, 4), np.float32)}, "found F32"),
        ({"expert_load": np.zeros((0, 3, 4), np.int32)}, "not empty"),
        (None, "cannot be read"),
        (b"nonsense", "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path, tensors, says):
    path = tmp_path / "trace.safetensors"
    if isinstance(tensors, bytes):
        path.write_bytes(tensors)
    elif tensors is not None:
        save_file(tensors, path)
    with pytest.raises(RequestError, match=says):
        RecordedTrace(path)


def test_a_negative_load_is_refused_where_it_is(tmp_path):
    load = np.ones((5, 1, 2), np.int32)
    load[3, 0, 1] = -1
    save_load_trace(tmp_path / "trace.safetensors", load)
    with pytest.raises(RequestError, match="negative load within steps 2 to 3"):
        list(RecordedTrace(tmp_path / "trace.safetensors").chunks(2))


def test_a_synthetic_load_has_all_picks_its_skew_and_is_repeatable():
    trace = SyntheticTrace(6, 2, 16, tokens=1000, top_k=4, skew=1.2, drift=0.0)
    load = np.concatenate(list(trace.chunks(4)))
    assert load.shape == trace.shape and (load.sum(2) == 4000).all()
    assert load.tolist() == np.concatenate(list(trace.chunks(5))).tolist()
    mean = np.sort(load.mean(0), axis=1)[:, ::-1]
    assert (mean[:, 0] < 1.15 * 1000).all(), "no expert is asked for more often than there are tokens"
    assert (mean[:, 0] > 5 * mean[:, -1]).all()
    even = next(SyntheticTrace(1, 1, 16, tokens=100000, skew=0.0).chunks(1))
    assert even.max() < 1.05 * even.min()


def test_drift_changes_who_is_popular():
    still, moving = (SyntheticTrace(200, 1, 32, skew=0.5, drift=drift) for drift in (0.0, 0.2))

    def likeness(trace):
        load = next(trace.chunks(200))
        return np.corrcoef(load[0, 0], load[-1, 0])[0, 1]

    assert likeness(still) > 0.95 > 0.7 > likeness(moving)


def test_more_picks_than_experts_are_refused():
    with pytest.raises(RequestError, match="8 different ones of 4 experts"):
        SyntheticTrace(1, 1, 4, top_k=8)


def test_the_placement_of_an_interval_comes_from_the_one_before():
    layout = ExpertLayout(4, 4, num_ranks=2)
    first, second = [10, 10, 0, 0], [0, 0, 10, 10]
    intervals = list(simulate(Given([[first]] * 2 + [[second]] * 2 + [[second]]), layout, 2, 100))
    assert [(each.first_step, each.num_steps) for each in intervals] == [(0, 2), (2, 2), (4, 1)]
    # 0 and 1 start on one rank; then each has a rank of its own, and so have 2 and 3.
    assert [each.balance_before for each in intervals] == [0.5, 0.5, 0.5]
    assert [each.balance_after for each in intervals] == [0.5, 1.0, 1.0]
    assert [each.slots_changed for each in intervals] == [0, 2, 0]
    assert [each.bytes_moved for each in intervals] == [0, 200, 0]
    assert [each.most_bytes_of_rank for each in intervals] == [0, 100, 0]
    assert intervals[0].policy_seconds == 0 < intervals[1].policy_seconds


def test_bytes_between_nodes_are_told_apart():
    layout = ExpertLayout(4, 4, num_ranks=2, num_nodes=2)
    (_, second) = simulate(Given([[[10, 10, 0, 0]], [[10, 10, 0, 0]]]), layout, 1, 7)
    assert second.bytes_between_nodes == second.bytes_moved == 14


def test_a_layout_for_other_experts_is_refused():
    with pytest.raises(RequestError, match="the trace has 3 experts, the layout 4"):
        list(simulate(Given([[[1, 2, 3]]]), ExpertLayout(4, 4), 1, 1))


CONFIGS = {
    "mixtral": (
        {"num_local_experts": 8, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_experts_per_tok": 2, "torch_dtype": "bfloat16"},
        {"experts": 8, "layers": 32, "top_k": 2, "groups": 1, "expert_bytes": 3 * 4096 * 14336 * 2},
    ),
    "deepseek": (
        {"n_routed_experts": 256, "hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432}
        | {"num_hidden_layers": 61, "first_k_dense_replace": 3, "num_experts_per_tok": 8, "n_group": 8}
        | {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}},
        {"experts": 256, "layers": 58, "top_k": 8, "groups": 8, "expert_bytes": 3 * 7168 * 2048},
    ),
    "nested": (
        {"text_config": {"num_experts": 64, "hidden_size": 8, "moe_intermediate_size": 4, "num_hidden_layers": 2}}
        | {"num_experts_per_tok": 2, "dtype": "float32"},
        {"experts": 64, "layers": 2, "top_k": 2, "groups": 1, "expert_bytes": 3 * 8 * 4 * 4},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shape_of_experts_in_a_config(tmp_path, name):
    config, shape = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert moe_shape(tmp_path) == shape


def test_a_config_without_experts_or_of_unknown_bytes_is_refused_with_all_problems(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "quantization_config": {"quant_method": "x"}}))
    with pytest.raises(CheckpointError) as caught:
        moe_shape(tmp_path)
    text = str(caught.value)
    assert "has none of n_routed_experts, num_experts, num_local_experts" in text and "quantised by x" in text
    with pytest.raises(CheckpointError, match=r"config\.json"):
        moe_shape(tmp_path / "nowhere")
