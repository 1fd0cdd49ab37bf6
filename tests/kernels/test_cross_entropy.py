import pytest
import torch
from pyggtrain.kernels.cross_entropy import IGNORED, cross_entropy_, linear_cross_entropy
from pyggtrain.kernels.reference import cross_entropy as reference
from pyggtrain.kernels.reference.checks import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS["cross_entropy"], ids=lambda check: check.id)
def test_loss_and_gradient_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_large_logits_do_not_overflow(device: torch.device) -> None:
    logits = torch.full((2, 5000), -3e4, device=device)
    logits[0, 4999] = logits[1, 0] = 3e4
    losses = cross_entropy_(logits, torch.tensor([4999, 1], device=device))
    torch.testing.assert_close(losses, torch.tensor([0.0, 6e4], device=device))
    assert logits[1, 0] == 1 and logits[1, 1] == -1


@pytest.mark.parametrize("check", CHECKS["linear_cross_entropy"], ids=lambda check: check.id)
def test_linear_loss_and_gradient_match_float64(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_reference_gradient_is_the_gradient() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([3, IGNORED, 0, 6, 2])
    expected = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    ours = logits.detach().clone()
    torch.testing.assert_close(reference.cross_entropy_(ours, targets), expected.detach())
    torch.testing.assert_close(ours, gradient)


def test_wrong_targets_and_workspace_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"int64 \[2\]"):
        cross_entropy_(torch.zeros(2, 4, device=device), torch.zeros(3, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="workspace is"):
        linear_cross_entropy(
            torch.zeros(2, 256, device=device),
            torch.zeros(4, 144, dtype=torch.uint8, device=device),
            "Q4_K",
            torch.zeros(2, dtype=torch.int64, device=device),
            token_chunk=2,
            workspace=torch.zeros(4, 128, device=device),
        )
