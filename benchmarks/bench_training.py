"""Tokens per second and peak memory of one LoRA step on a Llama-3.1-8B-shaped Q4_K_M model, rank 16 on all seven
linears.

    python benchmarks/bench_training.py --output benchmarks/results/training.jsonl

Weights are random valid blocks. A step is forward, backward, gradient clipping and AdamW on float32 masters; every
token is a target. Before anything is timed, a small model's loss and adapter gradients are compared with torch's
autograd over dequantised weights. Memory is the peak that torch allocated, weights and optimiser included.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from llama_step import GROUPS, LLAMA_3_1_8B, LlamaStep, Policy, Shape
from measure import append_line, environment
from pyggtrain.kernels.reference import dequant as reference
from pyggtrain.kernels.reference.rope import rope_forward

SMALL = Shape(4, 256, 512, 4, 2, 64, 600)

SETTINGS: dict[str, tuple[int, int, Policy, bool]] = {
    # name: sequences, tokens in each, policy, one CUDA graph for the whole step
    "4x2048_8gib": (4, 2048, Policy(2, 0, True, 1792, 42752), False),
    "4x2048_24gib": (4, 2048, Policy(32, 19, True, 896, 42752), False),
    "4x2048_36gib": (4, 2048, Policy(32, 32, True, 1024, 128256, kept_weights=12), False),
    "1x2048_6gib": (1, 2048, Policy(2, 0, True, 448, 42752), True),
    "1x2048_13gib": (1, 2048, Policy(32, 32, True, 1024, 128256), True),
}


def autograd_loss(step: LlamaStep, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the masters by torch's autograd, float64, from whole dequantised weights."""
    shape = step.shape
    master = step.master.detach().double().requires_grad_()
    position = {"a": 0, "b": step.num_a}

    def take(kind: str, like: torch.Tensor) -> torch.Tensor:
        flat = master[position[kind] : position[kind] + like.numel()]
        position[kind] += like.numel()
        return flat.view(like.shape)

    def norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(h, (shape.embedding_length,), weight.double(), shape.eps)

    def heads(flat: torch.Tensor) -> torch.Tensor:
        return flat.unflatten(1, (-1, shape.head_size))

    h = reference.dequantize(step.token_embd, "Q4_K", dtype=torch.float64)[tokens]
    for groups, norms in zip(step.layers, step.norms, strict=True):
        pairs = {group: (take("a", groups[group].lora_a), take("b", groups[group].lora_b)) for group in GROUPS}

        def apply(x: torch.Tensor, group: str, groups: dict = groups, pairs: dict = pairs) -> list[torch.Tensor]:
            linears, (a, b) = groups[group], pairs[group]
            outputs = []
            for i, (blocks, type, b_i) in enumerate(
                zip(linears.blocks, linears.types, b.split(linears.row_counts), strict=True)
            ):
                weight = reference.dequantize(blocks, type, dtype=torch.float64)
                a_i = a[i * linears.rank : (i + 1) * linears.rank]
                outputs.append(x @ weight.t() + step.scale * (x @ a_i.t()) @ b_i.t())
            return outputs

        q, k, v = (heads(flat) for flat in apply(norm(h, norms[0]), "qkv"))
        q, k = (rope_forward(part, step.cos, step.sin, is_neox=False) for part in (q, k))
        attention = F.scaled_dot_product_attention(
            *(step.batched(part) for part in (q, k, v)), is_causal=True, enable_gqa=True
        )
        h = h + apply(attention.transpose(1, 2).reshape(h.shape), "o")[0]
        gate, up = apply(norm(h, norms[1]), "gate_up")
        h = h + apply(F.silu(gate) * up, "down")[0]
    logits = norm(h, step.output_norm) @ reference.dequantize(step.output, "Q6_K", dtype=torch.float64).t()
    loss = F.cross_entropy(logits, targets)
    return loss.detach(), torch.autograd.grad(loss, master)[0]


