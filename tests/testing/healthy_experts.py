"""A small mixture of experts that conforms, into which test_planted_expert_faults.py plants one fault at a time."""

from torch import nn
from torchplug.layers import Attention, FusedMoE, FusedMoEModel, Linear, TopKRouter, load_weights


class Mixture(nn.Module):
    def __init__(self, vllm_config, width):
        super().__init__()
        self.gate = TopKRouter(width, 4, 2)
        self.experts = FusedMoE(4, width, 24, parallel_config=vllm_config.parallel_config)

    def forward(self, hidden):
        return self.experts(hidden, *self.gate.route(hidden))


class Decoder(nn.Module, FusedMoEModel):
    def __init__(self, vllm_config, width):
        super().__init__()
        self.qkv_proj = Linear(width, 3 * width)
        self.attn = Attention(width // 8, 8, 8**-0.5)
        self.first, self.second = Mixture(vllm_config, width), Mixture(vllm_config, width)
        self.set_moe_attributes()

    def forward(self, hidden):
        query, key, value = self.qkv_proj(hidden).chunk(3, dim=-1)
        hidden = hidden + self.attn(query, key, value)
        hidden = hidden + self.first(hidden)
        return hidden + self.second(hidden)


class HealthyForCausalLM(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.language_model = Decoder(vllm_config, config.hidden_size)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.language_model(hidden + self.embed_places(positions))

    def compute_logits(self, hidden_states):
        return self.lm_head(hidden_states)

    def load_weights(self, weights):
        return load_weights(self, weights)

    @classmethod
    def tiny_config(cls):
        return {"vocab_size": 96, "hidden_size": 32, "max_position_embeddings": 64}
