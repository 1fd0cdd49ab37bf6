import pytest
import torch
from pyggtrain.kernels.reference.checks import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS["gated_rms_norm"], ids=lambda check: check.id)
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)
