"""The checks of mixtures of experts are proven by planted faults that each, and no other check, catches."""

from __future__ import annotations

import pytest
import torch
from kinds_of_checks import OF_EXPERTS, OF_ITEMS, OF_STATES, outcomes_without
from torchplug.testing import Outcome, check_model

ATTRIBUTES = "        self.set_moe_attributes()\n"
EXPERTS = "        self.experts = FusedMoE(4, width, 24, parallel_config=vllm_config.parallel_config)\n"
FORWARD = "        return self.experts(hidden, *self.gate.route(hidden))\n"


def after(line: str, *more: str) -> tuple[str, str]:
    return line, line + "".join(f"        {text}\n" for text in more)


FAULTS = {
    # attributes; the model with experts lies inside the one that is loaded
    "an_attribute_is_missing_inside_a_wrapper": (
        "claims",
        after(ATTRIBUTES, "del self.num_expert_groups, self.num_routed_experts"),
        "which the model holds as language_model): lacks num_expert_groups, num_routed_experts",
    ),
    # numbers and layers
    "redundant_experts_not_counted": (
        "expert_layers",
        after(ATTRIBUTES, "self.num_redundant_experts += 1"),
        "4 logical and 1 redundant experts, but num_physical_experts is 4",
    ),
    "shared_experts_counted_as_routed": (
        "expert_layers",
        after(ATTRIBUTES, "self.num_routed_experts += 1"),
        "4 logical experts, but num_routed_experts is 5",
    ),
    "groups_that_do_not_divide": (
        "expert_layers",
        ("self.set_moe_attributes()", "self.set_moe_attributes(num_expert_groups=3)"),
        "4 logical experts do not make 3 groups",
    ),
    "a_layer_forgotten": (
        "expert_layers",
        after(ATTRIBUTES, "self.moe_layers, self.num_moe_layers = [self.first.experts], 1"),
        "moe_layers lacks second.experts",
    ),
    "the_number_of_layers_is_another": (
        "expert_layers",
        after(ATTRIBUTES, "self.num_moe_layers = 3"),
        "num_moe_layers is 3, and moe_layers holds 2",
    ),
    "a_tensor_of_another_first_dimension": (
        "expert_layers",
        after(EXPERTS, "self.experts.get_expert_weights = lambda: [self.experts.w13_weight.flatten(0, 1)]"),
        "expected [4, ...], contiguous",
    ),
    "parallel_settings_ignored": (
        "expert_layers",
        ("FusedMoE(4, width, 24, parallel_config=vllm_config.parallel_config)", "FusedMoE(4, width, 24)"),
        "4 physical experts on 2 rank(s), but num_local_physical_experts is 4",
    ),
    "slots_that_cannot_be_shared_are_not_refused": (
        "expert_layers",
        (
            EXPERTS,
            "        parallel = vllm_config.parallel_config\n"
            "        parallel.eplb_config.num_redundant_experts *= 2\n"
            "        self.experts = FusedMoE(4, width, 24, parallel_config=parallel)\n"
            "        parallel.eplb_config.num_redundant_experts //= 2\n",
        ),
        "expected an error that says that 5 physical experts",
    ),
    # moving
    "a_path_that_forgets_the_maps": (
        "expert_swap",
        (
            FORWARD,
            "        self.experts._eplb, eplb = None, self.experts._eplb\n"
            "        result = self.experts(hidden, *self.gate.route(hidden))\n"
            "        self.experts._eplb = eplb\n"
            "        if eplb is not None:\n"
            "            eplb.record(eplb.choose(self.gate.route(hidden)[1]))\n"
            "        return result\n",
        ),
        "the logits change when the slots of all layers change places",
    ),
    "maps_copied_when_they_are_handed_over": (
        "expert_swap",
        (
            EXPERTS,
            EXPERTS.replace("FusedMoE(", "Copying(") + "\n",
        ),
        "the logits change when the slots of all layers change places",
    ),
    "weights_kept_from_load": (
        "expert_swap",
        (
            FORWARD,
            "        experts = self.experts\n"
            "        if not hasattr(self, 'kept'):\n"
            "            self.kept = experts.w2_weight.clone()\n"
            "        moved, experts.w2_weight.data = experts.w2_weight.data, self.kept\n"
            "        result = experts(hidden, *self.gate.route(hidden))\n"
            "        experts.w2_weight.data = moved\n"
            "        return result\n",
        ),
        "compute nothing from expert weights at load",
    ),
    "redundant_slots_hold_other_experts": (
        "expert_swap",
        (EXPERTS, EXPERTS.replace("FusedMoE(", "Crossed(")),
        "the logits change when set_eplb_state hands over maps of the slots as they were loaded",
    ),
    "loads_are_not_recorded": (
        "expert_swap",
        (EXPERTS, EXPERTS.replace("FusedMoE(", "Silent(")),
        "expert_load_view stays 0 for moe_layers [0, 1]",
    ),
    "loads_of_logical_experts": (
        "expert_swap",
        (EXPERTS, EXPERTS.replace("FusedMoE(", "Logical(")),
        "is not counted at the slots that served the tokens",
    ),
}

LAYERS = """

class Copying(FusedMoE):
    def set_eplb_state(self, moe_layer_idx, expert_load_view, logical_to_physical_map, logical_replica_count):
        super().set_eplb_state(
            moe_layer_idx, expert_load_view, logical_to_physical_map.clone(), logical_replica_count.clone()
        )


class Crossed(FusedMoE):
    def process_weights_after_loading(self):
        if self.placement.num_redundant:
            self.w2_weight[-1] = self.w2_weight[1]


class Silent(FusedMoE):
    def set_eplb_state(self, moe_layer_idx, expert_load_view, logical_to_physical_map, logical_replica_count):
        super().set_eplb_state(
            moe_layer_idx, expert_load_view.clone(), logical_to_physical_map, logical_replica_count
        )


class Logical(FusedMoE):
    def set_eplb_state(self, moe_layer_idx, expert_load_view, logical_to_physical_map, logical_replica_count):
        self.counted = expert_load_view[moe_layer_idx]
        super().set_eplb_state(
            moe_layer_idx, expert_load_view.clone(), logical_to_physical_map, logical_replica_count
        )

    def forward(self, hidden, weights, ids, shared=None):
        if hasattr(self, "counted"):
            self.counted[:4] += ids.flatten().bincount(minlength=4).int()
        return super().forward(hidden, weights, ids, shared)


class Mixture(nn.Module):"""
"""Layers with a fault each, defined before the class that uses one of them."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def planted(make_package, *faults):
    layers = ("\n\nclass Mixture(nn.Module):", LAYERS)
    return check_model(make_package(layers, *faults, healthy="healthy_experts.py").name)


OF_OTHER_KINDS = OF_STATES | OF_ITEMS


def test_a_healthy_mixture_of_experts_passes_every_check(make_package):
    results = planted(make_package)
    assert {result.check.name: result.outcome for result in results} == outcomes_without(OF_OTHER_KINDS)
    notes = {result.check.name: result.notes for result in results}["expert_swap"]
    assert notes == ("slots moved in float32 on cpu", "slots moved in bfloat16 on cpu")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_its_own_check_and_no_other(make_package, fault):
    check, change, text = FAULTS[fault]
    results = planted(make_package, change)
    failed = {result.check.name: str(result.error()) for result in results if result.outcome is Outcome.FAILED}
    assert set(failed) == {check}, failed
    assert text in failed[check] and "fix: " in failed[check]


def test_every_check_of_experts_has_a_fault():
    assert {check for check, _, _ in FAULTS.values()} == OF_EXPERTS | {"claims"}
