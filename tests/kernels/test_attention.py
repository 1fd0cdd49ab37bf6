import pytest
import torch
from pyggtrain.kernels.attention.backward import attention_backward
from pyggtrain.kernels.attention.forward import attention_forward
from pyggtrain.kernels.attention.mask import AttentionMask
from pyggtrain.kernels.reference import attention as reference
from pyggtrain.kernels.reference.cases import ATTENTION_CASES, AttentionCase, assert_as_close_as_torch

CASES = pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.id)


def make(
    case: AttentionCase, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], AttentionMask, dict[str, object]]:
    """q, k, v as parts of one wider row, do, the mask, and the remaining arguments."""
    generator = torch.Generator(device).manual_seed(0)
    tokens, width = sum(case.lengths), (case.heads + 2 * case.kv_heads) * case.head_size
    rows = torch.randn(tokens, width + 16, device=device, generator=generator).to(dtype)[:, :width]
    q, k, v = rows.unflatten(1, (-1, case.head_size)).split((case.heads, case.kv_heads, case.kv_heads), 1)
    do = torch.randn(tokens, case.heads, case.head_size, device=device, generator=generator).to(dtype)
    cu_seqlens = torch.tensor((0, *case.lengths), device=device).cumsum(0)
    mask = AttentionMask.from_documents(cu_seqlens, tokens, window=case.window)
    sinks = torch.randn(case.heads, device=device, generator=generator) if case.has_sinks else None
    return [q, k, v, do], mask, {"softmax_scale": case.head_size**-0.5, "softcap": case.softcap, "sinks": sinks}


def plain_attention(tensors: list[torch.Tensor], mask: AttentionMask, options: dict[str, object]) -> list[torch.Tensor]:
    """o, dq, dk, dv by torch in the inputs' dtype: products as they are, softmax in float32."""
    *leaves, do = (tensor.detach().clone() for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    q, k, v = leaves
    heads, softcap, sinks = q.shape[1], options["softcap"], options["sinks"]
    z = torch.einsum("thk,shk->hts", q, reference.repeat_heads(k, heads)).float() * options["softmax_scale"]
    z = z if softcap is None else softcap * (z / softcap).tanh()
    z = z.masked_fill(~reference.scores(q, k, mask, 1.0, None)[1], float("-inf"))
    z = z if sinks is None else torch.cat((z, sinks[:, None, None].expand(-1, len(q), 1)), 2)
    o = torch.einsum("hts,shk->thk", z.softmax(2)[..., : len(q)].to(q.dtype), reference.repeat_heads(v, heads))
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


@CASES
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    case: AttentionCase, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        tensors, mask, options = make(case, dtype, device)
        q, k, v, do = tensors
        o, lse = attention_forward(q, k, v, mask, **options)
        expected, expected_lse = reference.attention_forward(q, k, v, mask, **options)
        options_backward = {name: value for name, value in options.items() if name != "sinks"}
        gradients = attention_backward(do, q, k, v, o, lse, mask, **options_backward)
        exact = reference.attention_backward(do, q, k, v, expected, expected_lse, mask, **options_backward)
        plain = plain_attention(tensors, mask, options)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 2e-3)
        # where a token sees only itself, dq is the difference of two equal terms as large as the other gradients
        magnitude = max(tensor.abs().max().item() for tensor in exact)
        for ours, torchs, exactly in zip((o, *gradients), plain, (expected, *exact), strict=True):
            assert_as_close_as_torch(ours, torchs, exactly, terms=len(q) + q.shape[2], magnitude=magnitude)


def test_documents_do_not_see_each_other(device: torch.device) -> None:
    """A document's output and gradients are the same alone and packed behind another."""
    case = AttentionCase((50, 77), 2, 1, 64)
    (q, k, v, do), mask, options = make(case, torch.float32, device)
    o, lse = attention_forward(q, k, v, mask, **options)
    del options["sinks"]
    packed = (o, *attention_backward(do, q, k, v, o, lse, mask, **options))
    q, k, v, do = (tensor[50:] for tensor in (q, k, v, do))
    mask = AttentionMask.from_documents(torch.tensor((0, 77), device=device), 77)
    o, lse = attention_forward(q, k, v, mask, **options)
    for together, alone in zip(packed, (o, *attention_backward(do, q, k, v, o, lse, mask, **options)), strict=True):
        torch.testing.assert_close(together[50:], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the interpreter has no order to lose")
def test_gradients_are_the_same_on_every_run() -> None:
    device = torch.device("cuda")
    (q, k, v, do), mask, options = make(ATTENTION_CASES[2], torch.float32, device)
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
    tensors, mask, options = make(case, torch.float64, torch.device("cpu"))
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]]
    o, lse = reference.attention_forward(*leaves, mask, **options)
    expected = torch.autograd.grad(o, leaves, tensors[3])
    del options["sinks"]
    for ours, exact in zip(
        reference.attention_backward(tensors[3], *leaves, o, lse, mask, **options), expected, strict=True
    ):
        torch.testing.assert_close(ours, exact)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    (q, k, v, _), mask, _ = make(AttentionCase((8,), 4, 2, 64), torch.float32, device)
    with pytest.raises(ValueError, match="whole groups"):
        attention_forward(q[:, :3], k, v, mask, softmax_scale=1.0)
    with pytest.raises(ValueError, match=r"v is .* needed: torch.float32 \[8, 2, 64\]"):
        attention_forward(q, k, v[:, :1], mask, softmax_scale=1.0)
    with pytest.raises(ValueError, match=r"int32 \[8\]"):
        attention_forward(q, k, v, AttentionMask(mask.first_key.long(), mask.last_query), softmax_scale=1.0)
