"""ops.swiglu."""

import pytest
import torch

from pyggtrain.ops import swiglu


def random(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def reference(gate, up):
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("shape", [(1, 5), (33, 70)])
def test_output_and_gradients_are_as_near_as_plain_torch(earned, shape):
    gate, up, dy = random(*shape) * 4, random(*shape, seed=2), random(*shape, seed=3)
    outcomes = []
    for function, dtype in ((swiglu, torch.float32), (reference, torch.float32), (reference, torch.float64)):
        given = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (gate, up)]
        y = function(*given)
        y.backward(dy.to(dtype))
        outcomes.append((y.detach(), *(tensor.grad for tensor in given)))
    for result, plain, exact in zip(*outcomes, strict=True):
        earned(result, plain, exact)


def test_gradcheck():
    inputs = [random(3, 4, seed=seed, dtype=torch.float64).requires_grad_() for seed in (1, 2)]
    assert torch.autograd.gradcheck(swiglu, inputs)


def test_gate_far_from_zero_is_finite():
    gate, up = torch.tensor([-200.0, 200.0], requires_grad=True), torch.tensor([3.0, 3.0], requires_grad=True)
    y = swiglu(gate, up)
    y.sum().backward()
    torch.testing.assert_close(y, torch.tensor([0.0, 600.0]))
    torch.testing.assert_close(gate.grad, torch.tensor([0.0, 3.0]))


def test_halves_of_one_tensor_are_taken():
    both = random(6, 20).requires_grad_()
    torch.testing.assert_close(swiglu(*both.chunk(2, -1)), reference(*both.detach().chunk(2, -1)))


def test_opcheck():
    arguments = (random(5, 8).requires_grad_(), random(5, 8, seed=2).requires_grad_())
    torch.library.opcheck(torch.ops.pyggtrain.swiglu.default, arguments)
