"""A small vision-language model that conforms, into which test_planted_multimodal_faults.py plants one fault at a time.

An image is its mean colour per square of 28 pixels, a film the same per frame; positions are M-RoPE's, added as learned
places.
"""

import torch
from torch import nn
from torchplug.interfaces import SupportsMRoPE, SupportsMultiModal
from torchplug.layers import Attention, GridSpan, Linear, load_weights, mrope_positions
from torchplug.multimodal import MULTIMODAL_REGISTRY, Batching, MultiModalProcessor, ProcessedItem

PADS = {"image": 90, "video": 91}


class Squares(MultiModalProcessor):
    modalities = ("image", "video")
    fields = {"colours": Batching.CONCATENATE, "grid": Batching.STACK}

    def placeholder(self, modality):
        return [PADS[modality]]

    def process(self, modality, item):
        frames = torch.tensor(item[None] if modality == "image" else item.frames)
        count, height, width, _ = frames.shape
        rows, columns = height // 28, width // 28
        squares = frames[:, : rows * 28, : columns * 28].view(count, rows, 28, columns, 28, 3)
        colours = squares.float().mean((2, 4)).reshape(-1, 3) / 255
        grid = torch.tensor([count, rows, columns])
        return ProcessedItem([PADS[modality]] * len(colours), {"colours": colours, "grid": grid})


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_places = nn.Embedding(config.max_position_embeddings, width)
        self.qkv = Linear(width, 3 * width)
        self.attn = Attention(width // 8, 8, 8**-0.5)
        self.lm_head = Linear(width, config.vocab_size)

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, hidden, positions):
        for row in positions if positions.dim() == 2 else [positions]:
            hidden = hidden + self.embed_places(row)
        return hidden + self.attn(*self.qkv(hidden).chunk(3, dim=-1))


@MULTIMODAL_REGISTRY.register_processor(Squares)
class HealthyForCausalLM(nn.Module, SupportsMultiModal, SupportsMRoPE):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        with self._mark_tower_model(vllm_config, {"image", "video"}):
            self.tower = Linear(3, config.hidden_size)
        with self._mark_language_model(vllm_config):
            self.language_model = Inner(config)

    @classmethod
    def get_placeholder_str(cls, modality, i):
        return f"<{modality}>" if modality in PADS else None

    def get_mrope_input_positions(self, input_tokens, mm_features):
        spans = [GridSpan(f.mm_position.offset, tuple(f.data["grid"].tolist())) for f in mm_features]
        positions, delta = mrope_positions(len(input_tokens), spans)
        return positions, delta

    def embed_multimodal(self, **kwargs):
        lengths = kwargs["grid"].prod(-1).tolist()
        rows = self.tower(kwargs["colours"])
        return rows.split(lengths)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.language_model(hidden, positions)

    def compute_logits(self, hidden_states):
        return self.language_model.lm_head(hidden_states)

    def load_weights(self, weights):
        return load_weights(self, weights)

    @classmethod
    def tiny_config(cls):
        return {"vocab_size": 96, "hidden_size": 32, "max_position_embeddings": 1024}
