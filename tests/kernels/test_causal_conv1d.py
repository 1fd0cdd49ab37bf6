import pytest
import torch
from pyggtrain.kernels.causal_conv1d import causal_conv1d_forward
from pyggtrain.kernels.reference.checks import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS["causal_conv1d"], ids=lambda check: check.id)
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    x, weight = torch.zeros(3, 8, device=device), torch.zeros(8, 4, device=device)
    first_token = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="a row for each of 8 channels"):
        causal_conv1d_forward(x, weight[:7], first_token, has_silu=True)
    with pytest.raises(ValueError, match="first_token is torch.int64"):
        causal_conv1d_forward(x, weight, first_token.long(), has_silu=True)
    with pytest.raises(ValueError, match="heads of a power of two"):
        causal_conv1d_forward(x, weight, first_token, has_silu=True, num_normed=1, head_size=6)
