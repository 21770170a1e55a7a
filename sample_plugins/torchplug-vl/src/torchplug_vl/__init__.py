"""Tangram, a small vision-language model. The entry point names the one class here; nothing else is public."""

from torchplug_vl.tangram import TangramForConditionalGeneration

__all__ = ["TangramForConditionalGeneration"]
