import pytest
import torch
from pyggtrain.kernels.reference import rope as reference
from pyggtrain.kernels.reference.cases import RopeCase
from pyggtrain.kernels.reference.checks import CHECKS, Check, rope_inputs
from pyggtrain.kernels.rope import rope_backward, rope_forward

STYLES = pytest.mark.parametrize("is_neox", [False, True], ids=["norm", "neox"])


@pytest.mark.parametrize("check", CHECKS["rope"], ids=lambda check: check.id)
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


@STYLES
def test_in_place_touches_only_the_rotated_part(is_neox: bool, device: torch.device) -> None:
    x, cos, sin = rope_inputs(RopeCase(4, 3, 16, 12), torch.float32, device)
    expected = reference.rope_forward(x, cos, sin, is_neox=is_neox)
    around = x._base.clone() if x._base is not None else None
    assert around is not None
    rope_forward(x, cos, sin, is_neox=is_neox, out=x)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)
    changed = (x._base != around).unflatten(-1, (-1, 16)) if x._base.dim() == 2 else x._base != around
    assert not changed[:, 0].any() and not changed[:, -1].any()


@STYLES
def test_backward_undoes_forward(is_neox: bool, device: torch.device) -> None:
    x, cos, sin = rope_inputs(RopeCase(6, 2, 32, 32), torch.float32, device)
    there = rope_forward(x, cos, sin, is_neox=is_neox)
    torch.testing.assert_close(rope_backward(there, cos, sin, is_neox=is_neox), x.contiguous(), rtol=1e-5, atol=1e-5)


@STYLES
def test_reference_backward_is_the_gradient(is_neox: bool) -> None:
    x, cos, sin = rope_inputs(RopeCase(3, 2, 8, 6), torch.float64, torch.device("cpu"))
    x = x.detach().clone().requires_grad_()
    y = reference.rope_forward(x, cos, sin, is_neox=is_neox)
    dy = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], reference.rope_backward(dy, cos, sin, is_neox=is_neox))


def test_wrong_tables_are_refused(device: torch.device) -> None:
    x = torch.zeros(4, 2, 8, device=device)
    table = torch.zeros(4, 5, device=device)
    with pytest.raises(ValueError, match="at most the head"):
        rope_forward(x, table, table, is_neox=True)
    with pytest.raises(ValueError, match=r"float32 \[4, num_rotary / 2\]"):
        rope_forward(x, table[:3, :4], table[:3, :4], is_neox=True)
