"""Every tensor type: decoding bit-equal to an independent decoder, products and gradients against float64.

Weights come from ggml's quantiser and from random valid bytes; rows are of every length that the type allows.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyggtrain.kernels.reference import dequant as reference
from pyggtrain.kernels.reference.cases import random_blocks

from pyggtrain import _bridge
from pyggtrain.gguf import QuantTensor, quantize_tensor
from pyggtrain.ops import dequantize, quant_linear

TYPES = _bridge.quant_types()
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

shapes = st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 40), st.integers(0, 2**32))


def make(type: str, source: str, shape: tuple[int, ...], seed: int) -> QuantTensor:
    """A weight quantised by ggml from normal numbers, or made of random valid bytes."""
    generator = torch.Generator().manual_seed(seed)
    if source == "quantised" or type in FLOATS:
        imatrix = torch.ones(shape[-1]) if TYPES[type].needs_imatrix else None
        return quantize_tensor("w", torch.randn(shape, generator=generator), type, imatrix=imatrix)
    blocks = random_blocks(type, math.prod(shape[:-1]), shape[-1], generator=generator)
    return QuantTensor("w", type, shape, blocks.reshape(*shape[:-1], -1))


def exact_values(weight: QuantTensor) -> torch.Tensor:
    """What the blocks stand for, by code that shares nothing with ggml."""
    rows = weight.blocks.reshape(weight.num_rows, -1)
    if weight.type in FLOATS:
        return rows.view(FLOATS[weight.type]).float().reshape(weight.shape)
    return reference.dequantize(rows, weight.type, dtype=torch.float32).reshape(weight.shape)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("source", ["quantised", "random bytes"])
@pytest.mark.parametrize("type", sorted(TYPES))
@settings(max_examples=4, deadline=None, derandomize=True)
@given(shape=shapes)
def test_decoding_products_and_gradients(type: str, source: str, shape: tuple[int, int, int, int]) -> None:
    num_rows, num_blocks, num_tokens, seed = shape
    # Rows of one float are allowed but say little.
    num_columns = num_blocks * max(TYPES[type].block_size, 24)
    weight = make(type, source, (num_rows, num_columns), seed)
    values = exact_values(weight)
    assert torch.equal(dequantize(weight), values)

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, num_columns, generator=generator).requires_grad_()
    dy = torch.randn(num_tokens, num_rows, generator=generator)
    y_exact, dx_exact = x.detach().double() @ values.double().t(), dy.double() @ values.double()
    for compute in ("exact", "ggml"):
        y = quant_linear(x, weight, compute=compute)
        (dx,) = torch.autograd.grad(y, x, dy)
        y = y.detach()
        # Sums of some hundred products in float32.
        assert error(dx, dx_exact) < 1e-5
        if compute == "exact":
            # Relative to the sizes that are summed: the sum itself may cancel.
            size = x.detach().double().abs() @ values.double().abs().t()
            assert float(((y.double() - y_exact).abs() / size.clamp_min(1e-30)).max()) < 1e-5
        else:
            # ggml rounds x to 8 bits, or to the weight's own precision; a sum may cancel.
            spread = x.detach().norm(dim=1, keepdim=True).double() @ values.double().norm(dim=1)[None]
            assert float(((y.double() - y_exact).abs() / spread.clamp_min(1e-30)).max()) < 2e-2


@pytest.mark.parametrize("type", sorted(TYPES))
def test_a_stack_of_experts_is_its_matrices(type: str) -> None:
    num_columns = 2 * max(TYPES[type].block_size, 32)
    weight = make(type, "quantised", (3, 5, num_columns), 0)
    values = exact_values(weight)
    assert torch.equal(dequantize(weight), values)
    x = torch.randn(4, num_columns, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for expert in range(3):
        matrix = QuantTensor("w", type, (5, num_columns), weight.blocks[expert])
        y = quant_linear(x, matrix, compute="exact")
        assert error(y, x.detach().double() @ values[expert].double().t()) < 1e-5
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert error(dx, values[expert].double().sum(0).expand(4, -1)) < 1e-5
