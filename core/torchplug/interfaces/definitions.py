"""The Protocols that a model class may claim, and the types that their methods speak of.

Names, signatures and defaults are those of vLLM's interface documentation, which torchplug implements; the words are
ours. Nothing here imports torch. In the docstrings `n` counts the tokens of a flat batch and `hidden` is the width of
the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
    runtime_checkable,
)
from weakref import WeakKeyDictionary

from torchplug.errors import ContractError, Problem
from torchplug.protocols import cooperative
from torchplug.protocols import find_method as find_method
from torchplug.protocols import is_stub as is_stub

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from torchplug.config import VllmConfig

    _ProcessorFactories: TypeAlias = Any  # what a registry of processors stores; opaque to us

P = TypeVar("P")


# ---------------------------------------------------------------------------------------------------------------------
# Types of arguments and results

MultiModalEmbeddings: TypeAlias = "list[Tensor] | Tensor | tuple[Tensor, ...]"
"""One [n_i, hidden] tensor per item, in prompt order; or one [items, n, hidden] tensor for items of equal length."""


@dataclass(frozen=True, slots=True, eq=False)
class PlaceholderRange:
    """Where one multimodal item stands in its prompt, counted in tokens of the expanded prompt.

    Attributes:
        offset: Index of the item's first token.
        length: Tokens that the item occupies, separators included.
        is_embed: bool [length], CPU: the tokens that receive an embedding; None means all of them.
    """

    offset: int
    length: int
    is_embed: Tensor | None = None

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0:
            says = f"offset {self.offset} and length {self.length}: neither may be negative"
        elif self.is_embed is not None and tuple(self.is_embed.shape) != (self.length,):
            says = f"is_embed has shape {list(self.is_embed.shape)}, expected [{self.length}], one entry per token"
        else:
            return
        fix = "count in tokens of the expanded prompt"
        raise ContractError("a multimodal item's position", Problem("PlaceholderRange", says, fix))

    @property
    def num_embeds(self) -> int:
        """How many tokens of the range receive an embedding; at most `length`."""
        return self.length if self.is_embed is None else int(self.is_embed.sum())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        if (self.offset, self.length) != (other.offset, other.length):
            return False
        ours, theirs = self.is_embed, other.is_embed
        if ours is None or theirs is None:
            return ours is theirs
        return bool((ours == theirs).all())  # a generated __eq__ would ask for the truth of a whole tensor

    def __hash__(self) -> int:
        return hash((self.offset, self.length))


@dataclass(frozen=True, slots=True)
class MultiModalFeatureSpec:
    """One multimodal item of a request.

    Attributes:
        modality: "image", "video", "audio", ...
        mm_position: Where its tokens stand in the prompt.
        data: The processor's outputs for this item by name, e.g. `image_grid_thw`; None once nobody needs them.
        identifier: A name for its content: items with the same one are the same in every respect; "" where unknown.
    """

    modality: str
    mm_position: PlaceholderRange
    data: Mapping[str, Any] | None = None
    identifier: str = ""


@dataclass(frozen=True, slots=True)
class MambaCopySpec:
    """A piece of a state tensor: `num_elements` elements from `start_addr` on, an address as of `Tensor.data_ptr()`."""

    start_addr: int
    num_elements: int


MambaStateCopyFunc: TypeAlias = Callable[["Tensor", list[int], int, int], MambaCopySpec]
"""(state [blocks, *shape], block_ids, cur_block_idx, num_accepted_tokens) -> the piece of `state` that must be kept."""


# ---------------------------------------------------------------------------------------------------------------------
# The Protocols


@cooperative
@runtime_checkable
class VllmModel(Protocol):
    """What every text model is: three methods over a flat batch. Built as `Class(*, vllm_config, prefix="")`."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token embeddings: int64 [n] -> [n, hidden] in model dtype, on the model's device."""
        ...

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [n, hidden] in model dtype.

        Args:
            input_ids: int64 [n]; None where `inputs_embeds` is given.
            positions: int64 [n], or [3, n] for M-RoPE.
            intermediate_tensors: What the previous pipeline stage handed over; None on the first.
            inputs_embeds: [n, hidden], used in place of `input_ids`.
        """
        ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits over the vocabulary: [n, hidden] -> [n, vocab]."""
        ...


