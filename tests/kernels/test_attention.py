import pytest
import torch
from pyggtrain.kernels.attention.backward import BACKWARD_TILES, BackwardTiles, attention_backward
from pyggtrain.kernels.attention.forward import attention_forward
from pyggtrain.kernels.attention.mask import AttentionMask
from pyggtrain.kernels.attention.scores import Tile
from pyggtrain.kernels.reference import attention as reference
from pyggtrain.kernels.reference.cases import ATTENTION_CASES, AttentionCase
from pyggtrain.kernels.reference.checks import CHECKS, Check, attention_inputs


@pytest.mark.parametrize("check", CHECKS["attention"], ids=lambda check: check.id)
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_documents_do_not_see_each_other(device: torch.device) -> None:
    """A document's output and gradients are the same alone and packed behind another."""
    case = AttentionCase((50, 77), 2, 1, 64)
    (q, k, v, do), mask, options = attention_inputs(case, torch.float32, device)
    o, lse = attention_forward(q, k, v, mask, **options)
    del options["sinks"]
    packed = (o, *attention_backward(do, q, k, v, o, lse, mask, **options))
    q, k, v, do = (tensor[50:] for tensor in (q, k, v, do))
    mask = AttentionMask.from_documents(torch.tensor((0, 77), device=device), 77)
    o, lse = attention_forward(q, k, v, mask, **options)
    for together, alone in zip(packed, (o, *attention_backward(do, q, k, v, o, lse, mask, **options)), strict=True):
        torch.testing.assert_close(together[50:], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_a_group_in_parts_has_the_sum_of_all_heads(num_parts: int, device: torch.device) -> None:
    """As many programs as a card wants: in the interpreter a group is never split by itself."""
    (q, k, v, do), mask, options = attention_inputs(AttentionCase((50, 30), 8, 2, 80), torch.float16, device)
    o, lse = attention_forward(q, k, v, mask, **options)
    del options["sinks"]
    tile = Tile(32, 32, 4, 1, heads_first=True)
    whole, *parts = (
        attention_backward(do, q, k, v, o, lse, mask, **options, tiles=tiles)
        for tiles in (
            BackwardTiles(tile, tile, num_parts=1),
            BackwardTiles(tile, tile, num_parts=num_parts),
            BackwardTiles(tile, tile, tile, num_parts=num_parts),
        )
    )
    for gradients in parts:
        for ours, expected in zip(gradients, whole, strict=True):
            torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3)


def test_parts_and_passes_write_into_one_matrix(device: torch.device) -> None:
    (q, k, v, do), mask, options = attention_inputs(AttentionCase((40,), 4, 2, 64), torch.float16, device)
    o, lse = attention_forward(q, k, v, mask, **options)
    del options["sinks"]
    rows = torch.zeros(40, 8 * 64 + 32, dtype=torch.float16, device=device)
    dq, dk, dv = rows[:, : 8 * 64].unflatten(1, (8, 64)).split((4, 2, 2), 1)
    tile = BACKWARD_TILES[64].k
    tiles = BackwardTiles(tile, tile, tile, num_parts=2)
    attention_backward(do, q, k, v, o, lse, mask, **options, dq=dq, dk=dk, dv=dv, tiles=tiles)
    expected = attention_backward(do, q, k, v, o, lse, mask, **options)
    for ours, gradient in zip((dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(ours, gradient, rtol=2e-3, atol=2e-3)
    assert not rows[:, 8 * 64 :].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the interpreter has no order to lose")
def test_gradients_are_the_same_on_every_run() -> None:
    device = torch.device("cuda")
    (q, k, v, do), mask, options = attention_inputs(ATTENTION_CASES[2], torch.float32, device)
    o, lse = attention_forward(q, k, v, mask, **options)
    del options["sinks"]
    first, second = (attention_backward(do, q, k, v, o, lse, mask, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_mask_of_documents_and_window() -> None:
    mask = AttentionMask.from_documents(torch.tensor((0, 3, 3, 7)), 7, window=2)
    assert mask.first_key.tolist() == [0, 0, 1, 3, 3, 4, 5]
    assert mask.last_query.tolist() == [1, 2, 2, 4, 5, 6, 6]


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "capped"])
def test_reference_backward_is_the_gradient(softcap: float | None) -> None:
    case = AttentionCase((5, 4), 4, 2, 6, window=3, softcap=softcap, has_sinks=True)
    tensors, mask, options = attention_inputs(case, torch.float64, torch.device("cpu"))
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]]
    o, lse = reference.attention_forward(*leaves, mask, **options)
    expected = torch.autograd.grad(o, leaves, tensors[3])
    del options["sinks"]
    for ours, exact in zip(
        reference.attention_backward(tensors[3], *leaves, o, lse, mask, **options), expected, strict=True
    ):
        torch.testing.assert_close(ours, exact)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    (q, k, v, _), mask, _ = attention_inputs(AttentionCase((8,), 4, 2, 64), torch.float32, device)
    with pytest.raises(ValueError, match="whole groups"):
        attention_forward(q[:, :3], k, v, mask, softmax_scale=1.0)
    with pytest.raises(ValueError, match=r"v is .* needed: torch.float32 \[8, 2, 64\]"):
        attention_forward(q, k, v[:, :1], mask, softmax_scale=1.0)
    with pytest.raises(ValueError, match=r"int32 \[8\]"):
        attention_forward(q, k, v, AttentionMask(mask.first_key.long(), mask.last_query), softmax_scale=1.0)
