"""A GPU's plan from the header alone, without a GPU: against the formula, measured peaks, and what a run takes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delta_models import Tiny, write_delta
from expert_models import write_experts, write_mixture
from model_shapes import ModelShape, qwen3moe_30b, qwen35moe_35b

from pyggtrain import models
from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.errors import ConfigError
from pyggtrain.gguf import GGUFFile
from pyggtrain.ops import workspace
from pyggtrain.ops.fused import Kept
from pyggtrain.training import gpu_memory, memory
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.gpu_memory import RehearsedOnGpu, plan_fused
from pyggtrain.training.memory import MemoryPlan
from pyggtrain.training.plan import RunPlan, plan_run
from pyggtrain.training.rehearse import Rehearsal

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")

GIB = 2**30
CUDA = torch.device("cuda")
DELTA = Tiny("qwen35", (True, False), 2, 4, 16)


def config_for(path: Path, **settings: Any) -> TrainConfig:
    settings = {"device": "cuda", "max_memory": "1GiB", "max_seq_length": 64, "r": 2, **settings}
    return TrainConfig(model=str(path), data=("d",), output="a.gguf", **settings)


def planned(path: Path, **settings: Any) -> RunPlan:
    return plan_run(config_for(path, **settings))


def peak(plan: RunPlan, policy: str) -> MemoryPlan:
    """The plan of one policy, for the largest micro-batch."""
    return max((one for one in plan.plans if one.policy == policy), key=lambda one: one.num_tokens)


@pytest.fixture(params=["llama", "qwen3moe", "gpt-oss", "qwen35"])
def path(request: pytest.FixtureRequest, tiny_llama_path: Path, tmp_path: Path) -> Path:
    if request.param == "llama":
        return tiny_llama_path
    if request.param == "qwen35":
        return write_delta(DELTA, tmp_path / "m.gguf")
    return write_mixture(tmp_path / "m.gguf", request.param)


def test_every_kind_of_model_is_planned(path: Path) -> None:
    plan = planned(path)
    assert plan.chosen is not None and plan.chosen is plan.plans[0]
    parts = plan.chosen.parts
    # The allocator gives out multiples of 512 bytes.
    assert 4 * plan.num_parameters <= parts["adapter"] < 8 * plan.num_parameters
    assert parts["base file"] > 0 and parts["activations"] > 0 and parts["optimiser"] > 0
    assert plan.device == "cuda, which is not in this machine"
    assert plan.to_dict()["chosen"]["total_bytes"] == sum(parts.values())


def test_a_gpu_of_unknown_size_is_refused(tiny_llama_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sees no CUDA device, so how much memory .* Set max_memory .* or device to"):
        planned(tiny_llama_path, max_memory=None)
    with pytest.raises(ConfigError, match="found 'cuda:x'; needed"):
        planned(tiny_llama_path, device="cuda:x")


def test_the_free_memory_of_a_card_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2 * GIB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(name="H200"))
    plan = planned(path, max_memory=None)
    assert plan.chosen is not None and plan.device == "cuda"
    loaded = plan.chosen.parts["base file"] + 4 * plan.num_parameters
    assert plan.chosen.free_bytes == pytest.approx(free - loaded, abs=512 * 1024)
    assert "beside base and adapter" in plan.chosen.bounds()
    free = 4 * 2**20
    plan = planned(path, max_memory=None)
    assert plan.chosen is None and "Nothing fits" in plan.verdict()


def test_a_smaller_workspace_serves_where_nothing_fits(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, large, small = tmp_path / "m.gguf", 16 << 20, 1 << 20
    write_experts(path, "qwen3moe", GGUFFile.open(smollm2_path))

    def plan(mib: int, *workspaces: int) -> tuple[RunPlan, int]:
        monkeypatch.setattr(memory, "_WORKSPACES", workspaces)
        return planned(path, max_memory=f"{mib}MiB", per_device_train_batch_size=1), workspace.limit_bytes("cuda")

    def least(of: RunPlan) -> int:
        return min(plan.total_bytes for plan in of.plans)

    try:
        with_large, with_small = (least(plan(1024, size)[0]) for size in (large, small))
        assert with_small + (2 << 20) < with_large
        assert plan((with_large >> 20) + 1, large, small)[1] == large
        tight, limit = plan((with_small >> 20) + 1, large, small)
        assert tight.chosen is not None and least(tight) == with_small and limit == small
        # A run that fits in no way is told what the usual workspace needs, and leaves that behind.
        none, limit = plan(with_small >> 20, large, small)
        assert none.chosen is None and least(none) == with_large and limit == large
    finally:
        workspace.set_limit_bytes(workspace.DEFAULT_GPU_LIMIT_BYTES, "cuda")


def test_the_free_memory_of_the_host_of_a_card_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_mixture(tmp_path / "m.gguf", "qwen3moe")
    settings: dict[str, Any] = {"per_device_train_batch_size": 1, "max_seq_length": 64}
    monkeypatch.setattr("pyggtrain.nn.host_stash._MIN_BYTES", 1024)
    unknown = planned(path, **settings)
    assert unknown.plans[0].host_free_bytes is None and "on the host" not in unknown.facts()["device"]
    needed = peak(unknown, "offload").host_bytes
    assert needed > 0

    def on_host_of(free: int, **more: Any) -> RunPlan:
        for place in ("plan", "memory"):
            monkeypatch.setattr(f"pyggtrain.training.{place}.host_free_bytes", lambda device: free)
        return planned(path, **settings, **more)

    for free, fits in ((2 * needed, True), (needed, False)):
        plan = on_host_of(free)
        offload = peak(plan, "offload")
        assert offload.fits == fits and offload.missing_bytes == 0
        assert offload.missing_on_host_bytes == (0 if fits else needed - int(0.9 * free))
        assert plan.to_dict()["host_free_bytes"] == free
        assert any("on the host" in row[4] for row in plan.setting_rows()) != fits
        # Nothing waits there otherwise.
        assert plan.chosen is not None and plan.chosen.policy == "none" and plan.chosen.fits
    only = on_host_of(needed, gradient_checkpointing="offload")
    assert only.chosen is only.plans[0] and not only.chosen.fits
    assert "Nothing fits the host" in only.verdict() and "are free there" in only.verdict()


def test_policies_of_a_mixture_are_compared(sparse_gguf: Callable[..., Path]) -> None:
    shape = qwen3moe_30b(2)
    plan = planned(sparse_gguf(shape.tensors, shape.metadata), max_seq_length=2048, max_memory="80GiB")
    none, matmuls, layers, offload = (peak(plan, policy) for policy in ("none", "matmuls", "layers", "offload"))
    assert none.total_bytes > matmuls.total_bytes > layers.total_bytes
    assert offload.total_bytes < matmuls.total_bytes and offload.host_bytes > 0 == matmuls.host_bytes
    assert plan.chosen is not None and plan.chosen.policy == "none"


def test_a_captured_steps_memory_stays_the_graphs(tmp_path: Path) -> None:
    path = write_mixture(tmp_path / "m.gguf", "qwen3moe")
    assert all("CUDA graph" in one.parts for one in planned(path).plans)
    assert all("CUDA graph" not in one.parts for one in planned(path, cuda_graphs=False).plans)


@pytest.mark.parametrize(("optim", "state"), [("paged_adamw", 8), ("paged_adamw_8bit", 2)])
def test_paged_gradients_and_moments_wait_on_the_host(optim: str, state: int, tmp_path: Path) -> None:
    if optim.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    path = write_mixture(tmp_path / "m.gguf", "qwen3moe", num_ff=2048, num_experts=64)
    settings: dict[str, Any] = {"gradient_checkpointing": "matmuls", "r": 16, "target_modules": ("ffn_*_exps",)}
    paged, kept = (planned(path, optim=name, **settings) for name in (optim, "adamw"))
    assert paged.plans[0].host_bytes == pytest.approx((4 + state) * paged.num_parameters, rel=0.02)
    # Gradients and moments are gone but for a window of both.
    saved = kept.plans[0].total_bytes - paged.plans[0].total_bytes
    assert saved > 12 * paged.num_parameters - 3 * 3 * (32 << 20) - (64 << 20)
    assert "paged_adamw_8bit: gradients and optimiser take" in kept.plans[0].advice()
    assert "paged" not in paged.plans[0].advice()


def test_a_fused_models_plan_is_what_a_run_takes(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, policy in (("1GiB", "auto"), ("1GiB", "layers"), ("164MiB", "auto")):
        config = config_for(tiny_llama_path, max_memory=limit, gradient_checkpointing=policy, max_seq_length=256, r=4)
        plan = plan_run(config)
        model = models.load(GGUFFile.open(tiny_llama_path))
        attach(model, LoraConfig(r=4), seed=0)
        loaded = plan.plans[0].parts["base file"] + plan.plans[0].parts["adapter"]
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device, loaded=loaded: loaded)
        monkeypatch.setattr(gpu_memory, "free_memory_bytes", lambda device: 40 * GIB)
        row = [0] * 256
        taken, _ = plan_fused(model, config, CUDA, 96, lambda size, row=row: [(row, row)] * size)
        assert plan.chosen is not None
        assert (plan.chosen.policy, plan.chosen.micro_batch_size) == (taken.policy, taken.micro_batch_size)
        assert plan.chosen.parts == taken.parts


def total(rehearsal: Rehearsal, num_documents: int, kept: list[Kept]) -> int:
    """What the plan of a step of so many times 2,048 tokens would be."""
    need, row = RehearsedOnGpu(rehearsal, kept), [0] * 2048
    return sum(need.parts("matmuls", [(row, row)] * num_documents).values())


# One H200, torch 2.11, as docs/performance.md has them: GiB that torch's allocator gave out at most. All halves keep
# what `Kept()` says; the first two with a workspace of 768 MiB.
EXPERTS = LoraConfig(r=8, target_modules=("ffn_*_exps",))
ALLOCATED = [
    pytest.param(qwen3moe_30b(8), EXPERTS, 768, 1, 5.98, id="experts of 8 layers"),
    pytest.param(qwen3moe_30b(), EXPERTS, 768, 4, 36.54, id="experts"),
    pytest.param(qwen35moe_35b(), LoraConfig(r=4), 352, 1, 27.75, id="gated delta nets and experts, single launches"),
]


@pytest.mark.parametrize(("shape", "lora", "workspace_mib", "num_documents", "measured"), ALLOCATED)
def test_other_models_are_within_5_percent_of_what_was_measured(
    shape: ModelShape,
    lora: LoraConfig,
    workspace_mib: int,
    num_documents: int,
    measured: float,
    sparse_gguf: Callable[..., Path],
) -> None:
    path = sparse_gguf(shape.tensors, shape.metadata)
    is_graph = shape.architecture != "qwen35moe"
    config = config_for(path, per_device_train_batch_size=1, gradient_accumulation_steps=1, cuda_graphs=is_graph)
    workspace.set_limit_bytes(workspace_mib << 20, "cuda")
    try:
        rehearsal = Rehearsal(GGUFFile.open(path), config, lora, CUDA, torch.bfloat16)
        found = total(rehearsal, num_documents, [Kept()] * len(rehearsal.model.layers))
    finally:
        workspace.set_limit_bytes(workspace.DEFAULT_GPU_LIMIT_BYTES, "cuda")
    assert found / GIB == pytest.approx(measured, rel=0.05)
