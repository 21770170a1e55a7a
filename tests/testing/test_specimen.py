"""Targets of the kit: an architecture, module:Class, a checkpoint, a class; and where config and weights come from."""

from __future__ import annotations

import pytest
import torch
from kinds_of_checks import OF_EXPERTS, OF_ITEMS, OF_STATES, outcomes_without
from torch import nn
from torchplug.errors import CheckpointError, DeviceError
from torchplug.testing import CHECKS, Outcome, Specimen, check_model


def outcomes(results):
    return {result.check.name: (result.outcome, result.reason) for result in results}


OF_OTHER_KINDS = OF_STATES | OF_EXPERTS | OF_ITEMS
CONFIG = {"vocab_size": 32, "hidden_size": 16}


def test_a_plain_class_with_a_config_given_passes_what_applies_to_it(plain_class):
    found = outcomes(check_model(plain_class, config=CONFIG))
    # Whether a new process could import this very file depends on how pytest was started.
    assert {name for name, (outcome, _) in found.items() if outcome is Outcome.SKIPPED} - {"import_contract"} == {
        "registration",
        "discovery_in_a_new_process",
        "cached_equals_uncached",
        "chunk_split",
        *OF_OTHER_KINDS,
    }
    assert Outcome.FAILED not in {outcome for outcome, _ in found.values()}
    assert "whole text in every step" in found["chunk_split"][1]


def test_without_a_config_behaviour_is_skipped_and_the_reason_says_what_is_missing(plain_class):
    found = outcomes(check_model(plain_class))
    for name in ("weights_round_trip", "dtype_and_device", "cached_equals_uncached"):
        assert found[name][0] is Outcome.SKIPPED and "tiny_config() -> dict" in found[name][1]


def test_module_and_class_is_a_target(make_package):
    package = make_package()
    found = outcomes(check_model(f"{package.module}:{package.name}"))
    skipped = {name for name, (outcome, _) in found.items() if outcome is Outcome.SKIPPED}
    assert skipped == {"registration", "discovery_in_a_new_process", *OF_OTHER_KINDS}
    assert Outcome.FAILED not in {outcome for outcome, _ in found.values()}


def test_distribution_and_architecture_is_a_target(make_package):
    package = make_package()
    package.register("planted-twin")
    found = outcomes(check_model(f"planted-twin:{package.name}"))
    assert {name: outcome for name, (outcome, _) in found.items()} == outcomes_without(OF_OTHER_KINDS)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("no_such_package.model:Thing", "No module named"),
        ("torchplug.errors:Nothing", "has no attribute 'Nothing'"),
        ("torchplug.errors:note_origin", "found function, expected a class"),
        ("NoSuchForCausalLM", "no installed plugin offers it"),
    ],
)
def test_a_target_that_is_not_there_fails_registration_with_the_reason(target, text):
    results = check_model(target)
    failed = [result for result in results if result.outcome is Outcome.FAILED]
    assert [result.check.name for result in failed] == ["registration"] and text in str(failed[0].error())


def test_a_checkpoint_is_checked_with_its_own_weights(tiny_checkpoint):
    specimen = Specimen(str(tiny_checkpoint))
    found = outcomes(check_model(specimen))
    assert {name: outcome for name, (outcome, _) in found.items()} == outcomes_without(OF_OTHER_KINDS)
    assert specimen.plugin.architecture == "LlamaForCausalLM" and not specimen.is_tiny


def test_a_checkpoint_or_a_device_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(CheckpointError):
        Specimen(tmp_path)
    with pytest.raises(DeviceError):
        Specimen("LlamaForCausalLM", devices=["cuda:99"])


def test_weights_are_random_with_fan_in_scaling_and_exact_in_bfloat16():
    tensors = Specimen("LlamaForCausalLM").tensors
    matrix, norm = tensors["model.layers.0.mlp.down_proj.weight"], tensors["model.norm.weight"]
    assert float(matrix.std()) == pytest.approx(2 / 112**0.5, rel=0.1)
    assert float(norm.min()) >= 0.5 and float(norm.max()) <= 1.5
    assert all(torch.equal(tensor.bfloat16().float(), tensor) for tensor in tensors.values())
    again = Specimen("LlamaForCausalLM").tensors
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())


def test_fused_parameters_are_given_in_their_parts_as_in_a_checkpoint():
    tensors = Specimen("LlamaForCausalLM").tensors
    shapes = {name.removeprefix("model.layers.0."): list(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["self_attn.q_proj.weight"] == [64, 64] and shapes["self_attn.k_proj.weight"] == [32, 64]
    assert "self_attn.qkv_proj.weight" not in shapes and shapes["mlp.gate_proj.weight"] == [112, 64]


def test_names_and_shapes_given_by_the_author_are_used(plain_class):
    specimen = Specimen(
        plain_class, config=CONFIG, weights={"embed.weight": (32, 16), "head.weight": torch.ones(32, 16)}
    )
    assert list(specimen.tensors) == ["embed.weight", "head.weight"]
    assert bool((specimen.tensors["head.weight"] == 1).all())


def test_the_kit_leaves_random_state_and_settings_alone():
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    check_model("LlamaForCausalLM")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), torch.get_deterministic_debug_mode()) == before[1:]


def test_every_check_says_what_it_proves_and_its_needs_come_first():
    seen = set()
    for check in CHECKS:
        assert check.proves and set(check.needs) <= seen
        seen.add(check.name)


@pytest.fixture
def redundant_class(plain_class):
    class Redundant(plain_class):
        """Three experts in a checkpoint, five slots for them in the model."""

        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config)
            slots = 3 + vllm_config.model_config.hf_config.num_redundant
            self.experts = nn.Parameter(torch.empty(slots, 16))
            self.num_redundant_experts = slots - 3
            self.num_moe_layers, self.moe_layers, self.expert_weights = 1, [], []
            self.num_expert_groups = self.num_shared_experts = 0
            self.num_logical_experts = self.num_routed_experts = 3
            self.num_physical_experts = self.num_local_physical_experts = slots

        def set_eplb_state(self, expert_load_view, logical_to_physical_map, logical_replica_count): ...
        def update_physical_experts_metadata(self, num_physical_experts, num_local_physical_experts): ...

        def load_weights(self, weights):
            slots = torch.arange(len(self.experts)) % 3
            return super().load_weights((name, x[slots] if name == "experts" else x) for name, x in weights)

    return Redundant


@pytest.mark.parametrize("redundant", [2, 0])
def test_a_redundant_expert_may_be_filled_from_the_tensor_of_another(redundant_class, redundant):
    weights = {"embed.weight": (32, 16), "head.weight": (32, 16), "experts": (3, 16)}
    results = check_model(redundant_class, config=CONFIG | {"num_redundant": redundant}, weights=weights)
    (found,) = [result for result in results if result.check.name == "weights_round_trip"]
    assert found.outcome is Outcome.OK, found.error()
