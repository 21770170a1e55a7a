"""Importing PyTorch, whose import reads every installed package: it loads device backends by their entry points.

A malformed `entry_points.txt` of any package, related or not, or a backend that fails, ends `import torch` with an
exception that names neither the package nor a way out. Here it does.
"""

from __future__ import annotations

import sys
import traceback
from importlib import metadata
from typing import Final

from torchplug.errors import PluginError, Problem
from torchplug.host.catalogue import identity, metadata_path

_GROUP: Final = "torch.backends"
_SWITCH: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD=0"


def import_torch() -> None:
    """Import torch, or say which installed package is in its way.

    Raises:
        PluginError: With the package and the fix. Other failures of the import propagate as they are.
    """
    if "torch" in sys.modules:
        return
    try:
        import torch  # noqa: F401
    except Exception as error:
        explained = explain_torch_import(error)
        if explained is None:
            raise
        raise explained from error


def explain_torch_import(error: Exception) -> PluginError | None:
    """The error for an exception that came out of torch's loading of backends; None for any other."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "_import_device_backends" not in names:
        return None
    unreadable, backends = [], []
    for distribution in metadata.distributions():
        try:
            backends += [each for each in distribution.entry_points if each.group == _GROUP]
        except Exception as reason:
            name, version = identity(distribution)
            where = f"{name or 'unnamed distribution'}{f'=={version}' if version else ''}"
            path = metadata_path(distribution)
            unreadable.append(
                Problem(
                    f"{where} ({path / 'entry_points.txt' if path else 'not from files'})",
                    f"its entry points cannot be read, and `import torch` reads those of every package: "
                    f"{type(reason).__name__}: {reason}",
                    f"`pip install --force-reinstall --no-deps {name}`, or `pip uninstall {name}`;\n"
                    f"until then set the environment variable {_SWITCH}: torch looks for no backends then",
                )
            )
    if unreadable:
        return PluginError("import of torch", unreadable)
    failed = [each for each in backends if f"extension: {each.name}." in str(error)]
    return PluginError("import of torch", [_failed_backend(each, error) for each in failed]) if failed else None


def _failed_backend(backend: metadata.EntryPoint, error: Exception) -> Problem:
    name, version = identity(backend.dist)
    cause = error.__cause__ or error
    return Problem(
        f"device backend {backend.name!r} of {name}{f'=={version}' if version else ''} ({backend.value})",
        f"torch loads it at its import, and it failed: {type(cause).__name__}: {cause}",
        f"install another version of {name}, or remove it: `pip uninstall {name}`;\n"
        f"until then set the environment variable {_SWITCH}: torch loads no backends then",
    )
