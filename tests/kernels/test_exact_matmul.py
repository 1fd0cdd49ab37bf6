"""Products of bfloat16 rows with a float32 matrix: as near to float64 as products of float32."""

import pytest
import torch
from pyggtrain.kernels.exact_matmul import exact_matmul_backward, exact_matmul_forward

# Tokens, columns, terms: less than a tile, several, and sizes that no tile divides.
SIZES = [(3, 8, 20), (64, 128, 256), (70, 200, 333)]


@pytest.mark.parametrize(("tokens", "columns", "terms"), SIZES)
def test_it_is_as_close_as_a_product_of_float32(tokens: int, columns: int, terms: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, terms, generator=generator).bfloat16()
    # Numbers of many sizes, all of their 24 bits in use.
    weight = torch.randn(columns, terms, generator=generator) * torch.rand(columns, 1, generator=generator) ** 4
    expected = x.double() @ weight.double().t()
    scale = x.double().abs() @ weight.double().abs().t()
    found = exact_matmul_forward(x.to(device), weight.to(device))
    assert found.dtype == torch.float32
    # A sum of float32 errs by a few units in its last place of what it adds up; W rounded to bfloat16 by 2**-9.
    assert float(((found.cpu().double() - expected).abs() / scale).max()) < 2**-21


@pytest.mark.parametrize(("tokens", "columns", "terms"), SIZES)
def test_what_comes_back_is_rounded_once(tokens: int, columns: int, terms: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    dy, weight = torch.randn(tokens, columns, generator=generator), torch.randn(columns, terms, generator=generator)
    expected = dy.double() @ weight.double()
    scale = dy.double().abs() @ weight.double().abs()
    found = exact_matmul_backward(dy.to(device), weight.to(device))
    assert found.dtype == torch.bfloat16
    error = (found.cpu().double() - expected).abs()
    # A unit of bfloat16's last place (the interpreter cuts off where a GPU rounds), and what two parts leave out.
    assert bool((error <= 2**-7 * expected.abs() + 2**-13 * scale).all())


def test_rows_may_lie_apart_and_none_may_be_there(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    both = torch.randn(5, 64, generator=generator).bfloat16().to(device)
    weight = torch.randn(4, 32, generator=generator).to(device)
    assert torch.equal(exact_matmul_forward(both[:, 32:], weight), exact_matmul_forward(both[:, 32:].clone(), weight))
    assert exact_matmul_forward(both[:0, :32], weight).shape == (0, 4)


def test_wrong_types_and_shapes_are_refused(device: torch.device) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 8\]"):
        exact_matmul_forward(x, weight)
    with pytest.raises(ValueError, match=r"needed: torch.bfloat16 \[T, 8\]"):
        exact_matmul_forward(x.bfloat16()[:, :4], weight)
    with pytest.raises(ValueError, match="weight is torch.bfloat16"):
        exact_matmul_backward(torch.zeros(2, 3, device=device), weight.bfloat16())
