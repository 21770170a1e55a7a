"""From a class to a module with weights: meta first, ties kept, everything that does not fit in one error."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
import torch
from torch import nn
from torchplug.errors import CheckpointError, ContractError, DeviceError, PluginError
from torchplug.host.loading import build_module, default_max_model_len, load_weights

CPU = torch.device("cpu")


class Source:
    """A checkpoint in memory."""

    name = "memory"
    config: ClassVar[dict] = {}

    def __init__(self, tensors):
        self.tensors = tensors
        self.total_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def weights(self):
        yield from self.tensors.items()


def full(module):
    return {name: torch.randn(p.shape, dtype=p.dtype) for name, p in module.named_parameters()}


def test_building_allocates_no_parameter_and_real_buffers(plain_class, vllm_config):
    class Buffered(plain_class):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.tied = nn.Linear(8, 16, bias=False)
            self.tied.weight = self.head.weight
            self.head.weight.weight_loader = "kept"

    module = build_module(Buffered, vllm_config, "plugin")
    assert all(p.is_meta for p in module.parameters())
    assert module.table.tolist() == [0, 1, 2, 3]
    weights = full(module)
    load_weights(module, Source(weights), CPU, "plugin")
    assert module.tied.weight is module.head.weight, "ties are kept"
    assert module.head.weight.weight_loader == "kept"
    assert torch.equal(module.head.weight, weights["head.weight"])
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu", "the registration hook is gone"


def test_the_model_dtype_is_the_default_only_while_building(plain_class, vllm_config):
    vllm_config.model_config.dtype = torch.bfloat16
    module = build_module(plain_class, vllm_config, "plugin")
    assert module.head.weight.dtype is torch.bfloat16 and torch.get_default_dtype() is torch.float32


def test_other_threads_build_real_modules_meanwhile(plain_class, vllm_config):
    made = []

    class Threaded(plain_class):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
            thread.start()
            thread.join()

    build_module(Threaded, vllm_config, "plugin")
    assert not made[0].weight.is_meta


def test_missing_parameters_are_listed_all_at_once(plain_class, vllm_config):
    module = build_module(plain_class, vllm_config, "plugin 'P'")
    with pytest.raises(CheckpointError) as raised:
        load_weights(module, Source({}), CPU, "plugin 'P'")
    assert "embed.weight\n     is missing" in str(raised.value) and "head.weight\n     is missing" in str(raised.value)
    assert "checkpoint 'memory' for plugin 'P'" in str(raised.value)


def test_load_weights_must_return_the_names(plain_class, vllm_config):
    class Silent(plain_class):
        def load_weights(self, weights):
            super().load_weights(weights)

    module = build_module(Silent, vllm_config, "plugin")
    with pytest.raises(ContractError, match="returned None, expected the set of parameter names"):
        load_weights(module, Source(full(module)), CPU, "plugin")


def test_a_failing_constructor_names_the_plugin_and_keeps_the_cause(plain_class, vllm_config):
    class Fails(plain_class):
        def __init__(self, *, vllm_config, prefix=""):
            raise ZeroDivisionError("heads")

    with pytest.raises(PluginError, match=r"plugin 'P'.*ZeroDivisionError: heads") as raised:
        build_module(Fails, vllm_config, "plugin 'P'")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert torch.get_default_dtype() is torch.float32


def test_a_missing_config_key_names_key_and_file(plain_class, vllm_config):
    class Asks(plain_class):
        def __init__(self, *, vllm_config, prefix=""):
            vllm_config.model_config.hf_config.num_hidden_layers

    with pytest.raises(CheckpointError, match=r"test/config.json: num_hidden_layers: .* does not have it"):
        build_module(Asks, vllm_config, "plugin")


def test_progress_ends_at_the_total(plain_class, vllm_config):
    module = build_module(plain_class, vllm_config, "plugin")
    source, seen = Source(full(module)), []
    load_weights(module, source, CPU, "plugin", lambda done, total: seen.append((done, total)))
    assert seen[-1] == (source.total_bytes, source.total_bytes) and seen == sorted(seen)


def test_weights_are_finished_once_they_are_loaded(plain_class, vllm_config):
    class Finishes(plain_class):
        def process_weights_after_loading(self):
            self.sum = self.head.weight.sum().item()

    module = build_module(Finishes, vllm_config, "plugin")
    weights = full(module)
    load_weights(module, Source(weights), CPU, "plugin")
    assert module.sum == weights["head.weight"].sum().item()


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 5}, 5),
        ({"n_positions": 7}, 7),
        ({"text_config": {"n_ctx": 9}}, 9),
        ({}, 2048),
        ({"max_position_embeddings": 8, "rope_scaling": {"type": "linear", "factor": 2.5}}, 20),
        ({"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 16),
        ({"max_position_embeddings": 8, "rope_parameters": {"rope_type": "yarn", "factor": 4}}, 32),
        (
            {
                "max_position_embeddings": 32,
                "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 8},
            },
            32,
        ),
        ({"max_position_embeddings": 8, "rope_scaling": {"rope_type": "llama3", "factor": 4}}, 8),
        ({"max_position_embeddings": 8, "rope_scaling": {"rope_type": "linear", "factor": "x"}}, 8),
    ],
)
def test_the_longest_sequence_is_what_the_config_says(config, length):
    assert default_max_model_len(config) == length


def test_a_typo_in_the_selection_is_a_warning_wherever_the_host_is_used(site):
    from torchplug import Host
    from torchplug.errors import PluginError, TorchplugWarning

    host = Host("no-such-package")
    with pytest.warns(TorchplugWarning, match="no-such-package"), pytest.raises(PluginError):
        host.model_class("LlamaForCausalLM")


def test_a_load_weights_that_raises_is_an_error_that_names_its_line(plain_class, vllm_config):
    class Failing(plain_class):
        def load_weights(self, weights):
            return {name for name, tensor in weights if tensor.no_such_attribute}

    module = build_module(Failing, vllm_config, "plugin 'P'")
    with pytest.raises(PluginError, match=r"plugin 'P': load_weights \(.*test_loading.py:\d+\): \w+Error") as raised:
        load_weights(module, Source(full(module)), CPU, "plugin 'P'")
    assert "test_loading.py:" in raised.value.problems[0].fix and raised.value.__cause__ is not None


def test_a_layer_that_cannot_be_finished_is_an_error_that_names_it(plain_class, vllm_config):
    class Layer(nn.Linear):
        def process_weights_after_loading(self):
            raise KeyError("scale")

    class Unfinished(plain_class):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.head = Layer(8, 16, bias=False)

    module = build_module(Unfinished, vllm_config, "plugin 'P'")
    with pytest.raises(PluginError, match=r"process_weights_after_loading .*: KeyError: 'scale'"):
        load_weights(module, Source(full(module)), CPU, "plugin 'P'")


@pytest.mark.parametrize(
    "error",
    [MemoryError("no room"), torch.OutOfMemoryError("no room"), RuntimeError("can't allocate memory: no room")],
)
def test_too_little_memory_is_an_error_with_the_way_out_and_not_the_plugins_fault(
    plain_class, vllm_config, monkeypatch, error
):
    def full_up(*arguments, **options):
        raise error

    module = build_module(plain_class, vllm_config, "plugin 'P'")
    weights = full(module)
    monkeypatch.setattr(torch, "empty", full_up)
    with pytest.raises(DeviceError, match=r"(?s)there is not enough memory: .*no room.*fix: free memory"):
        load_weights(module, Source(weights), CPU, "plugin 'P'")


def test_a_quantised_checkpoint_that_does_not_fit_is_called_quantised(plain_class, vllm_config):
    source = Source({})
    source.config = {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(CheckpointError, match=r"quantised \('gptq'\)"):
        load_weights(build_module(plain_class, vllm_config, "plugin"), source, CPU, "plugin")
