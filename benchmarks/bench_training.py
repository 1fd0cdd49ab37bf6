"""Tokens per second and peak memory of real training steps on models of a true shape and quant mix.

    python benchmarks/bench_training.py --output benchmarks/results/training.jsonl

The product's own model, adapter and optimiser step (forward, backward, clipping, AdamW on float32 masters); weights are
random valid blocks, LoRA r = 16 on all seven linears, every token a target. Before anything is timed, a small model's
loss and adapter gradients are compared with the same model in float32. Memory is the peak that torch allocated, weights
and optimiser included; the allocator is capped there, so that a step cannot take more for a moment.

With --model-path graph the same steps run on the model that is imported from llama.cpp's own graph, for which a header
is written to a temporary folder. Settings of other architectures exist only there.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import append_line, environment
from model_shapes import ModelShape, deepseek2_lite, mamba2_7b, nemotron_h_8b, qwen3moe_30b, qwen35moe_35b
from synthetic import LLAMA_3_1_8B, LLAMA_3_3_70B, HeaderFile, LlamaShape, SyntheticFile, random_tensors

from pyggtrain.adapters import LoraConfig, attach
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

SMALL = LlamaShape("small", 4, 256, 512, 4, 2, 64, 600, "Q4_K_M")
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    Attributes:
        documents, length: of a step's one micro-batch.
        max_gib: the allocator's cap.
        kept: number of layers -> what each keeps.
        head_parts: into how many parts the head is decoded.
        shape: of the model, or what makes it, for a number of layers.
        compute: how the base weights' products are computed, as in `TrainConfig`.
        r: rank of every pair.
    """

    documents: int
    length: int
    max_gib: float
    kept: Callable[[int], list[Kept]]
    head_parts: int = 3
    shape: LlamaShape | Callable[..., ModelShape] = LLAMA_3_1_8B
    compute: str = "auto"
    r: int = 16

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return torch.float16 if self.compute == "fp16" else torch.bfloat16


def on_host(layers: int) -> list[Kept]:
    return [Kept(on_host=True)] * layers


def on_host_but(gate_up: int, weights: int = 0) -> Callable[[int], list[Kept]]:
    """All on the host, but gate and up of the last layers kept, and decoded weights of fewer."""
    return lambda layers: [
        Kept(on_host=True, gate_up=layer >= layers - gate_up, weights=layer >= layers - weights)
        for layer in range(layers)
    ]


def all_kept(layers: int) -> list[Kept]:
    """What fused halves keep; all else of a layer is computed again."""
    return [Kept()] * layers


def inputs_on_host(layers: int) -> list[Kept]:
    return [Kept(attention=False, on_host=True)] * layers


SETTINGS = {
    "4x2048_8gib": Setting(4, 2048, 7.8, on_host_but(2)),
    "4x2048_24gib": Setting(4, 2048, 24, on_host_but(32, weights=6)),
    "4x2048_36gib": Setting(4, 2048, 36, on_host_but(32, weights=31), head_parts=1),
    "1x2048_6gib": Setting(1, 2048, 6.3, on_host),
    "1x2048_13gib": Setting(1, 2048, 13.3, on_host_but(32, weights=8)),
    "1x8192_8gib": Setting(1, 8192, 7.8, on_host_but(2)),
    "1x80k_24gib": Setting(1, 80 * 1024, 24, inputs_on_host),
    "4x2048_8gib_fp8": Setting(4, 2048, 7.8, on_host, compute="fp8"),
    "4x2048_24gib_fp8": Setting(4, 2048, 24, on_host_but(32), compute="fp8"),
    "4x2048_24gib_fp16": Setting(4, 2048, 24, on_host_but(32, weights=6), compute="fp16"),
    "1x2048_70b": Setting(1, 2048, 40, on_host, shape=LLAMA_3_3_70B),
    "1x2048_moe": Setting(1, 2048, 130, all_kept, shape=qwen3moe_30b),
    "1x2048_delta": Setting(1, 2048, 130, all_kept, shape=qwen35moe_35b, r=4),
    "4x2048_delta": Setting(4, 2048, 130, all_kept, shape=qwen35moe_35b, r=4),
    "1x2048_mla": Setting(1, 2048, 130, all_kept, shape=deepseek2_lite),
    "1x2048_mamba2": Setting(1, 2048, 130, all_kept, shape=mamba2_7b),
    "1x2048_hybrid": Setting(1, 2048, 130, all_kept, shape=nemotron_h_8b),
}
NATIVE_SETTINGS = [name for name, setting in SETTINGS.items() if isinstance(setting.shape, LlamaShape)]
# What the card's library sustains in products of bfloat16 (docs/performance.md).
SUSTAINED_FLOPS = 690e12


