"""A tiny attention model with its engine, and tokenizers of the kinds that checkpoints have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torchplug.config import CacheConfig, DeviceConfig, HfConfig, ModelConfig, SchedulerConfig, VllmConfig
from torchplug.engine.llm_engine import LLMEngine
from torchplug.layers import Attention

VOCAB, HIDDEN, HEADS, MAX_LEN = 48, 24, 4, 1024


class TinyModel(nn.Module):
    """Attention layers (one for each window) with learned positions; weights large enough that every token and position
    matters."""

    def __init__(self, seed: int = 0, windows: tuple[int | None, ...] = (None, None)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        self.embed = matrix(VOCAB, HIDDEN, scale=HIDDEN**0.5)
        self.places = matrix(MAX_LEN, HIDDEN, scale=HIDDEN**0.5)
        self.qkv = nn.ParameterList([matrix(2 * HIDDEN, HIDDEN, scale=2.0) for _ in windows])
        self.out = nn.ParameterList([matrix(HIDDEN, HIDDEN, scale=2.0) for _ in windows])
        self.head = matrix(VOCAB, HIDDEN, scale=2.0)
        self.attn = nn.ModuleList(
            [Attention(HEADS, HIDDEN // HEADS, 0.5, HEADS // 2, sliding_window=window) for window in windows]
        )
        self.calls: list[tuple[list[int], list[int]]] = []
        self.fail_at: int | None = None

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        self.calls.append((input_ids.tolist(), positions.tolist()))
        if self.fail_at is not None and len(self.calls) >= self.fail_at:
            raise RuntimeError("planted")
        hidden = self.embed[input_ids] + self.places[positions]
        for qkv, out, attn in zip(self.qkv, self.out, self.attn, strict=True):
            query, key, value = (hidden @ qkv.T).split((HIDDEN, HIDDEN // 2, HIDDEN // 2), dim=-1)
            hidden = hidden + torch.tanh(attn(query, key, value) @ out.T)
        return hidden

    def compute_logits(self, hidden_states):
        return hidden_states @ self.head.T


class CumulativeModel(nn.Module):
    """A model in the same conventions that uses none of our layers: it can only run over whole prefixes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.head = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.calls: list[tuple[list[int], list[int]]] = []

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        self.calls.append((input_ids.tolist(), positions.tolist()))
        return torch.tanh(self.embed[input_ids] * (1 + positions[:, None] % 7)).cumsum(0)

    def compute_logits(self, hidden_states):
        return hidden_states @ self.head.T


def greedy(module: nn.Module, prompt: list[int], count: int) -> list[int]:
    """The reference: the module's own forward over the whole prefix for every token, with no engine and no cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            hidden = module(torch.tensor(ids), torch.arange(len(ids)))
            ids.append(int(module.compute_logits(hidden[-1:]).argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="session")
def reference():
    return greedy


def make_engine(
    module: nn.Module | None = None,
    *,
    tokenizer=None,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 64,
    eos: int | list[int] | None = None,
    seed: int | None = 0,
    block_size: int = 16,
    enable_prefix_caching: bool = True,
    kv_cache_memory_bytes: int | None = None,
) -> LLMEngine:
    config = HfConfig({"vocab_size": VOCAB}, source="test/config.json")
    device = torch.device("cpu")
    loaded = SimpleNamespace(
        module=TinyModel() if module is None else module,
        vllm_config=VllmConfig(
            ModelConfig("test", config, torch.float32, max_model_len),
            DeviceConfig(device),
            cache_config=CacheConfig(block_size, enable_prefix_caching, kv_cache_memory_bytes=kv_cache_memory_bytes),
            scheduler_config=SchedulerConfig(max_num_seqs, max_num_batched_tokens),
        ),
        device=device,
        dtype=torch.float32,
        checkpoint=SimpleNamespace(generation_config={} if eos is None else {"eos_token_id": eos}, config={}),
        close=lambda: None,
        wrappers_of=lambda hook: (),
        subject="plugin 'Test' (test==1.0, test:Model)",
    )
    engine = LLMEngine(loaded, tokenizer, seed=seed)
    for layer in loaded.module.modules():
        if isinstance(layer, Attention):
            for half in layer.kv_cache:
                half.fill_(float("nan"))  # what no request wrote must never be read
    return engine


@pytest.fixture(scope="session")
def engine_of():
    """engine_of(module, **limits): an engine on a tiny model."""
    return make_engine


@pytest.fixture(scope="session")
def run_all():
    """Step an engine until it is idle; the last output of each request by its id."""

    def run(engine: LLMEngine) -> dict:
        outputs = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
        return outputs

    return run


@pytest.fixture(scope="session")
def tiny_model():
    return TinyModel


@pytest.fixture(scope="session")
def cumulative_model():
    return CumulativeModel


TEXTS = [
    "The capital of France is Paris. The capital of Italy is Rome.",
    "a quick brown fox; 1 2 3 42; naïve café, Größe, 東京は日本の首都, привет мир, 👍🏽👩‍👩‍👧 end",
    "  leading and   inner spaces\n\tand\r\nbreaks  ",
]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    backend.add_tokens(["plain added", "Ġ"])
    return backend


def sentencepiece() -> Backend:
    """As Llama 2's: a space mark before the text, unknown characters as bytes, one leading space dropped."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += ["▁", "a", "b", "c", "e", "h", "i", "s", "t", "é", "東", "�", "th", "the", "▁the", "▁a", "is", "▁is"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("i", "s"), ("▁", "is")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def metaspace() -> Backend:
    """As T5's and XLM-R's: unigrams whose decoder drops the first mark."""
    tokens = ["<unk>", "▁", "▁the", "▁a", "the", "is", "a", "b", "c", "d", "e", ".", "▁東", "京"]
    backend = Backend(models.Unigram([(token, -float(index)) for index, token in enumerate(tokens)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def wordpiece() -> Backend:
    tokens = ["[UNK]", "the", "is", "a", "##a", "##b", "b", ".", ",", "'", "##s", "don", "t"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


BACKENDS = {f.__name__: f for f in (byte_level, sentencepiece, metaspace, wordpiece)}


@pytest.fixture(scope="session", params=list(BACKENDS))
def any_backend(request):
    return BACKENDS[request.param]()


@pytest.fixture(scope="session")
def backends():
    """Makers of tokenizers by kind."""
    return BACKENDS


@pytest.fixture(scope="session")
def demo_checkpoint():
    from torchplug.errors import CheckpointError
    from torchplug.host.checkpoint import open_checkpoint

    try:
        return open_checkpoint("demo")
    except CheckpointError as error:
        pytest.skip(str(error))
