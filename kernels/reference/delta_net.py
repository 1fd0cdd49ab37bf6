"""The kernels of a gated delta net on their cases, each against its float64 reference and plain torch.

Needs Triton, and a GPU or Triton's interpreter.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from pyggtrain.kernels import causal_conv1d, delta_gates, gated_rms_norm
from pyggtrain.kernels.gated_delta_rule.backward import gated_delta_rule_backward
from pyggtrain.kernels.gated_delta_rule.chunks import CHUNK, Chunks
from pyggtrain.kernels.gated_delta_rule.forward import gated_delta_rule_forward
from pyggtrain.kernels.reference import causal_conv1d as causal_conv1d_reference
from pyggtrain.kernels.reference import delta_gates as delta_gates_reference
from pyggtrain.kernels.reference import gated_delta_rule as gated_delta_rule_reference
from pyggtrain.kernels.reference import gated_rms_norm as gated_rms_norm_reference
from pyggtrain.kernels.reference.cases import ConvolutionCase, DeltaRuleCase, RowCase, random_rows
from pyggtrain.kernels.reference.comparison import Comparison, as_close_as_torch, as_near_as_torch

EPS = 1e-5
DeltaRuleInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k, v, log_decay, beta."""


def delta_rule_inputs(
    case: DeltaRuleCase, dtype: torch.dtype, device: torch.device
) -> tuple[DeltaRuleInputs, torch.Tensor, list[int]]:
    """q, k and v as parts of one wider row, with the gates; do; and where documents begin and end."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = sum(case.lengths)
    key_width, width = case.key_heads * case.key_size, case.heads * case.value_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    q, k = (F.normalize(normal(tokens, case.key_heads, case.key_size), dim=-1) for _ in range(2))
    log_decay, beta = -case.decay * normal(tokens, case.heads).abs(), normal(tokens, case.heads).sigmoid()
    if case.has_one_key:
        k = F.normalize(k[:1] + 0.02 * normal(*k.shape), dim=-1)
        beta = 1 - 0.01 * beta
    rows = torch.cat([q.flatten(1), k.flatten(1), normal(tokens, width + 16)], 1).to(dtype)
    q, k = (part.unflatten(1, (case.key_heads, -1)) for part in rows[:, : 2 * key_width].split(key_width, 1))
    v = rows[:, 2 * key_width : 2 * key_width + width].unflatten(1, (case.heads, -1))
    do = normal(tokens, case.heads, case.value_size).to(dtype)
    bounds = torch.tensor((0, *case.lengths)).cumsum(0).tolist()
    return (q, k, v, log_decay, beta), do, bounds


def leaves_of(inputs: DeltaRuleInputs, dtype: torch.dtype | None = None) -> DeltaRuleInputs:
    """Copies that take gradients, in their own dtype or another."""
    q, k, v, log_decay, beta = (x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in inputs)
    return q, k, v, log_decay, beta


def plain_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    bounds: list[int],
    scale: float,
) -> torch.Tensor:
    """o by torch, chunk by chunk: gates, system and state in float32, what enters a product in the inputs' dtype."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # torch on the CPU sums a float16 product in float16: the bar is a float32 product of rounded factors
        return a.to(q.dtype).float() @ b.to(q.dtype).float()

    num_tiles = v.shape[1] // q.shape[1]
    outputs = []
    for start, end in itertools.pairwise(bounds):
        state = torch.zeros(v.shape[1], q.shape[2], v.shape[2], device=q.device)
        for first in range(start, end, CHUNK):
            part = slice(first, min(first + CHUNK, end))
            q_t, k_t = (x[part].repeat(1, num_tiles, 1).transpose(0, 1) for x in (q, k))
            v_t, b_t = v[part].transpose(0, 1), beta[part].t().unsqueeze(-1)
            g_t = log_decay[part].t().cumsum(1).unsqueeze(-1)
            is_later = torch.ones(q_t.shape[1], q_t.shape[1], dtype=torch.bool, device=q.device).triu(1)
            decay = (g_t - g_t.transpose(1, 2)).masked_fill(is_later, float("-inf")).exp()
            system = b_t * product(k_t, k_t.transpose(1, 2)) * decay
            inverse = torch.linalg.solve_triangular(
                system, torch.eye(system.shape[1], device=q.device), upper=False, unitriangular=True
            )
            u_t = product(inverse, b_t * v_t) - product(product(inverse, b_t * g_t.exp() * k_t), state)
            scores = product(q_t, k_t.transpose(1, 2)) * decay
            outputs.append((product(g_t.exp() * q_t, state) + product(scores, u_t)).transpose(0, 1))
            last = g_t[:, -1:]
            state = last.exp() * state + product(((last - g_t).exp() * k_t).transpose(1, 2), u_t)
    return (torch.cat(outputs) * scale).to(q.dtype)


