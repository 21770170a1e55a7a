"""The Llama plugin built by hand, against transformers' LlamaForCausalLM on random weights."""

import pytest
import torch
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, VllmConfig
from torchplug.errors import CheckpointError
from torchplug.forward_context import ForwardContext, set_forward_context
from torchplug.layers import Attention, WeightsMismatch, allocate_kv_cache
from torchplug_models.llama import LlamaForCausalLM
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Reference

PLAIN = LlamaForCausalLM.tiny_config()
ODD = PLAIN | {
    "hidden_size": 70,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "intermediate_size": 37,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
LEAST = {
    key: PLAIN[key]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}


def build(config):
    view = HfConfig(config, source="x/config.json", defaults=LlamaForCausalLM.config_defaults)
    model_config = ModelConfig("x", view, torch.float32, 256)
    return LlamaForCausalLM(vllm_config=VllmConfig(model_config, DeviceConfig(torch.device("cpu")))).eval()


def pair(config, seed=0):
    torch.manual_seed(seed)
    reference = Reference(LlamaConfig(**config)).eval()
    for name, parameter in reference.named_parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 2 / fan_in**0.5 if parameter.dim() > 1 else 0.3)
    model = build(config)
    loaded = model.load_weights(reference.state_dict().items())
    assert loaded == set(dict(model.named_parameters(remove_duplicate=False)))
    return model, reference


def assert_logits_close(ours, theirs):
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("config", [PLAIN, ODD, LEAST], ids=["plain", "odd", "least"])
def test_logits_equal_transformers(config):
    model, reference = pair(config)
    ids = torch.randint(0, config["vocab_size"], (29,))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        assert_logits_close(model.compute_logits(model(ids, torch.arange(29))), expected)
        embeds = model.embed_input_ids(ids)
        assert_logits_close(model.compute_logits(model(None, torch.arange(29), None, embeds)), expected)


def test_two_requests_through_the_cache_equal_transformers():
    model, reference = pair(ODD)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.kv_cache = allocate_kv_cache(layer.kv_cache_spec(), 4, 64, torch.float32, "cpu")
    prompts = torch.randint(0, ODD["vocab_size"], (2, 20))
    lengths, logits = [0, 0], [[], []]
    with torch.inference_mode():
        for plan in ([(1, 9)], [(0, 5), (1, 1)], [(1, 1), (0, 1)], [(0, 14), (1, 9)]):
            spans = [(request, lengths[request], lengths[request] + new) for request, new in plan]
            news = [new for _, new in plan]
            context = ForwardContext(
                torch.tensor([0, *news]).cumsum(0).int(),
                torch.tensor([stop for _, _, stop in spans]).int(),
                torch.cat([torch.arange(start, stop) + 64 * (request + 1) for request, start, stop in spans]),
                torch.tensor([[request + 1] for request, _, _ in spans]).int(),
                64,
                tuple(news),
                tuple(stop for _, _, stop in spans),
                tuple((request + 1,) for request, _, _ in spans),
            )
            ids = torch.cat([prompts[request, start:stop] for request, start, stop in spans])
            positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
            with set_forward_context(context):
                rows = model.compute_logits(model(ids, positions)).split(news)
            for (request, _, stop), part in zip(spans, rows, strict=True):
                logits[request].append(part)
                lengths[request] = stop
        for request in (0, 1):
            assert_logits_close(torch.cat(logits[request]), reference(prompts[request][None]).logits[0])


def test_names_are_transformers_own_apart_from_the_fused_ones():
    names = {name.removesuffix(".weight") for name, _ in build(PLAIN | {"num_hidden_layers": 1}).named_parameters()}
    assert names == {
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.post_attention_layernorm",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.norm",
        "lm_head",
    }


def test_each_attention_layer_knows_its_name():
    prefixes = [layer.prefix for layer in build(PLAIN).modules() if isinstance(layer, Attention)]
    assert prefixes == ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


def test_a_tied_model_has_one_table():
    model = build(PLAIN | {"tie_word_embeddings": True})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert build(PLAIN).lm_head.weight is not build(PLAIN).model.embed_tokens.weight


def test_weights_of_another_shape_are_refused_by_name():
    _, reference = pair(PLAIN)
    with pytest.raises(WeightsMismatch) as caught:
        build(PLAIN | {"num_key_value_heads": 4}).load_weights(reference.state_dict().items())
    assert {problem.where for problem in caught.value.problems} == {
        "model.layers.{0-1}.self_attn.k_proj.weight",
        "model.layers.{0-1}.self_attn.v_proj.weight",
    }


def test_an_unknown_activation_is_refused():
    with pytest.raises(CheckpointError, match="activation 'xielu'"):
        build(PLAIN | {"hidden_act": "xielu"})
