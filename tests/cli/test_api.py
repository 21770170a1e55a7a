"""`torchplug api`: the checked-in API is the one that the code serves."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from torchplug.cli import main
from torchplug.hookspecs import HOOKS

CHECKED_IN = Path(__file__).parent.parent.parent / "docs" / "api.json"


def test_the_checked_in_api_is_the_one_that_is_served():
    """A change of the hook API shows as a change of docs/api.json: `torchplug api --json > docs/api.json`."""
    result = CliRunner().invoke(main, ["api", "--json"])
    assert result.exit_code == 0 and json.loads(result.output) == json.loads(CHECKED_IN.read_text())


def test_the_table_names_every_hook():
    output = CliRunner().invoke(main, ["api"]).output
    assert all(f"{name}(" in output for name in HOOKS)
