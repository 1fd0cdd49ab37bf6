"""Tokens per second and peak memory of real training steps on models of a true shape and quant mix.

    python benchmarks/bench_training.py --output benchmarks/results/training.jsonl

The product's own model, adapter and optimiser step (forward, backward, clipping, AdamW on float32 masters); weights are
random valid blocks, every token a target. Before anything is timed, a small model's loss and adapter gradients are
compared with the same model in float32 (training_checks.py). Memory is the peak that torch allocated, weights and
optimiser included; the allocator is capped at a setting's limit, so that a step cannot take more for a moment.

Settings are in training_settings.py. With --model-path graph those of a llama run on the model that is imported from
llama.cpp's own graph, for which a header is written to a temporary folder; other architectures exist only there.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import append_line, environment
from model_shapes import ModelShape, flops_per_token
from step_families import break_down, device_intervals
from synthetic import HeaderFile, SyntheticFile, random_tensors
from training_checks import check, products_of
from training_settings import KEPT, NATIVE_SETTINGS, SETTINGS, Setting

from pyggtrain.adapters import LoraAdapter, LoraConfig, attach
from pyggtrain.gguf import QuantTensor
from pyggtrain.graph.model import ImportedModel
from pyggtrain.models.llama import Llama
from pyggtrain.nn import Batch, Model
from pyggtrain.ops import workspace
from pyggtrain.ops.fused import Kept
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.memory import join_free_device_memory
from pyggtrain.training.objectives import Supervised
from pyggtrain.training.optim import Optimizer
from pyggtrain.training.step_graph import StepGraphs, can_graph, max_tokens

GIB = 2**30
# What the card's library sustains in products of bfloat16 (docs/performance.md).
SUSTAINED_FLOPS = 690e12
# The first makes kernels, the second the graph.
WARM_UP = 3


def make_model(setting: Setting, path: str, device: torch.device, folder: Path) -> tuple[Model, dict[str, QuantTensor]]:
    """A model with random weights, by hand ("native") or imported ("graph"), and its tensors."""
    shape = setting.make_shape()
    options: dict[str, Any] = {"dtype": setting.dtype, "compute": products_of(setting.compute)}
    if isinstance(shape, ModelShape):
        tensors, metadata = random_tensors(shape, device), shape.metadata
    else:
        file = SyntheticFile(shape, device)
        if path == "native":
            return Llama(file, device=device, **options), file.tensors  # type: ignore[arg-type]
        tensors, metadata = file.tensors, {**file.metadata, "tokenizer.ggml.model": "no_vocab"}
    header = HeaderFile(folder / "header.gguf", metadata, tensors)
    return ImportedModel(header, device=str(device), **options), tensors


def lora_config(setting: Setting) -> LoraConfig:
    return LoraConfig(r=setting.r, lora_alpha=setting.lora_alpha, target_modules=setting.target_modules)


def make_batch(setting: Setting, vocabulary: int, seed: int) -> Batch:
    """Random tokens, every one with a target."""
    generator = torch.Generator().manual_seed(seed)
    tokens_T, targets_T = torch.randint(0, vocabulary, (2, setting.num_tokens), generator=generator)
    bounds = torch.arange(0, setting.num_tokens + 1, setting.length, dtype=torch.int32)
    positions_T = torch.arange(setting.length).repeat(setting.documents)
    return Batch(tokens_T, positions_T, targets_T, bounds)


def train_config(setting: Setting) -> TrainConfig:
    return TrainConfig(
        model="synthetic.gguf",
        data=("none",),
        output="none.gguf",
        compute=setting.compute,  # type: ignore[arg-type]
        optim=setting.optim,  # type: ignore[arg-type]
    )


def make_optimizer(setting: Setting, config: TrainConfig, model: Model, adapter: LoraAdapter) -> Optimizer:
    """With CUDA graphs where the product takes them."""
    parameters: dict[str, torch.Tensor] = {
        f"{name}.{half}": getattr(pair, half) for name, pair in adapter.pairs.items() for half in ("lora_a", "lora_b")
    }
    optimizer = Optimizer(parameters, config)
    # Gradients at fixed places would cost memory that longer micro-batches have a use for.
    if can_graph(config, model) and setting.num_tokens <= max_tokens(model):
        optimizer.graphs = StepGraphs(model, parameters, optimizer.pages)
    return optimizer


def begin(setting: Setting, device: torch.device) -> None:
    """Nothing left of the setting before; the workspace and the allocator's cap of this one."""
    gc.collect()
    torch.cuda.empty_cache()
    join_free_device_memory()
    workspace.set_limit_bytes(setting.workspace_bytes, "cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = 1.0 if setting.max_gib is None else min(1.0, setting.max_gib * GIB / total)
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def described(setting: Setting, kept: Sequence[Kept]) -> dict[str, object]:
    """A setting in a line of results; of what is kept the number of layers that do."""
    return {
        "documents": setting.documents,
        "length": setting.length,
        "layers": len(kept),
        "compute": setting.compute,
        "r": setting.r,
        "lora_alpha": setting.lora_alpha,
        "target_modules": setting.target_modules,
        "optim": setting.optim,
        "kept": {
            name: sum(getattr(one, name) for one in kept)
            for name in ("attention", "gate_up", "weights", "on_host", "halves")
        },
        "workspace_mib": setting.workspace_bytes >> 20,
        "cap_gib": setting.max_gib,
    }


def measure(
    name: str, setting: Setting, path: str, *, repeats: int, profile: Path | None, warm_up: int = WARM_UP
) -> dict[str, object]:
    """Step time, tokens per second and peak memory of one setting."""
    device, shape, config = torch.device("cuda", 0), setting.make_shape(), train_config(setting)
    begin(setting, device)
    with tempfile.TemporaryDirectory() as folder:
        model, tensors = make_model(setting, path, device, Path(folder))
    adapter = attach(model, lora_config(setting), seed=0)
    model.train()
    kept = model.kept = setting.kept(len(model.layers))
    model.checkpoint_policy = "layers"
    objective, optimizer = Supervised(model), make_optimizer(setting, config, model, adapter)
    batches = [make_batch(setting, shape.vocabulary, seed).to(device) for seed in range(warm_up + repeats)]
    torch.cuda.synchronize()
    loaded = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def step(batch: Batch) -> float:
        optimizer.step(objective, [batch], num_units=batch.num_targets, learning_rate=1e-4, seeds=[0])
        return time.perf_counter()

    # An update may run beside the next step: a step lasts until the next one is as far. The last has none beside it.
    ends = [time.perf_counter(), *(step(batch) for batch in batches)]
    torch.cuda.synchronize()
    ends[-1] = time.perf_counter()
    times_ms = sorted((end - start) * 1e3 for start, end in pairwise(ends[warm_up:]))
    step_ms = statistics.median(times_ms)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    experts_used = shape.experts_used if isinstance(shape, ModelShape) else 1.0
    layouts = {tensor.name: (tensor.type, tensor.shape) for tensor in tensors.values()}
    floor_ms = flops_per_token(layouts, experts_used) * setting.num_tokens / SUSTAINED_FLOPS * 1e3
    line = {
        "benchmark": "training",
        "setting": name,
        "model": shape.name,
        "model_path": "graph" if isinstance(shape, ModelShape) else path,
        "is_fused": model.is_fused,
        "is_cuda_graph": optimizer.graphs is not None and len(optimizer.graphs._graphs) > 0,
        **described(setting, kept),
        "trained_millions": round(adapter.num_parameters / 1e6, 1),
        "tokens_per_step": setting.num_tokens,
        "warm_up": warm_up,
        "step_ms": round(step_ms, 1),
        "p20_ms": round(times_ms[len(times_ms) // 5], 1),
        "p80_ms": round(times_ms[len(times_ms) * 4 // 5], 1),
        "tokens_per_s": round(setting.num_tokens / step_ms * 1e3),
        "floor_ms": round(floor_ms, 1),
        "share_of_floor": round(floor_ms / step_ms, 3),
        "weights_gib": round(sum(tensor.num_bytes for tensor in tensors.values()) / GIB, 2),
        "before_step_gib": round(loaded / GIB, 2),
        "peak_gib": round(peak / GIB, 2),
        "reserved_gib": round(reserved / GIB, 2),
    }
    if profile is not None:
        try:
            # Two: each has the other's update beside it.
            line |= profiled(lambda: [step(batch) for batch in batches[:2]], profile / f"{name}.txt", step_ms)
        except Exception as error:
            # What was timed is not to be lost.
            traceback.print_exc()
            line["profile_failed"] = in_one_line(error)
    return line


def profiled(steps: Callable[[], object], table: Path, step_ms: float) -> dict[str, Any]:
    """The families of two more steps' kernels, for one; their table of kernels goes to a file."""
    with torch.profiler.profile() as profiler:
        steps()
        torch.cuda.synchronize()
    table.parent.mkdir(parents=True, exist_ok=True)
    rows = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90)
    table.write_text(rows)
    return break_down(device_intervals(profiler.events()), step_ms, num_steps=2)


def in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(NATIVE_SETTINGS), help="comma-separated names, see SETTINGS")
    parser.add_argument("--model-path", choices=("native", "graph"), default="native", help="what computes a llama")
    parser.add_argument("--layers", type=int, help="fewer make a quick look")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps")
    parser.add_argument(
        "--warm-up", type=int, default=WARM_UP, help="steps before; 0 for steps of minutes, whose first is like others"
    )
    parser.add_argument("--optim", help="in place of the settings' own")
    parser.add_argument("--kept", choices=KEPT, help="what every layer keeps, in place of the settings' own")
    parser.add_argument("--workspace-mib", type=int, help="in place of the settings' own")
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    parser.add_argument("--profile", type=Path, help="folder for a table of kernels, one file for each setting")
    args = parser.parse_args()

    names = args.settings.split(",")
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"--settings: {', '.join(unknown)} unknown; there are {', '.join(SETTINGS)}")
    given = {"layers": args.layers, "optim": args.optim, "workspace_mib": args.workspace_mib}
    given["kept"] = None if args.kept is None else KEPT[args.kept]
    chosen = {key: value for key, value in given.items() if value is not None}
    settings = {name: replace(SETTINGS[name], **chosen) for name in names}

    passed = {}
    for key in sorted({(setting.family, setting.compute) for setting in settings.values()}):
        with tempfile.TemporaryDirectory() as folder:
            line = check(*key, torch.device("cuda", 0), Path(folder))
        append_line(args.output, line | environment())
        passed[key] = line["passed"]
    failed = False
    for name, setting in settings.items():
        if not passed[setting.family, setting.compute]:
            failed = True
            continue
        try:
            line = measure(
                name,
                setting,
                args.model_path,
                warm_up=args.warm_up,
                repeats=args.repeats,
                profile=args.profile,
            )
        except Exception as error:
            failed = True
            traceback.print_exc()
            line = {"benchmark": "training", "setting": name, "failed": in_one_line(error)}
        append_line(args.output, line | environment())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
