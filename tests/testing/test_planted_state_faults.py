"""Checks of recurrent state are proven by planted faults that each, and no other check, catches."""

from __future__ import annotations

import pytest
import torch
from kinds_of_checks import OF_EXPERTS, OF_ITEMS, outcomes_without
from torchplug.testing import Outcome, check_model

FAULTS = {
    "a_name_of_attention_that_nobody_builds": (
        "layer_kinds",
        ('if kind == "full_attention":', 'if kind == "attention":'),
        "names 1 of 3 layers attention, and the class builds no Attention layers and 2 recurrent",
    ),
    "a_recurrent_layer_left_out": (
        "layer_kinds",
        ('if kind == "recurrent":', 'if kind == "recurrent" and len(self.mixers) > 1:'),
        "layer_types of the config names 2 of 3 layers recurrent",
    ),
    "hybrid_that_is_not_claimed": (
        "layer_kinds",
        ("HasInnerState, IsHybrid, SupportsMamba", "HasInnerState, SupportsMamba"),
        "does not claim IsHybrid",
    ),
    "drafts_forgotten_by_the_hook": (
        "state_shapes",
        (
            "    def get_mamba_state_shape_from_config(cls, vllm_config):\n        return shapes(vllm_config)",
            "    def get_mamba_state_shape_from_config(cls, vllm_config):\n"
            "        (_, width), last = shapes(vllm_config)\n        return (TAPS - 1, width), last",
        ),
        "tensor-parallel size 1, 1 draft tokens, found float32[2, 24], float32[24]",
    ),
    "ranks_forgotten_by_the_hook": (
        "state_shapes",
        (
            "    def get_mamba_state_shape_from_config(cls, vllm_config):\n        return shapes(vllm_config)",
            "    def get_mamba_state_shape_from_config(cls, vllm_config):\n"
            "        conv, last = shapes(vllm_config)\n"
            "        return conv, (vllm_config.model_config.hf_config.hidden_size,)",
        ),
        "tensor-parallel size 2, 0 draft tokens",
    ),
    "another_dtype_in_the_layer": (
        "state_shapes",
        (
            "        return torch.float32, torch.float32\n\n    def forward",
            "        return torch.float32, torch.float64\n\n    def forward",
        ),
        "expected the state of layer 'mixers.0' and 1 more (float32[2, 24], float64[24])",
    ),
    "one_new_token_taken_for_decoding": (
        "fresh_state",
        ("if length > new:", "if length > new or new == 1:"),
        "a prompt of 1 in a slot that held NaN",
    ),
    "the_state_of_whoever_was_there": (
        "fresh_state",
        ("            if length > new:", "            if True:"),
        "a prompt of 1 in a slot that held NaN",
    ),
    "a_chunk_without_the_inputs_before_it": (
        "chunk_split",
        (
            "found, inputs[: TAPS - 1], total[:] = self.run(rows[start:stop], inputs[: TAPS - 1], total)",
            "found, inputs[: TAPS - 1], total[:] = self.run(\n"
            "                    rows[start:stop], inputs[: TAPS - 1] if new == 1 else None, total\n                )",
        ),
        "prompt of 9 cut at 1",
    ),
    "the_wrong_rows_kept": (
        "state_snapshots",
        (
            "state[block_ids[cur_block_idx], num_accepted_tokens - 1 :]",
            "state[block_ids[cur_block_idx], num_accepted_tokens:]",
        ),
        "expected the logits of the prompt when nothing was cached",
    ),
    "a_copy_of_an_older_state": (
        "state_snapshots",
        ("state[block_ids[cur_block_idx + num_accepted_tokens - 1]]", "state[block_ids[cur_block_idx - 1]]"),
        "named block",
    ),
    "an_address_outside_of_the_state": (
        "state_snapshots",
        (
            "return MambaCopySpec(block.data_ptr(), block.numel())",
            "return MambaCopySpec(block.data_ptr(), state.numel())",
        ),
        "let start_addr be state[block_ids[...], ...].data_ptr()",
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


OF_OTHER_KINDS = OF_EXPERTS | OF_ITEMS


def test_a_healthy_hybrid_passes_every_check(make_package):
    results = check_model(make_package(healthy="healthy_recurrent.py").name)
    assert {result.check.name: result.outcome for result in results} == outcomes_without(OF_OTHER_KINDS)
    (snapshots,) = [result for result in results if result.check.name == "state_snapshots"]
    assert snapshots.notes == ("44 prompt tokens from the cache",)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_its_own_check_and_no_other(make_package, fault):
    check, change, text = FAULTS[fault]
    results = check_model(make_package(change, healthy="healthy_recurrent.py").name)
    failed = {r.check.name: str(r.error()) for r in results if r.outcome is Outcome.FAILED}
    assert set(failed) == {check}, failed
    assert text in failed[check] and "fix: " in failed[check]


def test_every_check_of_states_has_a_fault():
    caught = {check for check, _, _ in FAULTS.values()}
    assert caught == {"layer_kinds", "state_shapes", "fresh_state", "chunk_split", "state_snapshots"}
