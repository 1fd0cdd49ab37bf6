"""nn.quant_linear: the module around the operation."""

import pytest
import torch

from pyggtrain.gguf import quantize_tensor
from pyggtrain.nn import LoraPair, QuantLinear


@pytest.fixture
def linear():
    weight = quantize_tensor("blk.0.attn_q.weight", torch.randn(24, 32), "Q8_0")
    return QuantLinear(weight, torch.randn(24), compute="exact")


def pair(dropout=0.0):
    return LoraPair(torch.randn(4, 32), torch.randn(24, 4), scale=0.5, dropout=dropout)


def test_base_is_frozen_and_the_pair_is_trained(linear):
    assert not list(linear.parameters())
    linear.lora = pair()
    assert {name for name, _ in linear.named_parameters()} == {"lora.lora_a", "lora.lora_b"}
    linear(torch.randn(3, 32)).sum().backward()
    assert linear.lora.lora_a.grad is not None and linear.lora.lora_b.grad is not None


def test_quant_describes_the_weight(linear):
    quant = linear.quant
    assert (quant.name, quant.type, quant.shape) == ("blk.0.attn_q.weight", "Q8_0", (24, 32))
    assert quant.blocks.data_ptr() == linear.weight.data_ptr()
    assert "blk.0.attn_q.weight, Q8_0, (24, 32)" in repr(linear)


def test_dropout_hides_parts_of_the_input_while_training_only(linear):
    x = torch.randn(2000, 32)
    base = linear(x)
    linear.lora = pair(dropout=0.25)
    linear.eval()
    whole = linear(x) - base
    torch.testing.assert_close(whole, 0.5 * (x @ linear.lora.lora_a.t()) @ linear.lora.lora_b.t(), rtol=1e-4, atol=1e-4)
    linear.train()
    dropped = linear(x) - base
    assert not torch.allclose(dropped, whole)
    # The expectation is kept: the mean over many tokens of dropped - whole is near zero.
    assert (dropped - whole).mean(0).norm() < 0.15 * whole.norm(dim=1).mean()


def test_dropout_follows_torchs_seed(linear):
    linear.lora = pair(dropout=0.5)
    x = torch.randn(5, 32)
    torch.manual_seed(3)
    first = linear(x)
    torch.manual_seed(3)
    assert torch.equal(linear(x), first)
    assert not torch.equal(linear(x), first)


def test_cross_entropy_is_that_of_the_logits(linear):
    linear.register_buffer("bias", None)
    linear.lora = pair()
    x, targets = torch.randn(6, 32), torch.tensor([1, 5, -100, 23, 0, 2])
    loss, num_targets = linear.cross_entropy(x, targets, chunk=2)
    expected = torch.nn.functional.cross_entropy(linear(x), targets, reduction="sum")
    assert num_targets == 5
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
