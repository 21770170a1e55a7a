"""The kit inside an author's own pytest run: an item per check, messages without traceback, nothing unless used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torchplug.testing import CHECKS


@pytest.fixture
def run_pytest(tmp_path):
    """run_pytest(source, *options) runs a test file in a new process and returns its output and exit code."""

    def run(source, *options):
        directory = tmp_path / "author"
        directory.mkdir(exist_ok=True)
        (directory / "test_author.py").write_text(source)
        (directory / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-rA", *options]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr, done.returncode

    return run


def test_the_plugin_loads_nothing_heavy_where_no_test_uses_it(run_pytest):
    source = (
        "import sys\n"
        "def test_nothing_is_loaded(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.hasplugin('torchplug')\n"
        "    assert not {'torch', 'numpy', 'transformers', 'torchplug.host'} & set(sys.modules)\n"
    )
    output, code = run_pytest(source)
    assert code == 0, output


def test_each_check_is_an_item_and_a_failure_is_its_message_alone(run_pytest, make_package):
    package = make_package(("return hidden + self.o_proj", "return hidden * positions.float().std() + self.o_proj"))
    source = (
        "from torchplug.testing import conformance\n"
        f"test_conforms = conformance({package.name!r}, skip={{'chunk_split': 'known, see our issue 7'}})\n"
        "def test_with_a_tiny_model(torchplug_tiny):\n"
        f"    model = torchplug_tiny({package.name!r})\n"
        "    assert str(model.dtype) == 'torch.float32' and model.interfaces == frozenset()\n"
    )
    output, code = run_pytest(source, "-W", "error")
    assert code == 1
    assert "PASSED test_author.py::test_conforms[weights_round_trip]" in output
    assert "PASSED test_author.py::test_with_a_tiny_model" in output
    assert "FAILED test_author.py::test_conforms[cached_equals_uncached]" in output
    assert "known, see our issue 7" in output
    assert "check cached_equals_uncached (decoding with the cache gives what" in output
    assert "Traceback" not in output and "pytest_items.py" not in output.split("short test summary")[0]


def test_a_hook_without_its_claim_is_a_warning(run_pytest, make_package):
    method = "    def set_aux_hidden_state_layers(self, layers): ...\n\n    def compute_logits"
    package = make_package(("    def compute_logits", method))
    source = f"from torchplug.testing import conformance\ntest_conforms = conformance({package.name!r})\n"
    output, code = run_pytest(source, "-k", "claims", "-m", "torchplug_conformance")
    assert code == 0 and f"1 passed, {len(CHECKS) - 1} deselected, 1 warning" in output
    assert "does not claim SupportsEagle3" in output and "fix: derive from SupportsEagle3" in output


def test_an_unknown_name_in_skip_is_refused():
    from torchplug.testing import conformance

    with pytest.raises(KeyError, match="no check is called 'chunks'"):
        conformance("LlamaForCausalLM", skip={"chunks": "a reason"})
