"""Every kernel but dequantisation: streaming ones against the card's copy bandwidth, attention against torch's.

    python benchmarks/bench_kernels.py --output benchmarks/results/kernels.jsonl
    python benchmarks/bench_kernels.py --only attention --head-sizes 256

Shapes are those of Llama-3.1-8B at 8,192 tokens, and heads of 256 are Qwen3.6-35B-A3B's. Correctness is the tests'
(tests/kernels), on the same functions.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from measure import append_line, copy_bandwidth, environment, time_ms
from pyggtrain.kernels.attention.backward import attention_backward
from pyggtrain.kernels.attention.forward import attention_forward
from pyggtrain.kernels.attention.mask import AttentionMask
from pyggtrain.kernels.cross_entropy import cross_entropy_
from pyggtrain.kernels.lora import lora_extend_
from pyggtrain.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from pyggtrain.kernels.rope import rope_forward
from pyggtrain.kernels.swiglu import swiglu_backward, swiglu_forward

TOKENS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 8192, 4096, 14336, 32, 8, 128, 128256
# Head size -> query and key heads.
ATTENTION_HEADS = {128: (HEADS, KV_HEADS), 64: (HEADS, KV_HEADS), 256: (16, 2)}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def streaming_cases() -> dict[str, tuple[Callable[[int], object], int]]:
    """Name -> (one call, bytes that it must move)."""
    x, residual, total = normal(TOKENS, WIDTH), normal(TOKENS, WIDTH), normal(TOKENS, WIDTH)
    weight, out = torch.rand(WIDTH, device="cuda"), normal(TOKENS, WIDTH + 64)[:, :WIDTH]
    inverse_rms = rms_norm_forward(x, weight, eps=1e-5)[2]
    gate_up, act = normal(TOKENS, 2 * FEED_FORWARD + 64), normal(TOKENS, FEED_FORWARD + 64)[:, :FEED_FORWARD]
    gate, up = gate_up[:, :FEED_FORWARD], gate_up[:, FEED_FORWARD : 2 * FEED_FORWARD]
    heads, table = normal(TOKENS, HEADS + 2 * KV_HEADS, HEAD_SIZE), torch.rand(TOKENS, HEAD_SIZE // 2, device="cuda")
    q_k = heads[:, : HEADS + KV_HEADS]
    logits, targets = normal(1024, VOCABULARY), torch.randint(0, VOCABULARY, (1024,), device="cuda")
    extended = normal(2 * FEED_FORWARD + 64, WIDTH + 64)
    pairs = [(normal(16, WIDTH).float(), normal(FEED_FORWARD, 16).float(), 1.0) for _ in range(2)]
    rows, wide = 2 * TOKENS * WIDTH, 2 * TOKENS * FEED_FORWARD
    return {
        "rms_norm forward, residual added": (
            lambda i: rms_norm_forward(x, weight, eps=1e-5, residual=residual, total=total, out=out),
            4 * rows,
        ),
        "rms_norm forward": (lambda i: rms_norm_forward(x, weight, eps=1e-5, out=out), 2 * rows),
        "rms_norm backward, residual added": (
            lambda i: rms_norm_backward(x, total, weight, inverse_rms, d_residual=residual, out=residual),
            4 * rows,
        ),
        "swiglu forward": (lambda i: swiglu_forward(gate, up, out=act), 3 * wide),
        "swiglu backward": (lambda i: swiglu_backward(act, gate, up, d_gate=gate, d_up=up, y=act), 6 * wide),
        "rope": (lambda i: rope_forward(q_k, table, table, is_neox=False, out=q_k), 4 * q_k.numel()),
        "cross_entropy": (lambda i: cross_entropy_(logits, targets), 6 * logits.numel()),
        "lora_extend": (
            lambda i: lora_extend_(extended, pairs, row_counts=(FEED_FORWARD, FEED_FORWARD)),
            2 * (2 * FEED_FORWARD * (32 + 64) + WIDTH * (64 + 64)),
        ),
    }


def attention_cases(head_size: int) -> dict[str, tuple[int, int, int | None]]:
    """Name -> (documents, tokens in each, window)."""
    if head_size == 256:
        return {"1 x 2048": (1, 2048, None), "4 x 2048": (4, 2048, None), "1 x 8192": (1, 8192, None)}
    return {
        "4 x 2048": (4, 2048, None),
        "1 x 8192": (1, 8192, None),
        "1 x 8192, window 1024": (1, 8192, 1024),
        "16 x 512": (16, 512, None),
    }


def measure_attention(documents: int, length: int, window: int | None, head_size: int) -> dict[str, float]:
    """Forward and backward in ms: ours, torch's flash attention for packed documents, cuDNN where it has the case."""
    aten = torch.ops.aten
    heads, kv_heads = ATTENTION_HEADS[head_size]
    rows = normal(documents * length, (heads + 2 * kv_heads) * head_size).unflatten(1, (-1, head_size))
    q, k, v = rows.split((heads, kv_heads, kv_heads), 1)
    do, scale = normal(*q.shape), head_size**-0.5
    cu_seqlens = torch.arange(0, documents * length + 1, length, device="cuda", dtype=torch.int32)
    mask = AttentionMask.from_documents(cu_seqlens, len(q), window=window)
    o, lse = attention_forward(q, k, v, mask, softmax_scale=scale)
    times = {
        "ours": lambda i: attention_forward(q, k, v, mask, softmax_scale=scale),
        "ours_backward": lambda i: attention_backward(do, q, k, v, o, lse, mask, softmax_scale=scale),
    }
    bounds = (cu_seqlens, cu_seqlens, length, length, 0.0, True)
    sides = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    flash = aten._flash_attention_forward(q, k, v, *bounds, False, scale=scale, **sides)
    times["flash"] = lambda i: aten._flash_attention_forward(q, k, v, *bounds, False, scale=scale, **sides)
    times["flash_backward"] = lambda i: aten._flash_attention_backward(
        do, q, k, v, flash[0], flash[1], *bounds, flash[2], flash[3], scale=scale, **sides
    )
    # Not for heads of 256 backward.
    if window is None and head_size <= 128:
        batched = [part.unflatten(0, (documents, length)).transpose(1, 2) for part in (q, k, v, do)]
        forward = aten._scaled_dot_product_cudnn_attention
        kept = forward(*batched[:3], None, True, 0.0, True, False)
        o_cudnn, lse_cudnn, cum_q, cum_k, max_q, max_k, seed, offset, _ = kept
        times["cudnn"] = lambda i: forward(*batched[:3], None, True, 0.0, True, False)
        times["cudnn_backward"] = lambda i: aten._scaled_dot_product_cudnn_attention_backward(
            batched[3], *batched[:3], o_cudnn, lse_cudnn, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
        )
    return {f"{name}_ms": round(time_ms(call, repeats=10)["ms"], 3) for name, call in times.items()}


