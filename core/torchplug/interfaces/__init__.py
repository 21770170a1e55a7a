"""The interfaces that a model class may claim (`definitions`), and the guards that read a claim (`claims`).

    from torchplug.interfaces import SupportsMultiModal, supports_multimodal

Nothing here imports torch.
"""

from torchplug.interfaces.claims import INTERFACES as INTERFACES
from torchplug.interfaces.claims import MOE_ATTRIBUTES as MOE_ATTRIBUTES
from torchplug.interfaces.claims import MULTIMODAL_FLAGS as MULTIMODAL_FLAGS
from torchplug.interfaces.claims import Guard as Guard
from torchplug.interfaces.claims import Interface as Interface
from torchplug.interfaces.claims import Older as Older
from torchplug.interfaces.claims import flag_problem as flag_problem
from torchplug.interfaces.claims import has_inner_state as has_inner_state
from torchplug.interfaces.claims import has_noops as has_noops
from torchplug.interfaces.claims import interfaces_of as interfaces_of
from torchplug.interfaces.claims import is_attention_free as is_attention_free
from torchplug.interfaces.claims import is_hybrid as is_hybrid
from torchplug.interfaces.claims import is_mixture_of_experts as is_mixture_of_experts
from torchplug.interfaces.claims import may_be_mixture_of_experts as may_be_mixture_of_experts
from torchplug.interfaces.claims import missing_moe_attributes as missing_moe_attributes
from torchplug.interfaces.claims import requires_raw_input_tokens as requires_raw_input_tokens
from torchplug.interfaces.claims import supports_any_eagle as supports_any_eagle
from torchplug.interfaces.claims import supports_cross_encoding as supports_cross_encoding
from torchplug.interfaces.claims import supports_eagle as supports_eagle
from torchplug.interfaces.claims import supports_eagle3 as supports_eagle3
from torchplug.interfaces.claims import supports_lora as supports_lora
from torchplug.interfaces.claims import supports_mamba_prefix_caching as supports_mamba_prefix_caching
from torchplug.interfaces.claims import supports_mrope as supports_mrope
from torchplug.interfaces.claims import supports_multimodal as supports_multimodal
from torchplug.interfaces.claims import supports_multimodal_encoder_tp_data as supports_multimodal_encoder_tp_data
from torchplug.interfaces.claims import supports_multimodal_raw_input_only as supports_multimodal_raw_input_only
from torchplug.interfaces.claims import unread_attributes as unread_attributes
from torchplug.interfaces.definitions import HasInnerState as HasInnerState
from torchplug.interfaces.definitions import HasNoOps as HasNoOps
from torchplug.interfaces.definitions import IsAttentionFree as IsAttentionFree
from torchplug.interfaces.definitions import IsHybrid as IsHybrid
from torchplug.interfaces.definitions import MambaCopySpec as MambaCopySpec
from torchplug.interfaces.definitions import MambaStateCopyFunc as MambaStateCopyFunc
from torchplug.interfaces.definitions import MambaStateDtype as MambaStateDtype
from torchplug.interfaces.definitions import MixtureOfExperts as MixtureOfExperts
from torchplug.interfaces.definitions import MultiModalEmbeddings as MultiModalEmbeddings
from torchplug.interfaces.definitions import MultiModalFeatureSpec as MultiModalFeatureSpec
from torchplug.interfaces.definitions import NoLanguageModel as NoLanguageModel
from torchplug.interfaces.definitions import PlaceholderRange as PlaceholderRange
from torchplug.interfaces.definitions import SupportsCrossEncoding as SupportsCrossEncoding
from torchplug.interfaces.definitions import SupportsEagle as SupportsEagle
from torchplug.interfaces.definitions import SupportsEagle3 as SupportsEagle3
from torchplug.interfaces.definitions import SupportsEagleBase as SupportsEagleBase
from torchplug.interfaces.definitions import SupportsLoRA as SupportsLoRA
from torchplug.interfaces.definitions import SupportsMambaPrefixCaching as SupportsMambaPrefixCaching
from torchplug.interfaces.definitions import SupportsMRoPE as SupportsMRoPE
from torchplug.interfaces.definitions import SupportsMultiModal as SupportsMultiModal
from torchplug.interfaces.definitions import VllmModel as VllmModel
from torchplug.protocols import find_method as find_method
from torchplug.protocols import is_stub as is_stub
