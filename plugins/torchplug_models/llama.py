"""Llama: a pre-norm decoder with rotary positions, grouped-query attention and a gated MLP.

Source: Touvron et al., LLaMA, 2023, section 2.2; Llama 2, 2023, section 2.2 (grouped queries); config and weight names
as in transformers' LlamaForCausalLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torchplug import VllmConfig, hookimpl
from torchplug.layers import (
    Attention,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_rotary,
    get_act_and_mul,
    load_weights,
    rope_from_config,
)


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions, or without where it is given no rotation.

    Which biases it has, how far back it sees and what scores are multiplied by (None for head_size ** -0.5) is the
    family's.
    """

    def __init__(
        self,
        config: Any,
        prefix: str,
        *,
        qkv_bias: bool,
        output_bias: bool,
        sliding_window: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        num_heads = config.num_attention_heads
        num_kv_heads = config.num_key_value_heads or num_heads
        head_size = head_size_of(config)
        self.qkv_proj = QKVParallelLinear(config.hidden_size, head_size, num_heads, num_kv_heads, qkv_bias)
        self.attn = Attention(
            num_heads,
            head_size,
            head_size**-0.5 if scale is None else scale,
            num_kv_heads,
            sliding_window=sliding_window,
            prefix=f"{prefix}.attn",
        )
        self.o_proj = RowParallelLinear(num_heads * head_size, config.hidden_size, output_bias)
        self.head_size = head_size
        self.q_size, self.kv_size = self.qkv_proj.q_size, self.qkv_proj.kv_size

    def forward(self, hidden_states: Tensor, rotation: Rotation | None) -> Tensor:
        qk, value = self.qkv_proj(hidden_states).split_with_sizes((self.q_size + self.kv_size, self.kv_size), -1)
        if rotation is not None:
            qk = apply_rotary(qk, rotation, self.head_size)
        query, key = qk.split_with_sizes((self.q_size, self.kv_size), -1)
        return self.o_proj(self.attn(query, key, value))


class LlamaMLP(nn.Module):
    """A gated MLP; `intermediate_size` None is the config's."""

    def __init__(self, config: Any, *, bias: bool, intermediate_size: int | None = None) -> None:
        super().__init__()
        inner = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, [inner] * 2, bias)
        self.act_fn = get_act_and_mul(config.hidden_act)
        self.down_proj = RowParallelLinear(inner, config.hidden_size, bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden_states)))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: Any, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), rotation)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LlamaModel(nn.Module):
    def __init__(
        self, config: Any, rotary_emb: RotaryEmbedding | None, layers: Iterable[nn.Module], norm_eps: float
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = rotary_emb
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, norm_eps)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        rotation = None if self.rotary_emb is None else self.rotary_emb(positions, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rotation)
        return self.norm(hidden_states)


class LlamaForCausalLM(nn.Module):
    """Llama with its language-model head. A family whose layers differ from Llama's replaces `decoder_layer`, one whose
    stack differs `stack`."""

    stack: ClassVar[type[LlamaModel]] = LlamaModel
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        layers = f"{prefix}.model.layers".lstrip(".")
        self.model = self.stack(
            config,
            self.rotary_embedding(config),
            [self.decoder_layer(vllm_config, index, f"{layers}.{index}") for index in range(config.num_hidden_layers)],
            self.norm_eps(config),
        )
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.model.embed_tokens if config.tie_word_embeddings else None,
        )

    @staticmethod
    def rotary_embedding(config: Any) -> RotaryEmbedding | None:
        """The rotation that all layers share; None in a family without."""
        return rope_from_config(config, head_size_of(config), config.max_position_embeddings)

    @staticmethod
    def norm_eps(config: Any) -> float:
        """What the last norm adds to the mean square."""
        return config.rms_norm_eps

    @staticmethod
    def decoder_layer(vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        """Layer `index` of the stack, which is called `prefix` in the model."""
        config = vllm_config.model_config.hf_config
        bias = config.attention_bias
        attention = LlamaAttention(config, f"{prefix}.self_attn", qkv_bias=bias, output_bias=bias)
        return LlamaDecoderLayer(config, attention, LlamaMLP(config, bias=config.mlp_bias))

    @hookimpl
    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        hidden_states = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(hidden_states, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(self, weights, packed=self.packed_modules_mapping)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A config of this architecture that is small enough to check in a blink."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rms_norm_eps": 1e-5,
        }


def head_size_of(config: Any) -> int:
    """`head_dim` where the config gives it; not every family's heads make up the hidden size."""
    return config.head_dim or config.hidden_size // config.num_attention_heads
