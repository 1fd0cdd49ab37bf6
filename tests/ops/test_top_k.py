"""ops.top_k."""

import pytest
import torch

from pyggtrain.ops import top_k


@pytest.mark.parametrize("shape", [(1, 1), (2, 1, 7, 40)], ids=str)
def test_these_are_the_first_columns_of_a_stable_sort(device, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round()
    k = min(shape[-1], 6)
    ids = top_k(x.to(device), k)
    assert ids.dtype == torch.int32 and ids.is_contiguous()
    assert torch.equal(ids.cpu().long(), torch.sort(x, descending=True, stable=True).indices[..., :k])


def test_what_no_kernel_takes_is_sorted(device):
    x = torch.arange(2000.0, device=device).flip(0).expand(3, -1)
    assert torch.equal(top_k(x, 40).cpu(), torch.arange(40).int().expand(3, -1))


def test_a_choice_has_no_gradient():
    assert not top_k(torch.randn(3, 4, requires_grad=True), 2).requires_grad


def test_opcheck():
    torch.library.opcheck(torch.ops.pyggtrain.top_k.default, (torch.randn(5, 8), 3))
