import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from pyggtrain.kernels.reference import swiglu as reference
from pyggtrain.kernels.reference.cases import ROW_CASES, RowCase, assert_as_close_as_torch, random_rows
from pyggtrain.kernels.swiglu import swiglu_backward, swiglu_forward

CASES = pytest.mark.parametrize("case", ROW_CASES, ids=lambda case: case.id)


@CASES
def test_forward_is_as_close_to_float64_as_torch(
    case: RowCase, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        gate, up = random_rows(case, 2, dtype, device)
        assert_as_close_as_torch(swiglu_forward(gate, up), F.silu(gate) * up, reference.swiglu_forward(gate, up))


@CASES
def test_backward_is_as_close_to_float64_as_torch(
    case: RowCase, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        gate, up, dy = random_rows(case, 3, dtype, device)
        results = swiglu_backward(dy, gate, up)
        expected = reference.swiglu_backward(dy, gate, up)
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (gate, up)]
        y = F.silu(leaves[0]) * leaves[1]
        plain = [*torch.autograd.grad(y, leaves, dy), y.detach()]
        for result, torchs, exact in zip(results, plain, expected, strict=True):
            assert_as_close_as_torch(result, torchs, exact)


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