# Relative error of the loss and of the adapter gradients in `check_small_model`: above these nothing is timed.
BOUNDS = {"auto": (2e-3, 3e-2), "fp16": (2e-3, 1e-2), "fp8": (1e-2, 2e-1)}


def products_of(compute: str) -> str:
    """How products are computed: float16 is a matter of activations alone."""
    return "auto" if compute == "fp16" else compute


def check_small_model(device: torch.device, compute: str) -> tuple[float, float, float]:
    """Relative difference of the loss and of all adapter gradients, and cosine of these: fused in half precision
    against float32 and single operations.
    """
    file = SyntheticFile(SMALL, device)
    results = []
    half = torch.float16 if compute == "fp16" else torch.bfloat16
    for dtype, products in ((half, products_of(compute)), (torch.float32, "exact")):
        model = Llama(file, device=device, dtype=dtype, compute=products)  # type: ignore[arg-type]
        adapter = attach(model, LoraConfig(r=4, lora_alpha=2), seed=0)
        generator = torch.Generator(device).manual_seed(1)
        for pair in adapter.pairs.values():
            with torch.no_grad():
                pair.lora_b.copy_(torch.randn(pair.lora_b.shape, device=device, generator=generator) * 0.05)
        if dtype == half:
            model.kept = [Kept(), Kept(gate_up=True), Kept(on_host=True), Kept(on_host=True, weights=True)]
        tokens = torch.randint(0, SMALL.vocabulary, (200,), generator=torch.Generator().manual_seed(2)).tolist()
        batch = Batch.from_documents([(tokens[:120], tokens[:120]), (tokens[120:], tokens[120:])]).to(device)
        loss_sum, _ = model.loss(batch)
        loss_sum.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in adapter.parameters()])
        results.append((loss_sum.item(), gradient.double()))
    (loss, gradient), (exact_loss, exact_gradient) = results
    error = float((gradient - exact_gradient).norm() / exact_gradient.norm())
    return abs(loss / exact_loss - 1), error, float(torch.cosine_similarity(gradient, exact_gradient, dim=0))


def make_model(
    shape: LlamaShape | ModelShape, path: str, device: torch.device, folder: Path, setting: Setting
) -> tuple[Model, dict[str, QuantTensor]]:
    """A model with random weights, by hand ("native") or imported ("graph"), and its tensors."""
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


def make_batch(setting: Setting, vocabulary: int, seed: int) -> Batch:
    """Random tokens, every one with a target."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = setting.documents * setting.length
    tokens_T, targets_T = torch.randint(0, vocabulary, (2, num_tokens), generator=generator)
    bounds = torch.arange(0, num_tokens + 1, setting.length, dtype=torch.int32)
    positions_T = torch.arange(setting.length).repeat(setting.documents)
    return Batch(tokens_T, positions_T, targets_T, bounds)


def with_layers(shape: LlamaShape | Callable[..., ModelShape], layers: int | None) -> LlamaShape | ModelShape:
    """A setting's shape, with another number of layers if one is given."""
    if isinstance(shape, LlamaShape):
        return shape if layers is None else replace(shape, block_count=layers)
    return shape() if layers is None else shape(layers)


