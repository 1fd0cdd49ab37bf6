"""ops.rms_norm."""

import pytest
import torch

from pyggtrain.ops import rms_norm


def random(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def reference(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("shape", [(1, 64), (37, 100), (5, 3, 32)])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
def test_output_and_gradient_are_as_near_as_plain_torch(earned, shape, size):
    x, weight, dy = random(*shape) * size, random(shape[-1], seed=2), random(*shape, seed=3)
    outcomes = []
    for function, dtype in ((rms_norm, torch.float32), (reference, torch.float32), (reference, torch.float64)):
        given = x.to(dtype, copy=True).requires_grad_()
        y = function(given, weight.to(dtype), eps=1e-5)
        y.backward(dy.to(dtype))
        outcomes.append((y.detach(), given.grad))
    for result, plain, exact in zip(*outcomes, strict=True):
        earned(result, plain, exact)


def test_gradcheck():
    x, weight = random(3, 8, dtype=torch.float64).requires_grad_(), random(8, seed=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight, eps=1e-2), (x,))


def test_views_give_what_contiguous_inputs_give():
    view, weight = random(10, 200)[1:9:2, 3:67].requires_grad_(), random(64)
    x = view.detach().clone().requires_grad_()
    for given in (view, x):
        y = rms_norm(given, weight, eps=1e-5)
        (given_gradient,) = torch.autograd.grad(y, given, random(64, 4).t())
        given.result = (y.detach(), given_gradient)
    for of_view, of_contiguous in zip(view.result, x.result, strict=True):
        torch.testing.assert_close(of_view, of_contiguous, rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros_is_finite():
    x = torch.zeros(2, 16, requires_grad=True)
    y = rms_norm(x, torch.ones(16), eps=1e-5)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 16))
    assert torch.isfinite(x.grad).all()


def test_opcheck():
    torch.library.opcheck(torch.ops.pyggtrain.rms_norm.default, (random(5, 16).requires_grad_(), random(16), 1e-5))
