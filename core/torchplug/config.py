"""What a model class receives: a `VllmConfig`, in the shape that authors of vLLM models know.

`hf_config` is an attribute view over config.json: nested, unknown keys kept, defaults declared by the model class
(`config_defaults: ClassVar[dict]`), and a key that neither has is an error that names the key and the file. No
transformers needed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from torchplug.errors import MissingConfigKey, Problem

if TYPE_CHECKING:
    import torch


class HfConfig:
    """Read-only attribute view over the mapping of a config.json.

    Args:
        values: The mapping; nested mappings become nested views.
        source: The file it came from, for error messages.
        defaults: What the model class declares for keys that the file may omit.
    """

    __slots__ = ("_defaults", "_path", "_source", "_values")

    def __init__(
        self, values: Mapping[str, Any], *, source: str, defaults: Mapping[str, Any] | None = None, path: str = ""
    ) -> None:
        self._values = dict(values)
        self._defaults = dict(defaults or {})
        self._source = source
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._values:
            value, default = self._values[name], self._defaults.get(name)
        elif name in self._defaults:
            value, default = self._defaults[name], None
        else:
            key = f"{self._path}{name}"
            raise MissingConfigKey(
                f"checkpoint config {self._source}",
                Problem(
                    key,
                    "the model class reads this key, the file does not have it and the class declares no default",
                    f"add {key!r} to {self._source}, or declare it in the class's config_defaults",
                ),
            )
        if isinstance(value, Mapping):
            nested = default if isinstance(default, Mapping) else None
            return HfConfig(value, source=self._source, defaults=nested, path=f"{self._path}{name}.")
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._defaults

    def __iter__(self) -> Iterator[str]:
        yield from self._defaults | self._values

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name` as attribute access gives it, or `default` where neither file nor class has it."""
        return getattr(self, name) if name in self else default

    def with_defaults(self, defaults: Mapping[str, Any]) -> HfConfig:
        """The same view with more defaults, e.g. those of the class that builds the language model of a nested config.
        Defaults that are there already win."""
        merged = dict(defaults) | self._defaults
        return HfConfig(self._values, source=self._source, defaults=merged, path=self._path)

    def updated(self, **values: Any) -> HfConfig:
        """The same view in which `values` stand in place of the file's."""
        return HfConfig(self._values | values, source=self._source, defaults=self._defaults, path=self._path)

    def to_dict(self) -> dict[str, Any]:
        """Defaults and file merged into one plain dict; nested mappings stay plain."""
        return self._defaults | self._values

    def __repr__(self) -> str:
        return f"HfConfig({self._source!r}, {self._values!r})"


@dataclass(slots=True)
class MultiModalConfig:
    """Limits and modes of multimodal input. A limit of 0 switches a modality off and spares its tower's weights."""

    limit_per_prompt: dict[str, int] = field(default_factory=dict)
    mm_encoder_only: bool = False
    mm_encoder_tp_mode: str = "weights"

    def get_limit_per_prompt(self, modality: str) -> int:
        """Greatest number of `modality` items in one prompt; 999 where no limit was given."""
        return self.limit_per_prompt.get(modality, 999)


@dataclass(slots=True)
class ModelConfig:
    """The checkpoint's side: `model` (path), `hf_config`, `dtype`, `max_model_len` in tokens, multimodal settings.

    `enforce_eager`: every step calls the model itself, never a CUDA graph of it.
    """

    model: str
    hf_config: HfConfig
    dtype: torch.dtype
    max_model_len: int
    multimodal_config: MultiModalConfig | None = None
    seed: int = 0
    enforce_eager: bool = False

    @property
    def hf_text_config(self) -> HfConfig:
        """The language model's config: `text_config` where the checkpoint nests one, else the whole."""
        nested = self.hf_config.get("text_config")
        return nested if isinstance(nested, HfConfig) else self.hf_config


@dataclass(slots=True)
class CacheConfig:
    """Paged cache: `block_size` in tokens; "auto" dtypes follow the model dtype; `kv_cache_memory_bytes` None takes a
    share of the memory that is there when the engine starts.
    """

    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"


def size_problems(**sizes: Any) -> list[Problem]:
    """What is wrong with arguments that are each an integer of at least 1, or None where a default applies."""
    return [
        Problem(name, f"expected an integer of at least 1, got {value!r:.80}", f"correct {name}")
        for name, value in sizes.items()
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
    ]


@dataclass(slots=True)
class SchedulerConfig:
    """Most requests in one step and most tokens in one step."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048


@dataclass(slots=True)
class EPLBConfig:
    """The expert load balancer: `num_redundant_experts` are physical experts of a layer beyond one for each logical
    one."""

    num_redundant_experts: int = 0


@dataclass(slots=True)
class ParallelConfig:
    """How many processes share one model, and which of them, from 0, this one is (`rank`).

    With `enable_expert_parallel` the processes hold whole experts, each some of them; without it every process holds
    all experts.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank: int = 0
    enable_expert_parallel: bool = False
    eplb_config: EPLBConfig = field(default_factory=EPLBConfig)


@dataclass(slots=True)
class SpeculativeConfig:
    """Most draft tokens that a step verifies; recurrent layers keep room to take so many back."""

    num_speculative_tokens: int


@dataclass(slots=True)
class DeviceConfig:
    """The device, resolved with its index."""

    device: torch.device


class CompilationMode(IntEnum):
    """Whether the forward pass goes through `torch.compile`; names and numbers as in vLLM."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1


@dataclass(slots=True)
class CompilationConfig:
    """How the forward pass is compiled, which is not at all unless somebody asks for it."""

    mode: CompilationMode = CompilationMode.NONE


@dataclass(slots=True)
class VllmConfig:
    """Everything that a model class receives at construction. `lora_config`, `speculative_config` and `quant_config`
    are None where the feature is off."""

    model_config: ModelConfig
    device_config: DeviceConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    lora_config: Any = None
    speculative_config: Any = None
    quant_config: Any = None
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)

    def with_hf_config(self, hf_config: HfConfig) -> VllmConfig:
        """The same for a model inside the model: the language model of a multimodal one is built from its own
        config."""
        return replace(self, model_config=replace(self.model_config, hf_config=hf_config))


class _Current(threading.local):
    config: VllmConfig | None = None


_current = _Current()


@contextmanager
def set_current_vllm_config(config: VllmConfig) -> Iterator[None]:
    """`config` is what this thread's `get_current_vllm_config_or_none` gives, while a model is built and loaded."""
    previous = _current.config
    _current.config = config
    try:
        yield
    finally:
        _current.config = previous


def get_current_vllm_config_or_none() -> VllmConfig | None:
    """The config of the model that this thread is building or loading, for layers that decide something once; None
    where a layer is made by itself."""
    return _current.config
