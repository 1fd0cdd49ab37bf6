"""The ways of a GPU to multiply with a quantised weight: which are offered where, and that all give the product."""

import pytest
import torch
from pyggtrain.kernels.dequant import DECODERS
from pyggtrain.kernels.reference import dequant as reference
from pyggtrain.kernels.reference.cases import random_blocks

from pyggtrain.errors import BridgeError
from pyggtrain.gguf import QuantTensor
from pyggtrain.ops import mmq, product_choice, quant_linear, quant_matmul

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_mmq = pytest.mark.skipif(not mmq.types() or not torch.cuda.is_available(), reason="needs a build with CUDA")


def blocks_of(type: str, rows: int, columns: int, device: str = "cpu") -> torch.Tensor:
    return random_blocks(type, rows, columns, generator=torch.Generator(device).manual_seed(0))


@pytest.fixture
def offered(monkeypatch):
    """What `choose` is offered; it takes the last."""
    seen = []

    def choose(product, ways, device):
        seen.append((product, list(ways)))
        return list(ways)[-1]

    monkeypatch.setattr(product_choice, "choose", choose)
    return seen


def way(direction="forward", num_tokens=4, type="Q4_K", columns=512, compute="auto", dtype=torch.bfloat16):
    blocks = torch.zeros(8, columns // 256 * 144 if type == "Q4_K" else columns * 2, dtype=torch.uint8)
    x = torch.zeros(num_tokens, columns if direction == "forward" else 8, dtype=dtype)
    return quant_matmul._way(direction, x, blocks, type, compute)


@pytest.mark.parametrize(
    ("direction", "num_tokens", "names"),
    [
        ("forward", 1, ["bf16", "fused", "mmq"]),
        ("forward", 128, ["bf16", "fused", "mmq"]),
        ("forward", 129, ["bf16", "mmq"]),
        ("backward", 128, ["bf16", "fused"]),
    ],
)
def test_ways_are_offered_where_they_can_serve(offered, monkeypatch, direction, num_tokens, names):
    monkeypatch.setattr(mmq, "types", lambda: frozenset({"Q4_K"}))
    assert way(direction, num_tokens) == names[-1]
    ((product, seen),) = offered
    assert seen == names
    assert (product.direction, product.type, product.num_rows, product.num_columns) == (direction, "Q4_K", 8, 512)
    assert product.max_tokens == product_choice.class_of(num_tokens) and product.dtype == "bfloat16"


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_tokens": 129},
        {"direction": "backward", "num_tokens": 300},
        {"type": "F16"},
        {"compute": "exact"},
        {"compute": "bf16"},
        {"dtype": torch.float32},
        {"num_tokens": 0},
    ],
)
def test_where_there_is_one_way_nothing_is_measured(offered, arguments):
    assert way(**arguments) == "bf16"
    assert not offered


def test_a_way_that_was_asked_for_is_taken(offered, monkeypatch):
    assert way(compute="fused", num_tokens=5000) == "fused"
    monkeypatch.setattr(mmq, "types", lambda: frozenset({"Q4_K"}))
    assert way(compute="mmq") == "mmq"
    assert not offered
    assert way("backward", compute="mmq", num_tokens=300) == "bf16"


def test_mmq_says_what_it_cannot_multiply(monkeypatch):
    monkeypatch.setattr(mmq, "types", frozenset)
    with pytest.raises(ValueError, match=r"cannot multiply Q4_K .* this build has no MMQ"):
        way(compute="mmq")
    monkeypatch.setattr(mmq, "types", lambda: frozenset({"Q8_0"}))
    assert not mmq.takes("Q8_0", 576) and mmq.takes("Q8_0", 768)


@pytest.mark.parametrize("compute", ["bf16", "fused", "mmq", "fp8"])
def test_ways_of_a_gpu_are_refused_on_a_cpu(compute):
    weight = QuantTensor(name="w", type="Q8_0", shape=(8, 64), blocks=blocks_of("Q8_0", 8, 64))
    with pytest.raises(ValueError, match=f"compute='{compute}' is for a GPU"):
        quant_linear(torch.zeros(2, 64), weight, compute=compute)


def test_a_build_without_cuda_says_so(monkeypatch):
    if mmq.types():
        pytest.skip("this build has MMQ")
    from pyggtrain import _bridge

    with pytest.raises(BridgeError, match="PYGGTRAIN_CUDA=ON"):
        _bridge.mmq_workspace_bytes("Q8_0", num_rows=8, num_columns=256, num_tokens=1, device=0)
    assert _bridge.CUDA_ARCHITECTURES == ""


