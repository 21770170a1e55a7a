"""Which processor belongs to which class: its own, never one that it inherits."""

from __future__ import annotations

import pytest
from torchplug.config import HfConfig
from torchplug.errors import ContractError
from torchplug.interfaces import SupportsMultiModal
from torchplug.multimodal import MULTIMODAL_REGISTRY, MultiModalProcessor, MultiModalRegistry, ProcessorContext

CONTEXT = ProcessorContext(HfConfig({}, source="x"))


class Nothing(MultiModalProcessor):
    fields = {}

    def placeholder(self, modality):
        return [1]

    def process(self, modality, item):
        raise NotImplementedError


def test_a_class_gets_the_processor_that_was_registered_for_it():
    @MULTIMODAL_REGISTRY.register_processor(Nothing)
    class Model(SupportsMultiModal):
        pass

    assert MULTIMODAL_REGISTRY.processor_factory(Model) is Nothing
    processor = MULTIMODAL_REGISTRY.create_processor(Model, CONTEXT)
    assert type(processor) is Nothing and processor.context is CONTEXT
    assert Model._processor_factory is Nothing


def test_a_subclass_does_not_inherit_it_and_is_told_so():
    @MULTIMODAL_REGISTRY.register_processor(Nothing)
    class Base(SupportsMultiModal):
        pass

    class Below(Base):
        pass

    assert MULTIMODAL_REGISTRY.processor_factory(Below) is None
    with pytest.raises(ContractError, match="that of Base, from which it derives, is not inherited"):
        MULTIMODAL_REGISTRY.create_processor(Below, CONTEXT)
    MULTIMODAL_REGISTRY.register_processor(Nothing)(Below)
    assert type(MULTIMODAL_REGISTRY.create_processor(Below, CONTEXT)) is Nothing


def test_a_class_without_one_is_told_what_to_write():
    class Alone(SupportsMultiModal):
        pass

    with pytest.raises(ContractError, match="register_processor\\(YourProcessor\\) above class Alone"):
        MULTIMODAL_REGISTRY.create_processor(Alone, CONTEXT)


def test_a_factory_may_be_any_callable_but_makes_a_processor():
    registry = MultiModalRegistry()

    @registry.register_processor(lambda context: Nothing(context))
    class Model:
        pass

    @registry.register_processor(lambda context: object())
    class Wrong:
        pass

    assert type(registry.create_processor(Model, CONTEXT)) is Nothing
    with pytest.raises(ContractError, match="made a object, expected a"):
        registry.create_processor(Wrong, CONTEXT)


def test_text_of_a_processor_needs_a_tokenizer():
    with pytest.raises(ContractError, match="without a tokenizer"):
        CONTEXT.token_ids("<1.0 seconds>")
    assert ProcessorContext(CONTEXT.hf_config, None, lambda text: [len(text)]).token_ids("abc") == [3]


def test_examples_of_images_and_films_differ_in_size():
    processor = Nothing(CONTEXT)
    shapes = {processor.example("image", index).shape for index in range(3)}
    assert len(shapes) == 3
    films = [processor.example("video", index).frames for index in range(3)]
    assert len(films[0]) > len(films[1])
    with pytest.raises(KeyError):
        processor.example("smell", 0)