def difference_from_autograd(device: torch.device, dtype: torch.dtype, policy: Policy) -> tuple[float, float]:
    """Relative difference of the loss and of the vector of all adapter gradients, on a small model."""
    step = LlamaStep(
        SMALL, batch_size=2, sequence_length=64, rank=4, scale=0.5, policy=policy, device=device, dtype=dtype
    )
    tokens, targets = torch.randint(
        0, SMALL.vocabulary, (2, 128), device=device, generator=torch.Generator(device).manual_seed(1)
    )
    # twice: a second step must not depend on what the first left in the buffers
    step.forward_backward(tokens, targets)
    loss = step.forward_backward(tokens, targets)
    expected, expected_gradient = autograd_loss(step, tokens, targets)
    gradient = step.master.grad
    assert gradient is not None
    return (
        ((loss - expected) / expected).abs().item(),
        ((gradient - expected_gradient).norm() / expected_gradient.norm()).item(),
    )


def measure(name: str, *, layers: int, repeats: int, seed: int = 0) -> dict[str, object]:
    """Median step time, tokens per second and peak memory of one setting."""
    batch_size, sequence_length, policy, is_graph = SETTINGS[name]
    shape = LLAMA_3_1_8B if layers == 32 else Shape(layers, 4096, 14336, 32, 8, 128, 128256)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = LlamaStep(
        shape,
        batch_size=batch_size,
        sequence_length=sequence_length,
        rank=16,
        scale=1.0,
        policy=policy,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        seed=seed,
    )
    optimizer = torch.optim.AdamW([step.master], lr=1e-4, fused=True, capturable=is_graph)
    num_tokens = batch_size * sequence_length
    generator = torch.Generator("cuda").manual_seed(seed)
    batches = torch.randint(0, shape.vocabulary, (repeats + 3, 2, num_tokens), device="cuda", generator=generator)
    tokens, targets = torch.empty_like(batches[0])
    torch.cuda.synchronize()
    loaded = torch.cuda.memory_allocated()

    def run() -> torch.Tensor:
        return step.step(tokens, targets, optimizer)

    tokens.copy_(batches[0, 0])
    targets.copy_(batches[0, 1])
    losses = [run().item()]
    if is_graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.graph(graph):
            loss = run()

        def run() -> torch.Tensor:
            graph.replay()
            return loss

    times = []
    for tokens_targets in batches[1:]:
        tokens.copy_(tokens_targets[0])
        targets.copy_(tokens_targets[1])
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(run().item())
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[2:])
    return {
        "benchmark": "training",
        "setting": name,
        "layers": layers,
        "tokens_per_step": num_tokens,
        "policy": vars(policy),
        "cuda_graph": is_graph,
        "step_ms": round(seconds * 1e3, 1),
        "p20_ms": round(sorted(times[2:])[len(times[2:]) // 5] * 1e3, 1),
        "p80_ms": round(sorted(times[2:])[len(times[2:]) * 4 // 5] * 1e3, 1),
        "tokens_per_s": round(num_tokens / seconds),
        "weights_gib": round(step.num_weight_bytes() / 2**30, 2),
        "before_step_gib": round(loaded / 2**30, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "loss": round(losses[-1], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated names, see SETTINGS")
    parser.add_argument("--layers", type=int, default=32, help="fewer make a quick look")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps")
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    args = parser.parse_args()

    for policy in (
        Policy(4, 4, True, 128, 600),
        Policy(2, 0, False, 50, 200),
        Policy(2, 1, True, 128, 600, kept_weights=2),
    ):
        loss, gradient = difference_from_autograd(torch.device("cuda"), torch.bfloat16, policy)
        line = {"benchmark": "training_check", "policy": vars(policy), "loss_error": loss, "gradient_error": gradient}
        append_line(args.output, line | environment())
        if not (loss < 2e-3 and gradient < 3e-2):
            return 1
    for name in args.settings.split(","):
        append_line(args.output, measure(name, layers=args.layers, repeats=args.repeats) | environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
