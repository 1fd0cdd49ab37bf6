import pytest
import torch
from pyggtrain.kernels.gated_rms_norm import gated_rms_norm_forward
from pyggtrain.kernels.reference.checks import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS["gated_rms_norm"], ids=lambda check: check.id)
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    o = torch.zeros(3, 2, 8, device=device)
    with pytest.raises(ValueError, match=r"weight is \[7\]"):
        gated_rms_norm_forward(o, o, torch.ones(7, device=device), eps=1e-5)
    with pytest.raises(ValueError, match="z is"):
        gated_rms_norm_forward(o, o[:, :1], torch.ones(8, device=device), eps=1e-5)
