"""ops.causal_conv1d on a CPU."""

import pytest
import torch
from pyggtrain.kernels.reference import causal_conv1d as reference

from pyggtrain import ops


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def documents(*bounds):
    return ops.Documents(torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("bounds", [(0, 1), (0, 9), (0, 2, 3, 7, 40)])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_each_channel_of_each_document_is_convolved_alone(bounds, width):
    x, weight = random(bounds[-1], 5).requires_grad_(), random(5, width, seed=1)
    found = ops.causal_conv1d(x, weight, documents(*bounds))
    torch.testing.assert_close(found, reference.causal_conv1d_forward(x, weight, bounds, has_silu=False))
    assert torch.autograd.gradcheck(lambda x: ops.causal_conv1d(x, weight, documents(*bounds)), (x,))


def test_columns_need_not_lie_side_by_side():
    x, weight = random(5, 12).requires_grad_(), random(5, 4, seed=1)
    found = ops.causal_conv1d(x.t(), weight, documents(0, 12))
    torch.testing.assert_close(found, ops.causal_conv1d(x.t().contiguous(), weight, documents(0, 12)))
    torch.autograd.grad(found, x, random(12, 5, seed=2))


def test_nothing_crosses_from_one_document_into_the_next():
    x, weight = random(12, 5), random(5, 4, seed=1)
    other = x.clone()
    other[:6] = torch.inf
    packed = (ops.causal_conv1d(given, weight, documents(0, 6, 12))[6:] for given in (x, other))
    assert torch.equal(*packed)


def test_opcheck():
    arguments = (random(7, 5).requires_grad_(), random(5, 3, seed=1), (0, 2, 7), torch.tensor([0, 2, 7]))
    torch.library.opcheck(torch.ops.pyggtrain.causal_conv1d.default, arguments)


def test_documents_must_cover_the_tokens():
    with pytest.raises(ValueError, match="documents cover tokens 0 to 4: needed 0 to 5"):
        ops.causal_conv1d(random(5, 2), random(2, 3), documents(0, 4))
