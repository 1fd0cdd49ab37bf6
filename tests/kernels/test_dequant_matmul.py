import pytest
import torch
from pyggtrain.kernels.dequant import DECODERS
from pyggtrain.kernels.dequant_matmul import dequant_matmul_backward, dequant_matmul_forward
from pyggtrain.kernels.reference import dequant_matmul as reference
from pyggtrain.kernels.reference.cases import random_blocks
from pyggtrain.kernels.reference.checks import CHECKS, Check

from pyggtrain.errors import UnsupportedError


@pytest.mark.parametrize("check", CHECKS["dequant_matmul"], ids=lambda check: check.id)
def test_products_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        if dtype in check.dtypes:
            for comparison in check.run(dtype, device):
                assert comparison.passed, (dtype, comparison)


def test_every_type_is_checked() -> None:
    ids = [check.id for check in CHECKS["dequant_matmul"]]
    assert all(any(id.startswith(f"{type}_13x") for id in ids) for type in DECODERS)


def test_reference_backward_is_the_gradient() -> None:
    blocks = random_blocks("Q5_K", 7, 256, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 256, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(3, 7, dtype=torch.float64)
    (dx,) = torch.autograd.grad(reference.dequant_matmul_forward(x, blocks, "Q5_K"), x, dy)
    torch.testing.assert_close(reference.dequant_matmul_backward(dy, blocks, "Q5_K"), dx)


def test_parts_of_the_sum_change_nothing_beyond_rounding(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    blocks = random_blocks("Q8_0", 20, 1024, generator=generator)
    x = torch.randn(2, 1024, device=device, generator=generator).half()
    whole = dequant_matmul_forward(x, blocks, "Q8_0", num_parts=1, out=x.new_empty(2, 20, dtype=torch.float32))
    parts = dequant_matmul_forward(x, blocks, "Q8_0", num_parts=8, out=x.new_empty(2, 20, dtype=torch.float32))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_beyond_two_gigabytes_are_addressed() -> None:
    """The last row of a head whose blocks and whose number of weights exceed 2^31."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    last = random_blocks("Q8_0", 1, 8192, generator=generator)
    blocks = torch.zeros(262_400, last.shape[1], dtype=torch.uint8, device=device)
    blocks[-1] = last[0]
    x = torch.randn(2, 8192, device=device, generator=generator).bfloat16()
    y = dequant_matmul_forward(x, blocks, "Q8_0")
    expected = dequant_matmul_forward(x, last, "Q8_0")
    assert blocks.numel() > 2**31
    torch.testing.assert_close(y[:, -1:], expected, rtol=1e-2, atol=1e-2)
    assert not y[:, :-1].any()


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    blocks = torch.zeros(4, 34, dtype=torch.uint8, device=device)
    half = torch.zeros(2, 32, dtype=torch.float16, device=device)
    with pytest.raises(UnsupportedError, match="Quant type Q9_0"):
        dequant_matmul_forward(half, blocks, "Q9_0")
    with pytest.raises(ValueError, match=r"x is torch.float32 .* needed: bfloat16 or float16 \[T, 32\]"):
        dequant_matmul_forward(half.float(), blocks, "Q8_0")
    with pytest.raises(ValueError, match=r"dy is .* needed: .* \[T, 4\]"):
        dequant_matmul_backward(half, blocks, "Q8_0")
    with pytest.raises(ValueError, match=r"out is .* needed: floats \[2, 4\]"):
        dequant_matmul_forward(half, blocks, "Q8_0", out=half)
    shifted = torch.zeros(4 * 34 + 1, dtype=torch.uint8, device=device)[1:].view(4, 34)
    with pytest.raises(ValueError, match="multiple of 2"):
        dequant_matmul_forward(half, shifted, "Q8_0")


def test_no_rows_give_no_rows(device: torch.device) -> None:
    blocks = torch.zeros(4, 34, dtype=torch.uint8, device=device)
    assert dequant_matmul_forward(torch.zeros(0, 32, dtype=torch.float16, device=device), blocks, "Q8_0").shape == (
        0,
        4,
    )
