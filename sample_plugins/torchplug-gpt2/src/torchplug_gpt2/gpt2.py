"""GPT-2: a decoder of pre-norm blocks with learned positions, a GELU MLP, and the token embedding as its head.

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3, on top of Radford et
al., Improving Language Understanding by Generative Pre-Training, 2018, section 4.1. Names of layers and config keys are
those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torchplug import VllmConfig, hookimpl
from torchplug.layers import (
    Attention,
    ColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_act_fn,
    load_weights,
)


class GPT2Attention(nn.Module):
    """Causal self-attention with as many key heads as query heads; query, key and value come from one projection."""

    def __init__(self, config: Any, layer: int, prefix: str) -> None:
        super().__init__()
        width, num_heads = config.n_embd, config.n_head
        head_size, rest = divmod(width, num_heads)
        if rest:
            raise ValueError(f"config.json: n_embd {width} is not a multiple of n_head {num_heads}")
        scale = head_size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        self.c_attn = QKVParallelLinear(width, head_size, num_heads, bias=True)
        self.attn = Attention(num_heads, head_size, scale, prefix=f"{prefix}.attn")
        self.c_proj = RowParallelLinear(width, width, bias=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        query, key, value = self.c_attn(hidden_states).chunk(3, dim=-1)
        return self.c_proj(self.attn(query, key, value))


class GPT2MLP(nn.Module):
    """Two projections with the activation between them; the inner width is n_inner, four times n_embd by default."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = ColumnParallelLinear(config.n_embd, inner, bias=True)
        self.act = get_act_fn(config.activation_function)
        self.c_proj = RowParallelLinear(inner, config.n_embd, bias=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(hidden_states)))


class GPT2Block(nn.Module):
    """One layer: each half normalises what it reads and adds what it finds to the stream."""

    def __init__(self, config: Any, layer: int, prefix: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer, f"{prefix}.attn")
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states))
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class GPT2LMHeadModel(nn.Module):
    """GPT-2 with its language-model head.

    `reorder_and_upcast_attn` needs nothing here: it guards a training run in float16 and changes no formula.
    """

    config_defaults: ClassVar[dict[str, Any]] = {
        "n_positions": 1024,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.wte = VocabParallelEmbedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(
            GPT2Block(config, layer, f"{prefix}.h.{layer}".lstrip(".")) for layer in range(config.n_layer)
        )
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        tied_to = self.wte if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.n_embd, tied_to=tied_to)

    @hookimpl
    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token embeddings without positions. input_ids: int64 [n]; returns [n, n_embd]."""
        return self.wte(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """All tokens of a step as one flat batch. input_ids, positions: int64 [n]; returns [n, n_embd]."""
        hidden_states = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states = hidden_states + self.wpe(positions)
        for block in self.h:
            hidden_states = block(hidden_states)
        return self.ln_f(hidden_states)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(
            self,
            weights,
            rename={"transformer": ""},  # the files of the first release name the layers without it
            skip=["attn.bias", "attn.masked_bias"],  # the causal mask, which older files hold as a buffer
            transposed=["c_attn.weight", "c_fc.weight", "c_proj.weight"],  # GPT-2 keeps them as [in, out]
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A config of this architecture that is small enough to check in a blink."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": 128,
            "n_positions": 64,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 4,
        }

    @classmethod
    def tiny_weights(cls) -> dict[str, tuple[int, ...]]:
        """Names and shapes in a checkpoint of `tiny_config()`, which differ from the parameters': matrices are [in,
        out].
        """
        config = cls.tiny_config()
        width, inner = config["n_embd"], 4 * config["n_embd"]
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (config["vocab_size"], width),
            "transformer.wpe.weight": (config["n_positions"], width),
        }
        norms = ["ln_f"]
        for block in (f"h.{layer}" for layer in range(config["n_layer"])):
            norms += [f"{block}.ln_1", f"{block}.ln_2"]
            for name, size_in, size_out in (
                ("attn.c_attn", width, 3 * width),
                ("attn.c_proj", width, width),
                ("mlp.c_fc", width, inner),
                ("mlp.c_proj", inner, width),
            ):
                shapes[f"transformer.{block}.{name}.weight"] = (size_in, size_out)
                shapes[f"transformer.{block}.{name}.bias"] = (size_out,)
        return shapes | {f"transformer.{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}
