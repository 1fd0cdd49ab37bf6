import pytest
import torch
from pyggtrain.kernels.reference import swiglu as reference
from pyggtrain.kernels.reference.cases import RowCase, random_rows
from pyggtrain.kernels.reference.checks import CHECKS, Check
from pyggtrain.kernels.swiglu import swiglu_backward, swiglu_forward


@pytest.mark.parametrize("check", CHECKS["swiglu"], ids=lambda check: check.id)
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_backward_may_overwrite_its_sources(device: torch.device) -> None:
    gate, up, dy = random_rows(RowCase(3, 1100), 3, torch.float32, device)
    expected = reference.swiglu_backward(dy, gate, up)
    results = swiglu_backward(dy, gate, up, d_gate=gate, d_up=up, y=dy)
    assert results[0] is gate and results[1] is up and results[2] is dy
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


def test_reference_backward_is_the_gradient() -> None:
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = reference.swiglu_forward(gate, up)
    dy = torch.randn_like(y)
    for gradient, ours in zip(
        torch.autograd.grad(y, (gate, up), dy), reference.swiglu_backward(dy, gate, up), strict=False
    ):
        torch.testing.assert_close(gradient, ours)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="up is"):
        swiglu_forward(torch.zeros(2, 8, device=device), torch.zeros(2, 9, device=device))
