"""Which processor belongs to which model class. Registered for a class, a processor is that class's alone: a subclass
with another tower would quietly get wrong pixels from the one that it inherits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchplug.errors import ContractError, Problem
from torchplug.multimodal.processor import MultiModalProcessor, ProcessorContext

C = TypeVar("C", bound=type)
ProcessorFactory = Callable[[ProcessorContext], MultiModalProcessor]


class MultiModalRegistry:
    """The registry of processors; `MULTIMODAL_REGISTRY` is the one."""

    def register_processor(self, factory: ProcessorFactory) -> Callable[[C], C]:
        """A class decorator: `factory`, most often the processor class itself, makes the processor of this class."""

        def register(cls: C) -> C:
            cls._processor_factory = factory  # type: ignore[attr-defined]
            return cls

        return register

    def processor_factory(self, cls: type) -> ProcessorFactory | None:
        """What was registered for this very class."""
        found: ProcessorFactory | None = vars(cls).get("_processor_factory")
        return found

    def create_processor(self, cls: type, context: ProcessorContext) -> MultiModalProcessor:
        """The processor of a model class.

        Raises ContractError: none is registered for it, or what is registered makes something else.
        """
        factory = self.processor_factory(cls)
        if factory is None:
            above = [base for base in cls.__mro__[1:] if self.processor_factory(base) is not None]
            says = "has no processor, so it takes no images, videos or the like"
            fix = f"put @MULTIMODAL_REGISTRY.register_processor(YourProcessor) above class {cls.__name__}"
            if above:
                says += f"; that of {above[0].__name__}, from which it derives, is not inherited"
                fix += ", with the same processor if it is the right one"
            raise ContractError(f"model class {cls.__name__!r}", Problem("", says, fix))
        processor = factory(context)
        if not isinstance(processor, MultiModalProcessor):
            says = f"made a {type(processor).__name__}, expected a torchplug.multimodal.MultiModalProcessor"
            fix = "derive the processor from MultiModalProcessor"
            raise ContractError(f"model class {cls.__name__!r}", Problem("its processor", says, fix))
        return processor


MULTIMODAL_REGISTRY = MultiModalRegistry()