def measure_streaming(output: Path | None) -> None:
    """Append what each streaming kernel reaches of the card's copy bandwidth."""
    peak = copy_bandwidth()
    append_line(output, {"benchmark": "copy", "TB_per_s": round(peak / 1e12, 3), **environment()})
    for name, (call, num_bytes) in streaming_cases().items():
        times = time_ms(call, repeats=20)
        rate = num_bytes / times["ms"] * 1e3
        line = {"benchmark": name} | {key: round(value, 4) for key, value in times.items()}
        append_line(output, line | {"TB_per_s": round(rate / 1e12, 3), "share_of_copy": round(rate / peak, 3)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    parser.add_argument("--only", choices=("streaming", "attention"), help="this part alone")
    parser.add_argument("--head-sizes", type=int, nargs="+", default=list(ATTENTION_HEADS), choices=ATTENTION_HEADS)
    args = parser.parse_args()
    if args.only != "attention":
        measure_streaming(args.output)
    if args.only != "streaming":
        append_line(args.output, {"benchmark": "environment", **environment()})
        for head_size in args.head_sizes:
            for name, (documents, length, window) in attention_cases(head_size).items():
                line = {"benchmark": "attention", "documents": name, "heads": [*ATTENTION_HEADS[head_size], head_size]}
                append_line(args.output, line | measure_attention(documents, length, window, head_size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
