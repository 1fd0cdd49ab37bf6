"""Every kernel on every case against its float64 reference: what the tests assert and `pyggtrain selftest` reports.

Needs Triton, and a GPU or Triton's interpreter (TRITON_INTERPRET=1 before the first import).
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from pyggtrain.kernels import cross_entropy, fp8, grouped_lora, lora, moe_routing, rms_norm, rope, swiglu, top_k
from pyggtrain.kernels.attention.backward import attention_backward
from pyggtrain.kernels.attention.forward import attention_forward
from pyggtrain.kernels.attention.mask import AttentionMask
from pyggtrain.kernels.dequant import DECODERS, dequantize
from pyggtrain.kernels.dequant_matmul import DTYPES, dequant_matmul_backward, dequant_matmul_forward
from pyggtrain.kernels.expert_swiglu import SWIGLU, Glu, expert_swiglu_backward, expert_swiglu_forward
from pyggtrain.kernels.grouped_dequant_matmul import grouped_dequant_backward, grouped_dequant_forward
from pyggtrain.kernels.grouped_matmul import LowRank, grouped_matmul_backward, grouped_matmul_forward, padded_rank
from pyggtrain.kernels.reference import attention as attention_reference
from pyggtrain.kernels.reference import cross_entropy as cross_entropy_reference
from pyggtrain.kernels.reference import dequant as dequant_reference
from pyggtrain.kernels.reference import dequant_matmul as dequant_matmul_reference
from pyggtrain.kernels.reference import experts as expert_reference
from pyggtrain.kernels.reference import fp8 as fp8_reference
from pyggtrain.kernels.reference import lora as lora_reference
from pyggtrain.kernels.reference import moe_routing as routing_reference
from pyggtrain.kernels.reference import rms_norm as rms_norm_reference
from pyggtrain.kernels.reference import rope as rope_reference
from pyggtrain.kernels.reference import swiglu as swiglu_reference
from pyggtrain.kernels.reference import top_k as top_k_reference
from pyggtrain.kernels.reference.cases import (
    ATTENTION_CASES,
    CONVOLUTION_CASES,
    CROSS_ENTROPY_CASES,
    DELTA_RULE_CASES,
    DEQUANT_MATMUL_CASES,
    DEQUANT_MATMUL_SHAPE_CASES,
    DEQUANTIZE_CASES,
    EXPERT_CASES,
    EXPERT_TYPES,
    GATE_CASES,
    GATED_NORM_CASES,
    LINEAR_CROSS_ENTROPY_CASES,
    LORA_CASES,
    ROPE_CASES,
    ROW_CASES,
    TOP_K_CASES,
    AttentionCase,
    CrossEntropyCase,
    DequantizeCase,
    DequantMatmulCase,
    ExpertCase,
    LinearCrossEntropyCase,
    LoraCase,
    RopeCase,
    RowCase,
    TopKCase,
    random_blocks,
    random_factors,
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
    block_size = DECODERS[type].block_size
    columns = math.ceil(case.columns / block_size) * block_size
    blocks = random_factors(type, case.rows, columns, generator=generator)
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
    weight = torch.rand(case.width, device=device, generator=torch.Generator(device).manual_seed(1)) + 0.5
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
    weight = torch.rand(case.width, device=device, generator=torch.Generator(device).manual_seed(1)) + 0.5
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


def check_routing(case: ExpertCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    ids = case.ids(device)
    routing = moe_routing.sort_by_expert(ids, case.experts)
    slot, bounds = routing_reference.sort_by_expert(ids, case.experts)
    generator = torch.Generator(device).manual_seed(0)
    y = torch.randn(ids.numel(), case.in_features + 8, device=device, generator=generator).to(dtype)[:, :-8]
    residual = torch.randn(case.tokens, case.in_features, device=device, generator=generator).to(dtype)
    probs = torch.rand(ids.shape, device=device, generator=generator)
    comparisons = [
        Comparison("slot", float((routing.slot != slot).sum()), 0.0),
        Comparison("bounds", float((routing.bounds != bounds).sum()), 0.0),
    ]
    for weights, added in ((None, None), (probs, residual)):
        out = moe_routing.combine(y, case.chosen, probs=weights, residual=added)
        exact = routing_reference.combine(y, case.chosen, probs=weights, residual=added)
        comparisons.append(as_close_as_torch("combined", out, exact.to(dtype), exact, terms=case.chosen))
    return comparisons


def check_top_k(case: TopKCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    generator = torch.Generator().manual_seed(case.columns)
    rows = torch.randn(case.tokens, case.columns + 3, generator=generator)
    rows = (rows * case.steps).round() / case.steps
    if case.is_hostile:
        for number in (-0.0, math.inf, -math.inf, math.nan):
            rows[torch.rand(rows.shape, generator=generator) < 0.02] = number
    x = rows.to(dtype)[:, : case.columns]
    ids = top_k.top_k(x.to(device), case.chosen).cpu()
    return [Comparison("ids", float((ids != top_k_reference.top_k(x, case.chosen)).sum()), 0.0)]


@dataclass(frozen=True, eq=False)
class ExpertInputs:
    """What the products with experts read, rows in the order of the places unless said otherwise."""

    routing: moe_routing.Routing
    x_of_tokens: torch.Tensor
    dy_of_slots: torch.Tensor
    h: torch.Tensor
    lora_a: list[torch.Tensor]
    lora_b: list[torch.Tensor]
    expert_scale: torch.Tensor
    bias: torch.Tensor

    @property
    def x(self) -> torch.Tensor:
        return self.x_of_tokens[self.routing.slot.long() // self.routing.num_chosen]

    @property
    def dy(self) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.dy_of_slots[self.routing.slot.long()].chunk(2, 1)
        return first, second


def expert_inputs(case: ExpertCase, dtype: torch.dtype, device: torch.device) -> ExpertInputs:
    """Two parts, as gate and up are; h and dh are one, [S, 2 BR]."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    routing = moe_routing.sort_by_expert(case.ids(device), case.experts)
    num_slots, rank = routing.num_slots, case.rank
    h = torch.zeros(num_slots, 2, padded_rank(rank), dtype=dtype, device=device)
    h[..., :rank] = normal(num_slots, 2, rank).to(dtype)
    return ExpertInputs(
        routing,
        normal(case.tokens, case.in_features + 8).to(dtype)[:, :-8],
        normal(num_slots, 2 * case.out_features + 8).to(dtype)[:, :-8],
        h.flatten(1),
        [normal(case.experts, rank, case.in_features) for _ in range(2)],
        [normal(case.experts, case.out_features, rank) for _ in range(2)],
        torch.rand(case.experts, device=device, generator=generator) + 0.5,
        normal(case.experts, case.out_features),
    )


