"""torchplug: a model architecture is a pip package.

Importing this package imports neither torch nor any plugin; every public name is loaded on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "torchplug.host": ("Host",),
    "torchplug.host.model": ("LoadedModel", "ModelClass"),
    "torchplug.host.marks": ("hookimpl",),
    "torchplug.host.wrappers": ("observer",),
    "torchplug.engine.llm": ("LLM",),
    "torchplug.engine.llm_engine": ("LLMEngine",),
    "torchplug.engine.outputs": ("CompletionOutput", "Logprob", "RequestOutput"),
    "torchplug.engine.async_llm": ("AsyncLLM",),
    "torchplug.engine.sampling_params": ("SamplingParams",),
    "torchplug.engine.structured_outputs": ("StructuredOutputsParams",),
    "torchplug.config": ("VllmConfig",),
    "torchplug.errors": (
        "CheckpointError",
        "ContractError",
        "DeviceError",
        "HookNotProvided",
        "PluginError",
        "Problem",
        "RequestError",
        "TorchplugError",
    ),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'torchplug' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from torchplug.config import VllmConfig as VllmConfig
    from torchplug.engine.async_llm import AsyncLLM as AsyncLLM
    from torchplug.engine.llm import LLM as LLM
    from torchplug.engine.llm_engine import LLMEngine as LLMEngine
    from torchplug.engine.outputs import CompletionOutput as CompletionOutput
    from torchplug.engine.outputs import Logprob as Logprob
    from torchplug.engine.outputs import RequestOutput as RequestOutput
    from torchplug.engine.sampling_params import SamplingParams as SamplingParams
    from torchplug.engine.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from torchplug.errors import CheckpointError as CheckpointError
    from torchplug.errors import ContractError as ContractError
    from torchplug.errors import DeviceError as DeviceError
    from torchplug.errors import HookNotProvided as HookNotProvided
    from torchplug.errors import PluginError as PluginError
    from torchplug.errors import Problem as Problem
    from torchplug.errors import RequestError as RequestError
    from torchplug.errors import TorchplugError as TorchplugError
    from torchplug.host import Host as Host
    from torchplug.host.marks import hookimpl as hookimpl
    from torchplug.host.model import LoadedModel as LoadedModel
    from torchplug.host.model import ModelClass as ModelClass
    from torchplug.host.wrappers import observer as observer
