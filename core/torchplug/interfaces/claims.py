"""What a model class claims: the table of interfaces, the flags, and the guards that read them.

A class claims an interface by subclassing its Protocol or by carrying the same flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

from torchplug.interfaces.definitions import (
    HasInnerState,
    HasNoOps,
    IsAttentionFree,
    IsHybrid,
    MixtureOfExperts,
    SupportsCrossEncoding,
    SupportsEagle,
    SupportsEagle3,
    SupportsEagleBase,
    SupportsLoRA,
    SupportsMambaPrefixCaching,
    SupportsMRoPE,
    SupportsMultiModal,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

P = TypeVar("P")


class Older(NamedTuple):
    """How vLLM 0.32 spells a claim: a class attribute, its value that claims, and the one that claims nothing."""

    attribute: str
    claims: object
    silent: object


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface that a model class may claim: the literal True in its class attribute `flag` does.

    Without a flag (MixtureOfExperts) what an instance has decides.

    Attributes:
        older: How vLLM 0.32 spells the claim, where it differs.
        unread: Attributes of vLLM 0.32 that nobody reads here, and what says the same.
    """

    name: str
    protocol: type
    flag: str | None
    older: Older | None = None
    unread: Mapping[str, str] = field(default_factory=dict)


_TABLE: tuple[Interface, ...] = (
    Interface("HasInnerState", HasInnerState, "has_inner_state"),
    Interface("HasNoOps", HasNoOps, "has_noops"),
    Interface("IsAttentionFree", IsAttentionFree, "is_attention_free"),
    Interface("IsHybrid", IsHybrid, "is_hybrid"),
    Interface("MixtureOfExperts", MixtureOfExperts, None),
    Interface(
        "SupportsCrossEncoding",
        SupportsCrossEncoding,
        "supports_cross_encoding",
        older=Older("score_type", claims="cross-encoder", silent="bi-encoder"),
    ),
    Interface("SupportsEagle", SupportsEagle, "supports_eagle"),
    Interface("SupportsEagle3", SupportsEagle3, "supports_eagle3"),
    Interface("SupportsLoRA", SupportsLoRA, "supports_lora"),
    Interface("SupportsMRoPE", SupportsMRoPE, "supports_mrope"),
    Interface("SupportsMambaPrefixCaching", SupportsMambaPrefixCaching, "supports_mamba_prefix_caching"),
    Interface(
        "SupportsMultiModal",
        SupportsMultiModal,
        "supports_multimodal",
        unread={
            "configure_mm_token_handling": "let embed_input_ids take handle_oov_mm_token=False",
            "supports_tower_connector_lora": (
                "implement get_num_mm_encoder_tokens and get_num_mm_connector_tokens, which say it"
            ),
        },
    ),
)

INTERFACES: Mapping[str, Interface] = MappingProxyType({interface.name: interface for interface in _TABLE})

_OLDER: Mapping[str, Older] = {row.flag: row.older for row in _TABLE if row.flag and row.older}

MULTIMODAL_FLAGS = ("supports_multimodal_raw_input_only", "supports_encoder_tp_data", "requires_raw_input_tokens")
"""Flags that refine SupportsMultiModal; each is read as an interface's own flag is."""

MOE_ATTRIBUTES = (
    "expert_weights",
    "num_moe_layers",
    "num_expert_groups",
    "num_logical_experts",
    "num_physical_experts",
    "num_local_physical_experts",
    "num_routed_experts",
    "num_shared_experts",
    "num_redundant_experts",
    "moe_layers",
)
"""What an instance must have in order to claim MixtureOfExperts."""

_ABSENT: Any = object()


def _class_attribute(model: object, name: str) -> Any:
    """The raw value in the first class of the MRO that has it; no metaclass, descriptor or `__getattr__` is asked."""
    for base in (model if isinstance(model, type) else type(model)).__mro__:
        if name in vars(base):
            return vars(base)[name]
    return _ABSENT


def _older_value(model: object, older: Older) -> Any:
    """The value in the first class of the MRO that says something: as in vLLM, a base's default hides no claim."""
    found = _ABSENT
    for base in (model if isinstance(model, type) else type(model)).__mro__:
        if older.attribute in vars(base):
            found = vars(base)[older.attribute]
            if found != older.silent:
                return found
    return found


def _claims_flag(model: object, flag: str) -> bool:
    value = _class_attribute(model, flag)
    if value is _ABSENT and flag in _OLDER:
        return bool(_older_value(model, _OLDER[flag]) == _OLDER[flag].claims)
    return value is True


def flag_problem(model: object, flag: str) -> str | None:
    """What is wrong with a flag of a class or an instance, as one sentence; None if it is absent, or True or False."""
    owner = model.__name__ if isinstance(model, type) else type(model).__name__
    if not isinstance(model, type) and flag in getattr(model, "__dict__", {}):
        return f"{flag} is set on the instance; it is read on the class {owner}, before anything is built"
    value = _class_attribute(model, flag)
    older = _OLDER.get(flag)
    if older is not None and not isinstance(model, type) and older.attribute in getattr(model, "__dict__", {}):
        return f"{older.attribute} is set on the instance; it is read on the class {owner}, before anything is built"
    if older is not None and value is False and _older_value(model, older) == older.claims:
        return f"{flag} of class {owner} is False, and its {older.attribute} = {older.claims!r} says the opposite"
    if value is _ABSENT or value is True or value is False:
        return None
    found = "a property" if isinstance(value, property) else f"{value!r} ({type(value).__name__})"
    return f"{flag} of class {owner} is {found}; a flag is the literal True or False in the class body"


