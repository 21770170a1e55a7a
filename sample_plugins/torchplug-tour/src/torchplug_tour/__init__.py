"""A tour of torchplug's hook API. The entry points name the two classes here; nothing else is public."""

from torchplug_tour.recurrent import TourRecurrentForCausalLM
from torchplug_tour.tour import TourForCausalLM

__all__ = ["TourForCausalLM", "TourRecurrentForCausalLM"]
