"""Time and peak memory of real training steps on mixtures of experts of a true shape and quant mix.

    python benchmarks/bench_expert_training.py --output benchmarks/results/expert_training.jsonl

The product's own road: the graph that llama.cpp builds for the file's header, its layers fused, LoRA r = 8 on every
expert, forward, backward, clipping and AdamW on float32 masters; every token is a target. Before anything is timed, the
loss and adapter gradients of one layer are compared with the same in float32 and single operations.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure import append_line, environment
from model_shapes import ModelShape, qwen3moe_30b
from synthetic import HeaderFile, random_tensors

from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import Batch
from pyggtrain.ops import workspace
from pyggtrain.ops.fused import Kept
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.memory import join_free_device_memory
from pyggtrain.training.objectives import Supervised
from pyggtrain.training.optim import Optimizer
from pyggtrain.training.step_graph import StepGraphs, max_tokens

TARGETS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    Attributes:
        documents, length: of a step's one micro-batch.
        layers: of the model.
        workspace_mib: into which weights are decoded; gate and up of all experts take 768 MiB.
        kept: what each layer keeps.
    """

    documents: int
    length: int
    layers: int = 48
    workspace_mib: int = 768
    kept: Kept = field(default_factory=Kept)


SETTINGS = {
    "1x2048_8layers": Setting(1, 2048, layers=8),
    "1x2048": Setting(1, 2048),
    "1x2048_small": Setting(1, 2048, workspace_mib=192, kept=Kept(on_host=True)),
    "4x2048": Setting(4, 2048),
    "4x2048_8layers": Setting(4, 2048, layers=8),
}


def make_model(shape: ModelShape, folder: Path, **options: str) -> ImportedModel:
    tensors = random_tensors(shape, torch.device("cuda"))
    file = HeaderFile(folder / "header.gguf", shape.metadata, tensors)
    return ImportedModel(file, device="cuda", **options)


def check_small_model(folder: Path) -> tuple[float, float]:
    """Relative difference of loss and of all adapter gradients: bfloat16 and fused against float32 and single
    operations, one layer of the true width.
    """
    results = []
    shape = qwen3moe_30b(1)
    choices: list[dict[str, str]] = [{}, {"compute": "exact"}]
    for options in choices:
        model = make_model(shape, folder, **options)
        adapter = attach(model, LoraConfig(r=4, lora_alpha=2), seed=0)
        generator = torch.Generator("cuda").manual_seed(1)
        for pair in adapter.pairs.values():
            with torch.no_grad():
                pair.lora_b.copy_(torch.randn(pair.lora_b.shape, device="cuda", generator=generator) * 0.05)
        tokens = torch.randint(0, shape.vocabulary, (200,), generator=torch.Generator().manual_seed(2)).tolist()
        batch = Batch.from_documents([(tokens[:120], tokens[:120]), (tokens[120:], tokens[120:])]).to("cuda")
        loss_sum, _ = model.loss(batch)
        loss_sum.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in adapter.parameters()])
        results.append((loss_sum.item(), gradient.double()))
    (loss, gradient), (exact_loss, exact_gradient) = results
    return abs(loss / exact_loss - 1), float((gradient - exact_gradient).norm() / exact_gradient.norm())


def make_batch(setting: Setting, vocabulary: int, seed: int) -> Batch:
    """Random tokens, every one with a target."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = setting.documents * setting.length
    tokens_T, targets_T = torch.randint(0, vocabulary, (2, num_tokens), generator=generator)
    bounds = torch.arange(0, num_tokens + 1, setting.length, dtype=torch.int32)
    return Batch(tokens_T, torch.arange(setting.length).repeat(setting.documents), targets_T, bounds)


def measure(name: str, folder: Path, *, repeats: int, profile: Path | None) -> dict[str, object]:
    """Median step time, tokens per second and peak memory of one setting."""
    setting, device = SETTINGS[name], torch.device("cuda", 0)
    shape = qwen3moe_30b(setting.layers)
    torch.cuda.empty_cache()
    join_free_device_memory()
    workspace.set_limit_bytes(setting.workspace_mib << 20, "cuda")
    model = make_model(shape, folder)
    adapter = attach(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS), seed=0)
    model.train()
    model.kept = [setting.kept] * setting.layers
    parameters = {str(index): parameter for index, parameter in enumerate(adapter.parameters())}
    objective = Supervised(model)
    optimizer = Optimizer(parameters, TrainConfig(model="synthetic.gguf", data=("none",), output="none.gguf"))
    if setting.documents * setting.length <= max_tokens(model):
        assert model.can_capture, "the model cannot be captured in a CUDA graph"
        optimizer.graphs = StepGraphs(model, parameters)
    batches = [make_batch(setting, shape.vocabulary, seed).to(device) for seed in range(repeats + 3)]
    torch.cuda.synchronize()
    loaded = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def step(batch: Batch) -> float:
        start = time.perf_counter()
        optimizer.step(objective, [batch], num_units=batch.num_targets, learning_rate=1e-4, seeds=[0])
        torch.cuda.synchronize()
        return time.perf_counter() - start

    # the first makes kernels, the second the graph
    times = sorted([step(batch) for batch in batches][3:])
    if profile is not None:
        with torch.profiler.profile() as profiler:
            step(batches[0])
        table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=60)
        (profile / f"{name}.txt").write_text(table)
    seconds = statistics.median(times)
    num_tokens = setting.documents * setting.length
    return {
        "benchmark": "expert_training",
        "setting": name,
        "model": shape.name,
        "layers": setting.layers,
        "tokens_per_step": num_tokens,
        "trained_millions": round(sum(parameter.numel() for parameter in adapter.parameters()) / 1e6, 1),
        "step_ms": round(seconds * 1e3, 1),
        "p20_ms": round(times[len(times) // 5] * 1e3, 1),
        "p80_ms": round(times[len(times) * 4 // 5] * 1e3, 1),
        "tokens_per_s": round(num_tokens / seconds),
        "before_step_gib": round(loaded / GIB, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated names, see SETTINGS")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps")
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    parser.add_argument("--profile", type=Path, help="folder for a table of kernels, one file for each setting")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loss, gradient = check_small_model(folder)
        check = {"benchmark": "expert_training_check", "loss_error": loss, "gradient_error": gradient}
        append_line(args.output, check | environment())
        if not (loss < 2e-3 and gradient < 3e-2):
            return 1
        for setting in args.settings.split(","):
            try:
                line = measure(setting, folder, repeats=args.repeats, profile=args.profile)
            except torch.OutOfMemoryError as error:
                line = {"benchmark": "expert_training", "setting": setting, "failed": str(error).splitlines()[0]}
            append_line(args.output, line | environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
