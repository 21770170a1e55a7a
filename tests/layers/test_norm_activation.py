"""RMSNorm and activations against transformers' own."""

import pytest
import torch
from torchplug.errors import CheckpointError
from torchplug.layers import RMSNorm, SiluAndMul, get_act_and_mul, get_act_fn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytestmark = pytest.mark.usefixtures("kernels_or_torch")


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("size", [7, 120])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_rms_norm_equals_llamas(rows, size, eps):
    ours, theirs = RMSNorm(size, eps), LlamaRMSNorm(size, eps)
    theirs.weight.data.normal_()
    ours.weight.copy_(theirs.weight)
    x = torch.randn(rows, size) * 3
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


def test_rms_norm_with_residual_adds_first_and_returns_the_sum():
    norm = RMSNorm(24, 1e-5)
    norm.weight.normal_()
    x, residual = torch.randn(2, 5, 24)
    before = x.clone(), residual.clone()
    normed, total = norm(x, residual)
    torch.testing.assert_close(total, before[0] + before[1])
    torch.testing.assert_close(normed, norm(total))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_computes_in_float32_for_bfloat16():
    ours = RMSNorm(64, 1e-6).to(torch.bfloat16)
    ours.weight.copy_(torch.rand(64) + 0.5)
    x = torch.randn(9, 64, dtype=torch.bfloat16) * 100
    exact = torch.nn.functional.rms_norm(x.double(), (64,), ours.weight.double(), 1e-6)
    torch.testing.assert_close(ours(x).double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"])
def test_activations_equal_transformers(name):
    x = torch.linspace(-6, 6, 401)
    torch.testing.assert_close(get_act_fn(name)(x), ACT2FN[name](x), rtol=1e-5, atol=1e-6)
    gate, up = torch.randn(2, 3, 11)
    gated = get_act_and_mul(name)(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(gated, ACT2FN[name](gate) * up, rtol=1e-5, atol=1e-6)


def test_silu_and_mul_gates_with_the_first_half_and_keeps_its_input():
    x = torch.randn(4, 10)
    before = x.clone()
    torch.testing.assert_close(SiluAndMul()(x), torch.nn.functional.silu(before[:, :5]) * before[:, 5:])
    assert torch.equal(x, before)


def test_an_unknown_activation_is_refused_with_the_known_ones():
    with pytest.raises(CheckpointError, match=r"'softsign': is not .*gelu_new, .*quick_gelu, .*silu"):
        get_act_fn("softsign")