def check_grouped_matmul(type: str, case: ExpertCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    """Both products with decoded weights (in two slices) and with packed ones."""
    inputs, generator = expert_inputs(case, dtype, device), torch.Generator(device).manual_seed(1)
    routing, num_out, num_in = inputs.routing, case.out_features, case.in_features
    stacks = [random_factors(type, case.experts * num_out, num_in, generator=generator) for _ in range(2)]
    weights = torch.stack([dequant_reference.dequantize(stack, type, dtype=dtype) for stack in stacks])
    weights = weights.view(2, case.experts, num_out, num_in)
    blocks = [stack.view(case.experts, num_out, -1) for stack in stacks]
    lora_a, lora_b = ([factor.to(dtype) for factor in factors] for factors in (inputs.lora_a, inputs.lora_b))
    rank, padded = case.rank, padded_rank(case.rank)
    hs, biases = inputs.h.split(padded, 1), [inputs.bias, inputs.bias.flip(0)]
    options: dict[str, Any] = {"expert_scale": inputs.expert_scale}
    places = (
        torch.empty_like(routing.slot)
        .scatter_(0, routing.slot.long(), torch.arange(routing.num_slots, dtype=torch.int32, device=device))
        .long()
    )
    exact = [
        expert_reference.grouped_matmul_forward(
            inputs.x, weight, routing.bounds, h=h[:, :rank], lora_b=b, bias=bias, **options
        )
        for weight, h, b, bias in zip(weights, hs, lora_b, biases, strict=True)
    ]
    exact_dx = expert_reference.grouped_matmul_backward(
        inputs.dy, list(weights), routing.bounds, dh=[h[:, :rank] for h in hs], lora_a=lora_a, **options
    )[places]
    forward = options | {"low_rank": LowRank(hs[0], (inputs.lora_b[0],)), "slots_per_row": case.chosen}
    together = forward | {"low_rank": LowRank(inputs.h, tuple(inputs.lora_b)), "biases": biases}
    backward = options | {"low_rank": LowRank(inputs.h, tuple(inputs.lora_a)), "slots_per_row": 1, "to_slots": True}

    def empty(width: int) -> torch.Tensor:
        return torch.full((routing.num_slots, width), float("nan"), dtype=dtype, device=device)

    x, dy = inputs.x_of_tokens, inputs.dy_of_slots
    y = grouped_dequant_forward(x, blocks[0], type, routing, out=empty(num_out), bias=biases[0], **forward)
    dx = grouped_dequant_backward(dy, blocks, type, routing, out=empty(num_in), **backward)
    results = [("packed y", y, exact[0], num_in), ("packed dx", dx, exact_dx, 2 * num_out)]
    if type == EXPERT_TYPES[0]:
        # Decoded weights are the same for every type.
        y, both, dx, half = empty(num_out), empty(2 * num_out), empty(num_in), case.experts // 2
        for first, end in ((0, half), (half, case.experts)):
            part = weights[:, first:end]
            grouped_matmul_forward(x, part[:1], routing, out=y, first_expert=first, biases=biases[:1], **forward)
            grouped_matmul_forward(x, part, routing, out=both, first_expert=first, **together)
            grouped_matmul_backward(dy, part, routing, out=dx, first_expert=first, **backward)
        results += [
            ("decoded y", y, exact[0], num_in),
            ("decoded y of both parts", both, torch.cat(exact, 1), num_in),
            ("decoded dx", dx, exact_dx, 2 * num_out),
        ]
    return [
        as_close_as_torch(name, ours, expected.to(dtype), expected, terms=4 * terms)
        for name, ours, expected, terms in results
    ]


def check_grouped_lora(case: ExpertCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    inputs, rank = expert_inputs(case, dtype, device), case.rank
    routing, padded = inputs.routing, padded_rank(case.rank)
    lora_a, lora_b, h = inputs.lora_a[0], inputs.lora_b[0], inputs.h[:, :padded]
    dy = inputs.dy_of_slots[:, : case.out_features]
    low_rank = grouped_lora.project(
        inputs.x_of_tokens, [lora_a, inputs.lora_a[-1]], routing, scales=[0.5, 2.0], slots_per_row=case.chosen
    )
    both_dy = torch.cat([dy, 2 * dy], 1)
    dh = grouped_lora.project(
        both_dy, [grouped_lora.turned(lora_b, dtype)] * 2, routing, scales=[0.5, -0.25], slots_per_row=1
    )
    d_lora_a = grouped_lora.outer(
        h, inputs.x_of_tokens, routing, rank=rank, is_lora_b=False, scale=0.5, slots_per_row=case.chosen
    )
    d_lora_b = grouped_lora.outer(h, dy, routing, rank=rank, is_lora_b=True, slots_per_row=1)
    bounds, dy_places, b_turned = routing.bounds, inputs.dy[0], lora_b.to(dtype).transpose(1, 2)
    exact = {
        "h": expert_reference.project(inputs.x, lora_a.to(dtype), bounds, scale=0.5),
        "h of a second part": expert_reference.project(inputs.x, inputs.lora_a[-1].to(dtype), bounds, scale=2.0),
        "dh": expert_reference.project(dy_places, b_turned, bounds, scale=0.5),
        "dh of a second part": expert_reference.project(dy_places, b_turned, bounds, scale=-0.5),
        "dA": expert_reference.outer(h[:, :rank], inputs.x, bounds, scale=0.5),
        "dB": expert_reference.outer(h[:, :rank], dy_places, bounds, scale=1.0).transpose(1, 2),
    }
    parts = [part for both in (low_rank, dh) for part in both.chunk(2, 1)]
    ours = dict(zip(exact, [*(part[:, :rank] for part in parts), d_lora_a, d_lora_b], strict=True))
    padding = sum(part[:, rank:].count_nonzero() for part in parts)
    return [
        Comparison("padding", float(padding), 0.0),
        *(
            as_close_as_torch(name, ours[name], value.to(ours[name].dtype), value, terms=4 * case.in_features)
            for name, value in exact.items()
        ),
    ]


def check_expert_swiglu(case: ExpertCase, glu: Glu, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    routing = moe_routing.sort_by_expert(case.ids(device), case.experts)
    rows = RowCase(routing.num_slots, case.out_features, gap=8)
    da, gate, up = random_rows(rows, 3, dtype, device)
    probs = torch.rand(case.tokens, case.chosen, device=device, generator=torch.Generator(device).manual_seed(0))
    weight = probs.flatten()[routing.slot.long()]
    settings = asdict(glu)
    expected_a = expert_reference.expert_swiglu_forward(gate, up, **settings)
    expected = (expected_a, *expert_reference.expert_swiglu_backward(da, gate, up, weight, **settings))
    a = expert_swiglu_forward(gate, up, glu=glu)
    d_probs = expert_swiglu_backward(da, gate, up, routing, probs, glu=glu, d_gate=gate, d_up=up, weighted=da)
    results = (a, gate, up, da, d_probs.flatten()[routing.slot.long()])
    names = ("a", "d_gate", "d_up", "weighted", "d_probs")
    return [
        as_close_as_torch(name, ours, exact.to(ours.dtype), exact, terms=4 * case.out_features)
        for name, ours, exact in zip(names, results, expected, strict=True)
    ]


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
    "top_k": [Check(case.id, partial(check_top_k, case)) for case in TOP_K_CASES],
    "moe_routing": [Check(case.id, partial(check_routing, case)) for case in EXPERT_CASES],
    "grouped_matmul": [
        Check(f"{type}_{case.id}", partial(check_grouped_matmul, type, case))
        for type in EXPERT_TYPES
        for case in (EXPERT_CASES if type == "Q4_K" else EXPERT_CASES[1:2])
    ],
    "grouped_lora": [Check(case.id, partial(check_grouped_lora, case)) for case in EXPERT_CASES],
    "expert_swiglu": [
        Check(f"{case.id}_{name}", partial(check_expert_swiglu, case, glu))
        for case in EXPERT_CASES
        for name, glu in (("swiglu", SWIGLU), ("limited", Glu(1.702, 1.0, 0.8)))
    ],
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