@cooperative
@runtime_checkable
class HasInnerState(Protocol):
    """Models that carry state from step to step besides keys and values: Mamba, and Jamba too."""

    has_inner_state: ClassVar[Literal[True]] = True
    """The model keeps recurrent state, a slot per running request; `scheduler_config.max_num_seqs` bounds the slots."""


@cooperative
@runtime_checkable
class HasNoOps(Protocol):
    """Models in which some layers have no attention or no feed-forward at all."""

    has_noops: ClassVar[Literal[True]] = True
    """The layers differ, and an absent attention takes no cache."""


@cooperative
@runtime_checkable
class IsAttentionFree(Protocol):
    """Models without any attention layer, whose memory does not grow with the sequence: Mamba, not Jamba."""

    is_attention_free: ClassVar[Literal[True]] = True
    """No layer attends, so no cache of keys and values is built."""


@cooperative
@runtime_checkable
class IsHybrid(Protocol):
    """Models with attention layers and recurrent (Mamba-like) layers side by side."""

    is_hybrid: ClassVar[Literal[True]] = True
    """Both kinds of layer are present; the config has `layers_block_type` or another list that says which is which."""

    @classmethod
    def get_mamba_state_shape_from_config(
        cls,
        vllm_config: VllmConfig,
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Shapes of one recurrent layer's state for one request, before any weight exists.

        Args:
            vllm_config: The model's configuration; shapes are those of one of its `tensor_parallel_size` ranks.

        Returns:
            One shape per state tensor, in the order in which the layer keeps them: convolution state, then state-space
            state. Other recurrent layers return one to five shapes of any rank.
        """
        ...

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """One copy function per state tensor, in the order of the shapes.

        Each is called as (state, block_ids, cur_block_idx, num_accepted_tokens) and says which piece of `state` a
        snapshot must keep, so that a later request with the same prefix can start from it.
        """
        ...


@cooperative
@runtime_checkable
class MambaStateDtype(Protocol):
    """An optional companion of HasInnerState and IsHybrid, ours alone and without a flag: dtypes of the states."""

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """One dtype per state tensor, in the order of the shapes. Without the method all have the model dtype."""
        ...


@cooperative
@runtime_checkable
class MixtureOfExperts(Protocol):
    """Models whose experts can be spread over processes and moved while serving (expert-parallel load balancing).

    A logical expert is one of the checkpoint's; a physical expert is a copy of it, in one slot of one process.
    """

    expert_weights: MutableSequence[Iterable[Tensor]]
    """Per MoE layer, the expert tensors of this process; in each, dim 0 is the local slot and rows are contiguous."""

    num_moe_layers: int
    """Layers with experts; 0 means that this checkpoint has none, and then nothing is claimed."""

    num_expert_groups: int
    """Groups that the router chooses among before it chooses experts; 1 where there are none."""

    num_logical_experts: int
    """Experts per layer, as the router numbers them."""

    num_physical_experts: int
    """Slots per layer over all processes: logical plus redundant."""

    num_local_physical_experts: int
    """Slots per layer in this process."""

    num_routed_experts: int
    """Experts per layer that the router can choose; shared experts do not count."""

    num_shared_experts: int
    """Experts per layer that see every token."""

    num_redundant_experts: int
    """Slots per layer beyond one for each logical expert."""

    moe_layers: Iterable[nn.Module]
    """The expert layers, in order; each has `get_expert_weights()` and `set_eplb_state(...)`."""

    def set_eplb_state(
        self,
        expert_load_view: Tensor,
        logical_to_physical_map: Tensor,
        logical_replica_count: Tensor,
    ) -> None:
        """Hand the balancer's tensors to the layers, and collect the expert weights.

        The weights are collected here and not in the loader, because post-processing may replace them. The tensors are
        views on the model's device that stay the same for life and are updated in place. A second call starts
        `expert_weights` afresh instead of doubling it.

        Args:
            expert_load_view: int32 [layers, physical], tokens counted per slot.
            logical_to_physical_map: int64 [layers, logical, most replicas], slots of each expert, -1 where unused.
            logical_replica_count: int64 [layers, logical], how many of them are in use.
        """
        del self.expert_weights[:]
        for layer_idx, layer in enumerate(self.moe_layers):
            experts = cast("Any", layer)
            self.expert_weights.append(experts.get_expert_weights())
            experts.set_eplb_state(
                moe_layer_idx=layer_idx,
                expert_load_view=expert_load_view,
                logical_to_physical_map=logical_to_physical_map,
                logical_replica_count=logical_replica_count,
            )

    def update_physical_experts_metadata(
        self,
        num_physical_experts: int,
        num_local_physical_experts: int,
    ) -> None:
        """Follow a change in the number of slots (processes joined or left); the local number must stay what it is."""
        ...


@cooperative
@runtime_checkable
class SupportsCrossEncoding(Protocol):
    """Models that score a pair of texts read together as one prompt."""

    supports_cross_encoding: ClassVar[Literal[True]] = True
    """The pooled output is one score per pair."""


@cooperative
@runtime_checkable
class SupportsEagleBase(Protocol):
    """What models of the EAGLE family declare. By itself it claims nothing."""

    has_own_lm_head: bool = False
    """The checkpoint brings its own head; otherwise the target model's is shared."""

    has_own_embed_tokens: bool = False
    """The checkpoint brings its own input embeddings; otherwise the target model's are shared."""


@cooperative
@runtime_checkable
class SupportsEagle(SupportsEagleBase, Protocol):
    """Models that EAGLE-1 and EAGLE-2 drafters can work with."""

    supports_eagle: ClassVar[Literal[True]] = True
    """Inherited by subclassing; there is no need to repeat it."""


@cooperative
@runtime_checkable
class SupportsEagle3(SupportsEagleBase, Protocol):
    """Models that EAGLE-3 drafters can work with: they also return the hidden states of a few chosen layers."""

    supports_eagle3: ClassVar[Literal[True]] = True
    """Inherited by subclassing; there is no need to repeat it."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Choose the layers whose input `forward` returns as well (residual included, before the norm).

        Args:
            layers: 0-based, ascending, distinct.
        """
        ...

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The layers that this model offers to a drafter which names none; 0-based, ascending, distinct."""
        ...


@cooperative
@runtime_checkable
class SupportsLoRA(Protocol):
    """Models that can serve low-rank adapters; the tables relate an adapter's module names to the model's."""

    supports_lora: ClassVar[Literal[True]] = True
    """Inherited by subclassing; there is no need to repeat it."""

    is_3d_moe_weight: ClassVar[bool] = False
    """Expert weights are one [experts, out, in] tensor per projection."""

    is_non_gated_moe: ClassVar[bool] = False
    """Experts have an up and a down projection only."""

    embedding_modules: ClassVar[dict[str, str]] = {}
    """Module name -> "input_embeddings" or "output_embeddings". Each class has its own."""

    packed_modules_mapping: dict[str, list[str]] = {}
    """Fused module -> its parts in the order of the output slices: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}."""


@cooperative
@runtime_checkable
class SupportsMRoPE(Protocol):
    """Models that rotate by three positions (time, height, width) instead of one."""

    supports_mrope: ClassVar[Literal[True]] = True
    """Inherited by subclassing; there is no need to repeat it."""

    def get_mrope_input_positions(
        self,
        input_tokens: list[int],
        mm_features: list[MultiModalFeatureSpec],
    ) -> tuple[torch.Tensor, int]:
        """The position table of one prompt.

        Args:
            input_tokens: The prompt's token ids, placeholders expanded.
            mm_features: Its multimodal items, in any order.

        Returns:
            (positions, delta): positions is int64 [3, len(input_tokens)] on the CPU, rows time, height and width; a
            generated token at index i of the sequence gets position i + delta in all rows.
        """
        ...


@cooperative
@runtime_checkable
class SupportsMambaPrefixCaching(Protocol):
    """Models whose recurrent state can be saved at a block boundary and restored under the same prefix."""

    supports_mamba_prefix_caching: ClassVar[Literal[True]] = True
    """`get_mamba_state_copy_func` covers every state tensor."""


class NoLanguageModel(ContractError, NotImplementedError):
    """`get_language_model` found no child that embeds token ids."""


_language_model_paths: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
"""Where each model keeps its language model: names, so that no module is kept alive and a new child is followed."""


@cooperative
@runtime_checkable
class SupportsMultiModal(Protocol):
    """Models that read images, video or audio beside text: outputs of encoders (towers) replace placeholder tokens."""

    supports_multimodal: ClassVar[Literal[True]] = True
    """Inherited by subclassing; there is no need to repeat it."""

    supports_multimodal_raw_input_only: ClassVar[bool] = False
    """`forward` takes the multimodal inputs raw; `embed_multimodal` is not used."""

    supports_encoder_tp_data: ClassVar[bool] = False
    """The encoder can run whole on each rank, each with its share of the items (`mm_encoder_tp_mode="data"`)."""

    requires_raw_input_tokens: ClassVar[bool] = False
    """`forward` needs the token ids as well as the embeddings."""

    _processor_factory: ClassVar[_ProcessorFactories]
    """Set by the registry of processors."""

    _language_model_names: list[str] = []
    """Dotted names of the modules marked by `_mark_language_model`."""

    _tower_model_names: list[str] = []
    """Dotted names of the modules marked by `_mark_tower_model`."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """The text that stands for item `i` (from 1) of `modality` in a prompt; None if the modality has no text."""
        ...

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Encode the items whose processor outputs are given by name.

        Returns:
            One [n_i, hidden] tensor per item, in prompt order, on the model's device; n_i: its embedding positions.
        """
        ...

    def get_language_model(self) -> VllmModel:
        """The child that turns merged embeddings into hidden states.

        It is what `_mark_language_model` marked, else the first child with `embed_input_ids`; never the model itself.

        Raises:
            NoLanguageModel: There is none. It is a NotImplementedError too.
        """
        known = _language_model_paths.get(self)
        found = None if known is None else _language_model_at(self, known)
        if found is not None:
            return found
        for path in _language_model_candidates(self, self._language_model_names):
            found = _language_model_at(self, path)
            if found is not None:
                _language_model_paths[self] = path
                return found
        name = type(self).__name__
        fix = f"assign it to {name} under `with self._mark_language_model(vllm_config):`, or define get_language_model"
        problem = Problem("get_language_model", "no child module has embed_input_ids", fix)
        raise NoLanguageModel(f"model class {name!r}", problem)

    @contextmanager
    def _mark_language_model(
        self,
        vllm_config: VllmConfig,
        *,
        targets: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    ) -> Iterator[None]:
        """Children assigned in this context are the language model; with `mm_encoder_only` they become placeholders.

        Args:
            vllm_config: Its `model_config.multimodal_config` decides; None there leaves nothing out.
            targets: Mark the descendants of these types instead, at any depth.
        """
        from torchplug.layers.stages import mark_stage

        mm_config = vllm_config.model_config.multimodal_config
        left_out = mm_config is not None and mm_config.mm_encoder_only
        with mark_stage(cast("nn.Module", self), "language_model", left_out=left_out, targets=targets) as names:
            yield
        self._language_model_names = _united(self._language_model_names, names)
        _language_model_paths.pop(self, None)

    @contextmanager
    def _mark_tower_model(
        self,
        vllm_config: VllmConfig,
        modalities: set[str] | str,
        *,
        targets: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    ) -> Iterator[None]:
        """Children assigned in this context encode `modalities`; if all their limits are 0 they become placeholders.

        Args:
            vllm_config: Its `model_config.multimodal_config` decides; None there leaves nothing out.
            modalities: One modality or several, e.g. {"image", "video"} for a vision tower.
            targets: Mark the descendants of these types instead, at any depth.
        """
        from torchplug.layers.stages import mark_stage

        modalities = {modalities} if isinstance(modalities, str) else modalities
        if not modalities:
            says = "no modality is named, so no limit can say whether the tower is built"
            problem = Problem("_mark_tower_model", says, 'name at least one modality, e.g. "image"')
            raise ContractError(f"model class {type(self).__name__!r}", problem)
        # Sorted, because a set of strings has another order in every process.
        stage_name = "vision_tower" if modalities == {"image", "video"} else "_".join([*sorted(modalities), "tower"])
        mm_config = vllm_config.model_config.multimodal_config
        left_out = mm_config is not None and all(mm_config.get_limit_per_prompt(m) == 0 for m in modalities)
        with mark_stage(cast("nn.Module", self), stage_name, left_out=left_out, targets=targets) as names:
            yield
        self._tower_model_names = _united(self._tower_model_names, names)

    @contextmanager
    def _mark_composite_model(
        self,
        vllm_config: VllmConfig,
        *,
        language_targets: type[nn.Module] | tuple[type[nn.Module], ...],
        tower_targets: dict[str, type[nn.Module] | tuple[type[nn.Module], ...]],
    ) -> Iterator[None]:
        """Both marks at once, for a model built in one piece: language model by type, towers by modality and type."""
        with ExitStack() as stack:
            stack.enter_context(self._mark_language_model(vllm_config, targets=language_targets))
            for modality, modality_targets in tower_targets.items():
                stack.enter_context(self._mark_tower_model(vllm_config, modality, targets=modality_targets))
            yield

    def get_num_mm_encoder_tokens(self, num_image_tokens: int) -> int:
        """Tokens inside the tower for `num_image_tokens` tokens of the prompt; needed for adapters on the tower."""
        ...

    def get_num_mm_connector_tokens(self, num_vision_tokens: int) -> int:
        """Tokens inside the connector for `num_vision_tokens` tokens of the tower; needed for adapters on it."""
        ...

    def _embed_text_input_ids(
        self,
        input_ids: Tensor,
        embed_input_ids: Callable[[Tensor], Tensor],
        *,
        is_multimodal: Tensor | None,
        handle_oov_mm_token: bool,
    ) -> Tensor:
        """Embed the text rows of `input_ids`; see `torchplug.layers.multimodal.embed_text_rows`."""
        from torchplug.layers.multimodal import embed_text_rows

        if handle_oov_mm_token and is_multimodal is not None:
            return embed_text_rows(input_ids, embed_input_ids, is_multimodal)
        return embed_input_ids(input_ids)

    @overload
    def embed_input_ids(self, input_ids: Tensor) -> Tensor: ...

    @overload
    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings,
        *,
        is_multimodal: torch.Tensor,
        handle_oov_mm_token: bool = False,
    ) -> Tensor: ...

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: Tensor | None = None,
        handle_oov_mm_token: bool = False,
    ) -> Tensor:
        """Embed token ids and write the multimodal embeddings over the placeholder rows.

        Args:
            input_ids: int64 [n].
            multimodal_embeddings: [n_i, hidden] tensors in the placeholders' order, as many rows as the mask marks.
            is_multimodal: bool [n], True at placeholder rows, on any device; required with embeddings, never modified.
            handle_oov_mm_token: Placeholder ids lie outside the vocabulary: look up text rows only, others are zero.

        Returns:
            [n, hidden] in the text embedding's dtype, on its device.

        Raises:
            ContractError: Counts, widths or dtypes do not fit; nothing has been written then.
        """
        from torchplug.layers.multimodal import _merge_multimodal_embeddings, _require_is_multimodal

        inputs_embeds = self._embed_text_input_ids(
            input_ids,
            self.get_language_model().embed_input_ids,
            is_multimodal=is_multimodal,
            handle_oov_mm_token=handle_oov_mm_token,
        )
        if multimodal_embeddings is None or len(multimodal_embeddings) == 0:
            return inputs_embeds
        return _merge_multimodal_embeddings(
            inputs_embeds=inputs_embeds,
            multimodal_embeddings=multimodal_embeddings,
            is_multimodal=_require_is_multimodal(is_multimodal),
        )


def _united(names: Iterable[str], more: Iterable[str]) -> list[str]:
    """A new list: a second mark (audio tower after vision tower) adds to the first, and the class's default stays."""
    return list(dict.fromkeys([*names, *more]))


def _language_model_candidates(model: Any, marked: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Paths worth a look: what the marked names have in common ("lm" of "lm.model" and "lm.head"), then each child."""
    common: list[str] = []
    for parts in zip(*(name.split(".") for name in marked), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    if common:
        yield tuple(common)
    for name, _ in model.named_children():
        yield (name,)


def _language_model_at(model: Any, path: tuple[str, ...]) -> VllmModel | None:
    module = model
    for name in path:
        module = getattr(module, name, None)
    if module is model or not hasattr(module, "embed_input_ids"):
        return None
    return cast("VllmModel", module)
