import pytest
import torch
from pyggtrain.kernels.reference import rms_norm as reference
from pyggtrain.kernels.reference.cases import RowCase, random_rows
from pyggtrain.kernels.reference.checks import CHECKS, EPS, Check
from pyggtrain.kernels.rms_norm import num_warps_for, rms_norm_backward, rms_norm_forward


@pytest.mark.parametrize("check", CHECKS["rms_norm"], ids=lambda check: check.id)
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_results_may_overwrite_their_sources(device: torch.device) -> None:
    case = RowCase(5, 64)
    x, residual, dy = random_rows(case, 3, torch.float32, device)
    weight = torch.rand(64, device=device)
    expected, expected_s, _ = reference.rms_norm_forward(x, weight, eps=EPS, residual=residual)
    y, s, inverse_rms = rms_norm_forward(x, weight, eps=EPS, residual=residual, total=residual)
    assert s.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    stream = dy.clone()
    rms_norm_backward(y, s, weight, inverse_rms, d_residual=stream, out=stream)
    torch.testing.assert_close(
        stream.double(),
        reference.rms_norm_backward(y, expected_s, weight, inverse_rms, d_residual=dy),
        rtol=1e-5,
        atol=1e-5,
    )


def test_reference_backward_is_the_gradient() -> None:
    x, residual = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.rand(8, dtype=torch.float64)
    y, s, inverse_rms = reference.rms_norm_forward(x, weight, eps=EPS, residual=residual)
    dy, d_residual = torch.randn_like(y), torch.randn_like(y)
    for gradient in torch.autograd.grad((y, s), (x, residual), (dy, d_residual)):
        torch.testing.assert_close(
            gradient, reference.rms_norm_backward(dy, s, weight, inverse_rms, d_residual=d_residual)
        )


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match="one weight per column"):
        rms_norm_forward(x, torch.ones(7, device=device), eps=EPS)
    with pytest.raises(ValueError, match="residual is"):
        rms_norm_forward(x, torch.ones(8, device=device), eps=EPS, residual=torch.zeros(3, 8, device=device))
    with pytest.raises(ValueError, match="unit column stride"):
        rms_norm_forward(torch.zeros(8, 2, device=device).t(), torch.ones(8, device=device), eps=EPS)


def test_warps_are_a_power_of_two() -> None:
    """Triton takes no other number, and Triton's interpreter does not care."""
    for width in (1, 576, 1536, 2560, 2880, 3072, 3584, 5120, 7168, 20480):
        assert num_warps_for(width) in (1, 2, 4, 8, 16)
