"""The tour: one class that claims every interface which can be claimed together, and has every hook of API version 1.

Read it beside `torchplug api`. Hooks stand in the order of the phases in which they are called: class, load, request,
step. Two hooks come from the interfaces' own bodies: `embed_input_ids` (SupportsMultiModal) and the rest of
`set_eplb_state` (MixtureOfExperts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchplug import VllmConfig, hookimpl
from torchplug.interfaces import (
    HasInnerState,
    HasNoOps,
    IsHybrid,
    MambaCopySpec,
    MixtureOfExperts,
    MultiModalFeatureSpec,
    SupportsCrossEncoding,
    SupportsEagle,
    SupportsEagle3,
    SupportsLoRA,
    SupportsMambaPrefixCaching,
    SupportsMRoPE,
    SupportsMultiModal,
)
from torchplug.layers import ExpertPlacement, load_weights

from torchplug_tour.decoder import TourDecoder


class TourForCausalLM(
    nn.Module,
    HasInnerState,
    HasNoOps,
    IsHybrid,
    MixtureOfExperts,
    SupportsCrossEncoding,
    SupportsEagle,
    SupportsEagle3,
    SupportsLoRA,
    SupportsMambaPrefixCaching,
    SupportsMRoPE,
    SupportsMultiModal,
):
    """A decoder with experts, an image tower and an audio tower, each a single matrix."""

    embedding_modules: ClassVar[dict[str, str]] = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}

    config_defaults: ClassVar[dict[str, Any]] = {
        "decay": 0.5,
        "num_redundant_experts": 0,
        "merge_size": 2,
        "max_position_embeddings": 64,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1
        placement = ExpertPlacement(
            config.num_experts,
            config.num_redundant_experts + parallel.eplb_config.num_redundant_experts,
            ranks,
            parallel.rank % ranks,
        )
        with self._mark_language_model(vllm_config):
            self.language_model = TourDecoder(config, placement)
        with self._mark_tower_model(vllm_config, "image"):
            self.image_tower = nn.Linear(config.patch_size, config.hidden_size, bias=False)
        with self._mark_tower_model(vllm_config, "audio"):
            self.audio_tower = nn.Linear(config.frame_size, config.hidden_size, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.aux_layers: tuple[int, ...] = ()

        self.expert_weights = []
        self.moe_layers = [layer.experts for layer in self.language_model.layers if layer.experts is not None]
        self.num_moe_layers = len(self.moe_layers)
        self.num_expert_groups = 1
        self.num_logical_experts = self.num_routed_experts = config.num_experts
        self.num_physical_experts = placement.num_physical
        self.num_local_physical_experts = placement.num_local
        self.num_shared_experts = 0
        self.num_redundant_experts = placement.num_redundant

    # -- class phase: no weights, no device ------------------------------------------------------------------

    @hookimpl
    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """The state of one recurrent layer is one row, the decayed sum so far: [hidden / tensor_parallel_size]."""
        return ((vllm_config.model_config.hf_config.hidden_size // vllm_config.parallel_config.tensor_parallel_size,),)

    @hookimpl
    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """A sum over a long prefix needs more digits than float16 has."""
        half = vllm_config.model_config.dtype is torch.float16
        return (torch.float32 if half else vllm_config.model_config.dtype,)

    @hookimpl
    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Callable[[Tensor, list[int], int, int], MambaCopySpec], ...]:
        return (copy_accepted_state,)

    @hookimpl
    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return f"<{modality}:{i}>" if modality in ("image", "audio") else None

    # -- load phase: once, before the first step -------------------------------------------------------------

    @hookimpl
    def get_language_model(self) -> TourDecoder:
        return self.language_model

    @hookimpl
    def get_num_mm_encoder_tokens(self, num_image_tokens: int) -> int:
        """The connector would merge squares of `merge_size` patches into one token of the prompt."""
        return num_image_tokens * self.config.merge_size**2

    @hookimpl
    def get_num_mm_connector_tokens(self, num_vision_tokens: int) -> int:
        return num_vision_tokens // self.config.merge_size**2

    @hookimpl
    def set_eplb_state(
        self, expert_load_view: Tensor, logical_to_physical_map: Tensor, logical_replica_count: Tensor
    ) -> None:
        """Check that the balancer counts as many experts as the model, then do what every model does."""
        expected = (self.num_moe_layers, self.num_physical_experts)
        if tuple(expert_load_view.shape) != expected:
            raise ValueError(f"expert_load_view is {list(expert_load_view.shape)}, expected {list(expected)}")
        super().set_eplb_state(expert_load_view, logical_to_physical_map, logical_replica_count)

    @hookimpl
    def update_physical_experts_metadata(self, num_physical_experts: int, num_local_physical_experts: int) -> None:
        if num_local_physical_experts != self.num_local_physical_experts:
            kept = self.num_local_physical_experts
            raise ValueError(f"this process has {kept} experts for life, not {num_local_physical_experts}")
        self.num_physical_experts = num_physical_experts
        self.num_redundant_experts = num_physical_experts - self.num_logical_experts

    @hookimpl
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.aux_layers = layers

    @hookimpl
    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The first layer, one in the middle, and the last."""
        last = len(self.language_model.layers) - 1
        return tuple(sorted({0, last // 2, last}))

    # -- request phase: once per prompt ----------------------------------------------------------------------

    @hookimpl
    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Text counts on in all three rows; an image of `grid` (rows, columns) stands still in time.

        The next token after an image counts on from its longer side. Audio counts as text does.
        """
        images = {f.mm_position.offset: f.data["grid"] for f in mm_features if f.modality == "image" and f.data}
        positions: list[tuple[int, int, int]] = []
        count = 0
        while len(positions) < len(input_tokens):
            rows, columns = images.get(len(positions), (1, 1))
            positions += [(count, count + row, count + column) for row in range(rows) for column in range(columns)]
            count += max(rows, columns)
        return torch.tensor(positions, dtype=torch.int64).reshape(-1, 3).T, count - len(input_tokens)

    # -- step phase: in every step ---------------------------------------------------------------------------

    @hookimpl
    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """`pixel_values`: [patches, patch_size] per image; `audio_values`: [frames, frame_size] per sound.

        Returns [patches, hidden] and [frames, hidden] tensors, in the order of the keywords.
        """
        towers = {"pixel_values": self.image_tower, "audio_values": self.audio_tower}
        return [towers[name](item) for name, items in kwargs.items() for item in items]

    # -- the conventions of every model ----------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Hidden states [n, hidden], with those of the auxiliary layers beside them once any are chosen.

        input_ids: int64 [n]; positions: int64 [n], or [3, n] from `get_mrope_input_positions`.
        """
        hidden_states = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states, read = self.language_model(hidden_states, positions, self.aux_layers)
        return (hidden_states, read) if self.aux_layers else hidden_states

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(self, weights)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A config of this architecture that is small enough to check in a blink."""
        return {
            "architectures": ["TourForCausalLM"],
            "model_type": "tour",
            "vocab_size": 32,
            "hidden_size": 8,
            "layers_block_type": ["attention", "none", "mamba", "attention"],
            "num_experts": 3,
            "num_redundant_experts": 2,
            "patch_size": 5,
            "frame_size": 3,
        }

    @classmethod
    def tiny_weights(cls) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a checkpoint of `tiny_config`: it has logical experts, fewer than the model has slots."""
        config = cls.tiny_config()
        hidden, experts = config["hidden_size"], config["num_experts"]
        shapes = {
            "language_model.embed_tokens.weight": (config["vocab_size"], hidden),
            "image_tower.weight": (hidden, config["patch_size"]),
            "audio_tower.weight": (hidden, config["frame_size"]),
            "lm_head.weight": (config["vocab_size"], hidden),
        }
        for index, kind in enumerate(config["layers_block_type"]):
            if kind != "none":
                shapes[f"language_model.layers.{index}.experts.gate.weight"] = (experts, hidden)
                shapes[f"language_model.layers.{index}.experts.weight"] = (experts, hidden)
        return shapes


def copy_accepted_state(
    state: Tensor, block_ids: list[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """The state after the last accepted token: drafted tokens keep theirs in the blocks that follow the current one."""
    row = state[block_ids[cur_block_idx + num_accepted_tokens - 1]]
    return MambaCopySpec(start_addr=row.data_ptr(), num_elements=row.numel())
