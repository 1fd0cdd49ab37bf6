import pytest
import torch
from pyggtrain.kernels.lora import lora_backward, lora_extend_
from pyggtrain.kernels.reference import lora as reference
from pyggtrain.kernels.reference.checks import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS["lora"], ids=lambda check: check.id)
def test_gradients_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_gradients_of_the_factors_are_float32(device: torch.device) -> None:
    dy, x, xa = (torch.ones(4, 16, device=device, dtype=torch.float16) for _ in range(3))
    lora_b = torch.ones(16, 16, device=device, dtype=torch.float16)
    assert [result.dtype for result in lora_backward(dy, x, xa, lora_b, scale=0.5)[1:]] == [torch.float32] * 2


@pytest.mark.parametrize(
    ("row_counts", "ranks"),
    [((40,), (5,)), ((24, 16), (5, 5)), ((20, 12, 8), (5, 2, 7)), ((20, 12, 8), (5, 0, 7)), ((24, 16), (0, 3))],
    ids=["one", "two", "three", "second without", "first without"],
)
def test_extended_weight_does_both_products(
    row_counts: tuple[int, ...], ranks: tuple[int, ...], device: torch.device
) -> None:
    """[x | s x Aᵀ] Eᵀ is the adapted forward, and [dy | dy B] E its gradient, in one product each."""
    width, num_rows, num_ranks = 24, sum(row_counts), sum(ranks)
    weight = torch.randn(num_rows, width, device=device)
    pairs = [
        (torch.randn(rank, width, device=device), torch.randn(count, rank, device=device), 0.5 + rank) if rank else None
        for count, rank in zip(row_counts, ranks, strict=True)
    ]
    extended = torch.full((num_rows + 16, width + 16), float("nan"), device=device)
    extended[:num_rows, :width] = weight
    lora_extend_(extended, pairs, row_counts=row_counts)

    expected = torch.full_like(extended, float("nan"))
    expected[:num_rows, :width] = weight
    reference.lora_extend_(expected, pairs, row_counts=row_counts)
    torch.testing.assert_close(extended, expected, equal_nan=True)

    deltas = [
        torch.zeros(count, width, device=device) if pair is None else pair[2] * pair[1] @ pair[0]
        for count, pair in zip(row_counts, pairs, strict=True)
    ]
    lora_a = torch.cat([pair[0] * pair[2] for pair in pairs if pair is not None])
    adapted = weight + torch.cat(deltas)
    x, dy = torch.randn(7, width, device=device), torch.randn(7, num_rows, device=device)
    x_extended = torch.cat((x, x @ lora_a.t(), torch.zeros(7, 16 - num_ranks, device=device)), 1)
    torch.testing.assert_close(x_extended @ extended[:num_rows].t(), x @ adapted.t(), rtol=1e-4, atol=1e-4)
    dy_extended = torch.cat((dy, dy @ extended[:num_rows, width:]), 1)
    torch.testing.assert_close(dy_extended @ extended[:, :width], dy @ adapted, rtol=1e-4, atol=1e-4)


def test_reference_backward_is_the_gradient() -> None:
    x, lora_a, lora_b = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 7), (3, 7), (5, 3))
    )
    y = 0.5 * (x @ lora_a.t()) @ lora_b.t()
    dy = torch.randn_like(y)
    dx, da, db = torch.autograd.grad(y, (x, lora_a, lora_b), dy)
    dyb, d_lora_a, d_lora_b = reference.lora_backward(dy, x, x @ lora_a.t(), lora_b, scale=0.5)
    torch.testing.assert_close(dyb @ lora_a, dx)
    torch.testing.assert_close(d_lora_a, da)
    torch.testing.assert_close(d_lora_b, db)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    zeros = lambda *shape: torch.zeros(*shape, device=device)  # noqa: E731
    with pytest.raises(ValueError, match="one each"):
        lora_extend_(zeros(24, 24), [(zeros(4, 8), zeros(8, 4), 1.0)], row_counts=(4, 4))
    with pytest.raises(ValueError, match=r"needed: \[R, 8\] and \[8, R\]"):
        lora_extend_(zeros(24, 24), [(zeros(4, 8), zeros(7, 4), 1.0)], row_counts=(8,))
    with pytest.raises(ValueError, match="power of two"):
        lora_extend_(zeros(20, 20), [(zeros(4, 8), zeros(8, 4), 1.0)], row_counts=(8,))
    with pytest.raises(ValueError, match=r"needed: \[T, N\]"):
        lora_backward(zeros(3, 8), zeros(3, 8), zeros(3, 5), zeros(8, 4), scale=1.0)
