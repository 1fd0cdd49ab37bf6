import pytest
import torch
from pyggtrain.kernels.cross_entropy import IGNORED, cross_entropy_, linear_cross_entropy
from pyggtrain.kernels.reference import cross_entropy as reference
from pyggtrain.kernels.reference.cases import assert_as_close_as_torch, random_blocks


def targets_for(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    targets = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(1))
    targets[1::4] = IGNORED
    targets[0], targets[-1] = vocabulary - 1, 0
    return targets.to(device)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (6, 4096), (9, 9001)])
def test_loss_and_gradient_are_as_close_to_float64_as_torch(
    rows: int, vocabulary: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        logits = (torch.randn(rows, vocabulary, device=device) * 4).to(dtype)
        targets = targets_for(rows, vocabulary, device)
        expected_gradient = logits.double()
        expected = reference.cross_entropy_(expected_gradient, targets, gradient_scale=0.25)
        leaf = logits.clone().requires_grad_()
        plain = torch.nn.functional.cross_entropy(leaf.float(), targets, ignore_index=IGNORED, reduction="none")
        (plain_gradient,) = torch.autograd.grad(plain.sum() * 0.25, leaf)
        losses = cross_entropy_(logits, targets, gradient_scale=0.25)
        assert_as_close_as_torch(losses, plain.detach(), expected)
        assert_as_close_as_torch(logits, plain_gradient, expected_gradient)
        assert not logits[targets == IGNORED].any() and not losses[targets == IGNORED].any()


def test_large_logits_do_not_overflow(device: torch.device) -> None:
    logits = torch.full((2, 5000), -3e4, device=device)
    logits[0, 4999] = logits[1, 0] = 3e4
    losses = cross_entropy_(logits, torch.tensor([4999, 1], device=device))
    torch.testing.assert_close(losses, torch.tensor([0.0, 6e4], device=device))
    assert logits[1, 0] == 1 and logits[1, 1] == -1


@pytest.mark.parametrize("workspace_rows", [96, 40], ids=["whole head", "head in parts"])
@pytest.mark.parametrize("token_chunk", [4, 64], ids=["tokens in parts", "all tokens"])
def test_linear_loss_and_gradient_match_float64(workspace_rows: int, token_chunk: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(2)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(10, 256, device=device, generator=generator).to(dtype)
    blocks = random_blocks("Q4_K", 96, 256, generator=generator, magnitude=1e-3)
    targets = targets_for(10, 96, device)
    workspace = torch.empty(workspace_rows, 256, dtype=dtype, device=device)
    losses, dx = linear_cross_entropy(
        x, blocks, "Q4_K", targets, token_chunk=token_chunk, workspace=workspace, gradient_scale=0.5
    )
    expected, expected_dx = reference.linear_cross_entropy(x, blocks, "Q4_K", targets, gradient_scale=0.5)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert (losses - expected).norm() <= tolerance * expected.norm()
    assert (dx - expected_dx).norm() <= tolerance * expected_dx.norm()


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
