"""How far back a layer sees: the sliding windows of a config.json, for all layers or for some."""

from __future__ import annotations

from torchplug.config import HfConfig
from torchplug.errors import CheckpointError, Problem

_SLIDES = {"sliding_attention": True, "full_attention": False}


def layer_window(hf_config: HfConfig, index: int, window: int | None, *, slides: bool = True) -> int | None:
    """The sliding window of one layer, for `Attention(sliding_window=...)`; None where the layer sees everything.

    Args:
        hf_config: `layer_types`, where it has them, says of every layer whether it is "sliding_attention" or
            "full_attention".
        index: The layer's place in the stack, from 0.
        window: Tokens that a sliding layer of this model sees, itself included; None where no layer slides.
        slides: Whether the layer slides in a config without `layer_types`.

    Raises CheckpointError naming the key and the file: a window below 1, layer types of another number than layers or
    of another kind, a sliding layer without a window.
    """
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise _error(hf_config, "sliding_window", f"expected a whole number above 0 or null, found {window!r}")
    layer_types = hf_config.get("layer_types")
    if layer_types is None:
        return window if slides else None
    if not isinstance(layer_types, list) or len(layer_types) != hf_config.num_hidden_layers:
        says = f"expected one type for each of {hf_config.num_hidden_layers} layers, found {layer_types!r}"
        raise _error(hf_config, "layer_types", says)
    kind = layer_types[index]
    if not isinstance(kind, str) or kind not in _SLIDES:
        says = f"{kind!r} is not a known type; this model class has {', '.join(sorted(_SLIDES))}"
        raise _error(hf_config, f"layer_types[{index}]", says)
    if _SLIDES[kind] and window is None:
        raise _error(hf_config, f"layer_types[{index}]", f"is {kind!r}, but the config switches sliding windows off")
    return window if _SLIDES[kind] else None


def _error(hf_config: HfConfig, where: str, says: str) -> CheckpointError:
    source = getattr(hf_config, "_source", "config.json")
    fix = "correct the file: take the value that the model's authors published"
    return CheckpointError(f"checkpoint config {source}", Problem(where, says, fix))
