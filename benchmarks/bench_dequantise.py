"""Dequantisation of every ggml type against the card's copy bandwidth.

    python benchmarks/bench_dequantise.py --output benchmarks/results/dequantise.jsonl

Bytes are those that must move: packed blocks read once, weights written once. Each type is compared bit by bit with the
reference before it is timed; a type that fails is reported and not timed.
"""

import argparse
import sys
from pathlib import Path

import torch
from measure import append_line, copy_bandwidth, environment, time_ms
from pyggtrain.kernels.dequant import DECODERS, dequantize
from pyggtrain.kernels.reference import dequant as reference
from pyggtrain.kernels.reference.cases import random_blocks


def measure(type: str, rows: int, columns: int, dtype: torch.dtype) -> dict[str, float]:
    """Times in ms and bytes per second of one type."""
    generator = torch.Generator("cuda").manual_seed(0)
    # two inputs and two outputs in turn: more than any second-level cache holds
    blocks = [random_blocks(type, rows, columns, generator=generator) for _ in range(2)]
    outputs = [torch.empty(rows, columns, dtype=dtype, device="cuda") for _ in range(2)]
    times = time_ms(lambda i: dequantize(blocks[i % 2], type, out=outputs[i % 2]))
    num_bytes = blocks[0].numel() + outputs[0].numel() * outputs[0].element_size()
    return times | {"bytes_per_s": num_bytes / times["ms"] * 1e3}


def is_right(type: str, dtype: torch.dtype) -> bool:
    """Whether the kernel gives the reference's bits."""
    blocks = random_blocks(type, 64, 4096, generator=torch.Generator("cuda").manual_seed(1))
    return torch.equal(dequantize(blocks, type, dtype=dtype), reference.dequantize(blocks, type, dtype=dtype))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(DECODERS), help="comma-separated ggml types")
    parser.add_argument("--rows", type=int, default=14336)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype)
    peak = copy_bandwidth()
    append_line(args.output, {"benchmark": "copy", "TB_per_s": round(peak / 1e12, 3), **environment()})
    num_wrong = 0
    for type in args.types.split(","):
        line = {"benchmark": "dequantise", "type": type, "shape": [args.rows, args.columns], "dtype": args.dtype}
        if not is_right(type, dtype):
            num_wrong += 1
            append_line(args.output, line | {"error": "differs from the reference"})
            continue
        result = measure(type, args.rows, args.columns, dtype)
        rate = result.pop("bytes_per_s")
        line |= {key: round(value, 4) for key, value in result.items()}
        append_line(args.output, line | {"TB_per_s": round(rate / 1e12, 3), "share_of_copy": round(rate / peak, 3)})
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
