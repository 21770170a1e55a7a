"""`import torch` reads every installed package: where one is in its way, the error names it and the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

MALFORMED = {
    "no value": "[console_scripts]\nnonsense\n",
    "not UTF-8": b"[console_scripts]\ncaf\xe9 = a:b\n",
}
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def run(site, *command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(site.root), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_package_with_malformed_entry_points_is_named(site, text):
    site.add("broken-thing", "1.0", text=text)
    for command in (["show", "LlamaForCausalLM", "--import"], ["check", "LlamaForCausalLM"], ["generate", "x"]):
        done = run(site, "-m", "torchplug", *command)
        assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr, done.stderr
        assert "import of torch: broken-thing==1.0 (" in done.stderr and "entry_points.txt" in done.stderr
        assert "pip uninstall broken-thing" in done.stderr and f"{SWITCH}=0" in done.stderr
    found = json.loads(run(site, "-m", "torchplug", "show", "LlamaForCausalLM", "--import", "--json").stdout)
    assert found["error"] == "PluginError"
    code = "from torchplug import Host, PluginError\n"
    code += "try: Host().load('demo')\nexcept PluginError as error: print(error.problems[0].where)"
    assert run(site, "-c", code).stdout.startswith("broken-thing==1.0 (")
    well = run(site, "-m", "torchplug", "show", "LlamaForCausalLM", "--import", **{SWITCH: "0"})
    assert well.returncode == 0, well.stderr


def test_a_device_backend_that_fails_is_named(site):
    site.add("odd-device", "2.1", groups={"torch.backends": {"odd": "odd_device:load"}}, modules=False)
    (site.root / "odd_device.py").write_text("def load(): raise OSError('libodd.so: not found')\n")
    done = run(site, "-m", "torchplug", "show", "LlamaForCausalLM", "--import")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "device backend 'odd' of odd-device==2.1 (odd_device:load)" in done.stderr
    assert "OSError: libodd.so: not found" in done.stderr and "pip uninstall odd-device" in done.stderr


def test_another_failure_of_the_import_is_shown_as_it_is(site):
    (site.root / "torch.py").write_text("raise ValueError('no torch of ours')\n")
    done = run(site, "-m", "torchplug", "show", "LlamaForCausalLM", "--import")
    assert (
        done.returncode == 1 and "ValueError: no torch of ours" in done.stderr and "import of torch" not in done.stderr
    )
