import pytest
import torch
from pyggtrain.kernels import fp8
from pyggtrain.kernels.reference.checks import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS["fp8"], ids=lambda check: check.id)
def test_rounding_is_within_half_a_step(check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_rows_of_zeros_stay_zero(device: torch.device) -> None:
    q, scale = fp8.quantize_rows(torch.zeros(2, 48, device=device))
    assert not q.float().any() and torch.isfinite(scale).all()
    q, scale = fp8.quantize_columns(torch.zeros(2, 48, device=device))
    assert q.shape == (48, 2) and not q.float().any() and torch.isfinite(scale).all()


def test_largest_of_a_row_is_exact(device: torch.device) -> None:
    x = torch.randn(5, 33, device=device, generator=torch.Generator(device).manual_seed(0)) * 1e-3
    q, scale = fp8.quantize_rows(x)
    torch.testing.assert_close((q.float() * scale).abs().amax(1), x.abs().amax(1), rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with 8-bit matrix units",
)
def test_product_is_that_of_the_rounded_factors() -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(rows, 192, device=device, generator=generator).bfloat16() for rows in (50, 96))
    for rounded_w, exact_w in ((fp8.quantize_rows(w), w), (fp8.quantize_columns(w.t().contiguous()), w)):
        rounded_x = fp8.quantize_rows(x)
        y = fp8.product(rounded_x, rounded_w, out=torch.empty(50, 96, dtype=torch.bfloat16, device=device))
        factors = [q.double() * scale.double() for q, scale in (rounded_x, rounded_w)]
        expected = factors[0] @ factors[1].t()
        # fast accumulation keeps 14 bits of a sum
        assert (y.double() - expected).norm() / expected.norm() < 5e-3
        exact = x.double() @ exact_w.double().t()
        assert (y.double() - exact).norm() / exact.norm() < 5e-2


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="needed: floats"):
        fp8.quantize_rows(torch.zeros(4, 4, 4, device=device))
    with pytest.raises(ValueError, match="unit column stride"):
        fp8.quantize_columns(torch.zeros(4, 8, device=device).t())