@pytest.mark.parametrize("accumulate", [False, True])
def test_fused_products_write_or_add(device, accumulate):
    blocks = blocks_of("Q8_0", 40, 96, device.type)
    exact = reference.dequantize(blocks, "Q8_0", dtype=torch.float64)
    generator = torch.Generator(device).manual_seed(1)
    for direction, width, weight in (("forward", 96, exact.t()), ("backward", 40, exact)):
        x = torch.randn(3, width, device=device, generator=generator).half()
        out = torch.randn(3, weight.shape[1], device=device, generator=generator)
        expected = x.double() @ weight + (out.double() if accumulate else 0)
        result = quant_matmul._fused(direction, x, blocks, "Q8_0", out, accumulate)
        assert (result.double() - expected).norm() / expected.norm() < 1e-3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compute", ["auto", "bf16", "fused", "mmq"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_way_gives_the_product_and_its_gradient(compute, dtype):
    if compute == "mmq" and not mmq.types():
        pytest.skip("needs a build with CUDA")
    for type, num_tokens in (("Q4_K", 5), ("IQ2_XXS", 130), ("Q8_0", 1)):
        weight = QuantTensor(name="w", type=type, shape=(70, 512), blocks=blocks_of(type, 70, 512, "cuda"))
        exact = reference.dequantize(weight.blocks, type, dtype=torch.float64)
        x = torch.randn(num_tokens, 512, device="cuda").to(dtype).requires_grad_()
        residual = torch.randn(num_tokens, 70, device="cuda").to(dtype)
        y = quant_linear(x, weight, residual_TN=residual, compute=compute)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert y.dtype == dx.dtype == dtype
        expected = x.detach().double() @ exact.t() + residual.double()
        # llama.cpp rounds x to 8 bits, the others to half precision at least
        for result, wanted in ((y.detach(), expected), (dx, dy.double() @ exact)):
            assert (result.double() - wanted).norm() / wanted.norm() < 2e-2


@pytest.mark.gpu
@needs_mmq
def test_mmq_is_captured_in_a_graph():
    blocks = blocks_of("Q5_K", 512, 1024, "cuda")
    x = torch.randn(64, 1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mmq.forward(x, blocks, "Q5_K")
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, mmq.forward(x, blocks, "Q5_K"))


@pytest.mark.gpu
@needs_mmq
def test_mmq_writes_nothing_but_its_rows():
    blocks = blocks_of("Q4_0", 70, 256, "cuda")
    x = torch.randn(9, 256, device="cuda")
    wide = torch.full((9, 80), 7.0, device="cuda")
    mmq.forward(x, blocks, "Q4_0", out=wide[:, 5:75])
    assert torch.equal(wide[:, 5:75], mmq.forward(x, blocks, "Q4_0"))
    assert (wide[:, :5] == 7).all() and (wide[:, 75:] == 7).all()


@pytest.mark.gpu
@needs_mmq
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_columns": 288}, "num_columns is 288; needed: a positive multiple of 256"),
        ({"device": 99}, "device is 99"),
        ({"x": 4}, "x is at address 4"),
        ({"x_stride": 1022}, "x_stride is 1022"),
        ({"y_stride": 511}, "y_stride is 511"),
        ({"y": 0}, "y is at address 0"),
        ({"workspace_bytes": 1024}, "workspace is 1024 bytes"),
        ({"num_tokens": 1 << 40}, "units of work"),
    ],
)
def test_what_ggml_would_abort_on_is_an_error(changed, message):
    from pyggtrain import _bridge

    blocks = blocks_of("Q5_K", 512, 1024, "cuda")
    x, y, workspace = (torch.zeros(1 << 20, device="cuda") for _ in range(3))
    arguments = {
        "blocks": blocks.data_ptr(),
        "num_rows": 512,
        "num_columns": 1024,
        "x": x.data_ptr(),
        "x_stride": 1024,
        "num_tokens": 64,
        "y": y.data_ptr(),
        "y_stride": 512,
        "workspace": workspace.data_ptr(),
        "workspace_bytes": 4 << 20,
        "device": 0,
        "stream": 0,
    }
    with pytest.raises(BridgeError, match=message):
        _bridge.mmq("Q5_K", **(arguments | changed))
    torch.cuda.synchronize()


def test_every_type_with_kernels_of_llama_cpp_has_a_decoder_here():
    assert mmq.types() <= set(DECODERS)
