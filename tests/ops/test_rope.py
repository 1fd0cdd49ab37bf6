"""ops.rope: rotation by a given table."""

import pytest
import torch

from pyggtrain.ops import RopeTables, rope


def random(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def tables(num_tokens, num_pairs, pairing, dtype=torch.float32, magnitude=1.3):
    angles = torch.rand(num_tokens, num_pairs, generator=torch.Generator().manual_seed(5), dtype=dtype) * 6
    return RopeTables(angles.cos() * magnitude, angles.sin() * magnitude, pairing)


def reference(x, tables):
    """Pair by pair, as the equation says."""
    y = x.clone()
    num_pairs = tables.cos_TP.shape[1]
    for i in range(num_pairs):
        first, second = (2 * i, 2 * i + 1) if tables.pairing == "NORM" else (i, i + num_pairs)
        a, b = x[..., first], x[..., second]
        cos, sin = tables.cos_TP[:, i, None], tables.sin_TP[:, i, None]
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


CASES = pytest.mark.parametrize(("num_pairs", "pairing"), [(8, "NORM"), (8, "NEOX"), (5, "NORM"), (5, "NEOX")])


@CASES
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_output_is_the_equation(num_tokens, num_pairs, pairing):
    x, table = random(num_tokens, 3, 16), tables(num_tokens, num_pairs, pairing)
    torch.testing.assert_close(rope(x, table), reference(x, table), rtol=1e-6, atol=1e-6)


@CASES
def test_gradcheck(num_pairs, pairing):
    x, table = random(2, 2, 16, dtype=torch.float64).requires_grad_(), tables(2, num_pairs, pairing, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rope(x, table), (x,))


@CASES
@pytest.mark.parametrize("offset", [0, 3])
def test_heads_inside_a_fused_product_are_taken(num_pairs, pairing, offset):
    # A view of [T, 7 * 16 + offset]: odd strides and offsets cannot be read as complex numbers.
    fused = random(4, 7 * 16 + offset)
    view = fused[:, offset:].unflatten(1, (7, 16))[:, 2:5].requires_grad_()
    table = tables(4, num_pairs, pairing)
    y = rope(view, table)
    assert y.is_contiguous()
    torch.testing.assert_close(y, reference(view.detach(), table), rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(y, view, random(3, 4, 16).transpose(0, 1))
    assert torch.isfinite(gradient).all()


@CASES
def test_opcheck(num_pairs, pairing):
    table = tables(4, num_pairs, pairing)
    arguments = (random(4, 3, 16).requires_grad_(), table.cos_TP, table.sin_TP, pairing == "NEOX", False)
    torch.library.opcheck(torch.ops.pyggtrain.rope.default, arguments)


def test_table_that_does_not_fit_is_refused():
    for table in (tables(3, 8, "NORM"), tables(4, 9, "NORM")):
        with pytest.raises(ValueError, match="does not fit x"):
            rope(random(4, 3, 16), table)
