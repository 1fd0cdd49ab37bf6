import pytest
import torch
from pyggtrain.kernels.reference import rope as reference
from pyggtrain.kernels.reference.cases import ROPE_CASES, RopeCase, assert_as_close_as_torch
from pyggtrain.kernels.rope import rope_backward, rope_forward

CASES = pytest.mark.parametrize("case", ROPE_CASES, ids=lambda case: case.id)
STYLES = pytest.mark.parametrize("is_neox", [False, True], ids=["norm", "neox"])


def make(case: RopeCase, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x as heads in the middle of a wider row, cos and sin of positions of two documents in a row."""
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(case.tokens, (case.heads + 2) * case.head_size, device=device, generator=generator).to(dtype)
    x = rows.unflatten(1, (-1, case.head_size))[:, 1:-1]
    positions = torch.cat((torch.arange(case.tokens - case.tokens // 3), torch.arange(case.tokens // 3))).to(device)
    frequencies = 10000.0 ** -torch.linspace(0, 1, case.rotary // 2 + 1, device=device)[:-1]
    angles = positions[:, None] * frequencies
    return x, angles.cos(), angles.sin()


@CASES
@STYLES
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    case: RopeCase, is_neox: bool, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        x, cos, sin = make(case, dtype, device)
        for ours, exact in ((rope_forward, reference.rope_forward), (rope_backward, reference.rope_backward)):
            expected = exact(x, cos, sin, is_neox=is_neox)
            # plain torch with products in the kernel's dtype
            plain = exact(x, cos.to(dtype), sin.to(dtype), is_neox=is_neox).to(dtype)
            assert_as_close_as_torch(ours(x, cos, sin, is_neox=is_neox), plain, expected)


@STYLES
def test_in_place_touches_only_the_rotated_part(is_neox: bool, device: torch.device) -> None:
    x, cos, sin = make(RopeCase(4, 3, 16, 12), torch.float32, device)
    expected = reference.rope_forward(x, cos, sin, is_neox=is_neox)
    around = x._base.clone() if x._base is not None else None
    assert around is not None
    rope_forward(x, cos, sin, is_neox=is_neox, out=x)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)
    changed = (x._base != around).unflatten(-1, (-1, 16)) if x._base.dim() == 2 else x._base != around
    assert not changed[:, 0].any() and not changed[:, -1].any()


@STYLES
def test_backward_undoes_forward(is_neox: bool, device: torch.device) -> None:
    x, cos, sin = make(RopeCase(6, 2, 32, 32), torch.float32, device)
    there = rope_forward(x, cos, sin, is_neox=is_neox)
    torch.testing.assert_close(rope_backward(there, cos, sin, is_neox=is_neox), x.contiguous(), rtol=1e-5, atol=1e-5)


@STYLES
def test_reference_backward_is_the_gradient(is_neox: bool) -> None:
    x, cos, sin = make(RopeCase(3, 2, 8, 6), torch.float64, torch.device("cpu"))
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
