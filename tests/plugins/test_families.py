"""Mistral, Qwen2 and Qwen3 built by hand: their parameters, windows and refusals."""

import pytest
import torch
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, VllmConfig
from torchplug.errors import CheckpointError
from torchplug.layers import Attention, WeightsMismatch
from torchplug_models.mistral import MistralForCausalLM
from torchplug_models.qwen2 import Qwen2ForCausalLM
from torchplug_models.qwen3 import Qwen3ForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM

CLASSES = [MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]


def build(cls, **changes):
    view = HfConfig(cls.tiny_config() | changes, source="x/config.json", defaults=cls.config_defaults)
    model_config = ModelConfig("x", view, torch.float32, 256)
    return cls(vllm_config=VllmConfig(model_config, DeviceConfig(torch.device("cpu")))).eval()


def reference(cls, **changes):
    config = cls.tiny_config() | changes
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()


@pytest.mark.parametrize("cls", CLASSES)
def test_the_tiny_config_is_the_familys_and_equals_transformers(cls):
    torch.manual_seed(0)
    model, oracle = build(cls), reference(cls)
    for parameter in oracle.parameters():
        parameter.data.normal_(0.3, 0.3)
    assert model.load_weights(oracle.state_dict().items()) == set(dict(model.named_parameters()))
    ids = torch.randint(0, 128, (20,))
    with torch.inference_mode():
        expected = oracle(ids[None]).logits[0]
        ours = model.compute_logits(model(ids, torch.arange(20)))
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
        embeds = model.embed_input_ids(ids)
        torch.testing.assert_close(model.compute_logits(model(None, torch.arange(20), None, embeds)), ours)
    assert cls.tiny_config()["architectures"] == [cls.__name__]
    assert any(layer.sliding_window for layer in model.modules() if isinstance(layer, Attention)), "no window to check"


@pytest.mark.parametrize(
    "cls, changes, biases",
    [
        (MistralForCausalLM, {}, set()),
        (MistralForCausalLM, {"attention_bias": True, "mlp_bias": True}, set()),
        (Qwen2ForCausalLM, {}, {"qkv_proj"}),
        (Qwen2ForCausalLM, {"attention_bias": False, "mlp_bias": True}, {"qkv_proj"}),
        (Qwen3ForCausalLM, {}, set()),
        (Qwen3ForCausalLM, {"attention_bias": True, "mlp_bias": True}, {"qkv_proj", "o_proj"}),
    ],
)
def test_biases_are_those_that_transformers_has_under_the_same_config(cls, changes, biases):
    named = [name.split(".") for name, _ in build(cls, **changes).named_parameters()]
    assert {parts[-2] for parts in named if parts[-1] == "bias"} == biases
    packed = {part: fused for fused, parts in cls.packed_modules_mapping.items() for part in parts}
    theirs = [name.split(".") for name, _ in reference(cls, **changes).named_parameters()]
    assert {packed.get(parts[-2], parts[-2]) for parts in theirs if parts[-1] == "bias"} == biases


def test_a_qwen3_checkpoint_is_not_taken_for_a_qwen2():
    with pytest.raises(WeightsMismatch) as caught:
        build(Qwen2ForCausalLM).load_weights(reference(Qwen3ForCausalLM).state_dict().items())
    assert {problem.where for problem in caught.value.problems} == {
        "model.layers.{0-1}.self_attn.k_norm.weight",
        "model.layers.{0-1}.self_attn.q_norm.weight",
    }


@pytest.mark.parametrize("cls", CLASSES)
def test_a_layer_type_that_the_family_does_not_have_is_refused_by_name(cls):
    with pytest.raises(CheckpointError, match="chunked_attention"):
        build(cls, layer_types=["full_attention", "chunked_attention"])


@pytest.mark.parametrize("cls", CLASSES)
def test_each_attention_layer_knows_its_name(cls):
    prefixes = [layer.prefix for layer in build(cls).modules() if isinstance(layer, Attention)]
    assert prefixes == ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
