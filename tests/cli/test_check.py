"""`torchplug check`: a line per check, problems with fixes, JSON, exit codes."""

from __future__ import annotations

import json

from click.testing import CliRunner
from kinds_of_checks import OF_EXPERTS, OF_ITEMS, OF_STATES
from torch import nn
from torchplug.cli import main
from torchplug.testing import CHECKS

NAMES = [check.name for check in CHECKS]
OF_OTHER_KINDS = OF_STATES | OF_EXPERTS | OF_ITEMS
"""Checks that do not apply to Llama."""


class Broken(nn.Module):
    """Claims with a flag that is no literal, and has hooks that nobody calls."""

    supports_lora = 1

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    def embed_input_ids(self, input_ids): ...
    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None): ...
    def compute_logits(self, hidden_states): ...
    def load_weights(self, weights): ...


class Unclaimed(Broken):
    supports_lora = False

    def set_aux_hidden_state_layers(self, layers): ...


def run(*arguments):
    return CliRunner().invoke(main, ["check", *arguments])


def test_a_class_that_conforms_prints_a_line_per_check_and_exits_0():
    result = run("LlamaForCausalLM")
    lines = [line.split() for line in result.stdout.splitlines() if " ms" in line]
    assert [line[1] for line in lines] == NAMES
    assert {line[1] for line in lines if line[0] == "skipped"} == OF_OTHER_KINDS
    assert result.stdout.splitlines()[0].startswith("checking plugin 'LlamaForCausalLM' (torchplug")
    assert f"{len(NAMES)} checks: 11 ok, 0 failed, {len(OF_OTHER_KINDS)} skipped" in result.stdout
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_broken_class_prints_problems_with_fixes_and_exits_1(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "my.models", __import__("types").SimpleNamespace(Broken=Broken))
    result = run("my.models:Broken")
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert "FAIL     claims" in result.stdout and "skipped  cached_equals_uncached" in result.stdout
    assert "claims failed" in result.stdout
    assert "check claims (every interface is claimed" in result.stderr
    assert "fix: write supports_lora = True in the class body, or leave it out" in result.stderr


def test_a_hook_without_its_claim_is_a_warning_and_no_failure(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "my.models", __import__("types").SimpleNamespace(It=Unclaimed))
    result = run("my.models:It")
    assert result.exit_code == 0
    assert "torchplug: warning: set_aux_hidden_state_layers" in result.stderr
    assert "fix: derive from SupportsEagle3" in result.stderr


def test_json_has_every_check_and_its_problems(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "my.models", __import__("types").SimpleNamespace(Broken=Broken))
    result = run("my.models:Broken", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["outcome"] == "failed" and found["target"] == "my.models:Broken"
    by_name = {each["check"]: each for each in found["checks"]}
    assert list(by_name) == NAMES
    assert by_name["claims"]["outcome"] == "failed" and by_name["claims"]["problems"][0]["fix"]
    assert by_name["chunk_split"]["outcome"] == "skipped" and by_name["chunk_split"]["reason"]
    assert by_name["stubs"] == by_name["stubs"] | {"outcome": "ok", "problems": [], "reason": None}


def test_a_target_that_is_no_checkpoint_is_an_error(tmp_path):
    result = run(str(tmp_path))
    assert result.exit_code == 1 and "config.json" in result.stderr and "Traceback" not in result.output


def test_an_unknown_architecture_is_told_with_what_was_meant():
    result = run("LlamaForCausal")
    assert result.exit_code == 1 and "did you mean 'LlamaForCausalLM'" in result.stderr


def test_a_missing_device_is_an_error():
    result = run("LlamaForCausalLM", "--device", "cuda:99")
    assert result.exit_code == 1 and "cuda:99" in result.stderr