class Guard(Generic[P]):
    """Tells whether a class or an instance claims one interface: its flag is the literal True in the class.

    It never asks isinstance: runtime Protocols look for names only, so that `supports_x = False` passes, and since
    Python 3.12 they do not see what `nn.Module.__getattr__` forwards.
    """

    __slots__ = ("flag",)

    def __init__(self, flag: str) -> None:
        self.flag = flag

    @overload
    def __call__(self, model: type[object], /) -> TypeIs[type[P]]: ...

    @overload
    def __call__(self, model: object, /) -> TypeIs[P]: ...

    def __call__(self, model: object, /) -> bool:
        return _claims_flag(model, self.flag)

    def __repr__(self) -> str:
        return f"<guard of the flag {self.flag}>"


has_inner_state: Guard[HasInnerState] = Guard("has_inner_state")
has_noops: Guard[HasNoOps] = Guard("has_noops")
is_attention_free: Guard[IsAttentionFree] = Guard("is_attention_free")
is_hybrid: Guard[IsHybrid] = Guard("is_hybrid")
supports_cross_encoding: Guard[SupportsCrossEncoding] = Guard("supports_cross_encoding")
supports_eagle: Guard[SupportsEagle] = Guard("supports_eagle")
supports_eagle3: Guard[SupportsEagle3] = Guard("supports_eagle3")
supports_lora: Guard[SupportsLoRA] = Guard("supports_lora")
supports_mrope: Guard[SupportsMRoPE] = Guard("supports_mrope")
supports_mamba_prefix_caching: Guard[SupportsMambaPrefixCaching] = Guard("supports_mamba_prefix_caching")
supports_multimodal: Guard[SupportsMultiModal] = Guard("supports_multimodal")


@overload
def supports_any_eagle(model: type[object], /) -> TypeIs[type[SupportsEagleBase]]: ...
@overload
def supports_any_eagle(model: object, /) -> TypeIs[SupportsEagleBase]: ...
def supports_any_eagle(model: object, /) -> bool:
    """Whether a class or an instance claims SupportsEagle or SupportsEagle3."""
    return _claims_flag(model, "supports_eagle") or _claims_flag(model, "supports_eagle3")


def supports_multimodal_raw_input_only(model: object, /) -> bool:
    """Whether a class or an instance takes multimodal inputs raw, so that `embed_multimodal` is not needed."""
    return _claims_flag(model, "supports_multimodal_raw_input_only")


def supports_multimodal_encoder_tp_data(model: object, /) -> bool:
    """Whether a class or an instance can run its encoder whole on each rank (flag `supports_encoder_tp_data`)."""
    return _claims_flag(model, "supports_encoder_tp_data")


def requires_raw_input_tokens(model: object, /) -> bool:
    """Whether a class or an instance needs the token ids as well as their embeddings."""
    return _claims_flag(model, "requires_raw_input_tokens")


def unread_attributes(cls: type, interface: Interface) -> Iterator[tuple[str, str, str]]:
    """Attributes of a class by which vLLM 0.32 says something about an interface, and which nobody reads here.

    Yields (attribute, what it says, what says the same here).
    """
    for attribute, instead in interface.unread.items():
        value = _class_attribute(cls, attribute)
        if value is not _ABSENT and value is not False:
            yield attribute, "is of another vLLM version and nobody reads it here", instead
    older = interface.older
    value = _ABSENT if older is None else _older_value(cls, older)
    if older is not None and value is not _ABSENT and value not in (older.claims, older.silent):
        says = f"is {value!r}, which claims nothing here; {older.claims!r} claims {interface.name}"
        yield older.attribute, says, f"leave it out, or write {older.attribute} = {older.claims!r}"


def missing_moe_attributes(model: object, /) -> tuple[str, ...]:
    """The names of MOE_ATTRIBUTES that an instance lacks; what `nn.Module.__getattr__` forwards is not lacking."""
    return tuple(name for name in MOE_ATTRIBUTES if not hasattr(model, name))


def is_mixture_of_experts(model: object, /) -> TypeIs[MixtureOfExperts]:
    """Whether an instance has experts: all of MOE_ATTRIBUTES, and `num_moe_layers` above 0. False for any class."""
    if isinstance(model, type) or missing_moe_attributes(model):
        return False
    layers: Any = getattr(model, "num_moe_layers", 0)
    return isinstance(layers, int) and layers > 0


def may_be_mixture_of_experts(cls: type, /) -> bool:
    """Whether instances of a class may turn out to have experts: it subclasses MixtureOfExperts."""
    return MixtureOfExperts in cls.__mro__


def interfaces_of(model: object, /) -> frozenset[str]:
    """The names in INTERFACES that a class or an instance claims."""
    return frozenset(
        interface.name
        for interface in INTERFACES.values()
        if (is_mixture_of_experts(model) if interface.flag is None else _claims_flag(model, interface.flag))
    )
