"""Several GPUs of one machine: the same losses as one, tokens per second, memory of each.

    python benchmarks/bench_processes.py --output one.jsonl
    torchrun --nproc-per-node 2 benchmarks/bench_processes.py --reference one.jsonl
    torchrun --nproc-per-node 2 benchmarks/bench_processes.py --split-mode layer --reference one.jsonl

--tensor-split 3 1 cuts the layers unevenly. A step has the same rows however many processes share it, so the losses
have to agree; with --reference the exit code is 1 if they do not. The model is a `llama` of random blocks with the
widths of an 8B model (Q4_K_M) and --layers layers. Data parallel, each GPU takes its share of the micro-batches; with
--split-mode layer, its share of the layers.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from synthetic import LLAMA_3_1_8B, SyntheticFile

from pyggtrain import models
from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.data import Example
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.objectives import OBJECTIVES
from pyggtrain.training.output import OutputFiles
from pyggtrain.training.pipeline import Pipeline, shares_of, split_layers
from pyggtrain.training.processes import join_processes
from pyggtrain.training.progress import Progress
from pyggtrain.training.trainer import Trainer

# bfloat16's rounding is the same, but sums are taken in another order.
TOLERANCE = 2e-3


def make_rows(count: int, num_tokens: int) -> list[Example]:
    numbers = random.Random(0)
    rows = []
    for index in range(count):
        ids = array("i", [numbers.randrange(128_000) for _ in range(num_tokens - 17 * (index % 7))])
        rows.append(Example(ids, ids, f"row {index}"))
    return rows


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """Train and say what was measured; None on all processes but the first."""
    is_split = options.split_mode == "layer"
    processes = join_processes(120, is_split=is_split)
    device = processes.device(torch.device("cuda"))
    config = TrainConfig(
        model="synthetic",
        data=("made up",),
        output=str(folder / "adapter.gguf"),
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.micro_batches // processes.num_replicas,
        learning_rate=1e-3,
        gradient_checkpointing="matmuls",
        split_mode=options.split_mode,
        tensor_split=options.tensor_split,
        cuda_graphs=False,
        save_steps=0,
        overwrite=True,
    )
    shape = replace(LLAMA_3_1_8B, block_count=options.layers)
    file: Any = SyntheticFile(shape, device)
    split = pipeline = layers = None
    if is_split:
        split = split_layers([1.0] * shape.block_count, shares_of(config, processes, None))
        layers = split.layers(processes.rank)
    model = models.load(file, device=device, layers=layers)
    adapter = attach(model, LoraConfig(r=16, lora_alpha=16.0), seed=0)
    model.checkpoint_policy = config.gradient_checkpointing
    model.train()
    if is_split:
        pipeline = Pipeline(model, config, processes, device, width=shape.embedding_length, dtype=torch.bfloat16)
    parameters: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for name, pair in adapter.pairs.items():
        some = parameters if layers is None or int(name.split(".")[1]) in layers else others
        some[f"{name}.lora_a"], some[f"{name}.lora_b"] = pair.lora_a, pair.lora_b
    memory: list[float] = []

    def watch() -> None:
        peaks = processes.all_gather(torch.cuda.max_memory_allocated(device))
        memory[:] = [round(peak / 2**30, 2) for peak in peaks]

    trainer = Trainer(
        OBJECTIVES["sft"](model, config),
        parameters,
        make_rows(64, options.tokens),
        make_rows(4, options.tokens),
        config=config,
        files=OutputFiles(Path(config.output)),
        base_sha256="synthetic",
        data_sha256="made up",
        started="2026-01-01T00:00:00",
        resume_from=None,
        device=device,
        progress=Progress(),
        processes=processes,
        pipeline=pipeline,
        other_parameters=others,
        layers=None if split is None else str(split),
        memory_excess=watch,
    )
    summary = trainer.run()
    if not processes.is_first:
        return None
    lines = [line for line in read_metrics(trainer.files.metrics) if "loss" in line]
    return {
        "benchmark": "processes",
        "processes": processes.count,
        "split_mode": options.split_mode,
        "layers": None if split is None else str(split),
        "losses": [round(line["loss"], 5) for line in lines],
        "eval_loss": round(summary.eval_loss or 0.0, 5),
        "grad_norms": [round(line["grad_norm"], 5) for line in lines],
        "tokens_per_second": round(statistics.median(line["tokens_per_second"] for line in lines[2:])),
        "peak_gib": memory,
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split-mode", choices=("none", "layer"), default="none")
    parser.add_argument("--tensor-split", type=float, nargs="+", default=())
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of the longest row")
    parser.add_argument("--micro-batches", type=int, default=8, help="rows of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--reference", type=Path, help="what one process wrote")
    parser.add_argument("--output", type=Path, help="append the JSON line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        line = run(options, Path(name))
    if line is None:
        return 0
    print(json.dumps(line), flush=True)
    if options.output is not None:
        with options.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
    if options.reference is None:
        return 0
    reference = json.loads(options.reference.read_text().splitlines()[0])
    mine, theirs = ([*one["losses"], one["eval_loss"]] for one in (line, reference))
    worst = max(abs(a / b - 1) for a, b in zip(mine, theirs, strict=True))
    print(f"largest difference of a loss from one process: {worst:.1e} (needed: {TOLERANCE:.0e})", flush=True)
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
