"""ops.lora_linear: a quantised weight with a low-rank update, and its gradients."""

import pytest
import torch

from pyggtrain.ops import lora_linear, quant_linear, quant_matmul


def random(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def reference(x, w, a, b, scale, mask=None, bias=0.0, residual=0.0):
    masked = x if mask is None else x * mask
    return x @ w.t() + scale * (masked @ a.t()) @ b.t() + bias + residual


def test_factor_is_alpha_over_rank(make_weight):
    # r = 8, alpha = 16, known numbers: the update is exactly 2 B (A x).
    weight, _ = make_weight("F32", 3, 4)
    a, b = torch.arange(32.0).view(8, 4) % 5 - 2, torch.arange(24.0).view(3, 8) % 7 - 3
    x = torch.tensor([[1.0, 2.0, -1.0, 3.0]])
    update = lora_linear(x, weight, a, b, scale=16 / 8) - quant_linear(x, weight)
    torch.testing.assert_close(update, 2.0 * (x @ a.t()) @ b.t(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 3, 8, 24])
@pytest.mark.parametrize("num_tokens", [1, 19])
@pytest.mark.parametrize("type", ["F32", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("has_dropout", [False, True])
def test_output_and_gradients_are_as_near_as_plain_torch(make_weight, earned, rank, num_tokens, type, has_dropout):
    weight, exact = make_weight(type, 48, 256)
    mask = torch.rand(num_tokens, 256, generator=torch.Generator().manual_seed(9)) < 0.8 if has_dropout else None
    inputs = (
        random(num_tokens, 256),
        random(rank, 256, seed=2),
        random(48, rank, seed=3),
        random(num_tokens, 48, seed=4),
    )
    dy = random(num_tokens, 48, seed=5)
    outcomes = []
    for dtype in (None, torch.float32, torch.float64):
        x, a, b, residual = (tensor.to(dtype or torch.float32, copy=True).requires_grad_() for tensor in inputs)
        if dtype is None:
            y = lora_linear(x, weight, a, b, scale=0.7, dropout_mask_TK=mask, residual_TN=residual, compute="exact")
        else:
            y = reference(x, exact.to(dtype), a, b, 0.7, mask, residual=residual)
        y.backward(dy.to(y.dtype))
        outcomes.append((y.detach(), x.grad, a.grad, b.grad, residual.grad))
    for result, plain, exact_result in zip(*outcomes, strict=True):
        earned(result, plain, exact_result)


def test_gradcheck_of_the_operation_itself(make_weight):
    weight, _ = make_weight("Q8_0", 6, 32)
    mask = torch.arange(96).view(3, 32) % 3 > 0
    shapes = [(3, 32), (2, 32), (6, 2), (3, 6)]
    inputs = [random(*shape, seed=seed, dtype=torch.float64).requires_grad_() for seed, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(
        lambda x, a, b, residual: lora_linear(x, weight, a, b, scale=1.3, dropout_mask_TK=mask, residual_TN=residual),
        inputs,
    )


def test_zero_b_is_the_base_bit_for_bit(make_weight):
    weight, _ = make_weight("Q4_1", 40, 64)
    x = random(50, 64)
    for compute in ("exact", "ggml"):
        y = lora_linear(x, weight, random(4, 64), torch.zeros(40, 4), scale=2.0, compute=compute)
        assert torch.equal(y, quant_linear(x, weight, compute=compute))


def test_ggml_rounds_the_base_product_only(make_weight):
    weight, _ = make_weight("Q4_K", 40, 256)
    x, a, b = random(50, 256), random(4, 256, seed=2), random(40, 4, seed=3)
    update = lora_linear(x, weight, a, b, scale=1.0, compute="ggml") - quant_linear(x, weight, compute="ggml")
    torch.testing.assert_close(update, (x @ a.t()) @ b.t(), rtol=1e-4, atol=1e-3)


def test_input_gradient_is_not_computed_when_not_needed(make_weight, monkeypatch):
    weight, _ = make_weight("Q4_1", 40, 64)

    def refuse(*args, **kwargs):
        raise AssertionError("dx was computed for an input without gradient")

    monkeypatch.setattr(quant_matmul, "backward", refuse)
    a, b = random(4, 64).requires_grad_(), random(40, 4).requires_grad_()
    lora_linear(random(3, 64), weight, a, b, scale=1.0).sum().backward()
    assert a.grad.abs().sum() > 0


def test_views_give_what_contiguous_inputs_give(make_weight):
    weight, _ = make_weight("Q4_1", 33, 64)
    x_view = random(10, 200)[1:9, 3:67].requires_grad_()
    x = x_view.detach().clone().requires_grad_()
    a, b = random(64, 4).t().requires_grad_(), random(4, 33).t().requires_grad_()
    dy = random(33, 8).t()
    grads = []
    for given in (x_view, x):
        y = lora_linear(given, weight, a, b, scale=0.5, compute="exact")
        grads.append(torch.autograd.grad(y, (given, a, b), dy))
    for view, contiguous in zip(*grads, strict=True):
        torch.testing.assert_close(view, contiguous, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_options", [False, True])
def test_opcheck(make_weight, has_options):
    weight, _ = make_weight("Q4_1", 24, 32)
    x, a, b = random(5, 32).requires_grad_(), random(3, 32).requires_grad_(), random(24, 3).requires_grad_()
    mask = torch.arange(160).view(5, 32) % 4 > 0 if has_options else None
    residual = random(5, 24).requires_grad_() if has_options else None
    bias = random(24) if has_options else None
    arguments = (x, weight.blocks, "Q4_1", a, b, 0.5, "exact", mask, bias, residual)
    torch.library.opcheck(torch.ops.pyggtrain.lora_linear.default, arguments)


def test_pair_of_another_shape_is_named(make_weight):
    weight, _ = make_weight("Q4_1", 24, 32)
    with pytest.raises(ValueError, match=r"blk.0.attn_q.weight.*needed \[r, 32\] and \[24, r\]"):
        lora_linear(random(2, 32), weight, random(4, 32), random(4, 24), scale=1.0)
