"""Every architecture that the torchplug distribution offers passes every check of the kit that applies to it."""

from __future__ import annotations

import pytest
from kinds_of_checks import OF_EXPERTS, OF_ITEMS, OF_STATES
from torchplug.host.catalogue import Catalogue
from torchplug.testing import CHECKS, Specimen
from torchplug.testing.checks import Outcome, run_check

OURS = sorted(
    row.name for offers in Catalogue(selection="*").models.values() for row in offers if row.distribution == "torchplug"
)

APPLIES = {
    **dict.fromkeys(
        ("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "BambaForCausalLM", "Lfm2ForCausalLM"),
        OF_STATES,
    ),
    **dict.fromkeys(("GraniteMoeHybridForCausalLM", "JambaForCausalLM"), OF_STATES | OF_EXPERTS),
    **dict.fromkeys(
        (
            *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
            *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        ),
        OF_EXPERTS,
    ),
    **dict.fromkeys(
        (
            *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
            "Qwen3VLForConditionalGeneration",
        ),
        OF_ITEMS,
    ),
    "LlavaForConditionalGeneration": OF_ITEMS - {"mrope_positions"},
}
"""The checks of some kinds that apply to an architecture; to all others none of these applies."""


@pytest.fixture(scope="module")
def specimens():
    return {name: Specimen(f"torchplug:{name}") for name in OURS}


def test_there_are_first_party_architectures():
    assert "LlamaForCausalLM" in OURS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("architecture", OURS)
def test_a_first_party_class_conforms(specimens, architecture, check):
    result = run_check(check, specimens[architecture])
    of_another_kind = check.name in (OF_STATES | OF_EXPERTS | OF_ITEMS) - APPLIES.get(architecture, set())
    expected = Outcome.SKIPPED if of_another_kind else Outcome.OK
    assert result.outcome is expected, result.reason or str(result.error())
    assert result.warnings == ()
