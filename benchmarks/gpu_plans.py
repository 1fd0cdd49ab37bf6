"""The peak memory that a GPU's plan foretells from a header, against the peak of real steps (`bench_plan.py`)."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_training import GIB, lora_config, measure, train_config
from model_shapes import deepseek2_lite, nemotron_h_8b, qwen3moe_30b
from synthetic import LlamaShape, write_header
from training_settings import EXPERTS, SETTINGS, KeptOf, Setting, all_kept, on_host

from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import kept_by
from pyggtrain.ops import workspace
from pyggtrain.training import paging
from pyggtrain.training.gpu_memory import FusedSizes, RehearsedOnGpu, StepSizes, fused_peak
from pyggtrain.training.optimizers import device_bytes
from pyggtrain.training.rehearse import Rehearsal
from pyggtrain.training.step_graph import MAX_TOKENS, MAX_TOKENS_OF_EXPERTS


def by(policy: str) -> KeptOf:
    return lambda layers: kept_by(policy, layers)


_EXPERTS_8 = SETTINGS["1x2048_experts_8layers"]
# A cap would make the allocator give back what it holds; without one, what is reserved is what it wants.
PLANS: dict[str, Setting] = {
    **{f"8B, {policy}": Setting(4, 2048, None, by(policy)) for policy in ("none", "matmuls", "layers", "offload")},
    "8B, 1 x 2048, graph": Setting(1, 2048, None, by("matmuls")),
    "8B, fp8, offload": Setting(4, 2048, None, by("offload"), compute="fp8"),
    "8B, paged_adamw_8bit, r 128": Setting(1, 2048, None, by("layers"), r=128, optim="paged_adamw_8bit"),
    "30B experts, 8 layers": _EXPERTS_8,
    "30B experts, 8 layers, 4 x 2048, none": replace(_EXPERTS_8, documents=4, kept=by("none")),
    "30B experts, 8 layers, host": replace(_EXPERTS_8, kept=on_host),
    "30B experts, 16 layers, paged_adamw_8bit": replace(_EXPERTS_8, layers=16, optim="paged_adamw_8bit"),
    "30B experts, 16 layers, paged_adamw": replace(_EXPERTS_8, layers=16, optim="paged_adamw"),
    "30B all, 8 layers": Setting(1, 2048, None, all_kept, shape=qwen3moe_30b, layers=8),
    "35B delta nets, 8 layers": replace(SETTINGS["1x2048_delta"], layers=8, max_gib=None),
    "35B delta nets, 8 layers, 4 x 2048": replace(SETTINGS["4x2048_delta"], layers=8, max_gib=None),
    "35B delta nets, 8 layers, paged_adamw_8bit": replace(
        SETTINGS["1x2048_delta"], layers=8, max_gib=None, optim="paged_adamw_8bit", target_modules=EXPERTS
    ),
    "latent attention, 27 layers": Setting(1, 2048, None, all_kept, shape=deepseek2_lite),
    "Mamba-2 hybrid, 9 layers": Setting(1, 2048, None, all_kept, shape=nemotron_h_8b, layers=9),
}


def planned(setting: Setting, folder: Path) -> dict[str, Any]:
    """What the header says, in bytes: parts, and for a fused model the formula's peak."""
    shape = setting.make_shape()
    path = folder / "planned.gguf"
    write_header(path, {"tokenizer.ggml.model": "no_vocab"} | shape.metadata, shape.tensors)
    # The steps that are measured run as graphs where these pay.
    longest = MAX_TOKENS if isinstance(shape, LlamaShape) else MAX_TOKENS_OF_EXPERTS
    config = replace(train_config(setting), gradient_accumulation_steps=1, cuda_graphs=setting.num_tokens <= longest)
    workspace.set_limit_bytes(setting.workspace_bytes, "cuda")
    rehearsal = Rehearsal(GGUFFile.open(path), config, lora_config(setting), torch.device("cuda", 0), setting.dtype)
    kept = setting.kept(len(rehearsal.model.layers))
    row = [0] * setting.length
    need = RehearsedOnGpu(rehearsal, kept)
    documents = [(row, row)] * setting.documents
    found: dict[str, Any] = {"parts": need.parts("layers", documents), "host": need.host_bytes("layers", documents)}
    if rehearsal.is_fused:
        gradients, optimiser = device_bytes(config.optim, rehearsal.num_parameters)
        resident = rehearsal.base_bytes + 4 * rehearsal.num_parameters + optimiser
        step = StepSizes(setting.num_tokens, setting.num_tokens, resident, gradients)
        found["formula"] = fused_peak(FusedSizes.of(rehearsal.model.fused_layers, shape.vocabulary), kept, step)
    return found


def compare(name: str) -> dict[str, Any]:
    """GiB: planned from the header alone, then measured in real steps."""
    # Without a cap there is room for all moments, which a plan does not count on.
    paging.room_for_state = lambda device: 0
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(PLANS[name], Path(folder))
    line = measure(name, PLANS[name], "native", repeats=1, profile=None)
    return {
        "planned_gib": sum(plan["parts"].values()) / GIB,
        "formula_gib": plan["formula"] / GIB if "formula" in plan else None,
        "allocated_gib": line["peak_gib"],
        "reserved_gib": line["reserved_gib"],
        "host_gib": plan["host"] / GIB,
        "is_cuda_graph": line["is_cuda_graph"],
        "parts": {part: num_bytes / GIB for part, num_bytes in plan["parts"].items()},
    }
