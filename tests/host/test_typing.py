"""What a type checker says of `model.hooks`: every hook has its interface's signature, no other name is there."""

from __future__ import annotations

from pathlib import Path

import pytest

mypy = pytest.importorskip("mypy.api")
ROOT = Path(__file__).parent.parent.parent

SOURCE = """
from torchplug import Host
model = Host().load("demo")
positions, delta = model.hooks.get_mrope_input_positions([1], [])
reveal_type(delta)
model.hooks.get_mrope_input_positions([1])
model.hooks.embed_inputs(1)
Host().model_class("A").hooks.get_placeholder_str("image", "1")
"""


def test_hooks_are_typed(tmp_path):
    file = tmp_path / "uses_hooks.py"
    file.write_text(SOURCE)
    output, _, status = mypy.run(["--strict", "--config-file", str(ROOT / "pyproject.toml"), str(file)])
    assert status == 1
    for expected in (
        ':5: note: Revealed type is "int"',
        ':6: error: Missing positional argument "mm_features"',
        ':7: error: "TypedHooks" has no attribute "embed_inputs"',
        ':8: error: Argument 2 to "get_placeholder_str"',
        "Found 3 errors in 1 file",
    ):
        assert expected in output, output
