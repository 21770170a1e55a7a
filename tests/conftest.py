"""Fixtures shared by all tests: a small conforming model class and a handle on an instance of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, VllmConfig


def make_config(dtype: torch.dtype = torch.float32, **values) -> VllmConfig:
    hf_config = HfConfig({"hidden_size": 8, "vocab_size": 16, **values}, source="test/config.json")
    return VllmConfig(ModelConfig("test", hf_config, dtype, 64), DeviceConfig(torch.device("cpu")))


class Plain(nn.Module):
    """The least that a model class needs."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed_input_ids(self, input_ids):
        return self.embed(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return hidden.cumsum(0)

    def compute_logits(self, hidden_states):
        return self.head(hidden_states)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].copy_(tensor)
            loaded.add(name)
        return loaded


@pytest.fixture
def vllm_config():
    return make_config()


@pytest.fixture
def plain_class():
    """A fresh class each time, so that a test may change it."""
    return type("Plain", (Plain,), {"__module__": __name__})


@pytest.fixture
def bind(vllm_config):
    """bind(cls) checks a class, builds an instance and binds its hooks, as `Host.load` does."""
    from torchplug.host.contracts import inspect_class
    from torchplug.host.model import LoadedModel

    def bound(cls, **kwargs):
        report = inspect_class(cls, subject="plugin 'Test' (test 1.0)")
        return LoadedModel(cls(vllm_config=vllm_config).eval(), report, vllm_config, **kwargs)

    return bound
