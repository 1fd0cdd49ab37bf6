"""Rows through ggml: bit-equal to an independent decoder, threads make no difference, broken calls are exceptions."""

import gguf
import numpy as np
import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.errors import BridgeError

TYPES = _bridge.quant_types()
# Types whose numpy decoder the gguf package has.
KNOWN_TO_GGUF = sorted(set(TYPES) - {"Q1_0", "Q2_0"})


def encode(type: str, values: torch.Tensor, *, num_threads: int = 1) -> torch.Tensor:
    traits = TYPES[type]
    blocks = torch.empty(values.shape[0], values.shape[1] // traits.block_size * traits.block_bytes, dtype=torch.uint8)
    imatrix = torch.ones(values.shape[1]) if traits.needs_imatrix else None
    _bridge.quantize(type, values, blocks, num_threads, imatrix)
    return blocks


def decode(type: str, blocks: torch.Tensor, columns: int, *, num_threads: int = 1) -> torch.Tensor:
    out = torch.full((blocks.shape[0], columns), float("nan"))
    _bridge.dequantize(type, blocks, out, num_threads)
    return out


@pytest.mark.parametrize("type", KNOWN_TO_GGUF)
def test_decoding_equals_the_gguf_package_bit_for_bit(type: str) -> None:
    values = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    blocks = encode(type, values)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[type])
    assert np.array_equal(decode(type, blocks, 512).numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("type", sorted(TYPES))
def test_threads_do_not_change_a_bit(type: str) -> None:
    values = torch.randn(7, 512, generator=torch.Generator().manual_seed(1))
    blocks = encode(type, values)
    assert torch.equal(blocks, encode(type, values, num_threads=2))
    assert torch.equal(decode(type, blocks, 512), decode(type, blocks, 512, num_threads=2))


@pytest.mark.parametrize("type", sorted(TYPES))
def test_product_is_within_the_rounding_of_activations(type: str) -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = encode(type, torch.randn(48, 512, generator=generator))
    weight = decode(type, blocks, 512).double()
    for rows in (1, 3, 40):
        x = torch.randn(rows, 512, generator=generator)
        y = torch.full((rows, 48), float("nan"))
        _bridge.mul_mat(type, blocks, x, y, 2)
        expected = x.double() @ weight.T
        error = float((y - expected).norm() / expected.norm())
        # ggml rounds activations to 8 bits for quantised weights, to the weight's own precision for F16 and BF16, not
        # at all for F32.
        bound = {"F32": 1e-6, "F16": 1e-3, "BF16": 6e-3}.get(type, 2e-2)
        assert error < bound


def test_broken_calls_are_exceptions_that_name_the_argument() -> None:
    blocks, x = encode("Q4_0", torch.randn(8, 64)), torch.randn(3, 64)
    out = torch.empty(3, 8)
    broken = {
        "type is": lambda: _bridge.mul_mat("Q9_9", blocks, x, out, 1),
        "x is of shape \\[3, 63\\]": lambda: _bridge.mul_mat("Q4_0", blocks, torch.randn(3, 63), out, 1),
        "blocks is of shape": lambda: _bridge.mul_mat("Q4_0", blocks[:, :-1].contiguous(), x, out, 1),
        "not contiguous": lambda: _bridge.mul_mat("Q4_0", blocks, torch.randn(64, 3).T, out, 1),
        "out is of shape": lambda: _bridge.mul_mat("Q4_0", blocks, x, torch.empty(8, 3), 1),
        "x is of another dtype": lambda: _bridge.mul_mat("Q4_0", blocks, x.double(), out, 1),
        "num_threads is 0": lambda: _bridge.mul_mat("Q4_0", blocks, x, out, 0),
        "needed: a torch tensor": lambda: _bridge.mul_mat("Q4_0", blocks, [1.0], out, 1),  # type: ignore[arg-type]
        "cannot be shared": lambda: _bridge.mul_mat("Q4_0", blocks, x.requires_grad_(), out, 1),
        "positive multiple": lambda: _bridge.mul_mat(
            "F32", torch.empty(8, 0, dtype=torch.uint8), torch.empty(3, 0), out, 1
        ),
        "values is not finite at element 1": lambda: encode(
            "Q4_0", torch.randn(2, 64).index_fill_(1, torch.tensor([1]), float("nan"))[[0, 1]]
        ),
        "imatrix is missing": lambda: _bridge.quantize(
            "IQ2_XXS", torch.randn(1, 256), torch.empty(1, 66, dtype=torch.uint8), 1
        ),
        "imatrix is 0": lambda: _bridge.quantize(
            "Q4_0", torch.randn(1, 64), torch.empty(1, 36, dtype=torch.uint8), 1, torch.zeros(64)
        ),
    }
    for message, call in broken.items():
        with pytest.raises(BridgeError, match=message):
            call()
