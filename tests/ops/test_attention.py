"""ops.attention: causal, grouped heads, several documents in one row."""

import pytest
import torch

from pyggtrain.ops import attention


def random(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def reference(q, k, v, bounds, scale):
    """Softmax over an explicit mask, in the dtype of q."""
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    document = torch.bucketize(torch.arange(num_tokens), torch.tensor(bounds[1:]), right=True)
    visible = (document[:, None] == document[None]) & (
        torch.arange(num_tokens)[:, None] >= torch.arange(num_tokens)[None]
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


CASES = [([0, 13], 4, 4), ([0, 13], 6, 2), ([0, 1, 6, 7, 40], 4, 2), ([0, 300], 2, 1)]


@pytest.mark.parametrize(("bounds", "num_heads", "num_kv_heads"), CASES)
def test_output_and_gradients_are_as_near_as_plain_torch(earned, bounds, num_heads, num_kv_heads):
    inputs = [
        random(bounds[-1], heads, 16, seed=seed) for seed, heads in enumerate((num_heads, num_kv_heads, num_kv_heads))
    ]
    dy = random(bounds[-1], num_heads, 16, seed=7)
    outcomes = []
    for dtype in (None, torch.float32, torch.float64):
        q, k, v = (tensor.to(dtype or torch.float32, copy=True).requires_grad_() for tensor in inputs)
        if dtype is None:
            y = attention(q, k, v, torch.tensor(bounds, dtype=torch.int32), softmax_scale=0.3)
        else:
            y = reference(q, k, v, bounds, 0.3)
        y.backward(dy.to(y.dtype))
        outcomes.append((y.detach(), q.grad, k.grad, v.grad))
    for result, plain, exact in zip(*outcomes, strict=True):
        earned(result, plain, exact)


def test_one_token_gives_its_own_value():
    q, k, v = (random(1, heads, 8, seed=heads).requires_grad_() for heads in (4, 2, 2))
    y = attention(q, k, v, torch.tensor([0, 1], dtype=torch.int32), softmax_scale=0.3)
    y.sum().backward()
    assert torch.equal(y, v.repeat_interleave(2, 1))
    assert torch.equal(v.grad, torch.full((1, 2, 8), 2.0))
    assert q.grad.abs().max() < 1e-6 and k.grad.abs().max() < 1e-6


def test_gradcheck():
    q, k, v = (random(5, heads, 4, seed=heads, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2))
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, bounds, softmax_scale=0.5), (q, k, v))


def test_no_document_sees_another():
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    q, k, v = random(9, 2, 8), random(9, 2, 8, seed=2), random(9, 2, 8, seed=3)
    before = attention(q, k, v, bounds, softmax_scale=1.0)
    k[2], v[2] = 100.0, 100.0
    after = attention(q, k, v, bounds, softmax_scale=1.0)
    assert torch.equal(before[4:], after[4:]), "the second document reads the first"
    assert torch.equal(before[:2], after[:2]), "a token reads a later one"
    assert not torch.equal(before[2:4], after[2:4])


@pytest.mark.parametrize(
    ("num_heads", "bounds", "needed"),
    [(3, [0, 5], "do not group"), (4, [0, 4], "needed 0 to 5"), (4, [1, 5], "needed 0 to 5")],
)
def test_wrong_arguments_are_named(num_heads, bounds, needed):
    with pytest.raises(ValueError, match=needed):
        attention(
            random(5, num_heads, 8),
            random(5, 2, 8),
            random(5, 2, 8),
            torch.tensor(bounds, dtype=torch.int32),
            softmax_scale=1.0,
        )
