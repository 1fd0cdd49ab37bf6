"""ops.quant_linear: y = x Wᵀ on quantised blocks, and its gradient."""

import pytest
import torch

from pyggtrain.errors import ConfigError
from pyggtrain.gguf import quantize_tensor
from pyggtrain.ops import quant_linear, quant_matmul, workspace

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
TYPES += ["IQ4_XS", "IQ3_S", "IQ2_XXS", "TQ1_0", "TQ2_0", "MXFP4"]
ROWS, COLUMNS = 70, 256


def random(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_exact_forward_is_as_near_as_plain_torch(make_weight, earned, type, num_tokens):
    weight, exact = make_weight(type, ROWS, COLUMNS)
    x = random(num_tokens, COLUMNS)
    y = quant_linear(x, weight, compute="exact")
    earned(y, x @ exact.float().t(), x.double() @ exact.t())


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("compute", ["exact", "ggml"])
def test_backward_is_jacobian_of_dequantised_weight(make_weight, earned, type, compute):
    weight, exact = make_weight(type, ROWS, COLUMNS)
    x, dy = random(5, COLUMNS).requires_grad_(), random(5, ROWS, seed=2)
    quant_linear(x, weight, compute=compute).backward(dy)
    earned(x.grad, dy @ exact.float(), dy.double() @ exact)


def test_backward_is_bit_exact_where_float32_is():
    # Whole numbers up to 127 with a scale of 1: Q8_0 holds them exactly, and sums of products stay below 2**24.
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (ROWS, COLUMNS), generator=generator).float()
    values[:, ::32] = 127
    weight = quantize_tensor("w", values, "Q8_0")
    x = torch.randint(-9, 10, (6, COLUMNS), generator=generator).float().requires_grad_()
    dy = torch.randint(-9, 10, (6, ROWS), generator=generator).float()
    y = quant_linear(x, weight, compute="exact")
    y.backward(dy)
    assert torch.equal(y, x @ values.t())
    assert torch.equal(x.grad, dy @ values)


def test_gradcheck_of_the_operation_itself(make_weight):
    weight, _ = make_weight("Q4_1", 7, 32)
    x, residual = (
        random(3, 32, dtype=torch.float64).requires_grad_(),
        random(3, 7, dtype=torch.float64).requires_grad_(),
    )
    bias = random(7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, residual: quant_linear(x, weight, bias_N=bias, residual_TN=residual), (x, residual)
    )


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K", "IQ2_XXS"])
def test_ggml_forward_is_within_eight_bit_noise(make_weight, type):
    weight, exact = make_weight(type, 64, 512)
    x = random(40, 512)
    y, reference = quant_linear(x, weight, compute="ggml"), x.double() @ exact.t()
    error = float((y - reference).norm() / reference.norm())
    # Rounding x to 8 bits costs 0.5-0.7 % (docs/numerics.md). Below 0.1 % it would not be ggml's arithmetic.
    assert 1e-3 < error < 1e-2


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("compute", ["exact", "ggml"])
def test_bias_and_residual_are_added_and_left_as_they_are(make_weight, compute, num_tokens):
    weight, _ = make_weight("Q8_0", 64, 64)
    x, bias, residual = random(num_tokens, 64), random(64, seed=2), random(num_tokens, 64, seed=3)
    bare = quant_linear(x, weight, compute=compute)
    for given, expected in (
        ({"bias_N": bias}, bare + bias),
        ({"residual_TN": residual}, bare + residual),
        ({"bias_N": bias, "residual_TN": residual}, bare + bias + residual),
    ):
        torch.testing.assert_close(quant_linear(x, weight, compute=compute, **given), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(bias, random(64, seed=2)) and torch.equal(residual, random(num_tokens, 64, seed=3))


@pytest.mark.parametrize("type", ["Q4_1", "F16"])
def test_chunks_change_nothing_beyond_rounding(make_weight, type):
    weight, _ = make_weight(type, 300, 1024)
    x = random(11, 1024).requires_grad_()
    results = []
    for limit in (workspace.DEFAULT_LIMIT_BYTES, workspace.MIN_LIMIT_BYTES):
        workspace.set_limit_bytes(limit)
        y = quant_linear(x, weight, compute="exact")
        (dx,) = torch.autograd.grad(y.sum(), x)
        results.append((y.detach(), dx))
    (y_whole, dx_whole), (y_chunks, dx_chunks) = results
    torch.testing.assert_close(y_chunks, y_whole, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dx_chunks, dx_whole, rtol=1e-5, atol=1e-4)


def test_workspace_is_bounded_and_reused(make_weight):
    workspace.set_limit_bytes(2**18)
    assert workspace.rows_per_chunk(10_000, 64) == 1024
    assert workspace.rows_per_chunk(10, 64) == 10
    assert workspace.rows_per_chunk(10, 10**6) == 1
    device = torch.device("cpu")
    assert workspace.rows(100, 64, device).data_ptr() == workspace.rows(20, 64, device).data_ptr()
    with pytest.raises(ConfigError, match="at least 65536"):
        workspace.set_limit_bytes(1000)


@pytest.mark.parametrize("compute", ["exact", "ggml"])
def test_views_give_what_contiguous_inputs_give(make_weight, compute):
    weight, _ = make_weight("Q4_1", 33, 64)
    wide = random(10, 200)
    x_view = wide[2:8:2, 5:69].requires_grad_()
    x = x_view.detach().clone().requires_grad_()
    dy = random(33, 3).t()
    for given in (x_view, x):
        quant_linear(given, weight, compute=compute).backward(dy)
    torch.testing.assert_close(x_view.grad, x.grad, rtol=0, atol=0)


def test_expanded_gradient_is_taken(make_weight):
    weight, exact = make_weight("Q8_0", 32, 64)
    x = random(4, 64).requires_grad_()
    quant_linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, exact.sum(0).float().expand(4, -1), rtol=1e-5, atol=1e-5)


