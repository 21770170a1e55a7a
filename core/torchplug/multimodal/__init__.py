"""Multimodal input: what a model's processor is, where it is registered, and how a prompt with items is made ready.

A model class brings its own processor:

    @MULTIMODAL_REGISTRY.register_processor(MyProcessor)
    class MyForConditionalGeneration(nn.Module, SupportsMultiModal): ...

Public names are importable from here.
"""

from torchplug.multimodal.hf_images import hf_image_processor, hf_settings
from torchplug.multimodal.inputs import MultiModalInputProcessor, MultiModalInputs
from torchplug.multimodal.media import Video, load_image, load_video
from torchplug.multimodal.processor import Batching, MultiModalProcessor, ProcessedItem, ProcessorContext
from torchplug.multimodal.registry import MULTIMODAL_REGISTRY, MultiModalRegistry

__all__ = [
    "MULTIMODAL_REGISTRY",
    "Batching",
    "MultiModalInputProcessor",
    "MultiModalInputs",
    "MultiModalProcessor",
    "MultiModalRegistry",
    "ProcessedItem",
    "ProcessorContext",
    "Video",
    "hf_image_processor",
    "hf_settings",
    "load_image",
    "load_video",
]
