"""Products with a packed weight, by the ways of `pyggtrain.ops.quant_matmul`, from one row to a thousand.

    python benchmarks/bench_products.py --output benchmarks/results/products.jsonl

Times are of the card alone: runs are queued behind a pause. Two weights in turn, more than a second-level cache holds.
x is bfloat16, and what "mmq" needs to make of it is timed with it. Each way is compared with float64 first; one that is
wrong is reported and not timed.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measure import append_line, environment, time_ms
from pyggtrain.kernels.reference import dequant as reference
from pyggtrain.kernels.reference.cases import random_blocks

from pyggtrain.ops import mmq, product_choice, quant_matmul

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096))
ROWS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
# llama.cpp rounds x to 8 bits, the others to bfloat16.
BOUND = 2e-2

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def products(direction: str, type: str, shape: tuple[int, int], num_tokens: int) -> dict[str, Product]:
    """Way -> (x, blocks) -> product, of the ways that can serve."""

    def multiply(way: str, x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        if direction == "forward":
            return quant_matmul.forward(x, blocks, type, compute=way)
        return quant_matmul.backward(x, blocks, type, compute=way, out=x.new_empty(num_tokens, shape[1]))

    ways = ["bf16"]
    if num_tokens <= product_choice.MAX_FUSED_ROWS:
        ways.append("fused")
    if direction == "forward" and mmq.takes(type, shape[1]):
        ways.append("mmq")
    return {way: partial(multiply, way) for way in ways}


def measure(direction: str, type: str, shape: tuple[int, int], num_tokens: int) -> dict[str, object]:
    """Microseconds of each way, or how far it is off."""
    generator = torch.Generator("cuda").manual_seed(0)
    blocks = [random_blocks(type, *shape, generator=generator, magnitude=1e-3) for _ in range(2)]
    width = shape[1] if direction == "forward" else shape[0]
    x = torch.randn(num_tokens, width, device="cuda", generator=generator).bfloat16()
    exact = reference.dequantize(blocks[0], type, dtype=torch.float32)
    expected = x.float() @ (exact.t() if direction == "forward" else exact)
    line: dict[str, object] = {}
    for way, multiply in products(direction, type, shape, num_tokens).items():
        error = float((multiply(x, blocks[0]).float() - expected).norm() / expected.norm())
        if not error < BOUND:
            line[way] = f"off by {error:.2g}"
            continue
        line[way] = round(time_ms(lambda i, multiply=multiply: multiply(x, blocks[i % 2]), repeats=15)["ms"] * 1e3, 1)  # type: ignore[misc]
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q4_K,Q6_K,Q8_0,IQ2_XXS", help="comma-separated ggml types")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="comma-separated numbers of rows")
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    args = parser.parse_args()

    append_line(args.output, {"benchmark": "products", "unit": "microseconds", **environment()})
    num_wrong = 0
    for type in args.types.split(","):
        for shape in SHAPES[: args.shapes]:
            for num_tokens in map(int, args.rows.split(",")):
                for direction in ("forward", "backward"):
                    line = measure(direction, type, shape, num_tokens)
                    num_wrong += any(isinstance(value, str) for value in line.values())
                    append_line(
                        args.output, {"direction": direction, "type": type, "shape": shape, "rows": num_tokens} | line
                    )
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
