"""A small model that conforms, into which test_planted_faults.py plants one fault at a time."""

import torch
from torch import nn
from torchplug.layers import Attention, Linear, QKVParallelLinear, load_weights


class HealthyForCausalLM(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_places = nn.Embedding(config.max_position_embeddings, width)
        self.qkv_proj = QKVParallelLinear(width, 8, width // 8)
        self.attn = Attention(width // 8, 8, 8**-0.5)
        self.o_proj = Linear(width, width)
        self.lm_head = Linear(width, config.vocab_size)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width), persistent=False)

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = (hidden + self.embed_places(positions)) * self.scale
        query, key, value = self.qkv_proj(hidden).chunk(3, dim=-1)
        return hidden + self.o_proj(self.attn(query, key, value))

    def compute_logits(self, hidden_states):
        return self.lm_head(hidden_states)

    def load_weights(self, weights):
        return load_weights(self, weights, packed=self.packed_modules_mapping)

    @classmethod
    def tiny_config(cls):
        return {"vocab_size": 96, "hidden_size": 32, "max_position_embeddings": 64}
