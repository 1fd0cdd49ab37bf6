"""Products with experts: packed and decoded weights against torch's grouped product on bfloat16 ones.

    python benchmarks/bench_experts.py --output benchmarks/results/experts.jsonl

Shapes are those of Qwen3-30B-A3B (gate, Q4_K) and gpt-oss-20b (gate, MXFP4), tokens spread at random over the experts.
A line's floor is the larger of two times: packed weights, rows and results moved at the card's copy bandwidth, and the
products at `PEAK`. Decoding is part of "decoded"; torch's weights lie in bfloat16 already. Correctness is the tests'
(tests/kernels), on the same functions.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import append_line, copy_bandwidth, environment, time_ms
from pyggtrain.kernels.dequant import dequantize
from pyggtrain.kernels.grouped_lora import outer, project
from pyggtrain.kernels.grouped_matmul import LowRank, padded_rank
from pyggtrain.kernels.moe_routing import combine, sort_by_expert
from pyggtrain.kernels.reference.cases import random_blocks

from pyggtrain.ops import expert_product, workspace
from pyggtrain.ops.expert_product import ExpertStack

# bfloat16 products of an H200 in bursts, FLOP/s (docs/performance.md).
PEAK = 780e12
ROWS = (16, 64, 256, 1024)
RANK = 8


@dataclass(frozen=True)
class Shape:
    """A stack of gate or up: E experts of [F, D], J of them for each token."""

    name: str
    type: str
    experts: int
    chosen: int
    width: int
    feed_forward: int
    magnitude: float


SHAPES = (
    Shape("Qwen3-30B-A3B gate", "Q4_K", 128, 8, 2048, 768, 6e-5),
    Shape("gpt-oss-20b gate", "MXFP4", 32, 4, 2880, 2880, 1e-2),
)


def measure(shape: Shape, rows: int, bandwidth: float) -> dict[str, object]:
    """Times in ms of one weight's products and its pair's, for `rows` rows of an expert on average."""
    experts, width, num_ff = shape.experts, shape.width, shape.feed_forward
    generator = torch.Generator("cuda").manual_seed(0)
    blocks = random_blocks(shape.type, experts * num_ff, width, generator=generator, magnitude=shape.magnitude)
    if shape.type == "MXFP4":
        scales = blocks.view(-1, 17)[:, 0]
        scales.copy_(scales % 8 + 118)
    stack = ExpertStack(blocks.view(experts, num_ff, -1), shape.type)
    weight = dequantize(blocks, shape.type).view(experts, num_ff, width)
    num_tokens = rows * experts // shape.chosen
    ids = torch.rand(num_tokens, experts, device="cuda", generator=generator).topk(shape.chosen, 1).indices
    routing = sort_by_expert(ids, experts)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", generator=generator)

    x, dy = normal(num_tokens, width).bfloat16(), normal(routing.num_slots, num_ff).bfloat16()
    x_sorted = x[routing.slot.long() // shape.chosen]
    ends = routing.bounds[1:].contiguous()
    lora_a, lora_b = normal(experts, RANK, width), normal(experts, num_ff, RANK)
    h = dy.new_zeros(routing.num_slots, padded_rank(RANK))
    y, dx = torch.empty_like(dy), torch.empty_like(x_sorted)
    order = {"slots_per_row": shape.chosen}
    forward = LowRank(h, (lora_b,))
    backward = LowRank(h, (lora_a,))
    calls: dict[str, Callable[[int], object]] = {
        "torch_forward": lambda i: torch._grouped_mm(x_sorted, weight.transpose(1, 2), offs=ends),
        "torch_backward": lambda i: torch._grouped_mm(dy, weight, offs=ends),
        "sort": lambda i: sort_by_expert(ids, experts),
        "project": lambda i: project(x, [lora_a], routing, scales=[1.0], out=h, **order),
        "outer_a": lambda i: outer(h, x, routing, rank=RANK, is_lora_b=False, **order),
        "outer_b": lambda i: outer(h, dy, routing, rank=RANK, is_lora_b=True),
        "combine": lambda i: combine(dx, shape.chosen),
    }
    times = {name: time_ms(call, repeats=10)["ms"] for name, call in calls.items()}
    for name, few_rows in (("packed", 1 << 30), ("decoded", 0)):
        expert_product.FEW_ROWS, expert_product.PACKED_TYPES = few_rows, frozenset({shape.type})
        times[f"{name}_forward"] = time_ms(
            lambda i: expert_product.forward(x, [stack], routing, out=y, low_rank=forward, **order), repeats=10
        )["ms"]
        times[f"{name}_backward"] = time_ms(
            lambda i: expert_product.backward(dy, [stack], routing, out=dx, to_slots=True, low_rank=backward),
            repeats=10,
        )["ms"]
    moved = blocks.numel() + 2 * (x.numel() + y.numel()), blocks.numel() + 2 * (dy.numel() + dx.numel())
    product_ms = 2 * routing.num_slots * width * num_ff / PEAK * 1e3
    floors = [max(num_bytes / bandwidth * 1e3, product_ms) for num_bytes in moved]
    best = [min(times[f"packed_{way}"], times[f"decoded_{way}"]) for way in ("forward", "backward")]
    return {
        "benchmark": "experts",
        "shape": shape.name,
        "type": shape.type,
        "rows": rows,
        **{f"{name}_ms": round(value, 4) for name, value in times.items()},
        "floor_forward_ms": round(floors[0], 4),
        "floor_backward_ms": round(floors[1], 4),
        "share_forward": round(floors[0] / best[0], 3),
        "share_backward": round(floors[1] / best[1], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    append_line(args.output, {"benchmark": "copy", "TB_per_s": round(bandwidth / 1e12, 3), **environment()})
    workspace.set_limit_bytes(1 << 30, "cuda")
    for shape in SHAPES:
        for rows in ROWS:
            append_line(args.output, measure(shape, rows, bandwidth))
    return 0


if __name__ == "__main__":
    sys.exit(main())