def measure(name: str, path: str, *, layers: int | None, repeats: int, profile: Path | None) -> dict[str, object]:
    """Median step time, tokens per second and peak memory of one setting."""
    setting, device = SETTINGS[name], torch.device("cuda", 0)
    shape = with_layers(setting.shape, layers)
    torch.cuda.empty_cache()
    join_free_device_memory()
    if isinstance(shape, LlamaShape):
        rows = -(-shape.vocabulary // setting.head_parts)
        workspace.set_limit_bytes(2 * shape.embedding_length * rows, "cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, setting.max_gib * GIB / total), device)
    with tempfile.TemporaryDirectory() as folder:
        model, tensors = make_model(shape, path, device, Path(folder), setting)
    adapter = attach(model, LoraConfig(r=setting.r, lora_alpha=16), seed=0)
    model.train()
    model.kept = setting.kept(len(model.layers))
    model.checkpoint_policy = "layers"
    parameters = {str(index): parameter for index, parameter in enumerate(adapter.parameters())}
    config = TrainConfig(model="synthetic.gguf", data=("none",), output="none.gguf", compute=setting.compute)  # type: ignore[arg-type]
    objective, optimizer = Supervised(model), Optimizer(parameters, config)
    if can_graph(config, model) and setting.documents * setting.length <= max_tokens(model):
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
    times = [step(batch) for batch in batches][3:]
    if profile is not None:
        with torch.profiler.profile() as profiler:
            step(batches[0])
        table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=60)
        (profile / f"{name}.txt").write_text(table)
    seconds = statistics.median(times)
    num_tokens = setting.documents * setting.length
    ordered = sorted(times)
    of_floor = {}
    if isinstance(shape, ModelShape):
        floor = shape.flops_per_token * num_tokens / SUSTAINED_FLOPS
        of_floor = {"floor_ms": round(floor * 1e3, 1), "share_of_floor": round(floor / seconds, 3)}
    return {
        "benchmark": "training",
        "setting": name,
        "model": shape.name,
        "model_path": path,
        "is_fused": model.is_fused,
        "layers": len(model.layers),
        "compute": setting.compute,
        "r": setting.r,
        "trained_millions": round(sum(parameter.numel() for parameter in adapter.parameters()) / 1e6, 1),
        "tokens_per_step": num_tokens,
        "step_ms": round(seconds * 1e3, 1),
        "p20_ms": round(ordered[len(times) // 5] * 1e3, 1),
        "p80_ms": round(ordered[len(times) * 4 // 5] * 1e3, 1),
        "tokens_per_s": round(num_tokens / seconds),
        **of_floor,
        "weights_gib": round(sum(tensor.num_bytes for tensor in tensors.values()) / GIB, 2),
        "before_step_gib": round(loaded / GIB, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
        "cap_gib": setting.max_gib,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(NATIVE_SETTINGS), help="comma-separated names, see SETTINGS")
    parser.add_argument("--model-path", choices=("native", "graph"), default="native", help="what computes")
    parser.add_argument("--layers", type=int, help="fewer make a quick look")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps")
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    parser.add_argument("--profile", type=Path, help="folder for a table of kernels, one file for each setting")
    args = parser.parse_args()

    names = args.settings.split(",")
    for compute in sorted({SETTINGS[name].compute for name in names}):
        loss, gradient, cosine = check_small_model(torch.device("cuda", 0), compute)
        errors = {"loss_error": loss, "gradient_error": gradient, "gradient_cosine": cosine}
        append_line(args.output, {"benchmark": "training_check", "compute": compute} | errors | environment())
        if not (loss < BOUNDS[compute][0] and gradient < BOUNDS[compute][1]):
            return 1
    for name in names:
        try:
            line = measure(name, args.model_path, layers=args.layers, repeats=args.repeats, profile=args.profile)
        except torch.OutOfMemoryError as error:
            line = {"benchmark": "training", "setting": name, "failed": str(error).splitlines()[0]}
        append_line(args.output, line | environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
