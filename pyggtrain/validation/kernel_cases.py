"""The cases of the self-test: what there is to run, and one of them run.

The cases and tolerances are the tests' own (`kernels/reference`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from pyggtrain import ops
from pyggtrain.gguf import QuantTensor
from pyggtrain.kernels.dequant import DECODERS
from pyggtrain.kernels.reference import dequant as reference
from pyggtrain.kernels.reference.cases import (
    QUANT_LINEAR_CASES,
    QuantLinearCase,
    dtypes_of,
    random_blocks,
    random_factors,
)
from pyggtrain.kernels.reference.comparison import Comparison, as_near_as_torch, relatively_close, same_bits
from pyggtrain.ops import mmq, quant_matmul
from pyggtrain.ops.quant_linear import quant_linear

# ggml rounds x to 8 bits: 0.5-0.7 % (docs/numerics.md), and 1.2 % for one row against weights of random bits.
_EIGHT_BIT_NOISE = 2e-2

Case = tuple[str, Callable[[], list[Comparison]]]
"""Its name, and what runs it."""


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        case: its name.
        comparisons: of each result with its reference.
        failure: the exception that ended it, or None.
    """

    case: str
    comparisons: tuple[Comparison, ...]
    failure: str | None = None


def run_case(case: Case) -> Outcome:
    """Run a case. An exception is an outcome."""
    name, run = case
    try:
        return Outcome(name, tuple(run()))
    # A kernel that does not compile or aborts is what a self-test is there to tell.
    except Exception as error:  # noqa: BLE001
        return Outcome(name, (), f"{type(error).__name__}: {error}")


def gpu_cases(device: torch.device) -> dict[str, list[Case]]:
    """Kernel -> its cases on a device: a GPU, or a CPU with Triton's interpreter."""
    # Defines the kernels, which needs Triton.
    from pyggtrain.kernels.reference.checks import CHECKS

    cases: dict[str, list[Case]] = {
        kernel: [
            (f"{check.id} {str(dtype).removeprefix('torch.')}", partial(check.run, dtype, device))
            for check in checks
            for dtype in dtypes_of(device)
            if dtype in check.dtypes
        ]
        for kernel, checks in CHECKS.items()
    }
    if device.type == "cuda" and mmq.types():
        cases["mmq"] = [
            (f"{type}_{name}", partial(check, type, device))
            for type in sorted(mmq.types())
            for name, check in (("dense", _check_mmq), ("experts", _check_mmq_experts))
        ]
    return cases


def compile_product(type: str, num_rows: int, num_columns: int, num_tokens: int, *, device: torch.device) -> None:
    """Run both directions of a product once, decoded on the way into the matrix units."""
    decoder = DECODERS[type]
    row_bytes = num_columns // decoder.block_size * decoder.block_bytes
    blocks = torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=device)
    x = torch.zeros(num_tokens, num_columns, dtype=torch.bfloat16, device=device)
    dy = torch.zeros(num_tokens, num_rows, dtype=torch.bfloat16, device=device)
    quant_matmul.forward(x, blocks, type, compute="fused")
    quant_matmul.backward(dy, blocks, type, compute="fused", out=torch.empty_like(x))


def cpu_cases() -> dict[str, list[Case]]:
    """Operation -> its cases on a CPU."""
    return {
        "ggml dequantize": [(type, partial(_check_dequantize, type)) for type in DECODERS],
        "quant_linear": [
            (f"{type}_{case.id}", partial(_check_quant_linear, type, case))
            for type in DECODERS
            for case in QUANT_LINEAR_CASES
        ],
    }


def _check_dequantize(type: str) -> list[Comparison]:
    """ggml's own decoder against the reference, bit by bit."""
    blocks = random_blocks(type, 9, 4 * DECODERS[type].block_size, generator=torch.Generator().manual_seed(0))
    exact = reference.dequantize(blocks, type, dtype=torch.float32)
    return [same_bits("weights", ops.dequantize(_weight(type, blocks)), exact)]


def _check_quant_linear(type: str, case: QuantLinearCase) -> list[Comparison]:
    """y = x Wᵀ and dx = dy W, with decoded weights and with ggml's 8-bit activations."""
    generator = torch.Generator().manual_seed(0)
    blocks = random_blocks(type, case.out_features, case.in_features, generator=generator)
    weight, exact = _weight(type, blocks), reference.dequantize(blocks, type, dtype=torch.float64)
    x = torch.randn(case.tokens, case.in_features, generator=generator)
    dy = torch.randn(case.tokens, case.out_features, generator=generator)
    leaf = x.clone().requires_grad_()
    y = quant_linear(leaf, weight, compute="exact")
    y.backward(dy)  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    expected = x.double() @ exact.t()
    return [
        as_near_as_torch("y", y.detach(), x @ exact.float().t(), expected),
        as_near_as_torch("dx", leaf.grad, dy @ exact.float(), dy.double() @ exact),
        relatively_close("y with ggml", quant_linear(x, weight, compute="ggml"), expected, bound=_EIGHT_BIT_NOISE),
    ]


def _weight(type: str, blocks: torch.Tensor) -> QuantTensor:
    columns = blocks.shape[1] // DECODERS[type].block_bytes * DECODERS[type].block_size
    return QuantTensor(name="blk.0.attn_q.weight", type=type, shape=(blocks.shape[0], columns), blocks=blocks)


def _check_mmq(type: str, device: torch.device) -> list[Comparison]:
    """llama.cpp's products, x in 8 bits: whole tiles and parts of some, x in float32 and bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    comparisons = []
    for rows, columns, tokens in ((128, 512, 33), (70, 256, 1), (130, 768, 150)):
        blocks = random_factors(type, rows, columns, generator=generator)
        exact = reference.dequantize(blocks, type, dtype=torch.float64)
        x = torch.randn(tokens, columns, device=device, generator=generator).bfloat16()
        for dtype in (torch.float32, torch.bfloat16):
            y = mmq.forward(x.to(dtype), blocks, type)
            comparisons.append(relatively_close("y", y, x.double() @ exact.t(), bound=_EIGHT_BIT_NOISE))
    return comparisons


def _check_mmq_experts(type: str, device: torch.device) -> list[Comparison]:
    """The same with the weights of each token's experts; experts that read one row, and a row each."""
    generator = torch.Generator(device).manual_seed(0)
    comparisons = []
    for experts, rows, columns, tokens, used, inputs in ((8, 128, 512, 33, 2, 1), (8, 70, 256, 9, 3, 3)):
        blocks = random_factors(type, experts * rows, columns, generator=generator)
        exact = reference.dequantize(blocks, type, dtype=torch.float64).view(experts, rows, columns)
        ids = torch.rand(tokens, experts, device=device, generator=generator).argsort(1)[:, :used]
        x = torch.randn(tokens, inputs, columns, device=device, generator=generator)
        y = mmq.experts_forward(x, blocks.view(experts, rows, -1), type, ids)
        expected = torch.einsum("tjk,tjnk->tjn", x.expand(tokens, used, columns).double(), exact[ids])
        comparisons.append(relatively_close("y", y, expected, bound=_EIGHT_BIT_NOISE))
    return comparisons
