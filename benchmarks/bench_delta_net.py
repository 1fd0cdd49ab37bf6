"""The kernels of a gated delta net, and the half of a layer that they make, at the shape of Qwen3.6-35B-A3B.

    python benchmarks/bench_delta_net.py --output benchmarks/results/delta_net.jsonl

Width 2048, 16 key heads and 32 value heads of 128, convolution over 4 tokens, bfloat16, LoRA r = 4 on all linears of
the layer. Correctness is the tests' (tests/kernels, tests/ops), on the same functions. Each kernel stands beside the
time that its bytes take at the card's copy bandwidth, and a layer beside its products alone, by the library.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import append_line, copy_bandwidth, environment, time_ms
from pyggtrain.kernels.causal_conv1d import causal_conv1d_backward, causal_conv1d_forward
from pyggtrain.kernels.gated_delta_rule.backward import gated_delta_rule_backward
from pyggtrain.kernels.gated_delta_rule.forward import gated_delta_rule_forward
from pyggtrain.kernels.gated_rms_norm import gated_rms_norm_backward, gated_rms_norm_forward
from pyggtrain.kernels.reference.cases import random_blocks

from pyggtrain.ops import Documents
from pyggtrain.ops.fused import DeltaBlock, Kept, LinearGroup, delta_block

WIDTH, KEY_HEADS, HEADS, HEAD_SIZE, TAPS, RANK = 2048, 16, 32, 128, 4, 4
CHANNELS, VALUES = (2 * KEY_HEADS + HEADS) * HEAD_SIZE, HEADS * HEAD_SIZE


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def kernel_cases(num_tokens: int) -> dict[str, tuple[Callable[[int], object], int]]:
    """Name -> (one call, bytes of its inputs and results)."""
    documents = Documents(torch.tensor([0, num_tokens], dtype=torch.int32))
    chunks = documents.chunks(torch.device("cuda", torch.cuda.current_device()))
    first_token = documents.mask(torch.device("cuda")).first_key
    x, dy, dx, mixed = (normal(num_tokens, CHANNELS) for _ in range(4))
    weight = normal(CHANNELS, TAPS, dtype=torch.float32)
    options: dict[str, Any] = {"has_silu": True, "num_normed": 2 * KEY_HEADS, "head_size": HEAD_SIZE, "eps": 1e-6}
    causal_conv1d_forward(x, weight, first_token, **options, out=mixed)
    q, k, v = (part.unflatten(1, (-1, HEAD_SIZE)) for part in mixed.split((2048, 2048, VALUES), 1))
    log_decay = -torch.rand(num_tokens, HEADS, device="cuda")
    beta = torch.rand(num_tokens, HEADS, device="cuda")
    do, z, o, h = (normal(num_tokens, HEADS, HEAD_SIZE) for _ in range(4))
    norm_weight = torch.rand(HEAD_SIZE, device="cuda")
    _, made = gated_delta_rule_forward(q, k, v, log_decay, beta, chunks, scale=0.1)
    inputs = (q, k, v, log_decay, beta, chunks)
    row, values = 2 * num_tokens * CHANNELS, 2 * num_tokens * VALUES
    return {
        "delta rule forward": (lambda i: gated_delta_rule_forward(*inputs, scale=0.1), row + values),
        "delta rule backward": (lambda i: gated_delta_rule_backward(do, *inputs, scale=0.1), 2 * row + values),
        "delta rule backward, states kept": (
            lambda i: gated_delta_rule_backward(do, *inputs, scale=0.1, made=made),
            2 * row + values,
        ),
        "convolution forward": (
            lambda i: causal_conv1d_forward(x, weight, first_token, **options, out=mixed),
            2 * row,
        ),
        "convolution backward": (
            lambda i: causal_conv1d_backward(dy, x, weight, first_token, **options, out=dx),
            3 * row,
        ),
        "gated norm forward": (lambda i: gated_rms_norm_forward(o, z, norm_weight, eps=1e-6, out=h), 3 * values),
        "gated norm backward": (
            lambda i: gated_rms_norm_backward(do, o, z, norm_weight, eps=1e-6, do=h, dz=h),
            5 * values,
        ),
    }


def linear_group(*rows: int, types: tuple[str, ...], columns: int = WIDTH) -> LinearGroup:
    generator = torch.Generator("cuda").manual_seed(0)
    blocks = [
        normal(count, columns).view(torch.uint8)
        if type == "BF16"
        else random_blocks(type, count, columns, generator=generator, magnitude=1e-3)
        for count, type in zip(rows, types, strict=True)
    ]
    return LinearGroup(tuple(blocks), types, rows, columns, (1.0,) * len(rows))


def make_layer() -> tuple[DeltaBlock, list[tuple[torch.Tensor, torch.Tensor]]]:
    block = DeltaBlock(
        norm_weight=torch.rand(WIDTH, device="cuda"),
        eps=1e-6,
        qkv_z=linear_group(CHANNELS, VALUES, types=("Q4_K", "Q4_K")),
        alpha_beta=linear_group(HEADS, HEADS, types=("BF16", "BF16")),
        output=linear_group(WIDTH, types=("Q4_K",), columns=VALUES),
        conv_weight=normal(CHANNELS, TAPS, dtype=torch.float32) / TAPS,
        a=-torch.rand(HEADS, device="cuda"),
        dt=normal(HEADS, dtype=torch.float32),
        head_norm_weight=torch.rand(HEAD_SIZE, device="cuda"),
        num_key_heads=KEY_HEADS,
        num_heads=HEADS,
        key_size=HEAD_SIZE,
        value_size=HEAD_SIZE,
    )
    shapes = [(CHANNELS, WIDTH), (VALUES, WIDTH), (HEADS, WIDTH), (HEADS, WIDTH), (WIDTH, VALUES)]
    pairs = [
        (
            (normal(RANK, columns, dtype=torch.float32) / columns**0.5).requires_grad_(),
            (normal(rows, RANK, dtype=torch.float32) * 0.01).requires_grad_(),
        )
        for rows, columns in shapes
    ]
    return block, pairs


def measure_layer(num_tokens: int, num_documents: int, keeps: bool) -> dict[str, Any]:
    """Forward and backward of the half layer: time as one CUDA graph and launched from Python, memory beside the input,
    and its products alone.
    """
    block, pairs = make_layer()
    bounds = torch.linspace(0, num_tokens, num_documents + 1).int()
    documents = Documents(bounds)
    x = normal(num_tokens, WIDTH).requires_grad_()
    dy = normal(num_tokens, WIDTH)
    parameters = [x, *(half for pair in pairs for half in pair)]

    def step(i: int) -> None:
        y = delta_block(x, block, documents, pairs, kept=Kept(attention=keeps))
        torch.autograd.grad(y, parameters, dy)

    step(0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    launched = time_ms(step)["ms"]
    peak = torch.cuda.max_memory_allocated() - before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    times = time_ms(lambda i: graph.replay())
    wide, narrow, out = normal(CHANNELS + VALUES, WIDTH), normal(num_tokens, CHANNELS + VALUES), normal(WIDTH, VALUES)
    heads = normal(num_tokens, VALUES)

    def products(i: int) -> None:
        for _ in range(1 if keeps else 2):
            torch.mm(x.detach(), wide.t())
        torch.mm(heads, out.t())
        torch.mm(narrow, wide)
        torch.mm(dy, out)

    floor = time_ms(products)["ms"]
    return {**times, "launched_ms": launched, "products_ms": floor, "peak_mib": peak / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    bandwidth, versions = copy_bandwidth(), environment()
    for num_tokens in (2048, 8192):
        for name, (run, num_bytes) in kernel_cases(num_tokens).items():
            line = {"kernel": name, "tokens": num_tokens, **time_ms(run), "floor_ms": num_bytes / bandwidth * 1e3}
            append_line(arguments.output, line | versions)
        for num_documents in (1, 4):
            for keeps in (False, True):
                line = {"layer": "delta net", "tokens": num_tokens, "documents": num_documents, "keeps": keeps}
                append_line(arguments.output, line | measure_layer(num_tokens, num_documents, keeps) | versions)


if __name__ == "__main__":
    main()
