"""RecurrentGemma as a model plugin."""

from torchplug_recurrentgemma.recurrentgemma import RecurrentGemmaForCausalLM

__all__ = ["RecurrentGemmaForCausalLM"]
