"""A small hybrid model that conforms, into which test_planted_state_faults.py plants one fault at a time."""

import torch
from torch import nn
from torchplug.interfaces import HasInnerState, IsHybrid, MambaCopySpec, SupportsMambaPrefixCaching
from torchplug.layers import Attention, Linear, QKVParallelLinear, RecurrentLayer, get_forward_context, load_weights

TAPS = 3


def shapes(vllm_config):
    config = vllm_config.model_config.hf_config
    drafts = 0 if vllm_config.speculative_config is None else vllm_config.speculative_config.num_speculative_tokens
    width = config.hidden_size // vllm_config.parallel_config.tensor_parallel_size
    return (TAPS - 1 + drafts, width), (width,)


def copy_inputs(state, block_ids, cur_block_idx, num_accepted_tokens):
    rows = state[block_ids[cur_block_idx], num_accepted_tokens - 1 :]
    return MambaCopySpec(rows.data_ptr(), rows.numel())


def copy_sum(state, block_ids, cur_block_idx, num_accepted_tokens):
    block = state[block_ids[cur_block_idx + num_accepted_tokens - 1]]
    return MambaCopySpec(block.data_ptr(), block.numel())


class GatedSum(RecurrentLayer):
    """Each token's row and half of the row two tokens before it, summed up with a decay per channel."""

    def __init__(self, width, shapes):
        super().__init__()
        self.width, self.shapes = width, shapes
        self.decay = nn.Parameter(torch.empty(width), requires_grad=False)

    def state_shapes(self):
        return self.shapes

    def state_dtypes(self):
        return torch.float32, torch.float32

    def forward(self, rows):
        context = get_forward_context()
        if context is None:
            return self.run(rows, None, None)[0]
        if self.state is None:  # every request begins in this step, and nothing is kept
            return torch.cat([self.run(part, None, None)[0] for part in rows.split(context.query_lens_host)])
        results = []
        starts, lengths = context.query_start_loc.tolist(), context.seq_lens_host
        for start, stop, length, slot in zip(starts, starts[1:], lengths, context.state_slots_host, strict=False):
            new = stop - start
            inputs, total = (state[slot] for state in self.state)
            if length > new:
                found, inputs[: TAPS - 1], total[:] = self.run(rows[start:stop], inputs[: TAPS - 1], total)
            else:
                found, inputs[: TAPS - 1], total[:] = self.run(rows[start:stop], None, None)
            results.append(found)
        return torch.cat(results)

    def run(self, rows, inputs, total):
        inputs = rows.new_zeros(TAPS - 1, self.width) if inputs is None else inputs.to(rows.dtype)
        total = rows.new_zeros(self.width) if total is None else total.to(rows.dtype)
        decay = self.decay / 2
        every = torch.cat((inputs, rows))
        found = []
        for index in range(len(rows)):
            total = total * decay + every[index + TAPS - 1] + every[index] / 2
            found.append(total)
        return torch.stack(found), every[-(TAPS - 1) :], total


class HealthyForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.mixers = nn.ModuleList()
        for kind in config.layer_types:
            if kind == "full_attention":
                self.qkv_proj = QKVParallelLinear(width, 8, width // 8)
                self.mixers.append(Attention(width // 8, 8, 8**-0.5))
            if kind == "recurrent":
                self.mixers.append(GatedSum(width, shapes(vllm_config)))
        self.lm_head = Linear(width, config.vocab_size)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config):
        return shapes(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config):
        return torch.float32, torch.float32

    @classmethod
    def get_mamba_state_copy_func(cls):
        return copy_inputs, copy_sum

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        for mixer in self.mixers:
            if isinstance(mixer, RecurrentLayer):
                hidden = hidden + torch.tanh(mixer(hidden))
            else:
                hidden = hidden + mixer(*self.qkv_proj(hidden).chunk(3, dim=-1))
        return hidden

    def compute_logits(self, hidden_states):
        return self.lm_head(hidden_states)

    def load_weights(self, weights):
        return load_weights(self, weights, packed=self.packed_modules_mapping)

    @classmethod
    def tiny_config(cls):
        return {
            "vocab_size": 96,
            "hidden_size": 24,
            "max_position_embeddings": 64,
            "layer_types": ["recurrent", "full_attention", "recurrent"],
        }
