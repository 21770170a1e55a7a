"""The host: find a model plugin, choose its owner, check it, load it, bind its hooks.

Importing this module and creating a `Host` reads entry-point metadata only; torch and plugins are imported by
`model_class` and `load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torchplug.host.catalogue import Catalogue, ModelPlugin

if TYPE_CHECKING:
    import os

    import torch

    from torchplug.host.checkpoint import Checkpoint
    from torchplug.host.loading import Progress
    from torchplug.host.model import LoadedModel, ModelClass
    from torchplug.host.plan import Plan
    from torchplug.host.wrappers import Wrapper


class Host:
    """Discovery and loading of model plugins.

    Args:
        plugins: Which distributions take part, e.g. "*,-foo"; None reads TORCHPLUG_PLUGINS.
        owners: Architecture to distribution, where more than one offers it.
        allowlist: The distributions whose code may be imported, e.g. "foo,bar"; nothing of another one is, whatever
            `plugins` says. None reads TORCHPLUG_ALLOWLIST; where both are given, both have to name it, and where
            neither is, every distribution is trusted.
    """

    def __init__(
        self,
        plugins: str | None = None,
        owners: Mapping[str, str] | None = None,
        allowlist: str | None = None,
    ) -> None:
        self.catalogue = Catalogue(selection=plugins, owners=owners, allowlist=allowlist)
        self._classes: dict[str, ModelClass] = {}
        self._wrappers: tuple[Wrapper, ...] | None = None
        self._warned = False

    @property
    def architectures(self) -> Mapping[str, ModelPlugin]:
        """Per architecture, the row of its owner. An absent or contested architecture is an error on access."""
        return _Owners(self.catalogue)

    def model_class(self, architecture: str) -> ModelClass:
        """Import and check the class that owns `architecture` ("Arch" or "distribution:Arch"). Needs no weights and no
        device.

        Raises:
            PluginError: nobody or more than one offers it, or its import failed.
            ContractError: with every problem of the class.
        """
        from torchplug.host.torch_import import import_torch

        import_torch()
        from torchplug.host.contracts import inspect_class
        from torchplug.host.importing import import_object, subject_of
        from torchplug.host.model import ModelClass

        self._warn_once()
        plugin = self.catalogue.owner(architecture)
        if architecture not in self._classes:
            cls = import_object(plugin)
            report = inspect_class(cls, subject=subject_of(plugin))
            self._classes[architecture] = ModelClass(cls, report, plugin, self.wrappers())
        return self._classes[architecture]

    def plan(self, architectures: Iterable[str]) -> Plan:
        """What the other processes of a job have to find, for these architectures and the enabled wrapper plugins.

        Pass `plan(...).to_json()` to each worker, which calls `Plan.verify` with it (`torchplug.host.plan`). Hashes
        files and imports no plugin.

        Raises:
            PluginError: Nobody or more than one offers an architecture.
        """
        from torchplug.host.plan import Plan

        self._warn_once()
        return Plan.of(self.catalogue, architectures)

    def _warn_once(self) -> None:
        """Pass on what the catalogue noticed, e.g. an unknown name in the selection, when the host is first used."""
        if self._warned:
            return
        self._warned = True
        import warnings

        from torchplug.errors import TorchplugWarning

        for text in self.catalogue.warnings:
            warnings.warn(text, TorchplugWarning, stacklevel=3)

    def wrappers(self) -> tuple[Wrapper, ...]:
        """The enabled wrapper plugins, imported on first use, each in its own try; a broken one is a warning and is
        left out.
        """
        if self._wrappers is None:
            from torchplug.host.importing import import_wrappers

            self._wrappers = import_wrappers(self.catalogue.wrappers)
        return self._wrappers

    def load(
        self,
        target: str | os.PathLike[str] | Checkpoint,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | None = None,
        enforce_eager: bool = False,
        compile: bool = False,
        progress: Progress | None = None,
    ) -> LoadedModel:
        """Load a checkpoint (a directory, a GGUF file, or "demo") with the class that owns its architecture.

        Args:
            target: The checkpoint.
            device: "auto", or a device that this machine has; never a fallback.
            dtype: "auto" (the checkpoint's own), "float32", "float16" or "bfloat16".
            max_model_len: Longest sequence in tokens; None is what the checkpoint says.
            max_num_seqs: Most requests in one step.
            max_num_batched_tokens: Most tokens in one step.
            block_size: Tokens of a block of an engine's KV cache.
            enable_prefix_caching: Whether an engine keeps what prompts have in common.
            kv_cache_memory_bytes: Most bytes of an engine's KV cache; None: a share of what is left after loading.
            enforce_eager: Whether an engine calls the module itself in every step, instead of a CUDA graph of it.
            compile: Whether an engine runs the module through `torch.compile`; its layers then keep to PyTorch's own
                operators.
            progress: Called as progress(bytes done, bytes in all) while weights stream.

        Raises:
            RequestError: a size is no positive integer, or max_model_len is more than the checkpoint allows.
            CheckpointError: the checkpoint is missing, damaged or does not fit its class.
            PluginError: nobody owns the architecture, or the owner is broken.
            DeviceError: the device or dtype is not there.
        """
        from torchplug.host.torch_import import import_torch

        import_torch()
        from torchplug import config
        from torchplug.errors import RequestError
        from torchplug.host.checkpoint import Checkpoint, open_checkpoint
        from torchplug.host.config_check import check_config
        from torchplug.host.devices import resolve_device, resolve_dtype
        from torchplug.host.loading import build_module, default_max_model_len, load_weights
        from torchplug.host.model import LoadedModel
        from torchplug.host.recurrent_layers import check_recurrent_layers

        problems = config.size_problems(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
        )
        if problems:
            raise RequestError("Host.load(...)", problems)
        checkpoint = target if isinstance(target, Checkpoint) else open_checkpoint(target)
        model_class = self.model_class(checkpoint.architecture)
        where = resolve_device(device)
        defaults = getattr(model_class.cls, "config_defaults", {})
        check_config(checkpoint.config, defaults, name=checkpoint.name, source=checkpoint.config_source)
        hf_config = config.HfConfig(checkpoint.config, source=checkpoint.config_source, defaults=defaults)
        longest = default_max_model_len({**defaults, **checkpoint.config})
        vllm_config = config.VllmConfig(
            model_config=config.ModelConfig(
                model=str(checkpoint.path),
                hf_config=hf_config,
                dtype=resolve_dtype(dtype, checkpoint.dtype, where),
                max_model_len=longest if max_model_len is None else _within(max_model_len, longest, checkpoint),
                enforce_eager=enforce_eager,
            ),
            device_config=config.DeviceConfig(where),
            cache_config=config.CacheConfig(
                block_size=block_size,
                enable_prefix_caching=enable_prefix_caching,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
            ),
            scheduler_config=config.SchedulerConfig(max_num_seqs, max_num_batched_tokens),
            compilation_config=config.CompilationConfig(
                config.CompilationMode.STOCK_TORCH_COMPILE if compile else config.CompilationMode.NONE
            ),
        )
        subject = model_class.report.subject
        with config.set_current_vllm_config(vllm_config):
            module = build_module(model_class.cls, vllm_config, subject)
            check_recurrent_layers(model_class, model_class.cls, module, vllm_config, subject)
            load_weights(module, checkpoint, where, subject, progress)
        return LoadedModel(
            module.eval(),
            model_class.report,
            vllm_config,
            plugin=model_class.plugin,
            checkpoint=checkpoint,
            wrappers=self.wrappers(),
        )


class _Owners(Mapping[str, ModelPlugin]):
    """Architecture to owner. Iteration lists every offered name; looking one up chooses its owner."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def __getitem__(self, architecture: str) -> ModelPlugin:
        return self._catalogue.owner(architecture)

    def __contains__(self, architecture: object) -> bool:
        return architecture in self._catalogue.models

    def __iter__(self) -> Any:
        return iter(self._catalogue.models)

    def __len__(self) -> int:
        return len(self._catalogue.models)


def _within(asked: int, longest: int, checkpoint: Checkpoint) -> int:
    from torchplug.errors import Problem, RequestError

    if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= longest:
        says = f"{asked!r:.80} was asked for, {checkpoint.config_source} allows 1 to {longest} tokens"
        raise RequestError("max_model_len", Problem("", says, f"use at most {longest}"))
    return asked
