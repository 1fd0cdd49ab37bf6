"""Every kernel on every case against its float64 reference: what the tests assert and `pyggtrain selftest` reports.

Needs Triton, and a GPU or Triton's interpreter (TRITON_INTERPRET=1 before the first import).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from pyggtrain.kernels import cross_entropy, fp8, lora, rms_norm, rope, swiglu
from pyggtrain.kernels.attention.backward import attention_backward
from pyggtrain.kernels.attention.forward import attention_forward
from pyggtrain.kernels.attention.mask import AttentionMask
from pyggtrain.kernels.dequant import DECODERS, dequantize
from pyggtrain.kernels.dequant_matmul import DTYPES, dequant_matmul_backward, dequant_matmul_forward
from pyggtrain.kernels.reference import attention as attention_reference
from pyggtrain.kernels.reference import cross_entropy as cross_entropy_reference
from pyggtrain.kernels.reference import dequant as dequant_reference
from pyggtrain.kernels.reference import dequant_matmul as dequant_matmul_reference
from pyggtrain.kernels.reference import fp8 as fp8_reference
from pyggtrain.kernels.reference import lora as lora_reference
from pyggtrain.kernels.reference import rms_norm as rms_norm_reference
from pyggtrain.kernels.reference import rope as rope_reference
from pyggtrain.kernels.reference import swiglu as swiglu_reference
from pyggtrain.kernels.reference.cases import (
    ATTENTION_CASES,
    CONVOLUTION_CASES,
    CROSS_ENTROPY_CASES,
    DELTA_RULE_CASES,
    DEQUANT_MATMUL_CASES,
    DEQUANT_MATMUL_SHAPE_CASES,
    DEQUANTIZE_CASES,
    GATE_CASES,
    GATED_NORM_CASES,
    LINEAR_CROSS_ENTROPY_CASES,
    LORA_CASES,
    ROPE_CASES,
    ROW_CASES,
    AttentionCase,
    CrossEntropyCase,
    DequantizeCase,
    DequantMatmulCase,
    LinearCrossEntropyCase,
    LoraCase,
    RopeCase,
    RowCase,
    random_blocks,
    random_rows,
)
from pyggtrain.kernels.reference.comparison import (
    Comparison,
    as_close_as_torch,
    relatively_close,
    same_bits,
    within,
)
from pyggtrain.kernels.reference.delta_net import (
    check_convolution,
    check_delta_gates,
    check_delta_rule,
    check_gated_rms_norm,
)

EPS = 1e-5


@dataclass(frozen=True)
class Check:
    """A kernel on one case.

    Attributes:
        id: of the case.
        run: (dtype, device) -> each result beside its reference.
        dtypes: that the kernel takes; all of `dtypes_of` by default.
    """

    id: str
    run: Callable[[torch.dtype, torch.device], list[Comparison]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


def check_dequantize(type: str, case: DequantizeCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    columns = case.row_blocks * DECODERS[type].block_size
    blocks = random_blocks(type, case.rows, columns, generator=torch.Generator(device).manual_seed(2))
    padded = torch.full((case.rows, columns + case.out_padding), float("nan"), dtype=dtype, device=device)
    out = dequantize(blocks, type, out=padded[:, :columns])
    written_beyond = (~padded[:, columns:].isnan()).sum().item()
    return [
        same_bits("weights", out, dequant_reference.dequantize(blocks, type, dtype=dtype)),
        Comparison("written beyond the row", float(written_beyond), 0.0),
    ]


def check_dequant_matmul(
    type: str, case: DequantMatmulCase, dtype: torch.dtype, device: torch.device
) -> list[Comparison]:
    generator = torch.Generator(device).manual_seed(3)
    columns = case.row_blocks * DECODERS[type].block_size
    blocks = random_blocks(type, case.rows, columns, generator=generator)
    if type in ("MXFP4", "NVFP4"):
        # random scales of a whole byte overflow float16
        scales = blocks.view(-1, DECODERS[type].block_bytes)[:, : 1 if type == "MXFP4" else 4]
        scales.copy_(scales % 8 + (116 if type == "MXFP4" else 32))
    exact = dequant_reference.dequantize(blocks, type, dtype=torch.float32)

    def rows(width: int) -> torch.Tensor:
        return torch.randn(case.tokens, width + 8, device=device, generator=generator).to(dtype)[:, :width]

    comparisons = []
    for name, width, ours, reference, rounded in (
        ("y", columns, dequant_matmul_forward, dequant_matmul_reference.dequant_matmul_forward, exact.to(dtype).t()),
        ("dx", case.rows, dequant_matmul_backward, dequant_matmul_reference.dequant_matmul_backward, exact.to(dtype)),
    ):
        x, start = rows(width), rows(rounded.shape[1])
        out = start.clone() if case.is_added else None
        result = ours(x, blocks, type, out=out, accumulate=case.is_added, num_parts=case.num_parts)
        expected, plain = reference(x, blocks, type), x.float() @ rounded.float()
        if case.is_added:
            expected, plain = expected + start.double(), plain + start.float()
        comparisons.append(as_close_as_torch(name, result, plain.to(dtype), expected, terms=width))
    return comparisons


def check_fp8(case: RowCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    """Within half a step of the exact value: 2^-4 of it, and 2^-10 where steps no longer shrink."""
    (x,) = random_rows(case, 1, dtype, device)
    comparisons = []
    for name, ours, reference in (
        ("rows", fp8.quantize_rows, fp8_reference.quantize_rows),
        ("columns", fp8.quantize_columns, fp8_reference.quantize_columns),
    ):
        (q, scale), (exact, exact_scale) = ours(x), reference(x)
        comparisons.append(within(f"scales of {name}", scale, exact_scale, rtol=1e-6, atol=1e-30))
        # Triton's interpreter converts to 8-bit floats wrongly: it truncates, and loses small numbers.
        if device.type == "cuda":
            # a step of float32 more: the product with 448 / max comes before the rounding
            comparisons.append(within(name, q.float(), exact, rtol=2**-4 + 1e-6, atol=2**-10))
    return comparisons


def check_rms_norm_forward(
    case: RowCase, has_residual: bool, dtype: torch.dtype, device: torch.device
) -> list[Comparison]:
    x, residual = random_rows(case, 2, dtype, device)
    added = residual if has_residual else None
    weight = torch.rand(case.width, device=device) + 0.5
    y, s, inverse_rms = rms_norm.rms_norm_forward(x, weight, eps=EPS, residual=added)
    expected, expected_s, expected_inverse = rms_norm_reference.rms_norm_forward(x, weight, eps=EPS, residual=added)
    plain = F.rms_norm(s, (case.width,), weight.to(dtype), EPS)
    return [
        Comparison("sum", float((s != expected_s).sum()), 0.0),
        as_close_as_torch("y", y, plain, expected),
        within("inverse rms", inverse_rms, expected_inverse, rtol=1e-6, atol=0),
    ]


def check_rms_norm_backward(
    case: RowCase, has_residual: bool, dtype: torch.dtype, device: torch.device
) -> list[Comparison]:
    s, dy, d_residual = random_rows(case, 3, dtype, device)
    added = d_residual if has_residual else None
    weight = torch.rand(case.width, device=device) + 0.5
    inverse_rms = rms_norm_reference.rms_norm_forward(s, weight, eps=EPS)[2].float()
    ds = rms_norm.rms_norm_backward(dy, s, weight, inverse_rms, d_residual=added)
    expected = rms_norm_reference.rms_norm_backward(dy, s, weight, inverse_rms, d_residual=added)
    leaf = s.detach().clone().requires_grad_()
    (plain,) = torch.autograd.grad(F.rms_norm(leaf, (case.width,), weight.to(dtype), EPS), leaf, dy)
    return [as_close_as_torch("ds", ds, plain + d_residual if has_residual else plain, expected)]


def check_swiglu(case: RowCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    gate, up, dy = random_rows(case, 3, dtype, device)
    results = (swiglu.swiglu_forward(gate, up), *swiglu.swiglu_backward(dy, gate, up))
    expected = (swiglu_reference.swiglu_forward(gate, up), *swiglu_reference.swiglu_backward(dy, gate, up))
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (gate, up)]
    y = F.silu(leaves[0]) * leaves[1]
    plain = (y.detach(), *torch.autograd.grad(y, leaves, dy), y.detach())
    names = ("y", "d_gate", "d_up", "y again")
    return [as_close_as_torch(*compared) for compared in zip(names, results, plain, expected, strict=True)]


def rope_inputs(
    case: RopeCase, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x as heads in the middle of a wider row, cos and sin of positions of two documents in a row."""
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(case.tokens, (case.heads + 2) * case.head_size, device=device, generator=generator).to(dtype)
    x = rows.unflatten(1, (-1, case.head_size))[:, 1:-1]
    positions = torch.cat((torch.arange(case.tokens - case.tokens // 3), torch.arange(case.tokens // 3))).to(device)
    frequencies = 10000.0 ** -torch.linspace(0, 1, case.rotary // 2 + 1, device=device)[:-1]
    angles = positions[:, None] * frequencies
    return x, angles.cos(), angles.sin()


def check_rope(case: RopeCase, is_neox: bool, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    x, cos, sin = rope_inputs(case, dtype, device)
    comparisons = []
    for name, ours, exact in (
        ("y", rope.rope_forward, rope_reference.rope_forward),
        ("dx", rope.rope_backward, rope_reference.rope_backward),
    ):
        expected = exact(x, cos, sin, is_neox=is_neox)
        # plain torch with products in the kernel's dtype
        plain = exact(x, cos.to(dtype), sin.to(dtype), is_neox=is_neox).to(dtype)
        comparisons.append(as_close_as_torch(name, ours(x, cos, sin, is_neox=is_neox), plain, expected))
    return comparisons


def check_lora_backward(case: LoraCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    generator = torch.Generator(device).manual_seed(0)

    def rows(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width + 8, device=device, generator=generator).to(dtype)[:, :width]

    dy, x, xa = (rows(case.tokens, width) for width in (case.out_features, case.in_features, case.rank))
    lora_b = rows(case.out_features, case.rank).contiguous()
    results = lora.lora_backward(dy, x, xa, lora_b, scale=0.5)
    expected = lora_reference.lora_backward(dy, x, xa, lora_b, scale=0.5)
    # torch on the CPU sums a float16 product in float16: the bar is a float32 product, rounded once
    dyb = (dy.float() @ lora_b.float() * 0.5).to(dtype)
    plain = (dyb, dyb.float().t() @ x.float(), dy.float().t() @ xa.float() * 0.5)
    terms = max(case.tokens, case.out_features)
    names = ("dyb", "d_lora_a", "d_lora_b")
    return [as_close_as_torch(*compared, terms=terms) for compared in zip(names, results, plain, expected, strict=True)]


def attention_inputs(
    case: AttentionCase, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], AttentionMask, dict[str, Any]]:
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


def plain_attention(tensors: list[torch.Tensor], mask: AttentionMask, options: dict[str, Any]) -> list[torch.Tensor]:
    """o, dq, dk, dv by torch in the inputs' dtype: products as they are, softmax in float32."""
    *leaves, do = (tensor.detach().clone() for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    q, k, v = leaves
    heads, softcap, sinks = q.shape[1], options["softcap"], options["sinks"]
    z = torch.einsum("thk,shk->hts", q, attention_reference.repeat_heads(k, heads)).float() * options["softmax_scale"]
    z = z if softcap is None else softcap * (z / softcap).tanh()
    z = z.masked_fill(~attention_reference.scores(q, k, mask, 1.0, None)[1], float("-inf"))
    z = z if sinks is None else torch.cat((z, sinks[:, None, None].expand(-1, len(q), 1)), 2)
    values = attention_reference.repeat_heads(v, heads)
    o = torch.einsum("hts,shk->thk", z.softmax(2)[..., : len(q)].to(q.dtype), values)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def check_attention(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    tensors, mask, options = attention_inputs(case, dtype, device)
    q, k, v, do = tensors
    o, lse = attention_forward(q, k, v, mask, **options)
    expected, expected_lse = attention_reference.attention_forward(q, k, v, mask, **options)
    backward = {name: value for name, value in options.items() if name != "sinks"}
    gradients = attention_backward(do, q, k, v, o, lse, mask, **backward)
    exact = attention_reference.attention_backward(do, q, k, v, expected, expected_lse, mask, **backward)
    plain = plain_attention(tensors, mask, options)
    # where a token sees only itself, dq is the difference of two equal terms as large as the other gradients
    magnitude = max(tensor.abs().max().item() for tensor in exact)
    terms = len(q) + q.shape[2]
    return [
        within("lse", lse, expected_lse, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 2e-3),
        *(
            as_close_as_torch(*compared, terms=terms, magnitude=magnitude)
            for compared in zip(("o", "dq", "dk", "dv"), (o, *gradients), plain, (expected, *exact), strict=True)
        ),
    ]


def cross_entropy_targets(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Random targets; the first and last token of the vocabulary and ignored rows are among them."""
    targets = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(1))
    targets[1::4] = cross_entropy.IGNORED
    targets[0], targets[-1] = vocabulary - 1, 0
    return targets.to(device)


def check_cross_entropy(case: CrossEntropyCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    generator = torch.Generator(device).manual_seed(0)
    logits = (torch.randn(case.rows, case.vocabulary, device=device, generator=generator) * 4).to(dtype)
    targets = cross_entropy_targets(case.rows, case.vocabulary, device)
    expected_gradient = logits.double()
    expected = cross_entropy_reference.cross_entropy_(expected_gradient, targets, gradient_scale=0.25)
    leaf = logits.clone().requires_grad_()
    plain = F.cross_entropy(leaf.float(), targets, ignore_index=cross_entropy.IGNORED, reduction="none")
    (plain_gradient,) = torch.autograd.grad(plain.sum() * 0.25, leaf)
    losses = cross_entropy.cross_entropy_(logits, targets, gradient_scale=0.25)
    ignored = targets == cross_entropy.IGNORED
    return [
        as_close_as_torch("losses", losses, plain.detach(), expected),
        as_close_as_torch("gradient", logits, plain_gradient, expected_gradient),
        Comparison("ignored rows", float(logits[ignored].count_nonzero() + losses[ignored].count_nonzero()), 0.0),
    ]


def check_linear_cross_entropy(
    case: LinearCrossEntropyCase, dtype: torch.dtype, device: torch.device
) -> list[Comparison]:
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn(10, 256, device=device, generator=generator).to(dtype)
    blocks = random_blocks("Q4_K", 96, 256, generator=generator, magnitude=1e-3)
    targets = cross_entropy_targets(10, 96, device)
    losses, dx = cross_entropy.linear_cross_entropy(
        x,
        blocks,
        "Q4_K",
        targets,
        token_chunk=case.token_chunk,
        workspace=torch.empty(case.workspace_rows, 256, dtype=dtype, device=device),
        gradient_scale=0.5,
    )
    expected, expected_dx = cross_entropy_reference.linear_cross_entropy(x, blocks, "Q4_K", targets, gradient_scale=0.5)
    # Logits and their gradient are rounded to the dtype on the way.
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    return [
        relatively_close("losses", losses, expected, bound=bound),
        relatively_close("dx", dx, expected_dx, bound=bound),
    ]


def _rows(check: Callable[..., list[Comparison]], name: str) -> list[Check]:
    return [
        Check(f"{name}_{case.id}_{'residual' if has_residual else 'plain'}", partial(check, case, has_residual))
        for case in ROW_CASES
        for has_residual in (False, True)
    ]


CHECKS: dict[str, list[Check]] = {
    "dequantize": [
        Check(f"{type}_{case.id}", partial(check_dequantize, type, case))
        for type in DECODERS
        for case in DEQUANTIZE_CASES
    ],
    "dequant_matmul": [
        Check(f"{type}_{case.id}", partial(check_dequant_matmul, type, case), DTYPES)
        for types, cases in (
            (tuple(DECODERS), DEQUANT_MATMUL_CASES),
            (("Q4_K", "Q8_0", "TQ1_0"), DEQUANT_MATMUL_SHAPE_CASES),
        )
        for type in types
        for case in cases
    ],
    "rms_norm": [*_rows(check_rms_norm_forward, "forward"), *_rows(check_rms_norm_backward, "backward")],
    "rope": [
        Check(f"{case.id}_{'neox' if is_neox else 'norm'}", partial(check_rope, case, is_neox))
        for case in ROPE_CASES
        for is_neox in (False, True)
    ],
    "fp8": [Check(case.id, partial(check_fp8, case)) for case in ROW_CASES],
    "swiglu": [Check(case.id, partial(check_swiglu, case)) for case in ROW_CASES],
    "lora": [Check(case.id, partial(check_lora_backward, case)) for case in LORA_CASES],
    "attention": [Check(case.id, partial(check_attention, case)) for case in ATTENTION_CASES],
    "gated_delta_rule": [Check(case.id, partial(check_delta_rule, case)) for case in DELTA_RULE_CASES],
    "causal_conv1d": [Check(case.id, partial(check_convolution, case)) for case in CONVOLUTION_CASES],
    "gated_rms_norm": [Check(case.id, partial(check_gated_rms_norm, case)) for case in GATED_NORM_CASES],
    "delta_gates": [Check(case.id, partial(check_delta_gates, case)) for case in GATE_CASES],
    "cross_entropy": [Check(case.id, partial(check_cross_entropy, case)) for case in CROSS_ENTROPY_CASES],
    "linear_cross_entropy": [
        Check(case.id, partial(check_linear_cross_entropy, case)) for case in LINEAR_CROSS_ENTROPY_CASES
    ],
}
"""Kernel -> its checks."""
