"""ops.embedding and ops.dequantize: blocks to numbers."""

import pytest
import torch

from pyggtrain.gguf import QuantTensor, quantize_tensor
from pyggtrain.ops import dequantize, embedding

TYPES = ["F32", "F16", "BF16", "Q4_1", "Q8_0", "Q6_K", "IQ3_S"]


@pytest.mark.parametrize("type", TYPES)
def test_rows_are_those_of_the_tokens(make_weight, type):
    weight, exact = make_weight(type, 50, 256)
    tokens = torch.tensor([3, 0, 49, 3])
    assert torch.equal(embedding(tokens, weight), exact[tokens].float())


def test_token_outside_the_vocabulary_is_an_error(make_weight):
    weight, _ = make_weight("Q8_0", 50, 32)
    with pytest.raises(IndexError):
        embedding(torch.tensor([50]), weight)


@pytest.mark.parametrize("type", TYPES)
def test_dequantize_gives_the_exact_values(make_weight, type):
    weight, exact = make_weight(type, 20, 256)
    assert torch.equal(dequantize(weight), exact.float())
    assert torch.equal(dequantize(weight, rows=slice(5, 9)), exact[5:9].float())
    assert torch.equal(dequantize(weight, dtype=torch.float64), exact)


def test_dequantize_keeps_the_shape_of_experts_and_vectors():
    experts = torch.randn(3, 4, 32).half().float()
    assert torch.equal(dequantize(quantize_tensor("w", experts, "F16")), experts)
    vector = torch.randn(32)
    assert torch.equal(dequantize(quantize_tensor("w", vector, "F32")), vector)


def test_dequantize_does_not_hand_out_the_file():
    values = torch.randn(4, 8)
    weight = QuantTensor("w", "F32", (4, 8), values.view(torch.uint8))
    dequantize(weight).zero_()
    assert values.abs().sum() > 0


def test_opcheck(make_weight):
    weight, _ = make_weight("Q4_1", 24, 32)
    arguments = (torch.tensor([1, 2]), weight.blocks, "Q4_1", torch.float32)
    torch.library.opcheck(torch.ops.pyggtrain.embedding.default, arguments)
    torch.library.opcheck(torch.ops.pyggtrain.dequantize.default, (weight.blocks, "Q4_1"))