def test_float32_weight_is_multiplied_where_it_lies(make_weight, monkeypatch):
    weight, exact = make_weight("F32", 40, 48)

    def refuse(*args):
        raise AssertionError("a float32 weight went through the workspace")

    monkeypatch.setattr(workspace, "rows", refuse)
    x = random(3, 48).requires_grad_()
    y = quant_linear(x, weight)
    y.sum().backward()
    torch.testing.assert_close(y, x @ exact.float().t())


@pytest.mark.parametrize(
    ("type", "num_rows", "chosen"),
    [
        ("F32", 1, "exact"),
        ("F16", 8, "exact"),
        ("Q4_1", 31, "ggml"),
        ("Q4_1", 32, "exact"),
        ("Q8_0", 512, "exact"),
        ("Q4_K", 512, "ggml"),
        ("IQ2_XXS", 512, "ggml"),
        ("Q2_0", 8, "exact"),
        ("TQ1_0", 512, "exact"),
    ],
)
def test_auto_takes_the_faster_way(type, num_rows, chosen):
    assert quant_matmul.chosen_compute("auto", type, num_rows, torch.float32) == chosen
    assert quant_matmul.chosen_compute("auto", type, num_rows, torch.float64) == "exact"


def test_opcheck(make_weight):
    weight, _ = make_weight("Q4_1", 24, 32)
    x, residual = random(5, 32).requires_grad_(), random(5, 24).requires_grad_()
    arguments = (x, weight.blocks, "Q4_1", "exact", random(24), residual)
    torch.library.opcheck(torch.ops.pyggtrain.quant_linear.default, arguments)


@pytest.mark.parametrize(
    ("x", "compute", "needed"),
    [
        (torch.zeros(2, 31), "auto", r"needed \[T, 32\]"),
        (torch.zeros(32), "auto", r"needed \[T, 32\]"),
        (torch.zeros(2, 32, dtype=torch.bfloat16), "auto", "needed float32"),
        (torch.zeros(2, 32, dtype=torch.float64), "ggml", "takes float32"),
        (torch.zeros(2, 32), "fast", "needed one of auto, exact, ggml"),
    ],
)
def test_wrong_arguments_are_named(make_weight, x, compute, needed):
    weight, _ = make_weight("Q4_1", 24, 32)
    with pytest.raises(ValueError, match=needed):
        quant_linear(x, weight, compute=compute)