def check_delta_rule(case: DeltaRuleCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    inputs, do, bounds = delta_rule_inputs(case, dtype, device)
    chunks, scale = Chunks.from_bounds(bounds, device), case.key_size**-0.5
    o, _ = gated_delta_rule_forward(*inputs, chunks, scale=scale)
    results = (o, *gated_delta_rule_backward(do, *inputs, chunks, scale=scale))
    expected = gated_delta_rule_reference.gated_delta_rule_forward(*inputs, bounds, scale=scale)
    exact = gated_delta_rule_reference.gated_delta_rule_backward(do, *inputs, bounds, scale=scale)
    leaves = leaves_of(inputs)
    plain_o = plain_delta_rule(*leaves, bounds, scale)
    plain = (plain_o.detach(), *torch.autograd.grad(plain_o, leaves, do))
    names = ("o", "dq", "dk", "dv", "d_log_decay", "d_beta")
    compared = list(zip(names, results, plain, (expected, *exact), strict=True))
    # What a gate gets is a sum of so many terms, as large as do·o and of both signs, that its largest error says
    # little. Of one token alone they cancel: nothing is left but their rounding.
    rounding = torch.finfo(torch.float32).eps * (do.double() * expected).sum(2).abs().max().item()
    gates = [as_near_as_torch(*one) for one in compared[4:]]
    return [
        *(as_close_as_torch(*one, terms=CHUNK + case.key_size) for one in compared[:4]),
        *(Comparison(one.name, one.error, one.bound + rounding) for one in gates),
    ]


def check_convolution(case: ConvolutionCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    x, dy = random_rows(RowCase(sum(case.lengths), case.channels, gap=16), 2, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    weight = torch.randn(case.channels, case.width, device=device, generator=generator)
    bounds = torch.tensor((0, *case.lengths)).cumsum(0)
    first_token = torch.repeat_interleave(bounds[:-1], bounds.diff()).int().to(device)
    options: dict[str, Any] = {
        "has_silu": case.has_silu,
        "num_normed": case.normed,
        "head_size": case.head_size,
        "eps": EPS,
    }
    y = causal_conv1d.causal_conv1d_forward(x, weight, first_token, **options)
    dx = causal_conv1d.causal_conv1d_backward(dy, x, weight, first_token, **options)
    leaf = x.detach().double().requires_grad_()
    expected = causal_conv1d_reference.causal_conv1d_forward(leaf, weight, bounds.tolist(), **options)
    (exact,) = torch.autograd.grad(expected, leaf, dy.double())
    plain_leaf = x.detach().clone().requires_grad_()
    plain = _plain_convolution(plain_leaf, weight, bounds.tolist(), case)
    (plain_dx,) = torch.autograd.grad(plain, plain_leaf, dy)
    return [
        as_close_as_torch("y", y, plain.detach(), expected.detach(), terms=case.width),
        as_close_as_torch("dx", dx, plain_dx, exact, terms=case.width),
    ]


def _plain_convolution(x: torch.Tensor, weight: torch.Tensor, bounds: list[int], case: ConvolutionCase) -> torch.Tensor:
    """torch's own convolution and functions, one document at a time, in x's dtype."""
    taps = weight.to(x.dtype).unsqueeze(1)
    rows = [
        F.conv1d(F.pad(x[start:end].t(), (case.width - 1, 0)), taps, groups=case.channels).t()
        for start, end in itertools.pairwise(bounds)
    ]
    y = torch.cat(rows)
    y = F.silu(y) if case.has_silu else y
    heads = y[:, : case.normed * case.head_size].unflatten(1, (case.normed, case.head_size))
    return torch.cat([F.normalize(heads, dim=-1).flatten(1), y[:, case.normed * case.head_size :]], 1)


def check_gated_rms_norm(case: RowCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    heads = 2 if case.width % 2 == 0 else 1
    o, z, dy = (x.unflatten(1, (heads, -1)) for x in random_rows(case, 3, dtype, device))
    weight = torch.rand(o.shape[2], device=device, generator=torch.Generator(device).manual_seed(1)) + 0.5
    y = gated_rms_norm.gated_rms_norm_forward(o, z, weight, eps=EPS)
    gradients = gated_rms_norm.gated_rms_norm_backward(dy, o, z, weight, eps=EPS)
    exact_o, exact_z = (x.detach().double().requires_grad_() for x in (o, z))
    expected = gated_rms_norm_reference.gated_rms_norm_forward(exact_o, exact_z, weight, eps=EPS)
    exact = torch.autograd.grad(expected, (exact_o, exact_z), dy.double())
    plain_o, plain_z = (x.detach().clone().requires_grad_() for x in (o, z))
    plain = F.rms_norm(plain_o, weight.shape, weight.to(dtype), EPS) * F.silu(plain_z)
    plain_gradients = torch.autograd.grad(plain, (plain_o, plain_z), dy)
    # Each result is a product of up to five rounded factors.
    return [
        as_close_as_torch("y", y, plain.detach(), expected.detach(), terms=5),
        as_close_as_torch("do", gradients[0], plain_gradients[0], exact[0], terms=5),
        as_close_as_torch("dz", gradients[1], plain_gradients[1], exact[1], terms=5),
    ]


def check_delta_gates(case: RowCase, dtype: torch.dtype, device: torch.device) -> list[Comparison]:
    alpha, b, d_alpha, d_b = random_rows(RowCase(case.tokens, case.width, gap=8), 4, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    a, dt = (torch.randn(case.width, device=device, generator=generator) for _ in range(2))
    a, alpha = -a.abs(), alpha * 8
    log_decay, beta = delta_gates.delta_gates_forward(alpha, b, a, dt)
    d_decay, d_beta = (torch.randn(alpha.shape, device=device, generator=generator) for _ in range(2))
    delta_gates.delta_gates_backward(d_decay, d_beta, alpha, beta, a, dt, d_alpha=d_alpha, d_b=d_b)
    comparisons = []
    exact_alpha, exact_b = (x.detach().double().requires_grad_() for x in (alpha, b))
    expected = delta_gates_reference.delta_gates_forward(exact_alpha, exact_b, a, dt)
    exact = torch.autograd.grad(expected, (exact_alpha, exact_b), (d_decay.double(), d_beta.double()))
    plain_alpha, plain_b = (x.detach().clone().requires_grad_() for x in (alpha, b))
    plain = (a * F.softplus(plain_alpha.float() + dt), plain_b.float().sigmoid())
    plain_gradients = torch.autograd.grad(plain, (plain_alpha, plain_b), (d_decay, d_beta))
    for name, ours, bar, right in zip(
        ("log_decay", "beta", "d_alpha", "d_b"),
        (log_decay, beta, d_alpha, d_b),
        (*plain, *plain_gradients),
        (*expected, *exact),
        strict=True,
    ):
        comparisons.append(as_close_as_torch(name, ours, bar.detach(), right.detach(), terms=4))
    return comparisons
