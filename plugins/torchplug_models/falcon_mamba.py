"""Falcon Mamba: Mamba with RMS norms, without weights, of the time step, b and c of every mixer.

Source: Zuo et al., Falcon Mamba, 2024, section 2; config and weight names as in transformers' FalconMambaForCausalLM.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torchplug.layers import MambaMixer, RecurrentLayer, StateSettings

from torchplug_models.mamba import MambaForCausalLM, mamba_options


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon Mamba with its language-model head."""

    config_defaults: ClassVar[dict[str, Any]] = MambaForCausalLM.config_defaults | {"mixer_rms_eps": 1e-6}

    @staticmethod
    def mixer(config: Any, settings: StateSettings) -> RecurrentLayer:
        return MambaMixer(config.hidden_size, **mamba_options(config), settings=settings, norm_eps=config.mixer_rms_eps)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return super().tiny_config() | {
            "architectures": ["FalconMambaForCausalLM"],
            "model_type": "falcon_mamba",
            "tie_word_embeddings": False,
        }
