"""Qwen3, the dense models: Qwen2 without biases, with every query and key head normalised before its rotation.

Source: Yang et al., Qwen3 Technical Report, 2025, section 2; the norm is that of Dehghani et al., Scaling Vision
Transformers to 22 Billion Parameters, 2023, section 2, as an RMSNorm; config and weight names as in transformers'
Qwen3ForCausalLM.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchplug import VllmConfig
from torchplug.layers import RMSNorm, Rotation, apply_rotary

from torchplug_models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from torchplug_models.qwen2 import Qwen2ForCausalLM, qwen_window


class Qwen3Attention(LlamaAttention):
    """Attention whose query heads share one norm over head_size, and whose key heads share another."""

    def __init__(
        self, config: Any, prefix: str, *, bias: bool, norm_eps: float, sliding_window: int | None = None
    ) -> None:
        super().__init__(config, prefix, qkv_bias=bias, output_bias=bias, sliding_window=sliding_window)
        self.q_norm = RMSNorm(self.head_size, norm_eps)
        self.k_norm = RMSNorm(self.head_size, norm_eps)

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        num_tokens = hidden_states.shape[0]
        query, key, value = self.qkv_proj(hidden_states).split_with_sizes((self.q_size, self.kv_size, self.kv_size), -1)
        query = self.q_norm(query.view(num_tokens, -1, self.head_size))
        key = self.k_norm(key.view(num_tokens, -1, self.head_size))
        qk = torch.cat((query, key), dim=1).view(num_tokens, self.q_size + self.kv_size)
        query, key = apply_rotary(qk, rotation, self.head_size).split_with_sizes((self.q_size, self.kv_size), -1)
        return self.o_proj(self.attn(query, key, value))


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Qwen3 with its language-model head."""

    config_defaults: ClassVar[dict[str, Any]] = Qwen2ForCausalLM.config_defaults | {
        "head_dim": 128,
        "attention_bias": False,
    }

    @staticmethod
    def decoder_layer(vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        attention = Qwen3Attention(
            config,
            f"{prefix}.self_attn",
            bias=config.attention_bias,
            norm_eps=config.rms_norm_eps,
            sliding_window=qwen_window(config, index),
        )
        return LlamaDecoderLayer(config, attention, LlamaMLP(config, bias=False))

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with one layer that sees everything and one with a window."""
        return super().tiny_config() | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
