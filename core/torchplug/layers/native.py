"""Whether layers may leave PyTorch's own operators: decided once, when a model's weights are in place."""

from __future__ import annotations

from torchplug.config import CompilationMode, get_current_vllm_config_or_none


def native_kernels_allowed() -> bool:
    """Whether a layer may take kernels and weight layouts that only it understands.

    False while a model that will be compiled is loaded: torch.compile can only trace and fuse operators over plain
    tensors. To be asked in `process_weights_after_loading`; a layer outside of any model may.
    """
    config = get_current_vllm_config_or_none()
    return config is None or config.compilation_config.mode is CompilationMode.NONE
