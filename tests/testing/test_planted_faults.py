"""Every check of the kit is proven by planted faults that it, and no other check, catches."""

from __future__ import annotations

import os

import pytest
import torch
from kinds_of_checks import OF_EXPERTS, OF_ITEMS, OF_STATES, outcomes_without
from torchplug.testing import CHECKS, Outcome, check_model

FORWARD = "        query, key, value = "
IMPORTS = "import torch\nfrom torch import nn\n"
LOADING = "        return load_weights(self, weights, packed=self.packed_modules_mapping)\n"
BUFFER = 'self.register_buffer("scale", torch.linspace(0.5, 1.5, width), persistent=False)'
MAPPING = "    packed_modules_mapping = "
CONSECUTIVE = "bool((positions[1:] - positions[:-1] == 1).all())"

FAULTS = {
    # what the module does when it is imported
    "prints": (
        "import_contract",
        (IMPORTS, IMPORTS + 'print("loading the planted model")\n'),
        "loading the planted model",
    ),
    "seeds": ("import_contract", (IMPORTS, IMPORTS + "torch.manual_seed(0)\n"), "random state of torch changed"),
    "starts_a_thread": (
        "import_contract",
        (IMPORTS, IMPORTS + "import threading\nthreading.Thread(target=threading.Event().wait, args=(0.3,)).start()\n"),
        "number of threads changed from 0 to 1",
    ),
    "claims_more_where_pytest_runs": (
        "import_contract",
        (MAPPING, f'    supports_eagle = "pytest" in __import__("sys").modules\n{MAPPING}'),
        "['SupportsEagle']",
    ),
    # what the class says
    "flag_that_is_1": ("claims", (MAPPING, f"    supports_eagle = 1\n{MAPPING}"), "is the literal True or False"),
    "flag_on_the_instance": (
        "claims",
        ("        super().__init__()\n", "        super().__init__()\n        self.supports_eagle = True\n"),
        "set on the instance",
    ),
    "claim_without_method": ("claims", (MAPPING, f"    supports_mrope = True\n{MAPPING}"), "does not implement it"),
    "method_that_is_absent": ("claims", ("def compute_logits", "def compute_logit"), "every model class needs it"),
    "renamed_argument": (
        "signatures",
        ("def embed_input_ids(self, input_ids):\n", "def embed_input_ids(self, tokens, input_ids=None):\n"),
        "embed_input_ids",
    ),
    "constructor_without_prefix": ("signatures", ('vllm_config, prefix=""', "vllm_config"), "does not take prefix"),
    "inherited_stub": (
        "stubs",
        (
            "class HealthyForCausalLM(nn.Module)",
            "class HealthyForCausalLM(nn.Module, torchplug.interfaces.SupportsMRoPE)",
        ),
        "inherits the interface's empty method",
    ),
    # what load_weights does
    "names_what_it_does_not_fill": (
        "weights_round_trip",
        (
            LOADING,
            "        kept = [pair for pair in weights if 'o_proj' not in pair[0]]\n"
            "        return load_weights(self, kept, packed=self.packed_modules_mapping) | {'o_proj.weight'}\n",
        ),
        "named o_proj.weight as filled, and some of its elements were never written",
    ),
    "keys_also_in_the_place_of_values": (
        "weights_round_trip",
        (
            LOADING,
            LOADING.replace("return", "loaded =")
            + "        self.qkv_proj.weight[64:] = self.qkv_proj.weight[32:64]\n        return loaded\n",
        ),
        "expected the 1024 elements of k_proj.weight in the parameters, found that it fills 2048",
    ),
    "returns_nothing": ("weights_round_trip", (LOADING, LOADING.replace("return ", "")), "found None"),
    "returns_the_checkpoints_names": (
        "weights_round_trip",
        (
            LOADING,
            "        weights = list(weights)\n" + LOADING.replace("\n", " | {name for name, _ in weights}\n"),
        ),
        "expected names of the module's parameters",
    ),
    "a_missing_tensor_unsaid": (
        "weights_round_trip",
        (LOADING, LOADING.replace("\n", " | set(dict(self.named_parameters()))\n")),
        "loads without a word",
    ),
    "an_extra_tensor_ignored": (
        "weights_round_trip",
        (LOADING, LOADING.replace("self, weights", "self, [pair for pair in weights if 'no_such' not in pair[0]]")),
        "found that it is ignored",
    ),
    # what the model computes
    "float32_results": (
        "dtype_and_device",
        (
            "return hidden + self.o_proj(self.attn(query, key, value))",
            "return (hidden + self.o_proj(self.attn(query, key, value))).float()",
        ),
        "expected bfloat16[9, ...] on cpu, found float32[9, 32] on cpu",
    ),
    "a_tensor_that_stays_behind": (
        "dtype_and_device",
        (BUFFER, "self.scale = torch.linspace(0.5, 1.5, width)"),
        "make every tensor that forward uses a Parameter or a buffer",
    ),
    "decoded_tokens_not_counted": (
        "cached_equals_uncached",
        (
            FORWARD,
            "        if len(positions) > 1 or not positions[0]:\n            self.read = int(positions[-1]) + 1\n"
            + FORWARD,
        ),
        "after 11 tokens on cpu, 2 of them decoded",
    ),
    "a_mean_over_the_batch": (
        "alone_equals_in_a_batch",
        (FORWARD, f"        if not {CONSECUTIVE}:\n            hidden = hidden + hidden.mean(0)\n{FORWARD}"),
        "of request 0 on cpu",
    ),
    "a_chunk_taken_for_a_prompt": (
        "chunk_split",
        (
            "        hidden = self.embed",
            f"        if len(positions) > 1 and {CONSECUTIVE}:\n            positions = positions - positions[0]\n"
            "        hidden = self.embed",
        ),
        "prompt of 9 cut at 1",
    ),
}
FURTHER = {
    "inherited_stub": [(IMPORTS, IMPORTS + "import torchplug.interfaces\n")],
    "decoded_tokens_not_counted": [
        ("self.embed_places(positions)", "self.embed_places(self.place(positions))"),
        (
            "    def compute_logits",
            "    read = 0\n\n    def place(self, positions):\n"
            "        decoding = len(positions) == 1 and positions[0] > 0\n"
            "        return torch.full_like(positions, self.read) if decoding else positions\n\n    def compute_logits",
        ),
    ],
}
"""What a fault changes besides."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def failures(results):
    return {result.check.name: str(result.error()) for result in results if result.outcome is Outcome.FAILED}


def assert_only(results, name, text):
    """Exactly the check `name` failed, with `text` in its message, and with the fix."""
    failed = failures(results)
    assert set(failed) == {name}, failed
    assert text in failed[name] and "fix: " in failed[name]


OF_OTHER_KINDS = OF_STATES | OF_EXPERTS | OF_ITEMS


def test_a_healthy_class_passes_every_check(make_package):
    results = check_model(make_package().name)
    assert {result.check.name: result.outcome for result in results} == outcomes_without(OF_OTHER_KINDS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_its_own_check_and_no_other(make_package, fault):
    check, change, text = FAULTS[fault]
    package = make_package(change, *FURTHER.get(fault, ()))
    assert_only(check_model(package.name), check, text)


def test_two_owners_are_caught_by_registration_alone(make_package):
    package = make_package()
    package.register("planted-twin")
    assert_only(check_model(package.name), "registration", "--owner")


def test_an_entry_point_in_another_group_is_caught_by_registration_alone(make_package):
    package = make_package()
    package.name += "Two"
    package.register("planted-next", "torchplug.models.v2")
    assert_only(check_model(package.name), "registration", "this torchplug reads 'torchplug.models.v1'")


def test_a_package_that_only_this_process_sees_is_caught_by_discovery_alone(make_package, monkeypatch):
    package = make_package()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(os.environ["PYTHONPATH"].split(os.pathsep)[1:]))
    assert_only(check_model(package.name), "discovery_in_a_new_process", "a new process has")


def test_every_check_has_a_fault():
    elsewhere = {"registration", "discovery_in_a_new_process", *OF_OTHER_KINDS}
    assert {check for check, _, _ in FAULTS.values()} | elsewhere == {check.name for check in CHECKS}


def test_what_a_failed_check_makes_meaningless_is_skipped_with_the_reason(make_package):
    package = make_package((MAPPING, f"    supports_eagle = 1\n{MAPPING}"))
    skipped = {r.check.name: r.reason for r in check_model(package.name) if r.outcome is Outcome.SKIPPED}
    assert skipped == {check.name: "claims failed" for check in CHECKS if "claims" in check.needs}
