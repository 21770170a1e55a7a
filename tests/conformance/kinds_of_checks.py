"""Which checks of the kit apply to some models only."""

OF_STATES = {"layer_kinds", "state_shapes", "fresh_state", "state_snapshots"}
OF_EXPERTS = {"expert_layers", "expert_swap"}
OF_ITEMS = {"multimodal_counts", "multimodal_order", "mrope_positions"}
"""Of images and whatever else is not text."""
