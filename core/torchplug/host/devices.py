"""Which device and dtype a model runs on: what was asked for, or a clear error, never a silent fallback."""

from __future__ import annotations

from typing import Final

import torch

from torchplug.errors import DeviceError, Problem

_DTYPES: Final = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def resolve_device(device: str | torch.device) -> torch.device:
    """The device with its index. "auto" is the machine's accelerator if it has one, else the CPU.

    Raises:
        DeviceError: the name is no device, or this machine does not have it.
    """
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        known = "auto, cpu, cuda, cuda:0, mps, xpu, or the name of an installed PyTorch backend"
        raise DeviceError(f"device {device!r}", Problem("", "is not a device", f"use one of {known}")) from error
    module = None if asked.type == "meta" else getattr(torch, asked.type, None)
    count = module.device_count() if module is not None and getattr(module, "is_available", bool)() else 0
    if (asked.index or 0) >= count:
        says = f"this machine has {count} {asked.type} device{'' if count == 1 else 's'}"
        raise DeviceError(f"device {str(device)!r}", Problem("", says, f"{_alternatives(asked.type, count)}"))
    if asked.type == "cpu":
        return torch.device("cpu")
    if asked.index is not None:
        return asked
    return torch.device(asked.type, module.current_device() if module is not None else 0)


def resolve_dtype(dtype: str | torch.dtype, stored: str | None, device: torch.device) -> torch.dtype:
    """The model's dtype. "auto" is the checkpoint's own (`stored`).

    Where the checkpoint names none (a quantised file), "auto" is bfloat16 where the device computes in it natively,
    else float32.

    Raises:
        DeviceError: the name, or with "auto" the checkpoint's, is not one of float32, float16, bfloat16.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        if stored in _DTYPES:
            return _DTYPES[stored]
        if stored is not None:
            says = "the checkpoint's config.json names it, and it is not served"
            raise DeviceError(f"dtype {stored!r}", Problem("", says, "choose one: float32, float16 or bfloat16"))
        return torch.bfloat16 if _native_bfloat16(device) else torch.float32
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise DeviceError(f"dtype {dtype!r}", Problem("", "is not served", "use auto, float32, float16 or bfloat16"))
    return _DTYPES[dtype]


def _native_bfloat16(device: torch.device) -> bool:
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.backends.cpu.get_cpu_capability() == "SVE256")
    supported = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    return bool(supported()) if supported is not None else True


def _alternatives(kind: str, count: int) -> str:
    if count:
        return f"use {kind}:0 to {kind}:{count - 1}" if count > 1 else f"use {kind}:0"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return f"use {accelerator.type} or cpu" if accelerator is not None else "use cpu"
