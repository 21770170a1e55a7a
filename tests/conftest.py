"""Fixtures shared by all tests: a small model class that conforms, a handle on an instance, and fake distributions."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import importlib_metadata
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


class FakeSite:
    """A directory on the import path that holds distributions as pip would have left them.

    Modules that are made for an entry point raise when they are imported: whatever imports a plugin fails its test.
    """

    def __init__(self, root):
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        name,
        version="1.0",
        *,
        models=None,
        wrappers=None,
        groups=None,
        text=None,
        modules=True,
        egg_info=False,
        editable=None,
        metadata=True,
    ):
        """Write one distribution and return its metadata directory.

        models, wrappers: entry-point name to value, in our two groups; groups: the same per group name; text:
        entry_points.txt as it is; modules: make the modules that the values name; editable: the directory in
        direct_url.json; metadata: write METADATA.
        """
        stem = name.replace("-", "_")
        directory = self.root / (f"{stem}.egg-info" if egg_info else f"{stem}-{version}.dist-info")
        directory.mkdir()
        if metadata:
            header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (directory / ("PKG-INFO" if egg_info else "METADATA")).write_text(header)
        sections = {"torchplug.models.v1": models, "torchplug.plugins.v1": wrappers, **(groups or {})}
        sections = {group: entries for group, entries in sections.items() if entries}
        if text is None:
            text = "\n".join(
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
                for group, entries in sections.items()
            )
        if text:
            (directory / "entry_points.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
        if editable is not None:
            url = {"url": editable.as_uri(), "dir_info": {"editable": True}}
            (directory / "direct_url.json").write_text(json.dumps(url))
        for value in [value for entries in sections.values() for value in entries.values()] if modules else []:
            module, _, attribute = value.partition(":")
            self.module(module, f"raise ImportError('a plugin was imported')\nclass {attribute or 'Nothing'}: ...\n")
        importlib_metadata.MetadataPathFinder.invalidate_caches()
        return directory

    def module(self, dotted, source):
        """Write a module and its packages, and return its file."""
        *packages, last = dotted.split(".")
        directory = self.root
        for package in packages:
            directory = directory / package
            directory.mkdir(exist_ok=True)
            (directory / "__init__.py").touch()
        file = directory / f"{last}.py"
        file.write_text(source)
        importlib.invalidate_caches()
        return file


@pytest.fixture
def make_site(tmp_path, monkeypatch):
    """make_site("a") makes a directory of distributions and appends it to the import path.

    Nothing else that is installed is seen, and no selection is in force. `make_site.pythonpath()` is the path for a
    subprocess, and `make_site.elsewhere("b")` a directory that is not on it.
    """
    for variable in ("TORCHPLUG_PLUGINS", "TORCHPLUG_ALLOWLIST"):
        monkeypatch.delenv(variable, raising=False)
    bare = [path for path in sys.path if not any(Path(path or ".").glob("*.dist-info"))]
    monkeypatch.setattr(sys, "path", bare)
    sites = []

    def make(name="site"):
        site = FakeSite(tmp_path / name)
        sites.append(str(site.root))
        sys.path.append(str(site.root))
        return site

    make.pythonpath = lambda: os.pathsep.join(filter(None, [*sites, os.environ.get("PYTHONPATH")]))
    make.elsewhere = lambda name: FakeSite(tmp_path / name)
    yield make
    for name, module in list(sys.modules.items()):  # what a test imported from its site is not there for the next one
        if (getattr(module, "__file__", None) or "").startswith(tuple(sites) or " "):
            del sys.modules[name]


@pytest.fixture
def site(make_site):
    """One directory of distributions on the import path; nothing else that is installed is seen."""
    return make_site()


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ message['role'] }}: {{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A directory with a random Llama of two layers, a byte-level tokenizer and a chat template; eos is unlikely."""
    import json

    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = tmp_path_factory.mktemp("tiny")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the capital of France is Paris, user: assistant: system:"] * 9, trainer)
    backend.save(str(path / "tokenizer.json"))
    vocab, hidden, inner, heads, kv_heads, size = backend.get_vocab_size(), 32, 48, 4, 2, 8
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    for name, value in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 2},
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (path / name).write_text(json.dumps(value))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": (heads * size, hidden),
            "self_attn.k_proj": (kv_heads * size, hidden),
            "self_attn.v_proj": (kv_heads * size, hidden),
            "self_attn.o_proj": (hidden, heads * size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 2 / shape[1] ** 0.5 for name, shape in shapes.items()}
    weights["lm_head.weight"][2] = 0.0
    norms = [f"model.layers.{i}.{name}" for i in range(2) for name in ("input_layernorm", "post_attention_layernorm")]
    for name in [*norms, "model.norm"]:
        weights[f"{name}.weight"] = torch.ones(hidden)
    save_file(weights, path / "model.safetensors")
    return path


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
