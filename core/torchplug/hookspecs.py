"""The hook API, version 1: one row per hook, from which specs, adapters, checks and docs are made.

A row names the interface function that gives the hook its name, signature and docstring; the moment it may be called;
what it returns; the interfaces that need it or may have it; and where its tensor arguments must live. There is no
per-hook code outside this table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import NoneType
from typing import Any, Final

from torchplug import interfaces, results

API_VERSION: Final = 1

BASE: Final = "VllmModel"
"""The conventions that every model class has; in `needed`, it stands for every model."""


class Phase(StrEnum):
    """When a hook may be called: CLASS needs no weights and no device, the others need a loaded model."""

    CLASS = "class"
    LOAD = "load"
    REQUEST = "request"
    STEP = "step"


class Place(StrEnum):
    """Where a tensor argument lives: DEVICE moves a CPU tensor to the model's device; VIEW must be there already, and
    is kept for life.
    """

    DEVICE = "device"
    VIEW = "view"


@dataclass(frozen=True, slots=True)
class Returns:
    """What a hook returns: for people (`says`), as a type compared inline (`exact`), or as a test factory run once per
    model (`test`).
    """

    says: str
    exact: type | None = None
    test: results.TestFactory | None = None


@dataclass(frozen=True, eq=False)
class Hook:
    """One row of the table.

    Attributes:
        of: The interface function; its name, signature and docstring are the hook's.
        phase: When it may be called.
        returns: What it returns.
        needed: Interfaces whose claim needs it.
        optional: Interfaces whose claim allows it.
        places: Where each tensor argument lives; an argument that is not named is passed as it is.
        unless: A class flag that, when claimed, lifts the need.
        older: Spellings of other vLLM versions: the call that serves them, without the arguments that a method does not
            take, or None to refuse them by name.
    """

    of: Callable[..., Any]
    phase: Phase
    returns: Returns
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    places: Mapping[str, Place] = field(default_factory=dict)
    unless: str = ""
    older: Mapping[str, str | None] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        return self.of.__name__

    @cached_property
    def signature(self) -> inspect.Signature:
        """The interface's own signature, without self or cls. Annotations are texts."""
        function = getattr(self.of, "__func__", self.of)
        whole = inspect.signature(function)
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    @cached_property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """pluggy's argument names (without `model`) and the parameters they stand for; `**kwargs` becomes the mapping
        `mm_kwargs`.
        """
        return {"mm_kwargs" if p.kind is p.VAR_KEYWORD else p.name: p for p in self.signature.parameters.values()}

    @property
    def interfaces(self) -> tuple[str, ...]:
        return self.needed + self.optional


_DEVICE, _VIEW = Place.DEVICE, Place.VIEW

TABLE: Final[tuple[Hook, ...]] = (
    Hook(
        of=interfaces.IsHybrid.get_mamba_state_shape_from_config,
        phase=Phase.CLASS,
        returns=Returns(
            "tuple of 1 to 5 shapes (tuples of ints), one per state tensor of a layer", test=results.state_shapes
        ),
        needed=("HasInnerState", "IsHybrid"),
    ),
    Hook(
        of=interfaces.MambaStateDtype.get_mamba_state_dtype_from_config,
        phase=Phase.CLASS,
        returns=Returns("tuple of torch dtypes, one per state tensor of a layer", test=results.state_dtypes),
        optional=("HasInnerState", "IsHybrid"),
    ),
    Hook(
        of=interfaces.IsHybrid.get_mamba_state_copy_func,
        phase=Phase.CLASS,
        returns=Returns("tuple of callables, one per state tensor of a layer", test=results.copy_functions),
        needed=("SupportsMambaPrefixCaching",),
        optional=("HasInnerState", "IsHybrid"),
        older={"get_mamba_state_copy_funcs": None},
    ),
    Hook(
        of=interfaces.SupportsMultiModal.get_placeholder_str,
        phase=Phase.CLASS,
        returns=Returns("str, or None for a modality without placeholder text", test=results.text_or_none),
        optional=("SupportsMultiModal",),
    ),
    Hook(
        of=interfaces.SupportsMultiModal.get_language_model,
        phase=Phase.LOAD,
        returns=Returns("torch.nn.Module", test=results.module),
        needed=("SupportsMultiModal",),
    ),
    Hook(
        of=interfaces.SupportsMultiModal.get_num_mm_encoder_tokens,
        phase=Phase.LOAD,
        returns=Returns("int", exact=int),
        optional=("SupportsMultiModal",),
        older={"get_mm_lora_token_counts": None},
    ),
    Hook(
        of=interfaces.SupportsMultiModal.get_num_mm_connector_tokens,
        phase=Phase.LOAD,
        returns=Returns("int", exact=int),
        optional=("SupportsMultiModal",),
        older={"get_mm_lora_token_counts": None},
    ),
    Hook(
        of=interfaces.MixtureOfExperts.set_eplb_state,
        phase=Phase.LOAD,
        returns=Returns("None", exact=NoneType),
        needed=("MixtureOfExperts",),
        places={"expert_load_view": _VIEW, "logical_to_physical_map": _VIEW, "logical_replica_count": _VIEW},
    ),
    Hook(
        of=interfaces.MixtureOfExperts.update_physical_experts_metadata,
        phase=Phase.LOAD,
        returns=Returns("None", exact=NoneType),
        needed=("MixtureOfExperts",),
    ),
    Hook(
        of=interfaces.SupportsEagle3.set_aux_hidden_state_layers,
        phase=Phase.LOAD,
        returns=Returns("None", exact=NoneType),
        needed=("SupportsEagle3",),
    ),
    Hook(
        of=interfaces.SupportsEagle3.get_eagle3_aux_hidden_state_layers,
        phase=Phase.LOAD,
        returns=Returns("tuple of layer indices (ints), ascending and distinct", test=results.layer_indices),
        needed=("SupportsEagle3",),
        older={"get_eagle3_default_aux_hidden_state_layers": "get_eagle3_default_aux_hidden_state_layers()"},
    ),
    Hook(
        of=interfaces.SupportsMRoPE.get_mrope_input_positions,
        phase=Phase.REQUEST,
        returns=Returns(
            "(int64 tensor [3 or more rows, num_tokens] on the CPU, int delta)", test=results.mrope_positions
        ),
        needed=("SupportsMRoPE",),
    ),
    Hook(
        of=interfaces.SupportsMultiModal.embed_multimodal,
        phase=Phase.STEP,
        returns=Returns(
            "one floating [tokens, hidden_size] tensor per item on the model's device, or one 3-D tensor for all",
            test=results.multimodal_embeddings,
        ),
        needed=("SupportsMultiModal",),
        places={"kwargs": _DEVICE},
        unless="supports_multimodal_raw_input_only",
        older={"get_multimodal_embeddings": "get_multimodal_embeddings(**kwargs)"},
    ),
    Hook(
        of=interfaces.SupportsMultiModal.embed_input_ids,
        phase=Phase.STEP,
        returns=Returns("[num_tokens, hidden_size] tensor, model dtype, model device", test=results.embeddings),
        needed=(BASE,),
        places={"input_ids": _DEVICE, "multimodal_embeddings": _DEVICE, "is_multimodal": _DEVICE},
        older={
            "get_input_embeddings": (
                "get_input_embeddings(input_ids, multimodal_embeddings, is_multimodal=is_multimodal,"
                " handle_oov_mm_token=handle_oov_mm_token)"
            )
        },
    ),
)

HOOKS: Final[Mapping[str, Hook]] = {hook.name: hook for hook in TABLE}
