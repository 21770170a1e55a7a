"""GPT-2 for torchplug. The entry point names the class here; nothing else is public."""

from torchplug_gpt2.gpt2 import GPT2LMHeadModel

__all__ = ["GPT2LMHeadModel"]
