"""What a value looks like, without its contents: shapes, dtypes and devices of tensors, however deep they lie.

Nothing here waits for a device or imports torch: a tensor is what has a shape, a dtype and a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 4
"""Items of a list that are shown; of the others only the number."""


def shape_of(value: Any) -> Any:
    """JSON-ready: {"dtype", "shape", "device"} for a tensor, {"type"} for an object; numbers, None and texts of at most
    40 characters as they are; items of lists and dicts by the same rule, of a long list the first ones.
    """
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "device"):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "device": str(value.device)}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if len(value) <= 40 else value[:37] + "..."
    if isinstance(value, (list, tuple)):
        more = [{"more": len(value) - MOST}] if len(value) > MOST else []
        return [*(shape_of(item) for item in value[:MOST]), *more]
    if isinstance(value, Mapping):
        return {str(key): shape_of(item) for key, item in value.items()}
    if type(value).__module__ == "torch":  # a dtype or a device, which say themselves best
        return str(value)
    return {"type": (value if isinstance(value, type) else type(value)).__name__}


def in_words(shape: Any) -> str:
    """What `shape_of` gave, short: int64[4] on cpu."""
    if isinstance(shape, list):
        return f"[{', '.join(map(in_words, shape))}]"
    if not isinstance(shape, dict):
        return repr(shape)
    if shape.keys() == {"dtype", "shape", "device"}:
        return f"{shape['dtype']}{shape['shape']} on {shape['device']}"
    if shape.keys() == {"type"}:
        return f"<{shape['type']}>"
    if shape.keys() == {"more"}:
        return f"{shape['more']} more"
    return "{" + ", ".join(f"{key}: {in_words(value)}" for key, value in shape.items()) + "}"
