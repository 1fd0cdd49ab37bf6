"""The way of a GPU through ops.expert_linear against plain torch in float64: Triton's interpreter or a GPU."""

import pytest
import torch
from pyggtrain.kernels.moe_routing import sort_by_expert
from pyggtrain.kernels.reference.cases import random_blocks
from pyggtrain.kernels.reference.dequant import dequantize

from pyggtrain.gguf import QuantTensor
from pyggtrain.ops import expert_linear, expert_linear_gpu, expert_product
from pyggtrain.ops.expert_product import ExpertStack

T, J, E, N, K, R = 9, 3, 5, 48, 256, 4


def make(device, slots_per_row, has_options):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    ids = torch.randint(0, E - 1, (T, J), generator=generator).to(device)
    blocks = random_blocks("Q4_K", E * N, K, generator=torch.Generator(device).manual_seed(2), magnitude=1e-3)
    weight = dequantize(blocks, "Q4_K", dtype=torch.float32).view(E, N, K)
    x = normal(T * J // slots_per_row, K)
    return {
        "ids": ids,
        "x": x,
        "blocks": blocks.view(E, N, -1),
        "weight": weight,
        "a": normal(E, R, K),
        "b": normal(E, N, R),
        "dy": normal(T * J, N),
        "mask": normal(*x.shape) > -1 if has_options else None,
        "factor": torch.rand(E, generator=generator).to(device) + 0.5 if has_options else None,
    }


def reference(given, slots_per_row, has_pair, scale):
    """y, dx, dA, dB in float64."""
    x, a, b = (given[name].double().requires_grad_() for name in "xab")
    e = given["ids"].flatten()
    rows = torch.arange(e.shape[0], device=e.device) // slots_per_row
    y = torch.einsum("snk,sk->sn", given["weight"].double()[e], x[rows])
    if given["factor"] is not None:
        y = y * given["factor"].double()[e][:, None]
    if has_pair:
        seen = x if given["mask"] is None else x * given["mask"]
        y = y + scale * torch.einsum("snr,srk,sk->sn", b[e], a[e], seen[rows])
    gradients = torch.autograd.grad(y, (x, a, b) if has_pair else (x,), given["dy"].double())
    return [y.detach(), *gradients]


@pytest.mark.parametrize("few_rows", [0, 1000], ids=["decoded", "packed"])
@pytest.mark.parametrize("slots_per_row", [1, J])
@pytest.mark.parametrize(("has_pair", "has_options"), [(True, False), (True, True), (False, False)])
def test_values_and_gradients_are_those_of_float64(device, monkeypatch, few_rows, slots_per_row, has_pair, has_options):
    monkeypatch.setattr(expert_product, "FEW_ROWS", few_rows)
    monkeypatch.setattr(expert_product, "PACKED_TYPES", frozenset({"Q4_K", "Q8_0", "Q4_0"}))
    given = make(device, slots_per_row, has_options)
    routing = sort_by_expert(given["ids"], E)
    stack = ExpertStack(given["blocks"], "Q4_K", given["factor"])
    pair = (given["a"], given["b"]) if has_pair else None
    order = (routing.slot, routing.bounds, stack, pair, 0.7, "exact", given["mask"])
    y, h = expert_linear_gpu.forward(given["x"], *order)
    results = [y, *expert_linear_gpu.backward(given["dy"], given["x"], h, *order, True)]
    for result, exact in zip(results, reference(given, slots_per_row, has_pair, 0.7), strict=False):
        assert float((result.double() - exact).norm() / exact.norm()) < 2e-6
    assert expert_linear_gpu.backward(given["dy"], given["x"], h, *order, False)[0].numel() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [1, J])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operation_takes_that_way_on_a_gpu(width, dtype):
    device = torch.device("cuda")
    torch.use_deterministic_algorithms(False)
    slots_per_row = J // width
    given = make(device, slots_per_row, False)
    weight = QuantTensor("blk.0.ffn_up_exps.weight", "Q4_K", (E, N, K), given["blocks"])
    x = given["x"].to(dtype).view(T, width, K).requires_grad_()
    a, b = given["a"].requires_grad_(), given["b"].requires_grad_()
    compute = "exact" if dtype == torch.float32 else "auto"
    y = expert_linear(x, given["ids"], weight, lora_a_ERK=a, lora_b_ENR=b, scale=0.7, compute=compute)
    gradients = torch.autograd.grad(y, (x, a, b), given["dy"].view(T, J, N).to(dtype))
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    for result, exact in zip((y.detach(), *gradients), reference(given, slots_per_row, True, 0.7), strict=True):
        assert float((result.double().flatten() - exact.flatten()).norm() / exact.norm()) < bound
