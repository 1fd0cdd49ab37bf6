"""Tiles of attention against each other: each candidate's time, and its distance from torch's result.

    python benchmarks/attention_tiles.py --head-size 256 --output tiles.jsonl

Every candidate differs in one kernel from the tiles in use, so backward's times tell the kernels apart. Processes
compile all of them side by side first; the card works for a few seconds. A candidate whose errors are far from the
others' is wrong, however fast: Triton gets some narrow products wrong on Hopper (kernels/gated_delta_rule/tiles.py).
"""

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import append_line, environment, time_ms
from pyggtrain.kernels.attention.backward import BACKWARD_TILES, BackwardTiles, attention_backward
from pyggtrain.kernels.attention.forward import FORWARD_TILES, attention_forward
from pyggtrain.kernels.attention.mask import AttentionMask
from pyggtrain.kernels.attention.scores import Tile

Sizes = tuple[int, int, int, int]


@dataclass(frozen=True)
class Candidates:
    """Heads of one size, and tiles that may be better than those in use: (queries, keys, warps, stages)."""

    heads: int
    kv_heads: int
    forward: tuple[Sizes, ...]
    q: tuple[Sizes, ...]
    k: tuple[Sizes, ...]
    v: tuple[Sizes, ...]


CANDIDATES = {
    256: Candidates(
        *(16, 2),
        ((128, 32, 8, 2), (64, 32, 4, 2), (128, 64, 8, 1)),
        ((128, 32, 8, 2), (128, 32, 8, 1)),
        ((32, 128, 8, 2), (32, 128, 8, 1), (32, 64, 4, 1)),
        ((64, 128, 8, 1), (32, 128, 8, 3), (32, 64, 4, 2)),
    ),
    128: Candidates(32, 8, ((64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)), ((128, 64, 8, 3),), (), ()),
}
# What heads of 256 had before: narrow, both sums over queries in one pass.
NARROW = BackwardTiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), num_parts=1)
NARROW_FORWARD = Tile(64, 64, 8, 2)
# By the number of tokens: few blocks for a card, and many.
NUM_PARTS = {2048: (4, 8), 8192: (1, 2, 4)}


def tile(sizes: Sizes) -> Tile:
    return Tile(*sizes, heads_first=True, is_wrapped=True)


def forward_candidates(head_size: int) -> dict[str, Tile]:
    """Name -> tile; the one in use first."""
    found = {"in use": FORWARD_TILES[head_size]}
    found |= {str(sizes): tile(sizes) for sizes in CANDIDATES[head_size].forward}
    return found | ({"before": NARROW_FORWARD} if head_size == 256 else {})


def backward_candidates(head_size: int, num_tokens: int) -> dict[str, BackwardTiles]:
    """Name -> tiles, those in use first; at 8,192 tokens only in other numbers of parts."""
    used, others = BACKWARD_TILES[head_size], CANDIDATES[head_size]
    found = {"in use": used}
    if head_size == 256:
        found |= {f"parts {num}": replace(used, num_parts=num) for num in NUM_PARTS[num_tokens]}
    if num_tokens > 2048 and head_size == 256:
        return found
    found |= {f"dq {sizes}": replace(used, q=tile(sizes)) for sizes in others.q}
    found |= {f"dk {sizes}": replace(used, k=tile(sizes)) for sizes in others.k}
    found |= {f"dv {sizes}": replace(used, v=tile(sizes)) for sizes in others.v}
    return found | ({"before": NARROW} if head_size == 256 else {})


def inputs(head_size: int, documents: int, length: int) -> tuple[list[torch.Tensor], AttentionMask, torch.Tensor]:
    """q, k, v and do as parts of one matrix, the mask and the documents' bounds."""
    torch.manual_seed(0)
    heads, kv_heads = CANDIDATES[head_size].heads, CANDIDATES[head_size].kv_heads
    split = (heads, kv_heads, kv_heads, heads)
    rows = torch.randn(documents * length, sum(split), head_size, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.arange(0, documents * length + 1, length, device="cuda", dtype=torch.int32)
    tensors = list(rows.split(split, 1))
    return tensors, AttentionMask.from_documents(cu_seqlens, documents * length), cu_seqlens


def compile_candidate(head_size: int, candidate: Tile | BackwardTiles) -> str:
    """In a process of its own: the result lies in Triton's cache on disk. Returns why it failed, if it did."""
    try:
        (q, k, v, do), mask, _ = inputs(head_size, 1, 256)
        if isinstance(candidate, Tile):
            attention_forward(q, k, v, mask, softmax_scale=head_size**-0.5, tile=candidate)
        else:
            lse = torch.zeros(q.shape[1], 256, device="cuda")
            attention_backward(do, q, k, v, do, lse, mask, softmax_scale=head_size**-0.5, tiles=candidate)
        torch.cuda.synchronize()
    # It is left out, and said so.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def measure(head_size: int, documents: int, length: int, failed: set[Any], output: Path | None) -> None:
    """Append a line for each candidate that compiled."""
    (q, k, v, do), mask, cu_seqlens = inputs(head_size, documents, length)
    bounds, scale = (cu_seqlens, cu_seqlens, length, length, 0.0, True), head_size**-0.5
    aten = torch.ops.aten
    o, flash_lse, *states = aten._flash_attention_forward(q, k, v, *bounds, False, scale=scale)[:4]
    exact = aten._flash_attention_backward(do, q, k, v, o, flash_lse, *bounds, *states, scale=scale)
    # Of tiles that have been in use for long.
    trusted = forward_candidates(head_size)["before" if head_size == 256 else "in use"]
    _, lse = attention_forward(q, k, v, mask, softmax_scale=scale, tile=trusted)

    def report(kernel: str, name: str, call: Callable[[], tuple[torch.Tensor, ...]], expected: Any) -> None:
        errors = [
            round(((ours.float() - theirs.float()).norm() / theirs.float().norm()).item(), 5)
            for ours, theirs in zip(call(), expected, strict=False)
        ]
        line = {"kernel": kernel, "head_size": head_size, "tokens": f"{documents} x {length}", "tile": name}
        append_line(output, line | {"errors": errors, "ms": round(time_ms(lambda i: call(), repeats=10)["ms"], 4)})

    for name, one in forward_candidates(head_size).items():
        if one not in failed:
            report("forward", name, partial(attention_forward, q, k, v, mask, softmax_scale=scale, tile=one), (o,))
    for name, tiles in backward_candidates(head_size, documents * length).items():
        if tiles not in failed:
            call = partial(attention_backward, do, q, k, v, o, lse, mask, softmax_scale=scale, tiles=tiles)
            report("backward", name, call, exact)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    parser.add_argument("--head-size", type=int, default=256, choices=CANDIDATES)
    args = parser.parse_args()
    candidates: dict[Tile | BackwardTiles, str] = {
        one: name for name, one in forward_candidates(args.head_size).items()
    }
    for num_tokens in NUM_PARTS:
        candidates |= {tiles: name for name, tiles in backward_candidates(args.head_size, num_tokens).items()}
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        outcomes = pool.map(partial(compile_candidate, args.head_size), candidates, chunksize=1)
    failures = {one: failure for one, failure in zip(candidates, outcomes, strict=True) if failure}
    append_line(args.output, {"benchmark": "attention tiles", **environment()})
    for one, failure in failures.items():
        append_line(args.output, {"tile": candidates[one], "failure": failure})
    for documents, length in ((1, 2048), (4, 2048), (1, 8192)):
        measure(args.head_size, documents, length, set(failures), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
