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
from torchplug.forward_context import get_forward_context
from torchplug.host.contracts import inspect_class
from torchplug.host.model import LoadedModel
from torchplug.interfaces import MambaCopySpec
from torchplug.layers import Attention, RecurrentLayer

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


class GatedSum(RecurrentLayer):
    """h_t = g_t * h_{t-1} + x_t + x_{t-2} / 2, token by token: a state of two parts, the last two inputs (as a
    convolution has, with a row more for each draft token) and the sum (float32)."""

    def __init__(self, width: int, num_spec: int = 0) -> None:
        super().__init__()
        self.width = width
        self.num_spec = num_spec

    def state_shapes(self):
        return (2 + self.num_spec, self.width), (self.width,)

    def state_dtypes(self):
        return torch.float32, torch.float32

    def forward(self, inputs, gates):
        context = get_forward_context()
        if context is None:
            starts, lengths, slots = [0, len(inputs)], [len(inputs)], (None,)
        else:
            starts, lengths = context.query_start_loc.tolist(), context.seq_lens_host
            slots = context.state_slots_host if self.state is not None else (None,) * len(lengths)
        rows = []
        for start, stop, length, slot in zip(starts, starts[1:], lengths, slots, strict=False):
            if slot == -1:
                rows += [torch.zeros(self.width)] * (stop - start)
                continue
            if length > stop - start:
                past, total = self.state[0][slot, :2].clone(), self.state[1][slot].clone()
            else:
                past, total = torch.zeros(2, self.width), torch.zeros(self.width)
            for index in range(start, stop):
                total = gates[index] * total + inputs[index] + past[0] / 2
                past = torch.stack([past[1], inputs[index]])
                rows.append(total)
            if slot is not None:
                self.state[0][slot, :2] = past
                self.state[1][slot] = total
        return torch.stack(rows)


def copy_conv_rows(state, block_ids, cur_block_idx, num_accepted_tokens):
    rows = state[block_ids[cur_block_idx], num_accepted_tokens - 1 :]
    return MambaCopySpec(rows.data_ptr(), rows.numel())


def copy_sum(state, block_ids, cur_block_idx, num_accepted_tokens):
    block = state[block_ids[cur_block_idx + num_accepted_tokens - 1]]
    return MambaCopySpec(block.data_ptr(), block.numel())


class RecurrentModel(nn.Module):
    """Layers in the order of `kinds`: "r" recurrent, "a" attention, "w" attention with a window of 6."""

    kinds = "rar"
    has_inner_state = True

    def __init__(self, *, vllm_config=None, prefix="", seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        speculative = getattr(vllm_config, "speculative_config", None)
        num_spec = 0 if speculative is None else speculative.num_speculative_tokens
        self.embed = matrix(VOCAB, HIDDEN, scale=HIDDEN**0.5)
        self.project = nn.ParameterList([matrix(2 * HIDDEN, HIDDEN, scale=2.0) for _ in self.kinds])
        self.out = nn.ParameterList([matrix(HIDDEN, HIDDEN, scale=2.0) for _ in self.kinds])
        self.head = matrix(VOCAB, HIDDEN, scale=2.0)
        self.mixers = nn.ModuleList(
            GatedSum(HIDDEN, num_spec)
            if kind == "r"
            else Attention(HEADS, HIDDEN // HEADS, 0.5, HEADS // 2, sliding_window=6 if kind == "w" else None)
            for kind in self.kinds
        )
        self.calls: list[tuple[list[int], list[int]]] = []
        self.fail_at: int | None = None

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config):
        speculative = vllm_config.speculative_config
        return (2 + (0 if speculative is None else speculative.num_speculative_tokens), HIDDEN), (HIDDEN,)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config):
        return torch.float32, torch.float32

    @classmethod
    def get_mamba_state_copy_func(cls):
        return copy_conv_rows, copy_sum

    def embed_input_ids(self, input_ids):
        return self.embed[input_ids]

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        self.calls.append((input_ids.tolist(), positions.tolist()))
        if self.fail_at is not None and len(self.calls) >= self.fail_at:
            raise RuntimeError("planted")
        hidden = self.embed[input_ids]
        for project, out, mixer in zip(self.project, self.out, self.mixers, strict=True):
            if isinstance(mixer, Attention):
                query, key, value = (hidden @ project.T).split((HIDDEN, HIDDEN // 2, HIDDEN // 2), dim=-1)
                mixed = mixer(query, key, value)
            else:
                inputs, gates = (hidden @ project.T).chunk(2, dim=-1)
                mixed = mixer(inputs, torch.sigmoid(gates))
            hidden = hidden + torch.tanh(mixed @ out.T)
        return hidden

    def compute_logits(self, hidden_states):
        return hidden_states @ self.head.T

    def load_weights(self, weights):
        return set()


def recurrent_class(kinds: str = "rar", **attributes) -> type[RecurrentModel]:
    """A class with layers of these kinds, and the claims that fit them; `attributes` change its body."""
    claims = {"is_hybrid": True} if set(kinds) != {"r"} else {"is_attention_free": True}
    return type(
        "RecurrentModel",
        (RecurrentModel,),
        {"kinds": kinds, "supports_mamba_prefix_caching": True} | claims | attributes,
    )


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
    vllm_config = VllmConfig(
        ModelConfig("test", config, torch.float32, max_model_len),
        DeviceConfig(device),
        cache_config=CacheConfig(block_size, enable_prefix_caching, kv_cache_memory_bytes=kv_cache_memory_bytes),
        scheduler_config=SchedulerConfig(max_num_seqs, max_num_batched_tokens),
    )
    checkpoint = SimpleNamespace(generation_config={} if eos is None else {"eos_token_id": eos}, config={})
    if isinstance(module, RecurrentModel):
        report = inspect_class(type(module), subject="test model")
        loaded = LoadedModel(module, report, vllm_config, checkpoint=checkpoint)
    else:
        loaded = SimpleNamespace(
            module=TinyModel() if module is None else module,
            vllm_config=vllm_config,
            device=device,
            dtype=torch.float32,
            checkpoint=checkpoint,
            close=lambda: None,
            wrappers_of=lambda hook: (),
            subject="plugin 'Test' (test==1.0, test:Model)",
        )
    engine = LLMEngine(loaded, tokenizer, seed=seed)
    for layer in loaded.module.modules():
        if isinstance(layer, Attention):
            for half in layer.kv_cache:
                half.fill_(float("nan"))  # what no request wrote must never be read
    if engine.kv_cache.states is not None:
        engine.kv_cache.states.fill(range(engine.kv_cache.states.num_slots), float("nan"))
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
def recurrent():
    """recurrent(kinds, **attributes): a class of recurrent and attention layers."""
    return recurrent_class


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
