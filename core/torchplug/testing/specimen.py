"""The model class under examination: where it comes from, its tiny checkpoint, and models loaded from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from torchplug.config import DeviceConfig, HfConfig, ModelConfig, VllmConfig
from torchplug.errors import ContractError, PluginError, Problem, TorchplugError
from torchplug.host import Host, locate
from torchplug.host.checkpoint import Checkpoint, open_checkpoint
from torchplug.host.contracts import ClassReport, inspect_class, location
from torchplug.host.demo import ALIASES
from torchplug.host.devices import resolve_device
from torchplug.host.importing import subject_of
from torchplug.host.loading import default_max_model_len
from torchplug.host.model import LoadedModel, ModelClass
from torchplug.host.selection import normalized
from torchplug.testing.tiny import TinyCheckpoint, checkpoint_shapes, random_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from torchplug.host.catalogue import Catalogue, ModelPlugin
    from torchplug.testing.checks import Result

Shapes = Mapping[str, "Sequence[int] | Tensor"]
Weights = Shapes | Callable[[], Shapes]


class Skip(Exception):
    """A check does not apply; the text says why."""


class Specimen:
    """One model class and what its checks share. Nothing is imported or loaded before a check asks for it.

    Args:
        target: An architecture that is installed ("Arch" or "distribution:Arch"), "package.module:Class", a checkpoint
            (a directory, a GGUF file, "demo"), or a class.
        config: What config.json would hold; None: the checkpoint's, or else the class's `tiny_config()`.
        weights: Names in checkpoints and their shapes (or tensors), or a function that gives them; None: the class's
            `tiny_weights()`, or else its parameters' own names, fused ones taken apart by `packed_modules_mapping`.
        plugins: Which distributions take part in finding the owner; None reads TORCHPLUG_PLUGINS.
        owners: Architecture to distribution, where more than one offers it.
        devices: Where behaviour is checked; None: on the CPU, and on the accelerator that PyTorch finds.

    Attributes:
        host: With the owner's distribution alone enabled, so that no other wrapper plugin takes part.
        results: By check name, what `run_check` has found so far.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | type,
        *,
        config: Mapping[str, Any] | None = None,
        weights: Weights | None = None,
        plugins: str | None = None,
        owners: Mapping[str, str] | None = None,
        devices: Sequence[str | torch.device] | None = None,
    ) -> None:
        self.target = target
        self.results: dict[str, Result] = {}
        self._config = config
        self._weights = weights
        self._loaded: tuple[torch.device, torch.dtype, LoadedModel] | None = None
        self.plugins = plugins
        self.owners = dict(owners or {})
        self._ambient = Host(plugins, owners)
        self._given: Checkpoint | None = None
        self._class_path: str | None = None
        self.architecture: str | None = None
        if isinstance(target, str) and target not in ALIASES and not os.path.exists(target):
            left, colon, right = target.partition(":")
            if colon and not self._offers(left, right) and (locate.module_exists(left) or "." in left):
                self._class_path = target
            else:
                self.architecture = target
        elif not isinstance(target, type):
            self._given = open_checkpoint(target)
            self.architecture = self._given.architecture
        found = ["cpu", "auto"] if devices is None else devices
        self.devices = tuple(dict.fromkeys(resolve_device(device) for device in found))

    def _offers(self, distribution: str, architecture: str) -> bool:
        offers = self.catalogue.models.get(architecture, ())
        return any(normalized(row.distribution or "") == normalized(distribution) for row in offers)

    @property
    def catalogue(self) -> Catalogue:
        """Where the owner is looked up."""
        return self._ambient.catalogue

    # -- the class --------------------------------------------------------------------------------------------------

    @cached_property
    def plugin(self) -> ModelPlugin | None:
        """The entry point of the owner; None for a class given directly.

        Raises:
            PluginError: nobody offers the architecture, or several do and none was chosen.
        """
        return None if self.architecture is None else self.catalogue.owner(self.architecture)

    @cached_property
    def host(self) -> Host:
        if self.plugin is None:
            return _HostOfOne(self.model_class)
        return Host(self.plugin.distribution or self.plugins, self.owners)

    @property
    def subject(self) -> str:
        """What errors call it, as far as that is known."""
        try:
            if self.plugin is not None:
                return subject_of(self.plugin)
        except PluginError:
            return f"architecture {self.architecture!r}"
        if isinstance(self.target, type):
            return f"class {self.target.__name__!r} ({self.target.__module__})"
        return f"class {self.target!r}"

    @cached_property
    def cls(self) -> type[nn.Module]:
        """The class itself.

        Raises:
            PluginError: it cannot be imported, or is no class.
        """
        found: Any = self.target
        if self.plugin is not None:
            try:
                self.host.model_class(self.plugin.architecture)
            except ContractError as error:
                if any(problem.where == "entry point" for problem in error.problems):
                    raise
            found = self.plugin.entry_point.load()  # imported by now
        elif self._class_path is not None:
            found = _imported(self._class_path)
        if not isinstance(found, type):
            says = f"found {type(found).__name__}, expected a class that derives from torch.nn.Module"
            raise PluginError(self.subject, Problem("", says, "name the model class: package.module:Class"))
        return found

    @property
    def module_and_name(self) -> tuple[str, str]:
        """Where the class is imported from: a module, and a dotted name in it."""
        if self.plugin is not None:
            return self.plugin.module, self.plugin.attribute
        if self._class_path is not None:
            module, _, name = self._class_path.partition(":")
            return module, name
        return self.cls.__module__, self.cls.__qualname__

    @cached_property
    def class_problems(self) -> tuple[Problem, ...]:
        """Everything that the host refuses the class for; empty for one that it takes."""
        try:
            inspect_class(self.cls, subject=self.subject)
        except ContractError as error:
            return error.problems
        return ()

    @cached_property
    def report(self) -> ClassReport:
        """What the class promises; ContractError where `class_problems` has any."""
        return inspect_class(self.cls, subject=self.subject)

    @cached_property
    def model_class(self) -> ModelClass:
        return ModelClass(self.cls, self.report, self.plugin)

    def where(self, method: str) -> str:
        """`method (file:line)` of the class."""
        return f"{method} ({location(getattr(self.cls, method, None))})"

    # -- its models -------------------------------------------------------------------------------------------------

    @property
    def is_tiny(self) -> bool:
        """Whether the weights are random ones made here, not a checkpoint's."""
        return self._given is None

    @cached_property
    def config(self) -> dict[str, Any]:
        """What config.json would hold. Raises Skip where nobody gives one."""
        if self._config is not None:
            config = dict(self._config)
        elif self._given is not None:
            config = dict(self._given.config)
        else:
            tiny = getattr(self.cls, "tiny_config", None)
            if tiny is None:
                raise Skip("the class has no classmethod tiny_config() -> dict, and no config was given")
            config = tiny()
            if not isinstance(config, dict):
                fix = "return what a small config.json of the architecture would hold"
                says = f"returned {type(config).__name__}, expected a dict"
                raise ContractError(self.subject, Problem(self.where("tiny_config"), says, fix))
        return {"architectures": [self.cls.__name__]} | config

    @property
    def config_source(self) -> str:
        """Where the config comes from, for messages."""
        if self._given is not None:
            return self._given.config_source
        return "the config given" if self._config is not None else f"{self.cls.__name__}.tiny_config()"

    @cached_property
    def vllm_config(self) -> VllmConfig:
        """What the class receives in float32 on the CPU."""
        view = HfConfig(self.config, source=self.config_source, defaults=getattr(self.cls, "config_defaults", None))
        model_config = ModelConfig(self.config_source, view, torch.float32, default_max_model_len(self.config))
        return VllmConfig(model_config, DeviceConfig(torch.device("cpu")))

    def build(self) -> nn.Module:
        """A module as its constructor makes it, in float32 on the CPU, without weights. Random state is left alone."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.random.fork_rng(devices=[]):
                module: nn.Module = self.cls(vllm_config=self.vllm_config, prefix="")
        finally:
            torch.set_default_dtype(before)
        return module.eval()

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the tiny checkpoint by checkpoint name, float32 on the CPU."""
        given = self._own_tensors
        shapes = given() if callable(given) else given
        if shapes is None:
            shapes = checkpoint_shapes(self.build(), getattr(self.cls, "packed_modules_mapping", None) or {})
        return random_tensors(shapes)

    @property
    def _own_tensors(self) -> Weights | None:
        return getattr(self.cls, "tiny_weights", None) if self._weights is None else self._weights

    @property
    def has_own_tensors(self) -> bool:
        """Whether somebody gave the names and shapes of `tensors`; else they are those of the parameters."""
        return self._own_tensors is not None

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """What is loaded: the checkpoint given, or a tiny one with random weights. Raises Skip without a config."""
        if self._given is not None:
            return self._given
        name = self.architecture.rpartition(":")[2] if self.architecture else self.cls.__name__
        return TinyCheckpoint(self.config | {"architectures": [name]}, self.config_source, self.tensors)

    def load(self, device: torch.device, dtype: torch.dtype = torch.float32) -> LoadedModel:
        """The checkpoint loaded by the host. The last model loaded is kept, and memory that nobody wrote is NaN.

        Raises what `Host.load` raises, and Skip.
        """
        if self._loaded is not None:
            if self._loaded[:2] == (device, dtype):
                return self._loaded[2]
            self.close()
        with poisoned_memory():
            model = self.host.load(self.checkpoint, device=device, dtype=dtype)
        self._loaded = device, dtype, model
        return model

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        size = self.vllm_config.model_config.hf_text_config.get("vocab_size")
        return int(size) if isinstance(size, int) else 2

    def token_ids(self, count: int, seed: int = 0) -> list[int]:
        """Random ids."""
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = torch.randint(self.vocab_size, (count,), generator=generator).tolist()
        return ids

    def close(self) -> None:
        """Free the model that is kept."""
        if self._loaded is not None:
            self._loaded[2].close()
            self._loaded = None


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, PyTorch fills what `torch.empty` allocates with NaN (integers: their greatest value)."""
    settings: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    # use_deterministic_algorithms does the same, and imports the compiler first: 1.3 s.
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill


class _HostOfOne(Host):
    """A host that serves one class, which needs no entry point; no wrapper plugin takes part."""

    def __init__(self, model_class: ModelClass) -> None:
        super().__init__("none")
        self._only = model_class

    def model_class(self, architecture: str) -> ModelClass:
        return self._only


def _imported(path: str) -> Any:
    """The object at `package.module:Name`."""
    from importlib import import_module

    module, _, name = path.partition(":")

    def refuse(says: str, fix: str, cause: BaseException) -> NoReturn:
        raise PluginError(f"class {path!r}", Problem("", says, fix)) from cause

    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        refuse(f"import failed: {error}", "install its package, or put its directory on PYTHONPATH", error)
    except (Exception, SystemExit) as error:
        refuse(f"import of {module} raised {type(error).__name__}: {error}", "correct the module", error)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        refuse(str(error), f"name a class that {module} defines", error)
    return found


def problems_of(error: BaseException, where: str, doing: str) -> Sequence[Problem]:
    """An exception out of a model, as problems: a TorchplugError's own, or one that says what raised, and where."""
    if isinstance(error, TorchplugError):
        return error.problems
    text = next(iter(str(error).splitlines()), "")
    says = f"expected {doing}; it raised {type(error).__name__}: {text}"
    return (Problem(_raised_at(error) or where, says, "correct what raises; `torchplug check` shows it again"),)


def _raised_at(error: BaseException) -> str | None:
    """`function (file:line)` of the last frame that is neither torch's nor ours; None where all are."""
    ours = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith((*ours, "<")):
            found = f"{code.co_name} ({'/'.join(code.co_filename.split(os.sep)[-2:])}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found
