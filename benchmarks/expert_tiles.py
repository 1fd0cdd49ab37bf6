"""Tiles of the products with decoded experts against each other: each candidate's time, and its error.

    python benchmarks/expert_tiles.py --shapes qwen35moe --products forward_gate_up --output tiles.jsonl

The four products of one layer are made as training makes them: slices of experts as a workspace holds them, tokens
spread at random, rank 8, sums in the order of the slots where they are combined. Processes compile all candidates side
by side first; the card works for some seconds. A candidate whose error is far from the others' is wrong, however fast.
A line's floor is the larger of two times: the slice's weights read at the card's copy bandwidth, and the products at
`PEAK`. What wins goes into `TILES` of kernels/grouped_matmul.py.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any

import torch
from measure import append_line, copy_bandwidth, environment, time_ms
from pyggtrain.kernels.grouped_matmul import (
    LowRank,
    Tiles,
    grouped_matmul_backward,
    grouped_matmul_forward,
    padded_rank,
    tiles_for,
)
from pyggtrain.kernels.moe_routing import Routing, sort_by_expert

# bfloat16 products of an H200 in bursts, FLOP/s (docs/performance.md).
PEAK = 780e12
RANK = 8
TOKENS = 2048
# Of a multiprocessor of an H200, less a margin, for one program or each of two.
SHARED_BYTES = 220 * 1024
MAX_STAGES = 5
# Part of the time after which nothing more is compiled.
COMPILE_PART = 0.7


@dataclass(frozen=True)
class Layer:
    """Experts of a layer, and how many of them a workspace holds: gate and up of `slice`, down of twice as many."""

    name: str
    experts: int
    chosen: int
    width: int
    feed_forward: int
    slice: int
    has_bias: bool = False


LAYERS = (
    Layer("qwen35moe", 256, 8, 2048, 512, 64),
    Layer("qwen35moe", 256, 8, 2048, 512, 32),
    Layer("qwen3moe", 128, 8, 2048, 768, 64),
    Layer("gpt-oss", 32, 4, 2880, 2880, 8, has_bias=True),
)
# Name -> parts, whether W is turned.
PRODUCTS = {
    "forward_gate_up": (2, False),
    "forward_down": (1, False),
    "backward_down": (1, True),
    "backward_gate_up": (2, True),
}


@dataclass(frozen=True)
class Product:
    """One of `PRODUCTS` of a layer."""

    layer: Layer
    name: str

    @property
    def num_parts(self) -> int:
        return PRODUCTS[self.name][0]

    @property
    def is_backward(self) -> bool:
        return PRODUCTS[self.name][1]

    @property
    def slice(self) -> int:
        """G."""
        return min(self.layer.experts, self.layer.slice * 2 // self.num_parts)

    @property
    def weight_shape(self) -> tuple[int, int]:
        """[N, K] of each part."""
        sizes = self.layer.feed_forward, self.layer.width
        return sizes if self.num_parts == 2 else sizes[::-1]

    @property
    def tiles_in_use(self) -> Tiles:
        return tiles_for(TOKENS * self.layer.chosen / self.layer.experts, torch.bfloat16)

    def floor_ms(self, bandwidth: float) -> float:
        num_rows, num_columns = self.weight_shape
        num_weights = self.num_parts * self.slice * num_rows * num_columns
        num_terms = num_weights * TOKENS * self.layer.chosen / self.layer.experts
        return max(2 * num_weights / bandwidth, 2 * num_terms / PEAK) * 1e3

    def __str__(self) -> str:
        return f"{self.layer.name} {self.name} of {self.slice}"


def candidates(of: Product) -> list[Tiles]:
    """Those in use first; with as many stages as one program on a multiprocessor has room for, or each of two."""
    found = [of.tiles_in_use]
    for rows, columns, terms, num_warps in product((128, 64, 32), (256, 128, 64), (64, 128, 32), (8, 4)):
        # Of 255 that a thread has, accumulators may take half. Eight warps want work for each.
        registers = rows * columns // (32 * num_warps)
        is_sensible = rows * columns >= 64 * 64 and (64 if num_warps == 8 else 32) <= registers <= 128
        # An expert of many rows has no use for narrow tiles.
        is_narrow = rows < 64 and TOKENS * of.layer.chosen > 128 * of.layer.experts
        stage_bytes = 2 * terms * (rows + columns)
        # Short steps where longer ones leave no room for stages.
        if not is_sensible or is_narrow or (terms == 32 and MAX_STAGES * 2 * stage_bytes <= SHARED_BYTES):
            continue
        stages = {min(MAX_STAGES, SHARED_BYTES // programs // stage_bytes) for programs in (1, 2)}
        found += [Tiles(rows, columns, terms, num_warps, num) for num in sorted(stages, reverse=True) if num >= 2]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a product reads, all experts of it, and where it writes.

    Attributes:
        weights: [P, E, N, K].
        options: of `grouped_matmul_forward` or `_backward`.
    """

    of: Product
    x: torch.Tensor
    weights: torch.Tensor
    routing: Routing
    out: torch.Tensor
    options: dict[str, Any]

    def run(self, tiles: Tiles, index: int) -> torch.Tensor:
        """The product with slice `index`, counted around."""
        first = index % (self.of.layer.experts // self.of.slice) * self.of.slice
        launch = grouped_matmul_backward if self.of.is_backward else grouped_matmul_forward
        weights = self.weights[:, first : first + self.of.slice]
        return launch(self.x, weights, self.routing, out=self.out, first_expert=first, tiles=tiles, **self.options)

    def exact(self) -> torch.Tensor:
        """In float32 and the order of the places, the rows of the first slice."""
        of, routing = self.of, self.routing
        bounds = routing.bounds.tolist()
        low_rank: LowRank = self.options["low_rank"]
        hs = low_rank.h.float().chunk(of.num_parts, 1)
        biases = self.options.get("biases", ())
        places = routing.slot.long() // routing.num_chosen if self.options["slots_per_row"] else slice(None)
        x = self.x[places]
        # Rows of dy hold both parts, rows of x serve both.
        xs = x.chunk(of.num_parts, 1) if of.is_backward else [x] * of.num_parts
        results = []
        for expert in range(of.slice):
            own = slice(bounds[expert], bounds[expert + 1])
            parts = []
            for index, factor in enumerate(low_rank.factors):
                weight, pair = self.weights[index, expert].float(), factor[expert].to(x.dtype).float()
                h = hs[index][own, :RANK]
                if of.is_backward:
                    part = xs[index][own].float() @ weight + h @ pair
                else:
                    part = xs[index][own].float() @ weight.t() + h @ pair.t()
                parts.append(part + biases[index][expert] if biases else part)
            results.append(sum(parts) if of.is_backward else torch.cat(parts, 1))
        return torch.cat(results)

    def error(self, tiles: Tiles, exact: torch.Tensor) -> float:
        """Largest difference, as a part of the largest number; not a number where something was not written."""
        self.out.fill_(float("nan"))
        out = self.run(tiles, 0)
        rows = out[self.routing.slot.long()] if self.options["to_slots"] else out
        return float((rows[: len(exact)].float() - exact).abs().max() / exact.abs().max())


def inputs(
    of: Product, num_tokens: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, *, is_filled: bool = True
) -> Inputs:
    """Random ones.

    Args:
        is_filled: False: weights are whatever lay there, for compiling.
    """
    layer, num_parts = of.layer, of.num_parts
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    chances = torch.rand(num_tokens, layer.experts, device=device, generator=generator)
    routing = sort_by_expert(chances.topk(layer.chosen, 1).indices, layer.experts)
    num_rows, num_columns = of.weight_shape
    weights = torch.empty(num_parts, layer.experts, num_rows, num_columns, dtype=dtype, device=device)
    if is_filled:
        weights.normal_(0, num_columns**-0.5, generator=generator)
    num_out, num_in = (num_columns, num_parts * num_rows) if of.is_backward else (num_parts * num_rows, num_columns)
    # Forward gate and up, and backward down, read a token's row for all of its slots; the other two write slots.
    is_gathered = of.name in ("forward_gate_up", "backward_down")
    factor_shape = (layer.experts, RANK, num_columns) if of.is_backward else (layer.experts, num_rows, RANK)
    h = torch.zeros(routing.num_slots, num_parts, padded_rank(RANK), dtype=dtype, device=device)
    h[..., :RANK] = normal(routing.num_slots, num_parts, RANK).to(dtype)
    options: dict[str, Any] = {
        "slots_per_row": layer.chosen if is_gathered else 0,
        "to_slots": not is_gathered,
        "low_rank": LowRank(h.flatten(1), tuple(normal(*factor_shape) for _ in range(num_parts))),
    }
    if layer.has_bias and not of.is_backward:
        options["biases"] = [normal(layer.experts, num_rows) for _ in range(num_parts)]
    x = normal(num_tokens if is_gathered else routing.num_slots, num_in).to(dtype)
    return Inputs(of, x, weights, routing, x.new_empty(routing.num_slots, num_out), options)


def compile_candidate(task: tuple[Product, Tiles]) -> tuple[Product, Tiles, str]:
    """In a process of its own: the result lies in Triton's cache on disk. The text says why it failed, if it did."""
    of, tiles = task
    try:
        inputs(of, 16, is_filled=False).run(tiles, 0)
        torch.cuda.synchronize()
    # It is left out, and said so.
    except Exception as error:  # noqa: BLE001
        return of, tiles, f"{type(error).__name__}: {error}"[:200]
    return of, tiles, ""


def compiled(
    tasks: Iterable[tuple[Product, Tiles]], num_processes: int, deadline: float, output: Path | None
) -> Iterator[tuple[Product, Tiles]]:
    """Those that compiled before the deadline (of `time.monotonic`)."""
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        outcomes = pool.imap_unordered(compile_candidate, tasks)
        while True:
            try:
                of, tiles, failure = outcomes.next(max(0.1, deadline - time.monotonic()))
            except StopIteration:
                return
            except multiprocessing.TimeoutError:
                append_line(output, {"failure": "no time to compile the rest"})
                return
            if failure:
                append_line(output, {"product": str(of), "tiles": astuple(tiles), "failure": failure})
            else:
                yield of, tiles


def measure(of: Product, tiles: Iterable[Tiles], bandwidth: float, deadline: float, output: Path | None) -> list[str]:
    """Append a line for each; the best five as text."""
    given = inputs(of, TOKENS)
    exact = given.exact()
    floor = of.floor_ms(bandwidth)
    found: list[tuple[float, str]] = []
    for one in tiles:
        if time.monotonic() > deadline:
            append_line(output, {"product": str(of), "failure": "no time to measure the rest"})
            break
        error = given.error(one, exact)
        ms = time_ms(partial(given.run, one), repeats=16)["ms"]
        line = {"product": str(of), "tiles": astuple(one), "is_in_use": one == of.tiles_in_use}
        append_line(output, line | {"ms": round(ms, 4), "share": round(floor / ms, 3), "error": round(error, 5)})
        text = f"  {ms:7.4f} ms {floor / ms:6.1%}  error {error:.5f}  {astuple(one)}"
        found.append((ms, text + (" in use" if one == of.tiles_in_use else "")))
    return [f"{of}, floor {floor:.4f} ms", *(text for _, text in sorted(found)[:5])]


def main() -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    parser.add_argument("--shapes", nargs="+", choices=sorted({layer.name for layer in LAYERS}), help="default: all")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, help="default: all")
    parser.add_argument("--slices", nargs="+", type=int, help="of gate and up; default: all of a shape")
    parser.add_argument("--limit-s", type=float, default=150, help="time after which the rest is left out")
    parser.add_argument("--processes", type=int, default=16, help="that compile")
    args = parser.parse_args()
    products = [
        Product(layer, name)
        for layer in LAYERS
        for name in args.products or PRODUCTS
        if layer.name in (args.shapes or [layer.name]) and layer.slice in (args.slices or [layer.slice])
    ]
    append_line(args.output, {"benchmark": "expert tiles", **environment()})
    # One of each product in turn, so that a limit leaves out the last of all.
    turns = zip_longest(*([(of, tiles) for tiles in candidates(of)] for of in products))
    tasks = [task for task in chain.from_iterable(turns) if task is not None]
    ready: dict[Product, set[Tiles]] = {of: set() for of in products}
    for of, tiles in compiled(tasks, args.processes, start + COMPILE_PART * args.limit_s, args.output):
        ready[of].add(tiles)
    count = sum(map(len, ready.values()))
    append_line(args.output, {"compiled": count, "of": len(tasks), "seconds": round(time.monotonic() - start, 1)})
    bandwidth = copy_bandwidth()
    best: list[str] = []
    for index, of in enumerate(products):
        # Each product has its part of what time is left.
        now = time.monotonic()
        deadline = now + (start + args.limit_s - now) / (len(products) - index)
        tiles_in_order = [tiles for tiles in candidates(of) if tiles in ready[of]]
        best += measure(of, tiles_in_order, bandwidth, deadline, args.output)
    print("\n".join(best))
    return 0


if __name__ == "__main__":
    sys.exit(main())
