"""Every architecture that the torchplug distribution offers passes every check of the kit that applies to it."""

from __future__ import annotations

import pytest
from torchplug.host.catalogue import Catalogue
from torchplug.testing import CHECKS, Specimen
from torchplug.testing.checks import Outcome, run_check
from torchplug.testing.experts import NO_EXPERTS

OURS = sorted(
    row.name for offers in Catalogue(selection="*").models.values() for row in offers if row.distribution == "torchplug"
)

NOT_ITS_KIND = {
    NO_EXPERTS,
    "the class claims no state and builds no RecurrentLayer",
    "the class builds no RecurrentLayer",
    "the class does not claim SupportsMambaPrefixCaching",
    "the class does not claim SupportsMultiModal",
    "the class does not claim SupportsMRoPE",
}
"""Reasons to skip a check that say that a class is of another kind than the check is for."""


@pytest.fixture(scope="module")
def specimens():
    return {name: Specimen(f"torchplug:{name}") for name in OURS}


def test_there_are_first_party_architectures():
    assert "LlamaForCausalLM" in OURS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("architecture", OURS)
def test_a_first_party_class_conforms(specimens, architecture, check):
    result = run_check(check, specimens[architecture])
    if result.outcome is Outcome.SKIPPED:
        assert result.reason in NOT_ITS_KIND, result.reason
        return
    assert result.outcome is Outcome.OK, result.reason or str(result.error())
    assert result.warnings == ()
