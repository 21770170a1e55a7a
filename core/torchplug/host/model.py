"""The two handles that the host gives out: a model class (no weights, no device) and a loaded model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torchplug.hookspecs import Phase
from torchplug.host.binding import Binding
from torchplug.host.contracts import ClassReport, inspect_instance
from torchplug.host.wrappers import Wrapper
from torchplug.results import Facts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchplug import interfaces
    from torchplug.config import VllmConfig
    from torchplug.host.catalogue import ModelPlugin
    from torchplug.host.checkpoint import Checkpoint

    class TypedHooks(
        interfaces.IsHybrid,
        interfaces.MambaStateDtype,
        interfaces.MixtureOfExperts,
        interfaces.SupportsEagle3,
        interfaces.SupportsMRoPE,
        interfaces.SupportsMultiModal,
    ):
        """What a type checker knows of `model.hooks`: every hook with the signature of its interface."""


class _Handle:
    """What both handles share: the plugin, its interfaces, its hooks and the wrappers around them."""

    plugin: ModelPlugin | None
    interfaces: frozenset[str]
    _binding: Binding

    @property
    def hooks(self) -> TypedHooks:
        """Every hook that can be called now, with the interface's own signature."""
        return cast("TypedHooks", self._binding.hooks)

    def attach(self, plugin: Any) -> None:
        """Put a wrapper plugin around the hooks that it names; the last attached is the outermost. Between steps only.

        Raises:
            ContractError: with every problem of the plugin.
        """
        self._binding.attach(plugin if isinstance(plugin, Wrapper) else Wrapper(plugin))

    def detach(self, plugin: Any) -> None:
        """Take a wrapper plugin away again."""
        self._binding.detach(plugin)

    @contextmanager
    def attached(self, plugin: Any) -> Iterator[None]:
        """`plugin` is attached for the duration of a with block."""
        self.attach(plugin)
        try:
            yield
        finally:
            self.detach(plugin)


class ModelClass(_Handle):
    """A checked model class. `hooks` holds the class-phase hooks.

    Attributes:
        cls: The author's class.
        plugin: The catalogue row that it came from, None for a class given directly.
        interfaces: Names of the interfaces it claims.
        possible_interfaces: Interfaces that only a loaded model can claim.
        report: What the contract checks found.
    """

    def __init__(
        self, cls: type[nn.Module], report: ClassReport, plugin: ModelPlugin | None, wrappers: Iterable[Wrapper] = ()
    ) -> None:
        self.cls = cls
        self.plugin = plugin
        self.report = report
        self.interfaces = report.interfaces
        self.possible_interfaces = report.possible
        self._binding = Binding(cls, report, phases=(Phase.CLASS,), claimed=report.interfaces, facts=Facts())
        for wrapper in wrappers:
            self._binding.attach(wrapper)

    def __repr__(self) -> str:
        return f"ModelClass({self.cls.__module__}.{self.cls.__qualname__})"


class LoadedModel(_Handle):
    """A module with its weights on its device, and its hooks.

    Attributes:
        module: The author's module, in eval mode.
        plugin: The catalogue row that it came from.
        subject: How errors name it.
        interfaces: Names of the interfaces it claims.
        vllm_config: What the class received.
        checkpoint: Where the weights came from.
    """

    def __init__(
        self,
        module: nn.Module,
        report: ClassReport,
        vllm_config: VllmConfig,
        *,
        plugin: ModelPlugin | None = None,
        checkpoint: Checkpoint | None = None,
        wrappers: Iterable[Wrapper] = (),
    ) -> None:
        self.module = module
        self.plugin = plugin
        self.subject = report.subject
        self.checkpoint = checkpoint
        self.vllm_config = vllm_config
        self.interfaces = inspect_instance(module, report)
        facts = Facts(device=self.device, dtype=self.dtype)
        self._binding = Binding(module, report, phases=tuple(Phase), claimed=self.interfaces, facts=facts)
        for wrapper in wrappers:
            self._binding.attach(wrapper)

    @property
    def device(self) -> torch.device:
        """The device of parameters and of `device` arguments, with its index."""
        return self.vllm_config.device_config.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and hidden states."""
        return self.vllm_config.model_config.dtype

    def wrappers_of(self, hook: str) -> tuple[Wrapper, ...]:
        """The wrappers attached to one hook, innermost first. Where there are none, a caller may take a shorter way to
        the same result."""
        return tuple([each for each in self._binding.wrappers if hook in each.hook_names])

    def close(self) -> None:
        """Detach every wrapper and let go of the module; its memory is free once nobody else holds it."""
        self._binding.close()
        del self.module

    def __repr__(self) -> str:
        return f"LoadedModel({type(self.module).__name__}, {self.dtype}, {self.device})"
