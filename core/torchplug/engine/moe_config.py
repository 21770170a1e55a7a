"""What a checkpoint's config.json says of its experts, in the spellings of the mixture-of-experts families."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torchplug.errors import CheckpointError, Problem
from torchplug.host.untrusted import read_json_object

_LARGEST: Final = 1 << 20
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

_SPELLINGS: Final = {
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "inner": ("moe_intermediate_size", "intermediate_size"),
    "hidden": ("hidden_size",),
    "blocks": ("num_hidden_layers",),
    "top_k": ("num_experts_per_tok", "moe_topk"),
}


def moe_shape(checkpoint: Path) -> dict[str, int]:
    """The shape of a checkpoint's expert layers.

    Args:
        checkpoint: A directory with config.json; weights are not needed.

    Returns:
        experts, layers, top_k, groups and expert_bytes (gate, up and down projection of one expert of a layer).

    Raises:
        CheckpointError: There is no config.json, it has no experts, or their size cannot be told (quantised).
    """
    path, problems = checkpoint / "config.json", list[Problem]()
    config = read_json_object(path, limit=_LARGEST, problems=problems)
    if config is None:
        raise CheckpointError(f"checkpoint {str(checkpoint)!r}", problems)
    nested = config.get("text_config")
    config |= nested if isinstance(nested, dict) else {}
    found = {what: _number(config, names) for what, names in _SPELLINGS.items()}
    for what, value in found.items():
        if value is None:
            says = f"has none of {', '.join(_SPELLINGS[what])} as a positive whole number"
            problems.append(Problem(str(path), says, "name the directory of a mixture-of-experts checkpoint"))
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    width = 1 if method == "fp8" else None if quantised else _BYTES.get(str(dtype))
    if width is None:
        says = f"does not tell the bytes of a weight: {'quantised by ' + str(method) if quantised else dtype!r}"
        problems.append(
            Problem(str(path), says, "leave out the checkpoint and give --expert-bytes, --experts and --layers")
        )
    if problems:
        raise CheckpointError(f"checkpoint {str(checkpoint)!r}", problems)
    size = {what: value or 0 for what, value in found.items()}
    return {
        "experts": size["experts"],
        "layers": max(1, size["blocks"] - (_number(config, ("first_k_dense_replace",)) or 0)),
        "top_k": size["top_k"],
        "groups": _number(config, ("n_group",)) or 1,
        "expert_bytes": 3 * size["hidden"] * size["inner"] * (width or 0),
    }


def _number(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None
