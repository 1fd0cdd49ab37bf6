"""Where a step's time goes: the kernels that a profiler saw on the device, by what they are for.

A name says what computes, not for whom: products that the library computes for LoRA's pairs and for the head are
"dense products", and decoding the head is "dequantise".
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

OTHER, FLOAT32_PRODUCTS = "other", "float32 products"
# Family -> pattern of kernel names. The first that is found counts, so what is special stands first.
_PATTERNS = {
    # In half precision only a router's: our own, SIMT kernels, or those whose every letter says so.
    FLOAT32_PRODUCTS: r"exact_matmul_|sgemm|gemm_f32f32_f32f32_f32|s1688",
    # fused AdamW, norms and clearing of all gradients are torch's multi-tensor kernels
    "optimiser": r"multi_tensor_apply|lpnorm|[Aa]dam|[Oo]ptimizer",
    "delta rule": r"delta_rule_|delta_gates_",
    "convolution": r"causal_conv1d_|conv_depthwise|conv1d",
    "norms": r"rms_norm_|layer_norm",
    "activations": r"swiglu_|silu|sigmoid|softplus",
    "experts": r"grouped_dequant_|grouped_matmul_",
    "LoRA products": r"lora_|grouped_project_|grouped_outer_",
    "loss": r"cross_entropy|LogSoftMax|nll_loss",
    "attention": r"^attention_|rope_kernel|flash|fmha",
    "routing": r"top_k_kernel|expert_count_|expert_place_|combine_kernel"
    r"|[Ss]ort|[Tt]op[Kk]|SoftMax|DeviceScan|[Hh]istogram",
    # of rows to 8 bits for a product included
    "dense products": r"dequant_matmul_|sum_parts_|quantize_rows_|quantize_columns_|column_maximum_"
    r"|nvjet|gemm|gemv|cutlass|cublas|splitK|mul_mat|quantize_mmq",
    "dequantise": r"^dequantize",
    "copies": r"^Mem(cpy|set)|[Cc]opy|CatArray|FillFunctor|[Gg]ather|[Ii]ndex",
}
FAMILIES = (*_PATTERNS, OTHER)
_RANGE = re.compile(r"(Optimizer\.\w+|ProfilerStep)#")


def family_of(name: str) -> str:
    """One of `FAMILIES`, for the name of a kernel."""
    return next((family for family, pattern in _PATTERNS.items() if re.search(pattern, name)), OTHER)


def device_intervals(events: Iterable[Any]) -> list[tuple[str, float, float]]:
    """Name, start and end in µs of what ran on the device, from a profiler's `events()`.

    Autograd functions and aten operations repeat the time of the kernels that they launch, and named ranges (an
    optimiser's step) that of those inside: neither is counted.
    """
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation and not _RANGE.match(event.name)
    ]


def break_down(intervals: Iterable[tuple[str, float, float]], step_ms: float, num_steps: int = 1) -> dict[str, Any]:
    """Milliseconds and share of a step by family, largest first, and what is left: "idle".

    Idle is the step without the time in which anything ran. That is less than the sum of the families where copies run
    beside products.

    Args:
        step_ms: of an ordinary step: a profiler makes launching slower, but not the kernels.
        num_steps: in the intervals.
    """
    total_ms: defaultdict[str, float] = defaultdict(float)
    busy_us, last_end = 0.0, 0.0
    others: defaultdict[str, float] = defaultdict(float)
    for name, start, end in sorted(intervals, key=lambda interval: interval[1]):
        family = family_of(name)
        total_ms[family] += (end - start) / 1e3 / num_steps
        if family == OTHER:
            others[name[:80]] += (end - start) / 1e3 / num_steps
        busy_us += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    idle_ms = step_ms - busy_us / 1e3 / num_steps
    return {
        "kernels_ms": round(sum(total_ms.values()), 1),
        "idle_ms": round(idle_ms, 1),
        "idle_share": round(idle_ms / step_ms, 3),
        "families": {
            family: {"ms": round(ms, 2), "share": round(ms / step_ms, 3)} for family, ms in _largest_first(total_ms)
        },
        "largest_others": {name: round(ms, 2) for name, ms in _largest_first(others)[:3]},
    }


def _largest_first(total_ms: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(total_ms.items(), key=lambda item: -item[1])
