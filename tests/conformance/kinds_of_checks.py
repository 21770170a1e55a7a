"""Which checks of the kit apply to some models only."""

from torchplug.testing import CHECKS, Outcome

OF_STATES = {"layer_kinds", "state_shapes", "fresh_state", "state_snapshots"}
OF_EXPERTS = {"expert_layers", "expert_swap"}
OF_ITEMS = {"multimodal_counts", "multimodal_order", "mrope_positions"}
"""Of images and whatever else is not text."""


def outcomes_without(kinds):
    """What a class without fault gives: every check is fine but those of `kinds`, which do not apply to it."""
    return {check.name: Outcome.SKIPPED if check.name in kinds else Outcome.OK for check in CHECKS}
