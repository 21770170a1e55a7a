"""docs/testing.md has a heading for every check, and says of each what it proves, how it fails and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torchplug.testing import CHECKS

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_every_check_has_its_heading_and_no_other_has_one():
    assert list(SECTIONS) == [check.name for check in CHECKS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_section_says_what_is_proved_how_it_fails_and_the_fix(check):
    text = " ".join(SECTIONS[check.name].split())
    assert f"**Proves** that {check.proves}." in text
    assert "**Fails**" in text and "**Fix**" in text


def test_the_examples_of_the_page_name_what_there_is():
    import torchplug.testing

    named = set(re.findall(r"from torchplug\.testing import ([\w, ]+)", PAGE))
    names = {name.strip() for line in named for name in line.split(",")}
    assert names and names <= set(torchplug.testing.__all__)
