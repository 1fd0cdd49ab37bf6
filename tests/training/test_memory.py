"""The memory plan: equal to the real run's buffers, the fastest setting that fits, refusal with advice, a guard."""

import pytest
import torch

from pyggtrain import models
from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import POLICIES, Batch
from pyggtrain.ops import workspace
from pyggtrain.training import memory
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.memory import (
    MeasuredNeed,
    MemoryGuard,
    MemoryPlan,
    Planner,
    RehearsedNeed,
    explained_out_of_memory,
    free_memory_bytes,
    limit_device_memory,
    relative_time,
)
from pyggtrain.training.objectives import Supervised
from pyggtrain.training.optim import Optimizer
from pyggtrain.training.rehearse import Rehearsal

CPU = torch.device("cpu")
IDS = [5, 17, 3, 80, 41]
LORA = LoraConfig(r=4)


def row(num_tokens: int) -> tuple[list[int], list[int]]:
    ids = (IDS * num_tokens)[:num_tokens]
    return ids, ids


def config_for(path, **settings) -> TrainConfig:
    return TrainConfig(model=str(path), data=("d",), output="a.gguf", r=4, **settings)


@pytest.fixture(autouse=True)
def _allocator_without_holes(monkeypatch):
    """In a model this tiny the allocator's measured share weighs more than what a policy saves."""
    monkeypatch.setattr(memory, "ALLOCATOR_SHARE", dict.fromkeys(POLICIES, 0.0))
    monkeypatch.setattr(memory, "FUSED_MATMULS_SHARE", 0.0)


@pytest.fixture(scope="module")
def rehearsal(tiny_llama_path) -> Rehearsal:
    return Rehearsal(GGUFFile.open(tiny_llama_path), config_for(tiny_llama_path), LORA)


def planner(rehearsal, path, *, num_tokens: int = 50, **settings) -> Planner:
    return Planner(RehearsedNeed(rehearsal), config_for(path, **settings), CPU, lambda size: [row(num_tokens)] * size)


@pytest.mark.parametrize("implementation", ["native", "graph"])
@pytest.mark.parametrize("policy", POLICIES)
def test_trace_has_the_buffers_of_a_real_run(tiny_llama_path, allocated_peak, policy, implementation):
    config = config_for(tiny_llama_path, model_impl=implementation)
    file = GGUFFile.open(tiny_llama_path)
    traced = Rehearsal(file, config, LORA).trace(policy, [row(130), row(70)]).peak()

    model = models.load(file, implementation=implementation)
    model.checkpoint_policy = policy
    adapter = attach(model, LORA, seed=config.seed)
    model.train()
    batch = Batch.from_documents([row(130), row(70)])
    optimizer = Optimizer({str(index): pair for index, pair in enumerate(adapter.parameters())}, config)
    objective = Supervised(model)
    with workspace.set_aside():

        def step() -> None:
            optimizer.step(objective, [batch, batch], num_units=1, learning_rate=1e-4, seeds=[0, 0])

        # The adapter, and what loading decoded, are there before the first event.
        real = allocated_peak(lambda: (step(), step())) + sum(traced.get(part, 0) for part in ("adapter", "base file"))
    assert sum(traced.values()) == pytest.approx(real, rel=0.03)
    # torch's own kernels make small buffers that nobody is told of; in a model this tiny they are 2 %.
    # Two moments and a gradient for each trained number.
    num_bytes = 4 * adapter.num_parameters
    assert traced["adapter"] == num_bytes
    assert traced["optimiser"] == pytest.approx(2 * num_bytes, rel=0.05)
    # Besides, a half of a layer hands over the gradients of all its pairs at once, and those of a later micro-batch
    # wait beside the sum.
    waiting = sum(
        4 * half.numel()
        for name, pair in adapter.pairs.items()
        if name.startswith("blk.0.ffn")
        for half in pair.parameters()
    )
    assert 0 < traced["gradients"] <= num_bytes + waiting


@pytest.mark.parametrize("settings", [{"method": "dpo"}, {"method": "orpo"}, {"optim": "muon"}, {"lora_dropout": 0.1}])
def test_other_runs_are_rehearsed_too(tiny_llama_path, settings):
    config = config_for(tiny_llama_path, **settings)
    lora = LoraConfig(r=4, lora_dropout=config.lora_dropout)
    peak = Rehearsal(GGUFFile.open(tiny_llama_path), config, lora).trace("layers", [row(30), row(20)]).peak()
    assert peak["adapter"] > 0 and peak["optimiser"] > 0 and peak["activations"] > 0


def test_moments_of_8_bits_are_rehearsed_as_such(tiny_llama_path):
    pytest.importorskip("bitsandbytes")
    peaks = {}
    for optim in ("adamw", "adamw_8bit"):
        config = config_for(tiny_llama_path, optim=optim)
        # bitsandbytes keeps pairs below 4,096 numbers in float32: only width 64 with rank 64 has more.
        lora = LoraConfig(r=64, target_modules=("attn_q", "attn_output"))
        peaks[optim] = Rehearsal(GGUFFile.open(tiny_llama_path), config, lora).trace("none", [row(30)]).peak()
    # Two bytes for each number, a scale for each block of 256, and a table, against eight bytes.
    assert 0.2 < peaks["adamw_8bit"]["optimiser"] / peaks["adamw"]["optimiser"] < 0.4


def test_no_weight_is_read_and_the_file_stays_as_it_is(tiny_llama_path, monkeypatch):
    from pyggtrain import _bridge

    def refuse(*arguments) -> None:
        raise AssertionError("a weight was decoded")

    monkeypatch.setattr(_bridge, "dequantize", refuse)
    monkeypatch.setattr(_bridge, "mul_mat", refuse)
    file = GGUFFile.open(tiny_llama_path)
    Rehearsal(file, config_for(tiny_llama_path), LORA).trace("layers", [row(30)])
    assert all(type(tensor.blocks) is torch.Tensor for tensor in file.tensors.values())


def test_recomputing_costs_less_memory(rehearsal, tiny_llama_path):
    plans = [planner(rehearsal, tiny_llama_path, num_tokens=500).plan(policy, 2) for policy in POLICIES]
    # The program's own size is read anew for each, and grows while a first rehearsal brings in libraries.
    none, matmuls, layers = (plan.total_bytes - plan.parts[memory.PROGRAM] for plan in plans)
    assert none > matmuls > layers > 0


def test_allocator_keeps_a_share_of_what_comes_and_goes(rehearsal, tiny_llama_path, monkeypatch):
    monkeypatch.setattr(memory, "_mallopt", lambda: object())
    monkeypatch.setitem(memory.ALLOCATOR_SHARE, "layers", 0.5)
    parts = planner(rehearsal, tiny_llama_path).plan("layers", 2).parts
    passing = sum(parts.get(name, 0) for name in ("activations", "gradients", "loss chunk", "workspace"))
    # What loading decoded (norms) is counted with the file, and also passes through the allocator.
    assert parts["allocator"] == pytest.approx(passing / 2, rel=0.05)
    monkeypatch.setattr(memory, "_mallopt", lambda: None)
    assert "allocator" not in planner(rehearsal, tiny_llama_path).plan("layers", 2).parts


def test_auto_takes_the_fastest_policy_that_fits(rehearsal, tiny_llama_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 2**40)
    free = planner(rehearsal, tiny_llama_path, num_tokens=500)
    for policy in POLICIES:
        need = free.plan(policy, 2).new_bytes
        monkeypatch.setattr(memory, "free_memory_bytes", lambda device, need=need: int(need / 0.9) + 100)
        assert planner(rehearsal, tiny_llama_path, num_tokens=500).choose().policy == policy


def test_limit_chooses_micro_batch_and_policy(rehearsal, tiny_llama_path, monkeypatch):
    monkeypatch.setattr(memory, "program_bytes", lambda paths: 0)
    free = planner(rehearsal, tiny_llama_path, num_tokens=500, max_memory="1TiB")
    assert {size for _, size in free.settings} == {8, 4, 2, 1}
    assert free.settings[0] == ("none", 8) == (free.choose().policy, free.choose().micro_batch_size)
    limit = free.plan("none", 2).total_bytes
    chosen = planner(rehearsal, tiny_llama_path, num_tokens=500, max_memory=f"{limit / 1000:.3f}KB").choose()
    assert (chosen.policy, chosen.micro_batch_size) == ("none", 2)
    asked = planner(
        rehearsal, tiny_llama_path, max_memory="1TiB", per_device_train_batch_size=4, gradient_checkpointing="layers"
    )
    assert asked.settings == [("layers", 4)]


def test_order_of_settings_weighs_recomputing_against_small_micro_batches():
    assert (
        relative_time("none", 2048, "cpu")
        < relative_time("matmuls", 4096, "cpu")
        < relative_time("layers", 99999, "cpu")
    )
    # Weights are decoded anew for each micro-batch: tiny ones cost more than recomputing.
    assert relative_time("matmuls", 512, "cpu") < relative_time("none", 64, "cpu")


def test_step_that_cannot_fit_is_refused_with_advice(rehearsal, tiny_llama_path, monkeypatch):
    with pytest.raises(UnsupportedError, match=r"100 tokens needs about \d+ MiB .*max_memory is 1 MiB. Lower per_dev"):
        planner(rehearsal, tiny_llama_path, max_memory="1MiB", per_device_train_batch_size=2).choose()
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 2**17)
    with pytest.raises(UnsupportedError, match="free are 0 MiB.*or set gradient_checkpointing to layers"):
        planner(rehearsal, tiny_llama_path, gradient_checkpointing="none").choose()


def test_unknown_free_memory_refuses_nothing(rehearsal, tiny_llama_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: None)
    assert planner(rehearsal, tiny_llama_path).choose().policy == "none"


class Card:
    """torch.cuda's account of a card: each micro-batch takes 10 MiB and 3 KiB for each token."""

    def __init__(self, monkeypatch) -> None:
        self.held, self.peak = 0, 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.held)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)


class CardsObjective(Supervised):
    """Cross entropy that leaves its trace on a card."""

    def __init__(self, model, card) -> None:
        super().__init__(model)
        self.card = card

    def loss(self, batch):
        self.card.peak = self.card.held + 10 * 2**20 + 3 * 2**10 * batch.num_tokens
        return super().loss(batch)


def on_a_card(path, monkeypatch):
    """A model, the card that holds 1 GiB of it and its adapter, and the adapter's bytes."""
    model = models.load(GGUFFile.open(path))
    adapter = attach(model, LORA, seed=1)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    card, adapter_bytes = Card(monkeypatch), 4 * adapter.num_parameters
    card.held = 2**30 + adapter_bytes
    return model, card, adapter_bytes


def test_need_of_a_gpu_grows_with_the_tokens(tiny_llama_path, monkeypatch):
    model, card, adapter_bytes = on_a_card(tiny_llama_path, monkeypatch)
    parts = MeasuredNeed(CardsObjective(model, card), model, CPU).parts("matmuls", [row(3000), row(1000)])
    assert parts == {
        "base file": 2**30,
        "adapter": adapter_bytes,
        "gradients": adapter_bytes,
        "optimiser": 2 * adapter_bytes,
        "activations": 10 * 2**20 + 3 * 2**10 * 4000,
    }
    assert model.checkpoint_policy == "matmuls"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_paged_gradients_are_gone_as_soon_as_they_are_there(tiny_llama_path, monkeypatch):
    model, card, adapter_bytes = on_a_card(tiny_llama_path, monkeypatch)
    held = []

    class Watched(CardsObjective):
        def loss(self, batch):
            held.append(any(parameter.grad is not None for parameter in model.parameters()))
            return super().loss(batch)

    need = MeasuredNeed(Watched(model, card), model, CPU, "paged_adamw_8bit")
    parts = need.parts("layers", [row(1000)])
    # A window of so few numbers is all of them: gradients of 4 bytes, moments of 2.
    assert parts["gradients"] == 0 and parts["optimiser"] == adapter_bytes * 6 // 4
    assert not any(held) and all(parameter.grad is None for parameter in model.parameters())
    # The hooks are gone: gradients stay again.
    Supervised(model).loss(Batch.from_documents([row(8)]))[0].backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_what_a_micro_batch_leaves_on_the_host_is_measured(tiny_llama_path, monkeypatch):
    model, card, _ = on_a_card(tiny_llama_path, monkeypatch)
    held = []

    class Stashing(CardsObjective):
        def loss(self, batch):
            # 2 KiB for each token; shorter micro-batches find the memory of longer ones.
            held.append(max([*held, 2048 * batch.num_tokens]))
            return super().loss(batch)

    monkeypatch.setattr(type(model), "stashed_bytes", property(lambda self: held[-1]))
    monkeypatch.setattr(type(model), "release_stash", lambda self: held.clear())
    need = MeasuredNeed(Stashing(model, card), model, CPU)
    for num_tokens in (4000, 1000):
        need.parts("offload", [row(num_tokens)])
        assert need.host_bytes("offload", [row(num_tokens)]) == 2048 * num_tokens
    paged = MeasuredNeed(Stashing(model, card), model, CPU, "paged_adamw_8bit")
    paged.parts("offload", [row(1000)])
    assert paged.host_bytes("offload", [row(1000)]) == 2048 * 1000 + paged.host_bytes("layers", [row(1000)])


def test_a_micro_batch_that_a_gpu_cannot_hold_needs_at_least_what_is_free(tiny_llama_path, monkeypatch):
    model = models.load(GGUFFile.open(tiny_llama_path))
    attach(model, LORA, seed=1)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 40 * 2**20)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    card = Card(monkeypatch)

    class FullCard(CardsObjective):
        def loss(self, batch):
            if batch.num_tokens > 512:
                raise torch.OutOfMemoryError("full")
            return super().loss(batch)

    need = MeasuredNeed(FullCard(model, card), model, CPU)
    assert need.parts("none", [row(4000)])["activations"] == 40 * 2**20
    # Foretold by the two short ones: 10 MiB and 3 KiB for each token.
    assert need.parts("none", [row(20000)])["activations"] == 10 * 2**20 + 3 * 2**10 * 20000
    assert all(parameter.grad is None for parameter in model.parameters())


A_PLAN = MemoryPlan("none", 2, 500, "cpu", {"base file": 2**20, "activations": 2**20}, None, 2**30)


@pytest.mark.parametrize(
    "make_error",
    [
        lambda: torch.empty(2**55, dtype=torch.uint8),
        lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
        lambda: (_ for _ in ()).throw(MemoryError()),
    ],
)
def test_out_of_memory_tells_the_estimate_and_what_to_lower(make_error):
    with (
        pytest.raises(
            UnsupportedError, match=r"Out of memory. A micro-batch of 500 tokens needs about .* Lower per_dev"
        ),
        explained_out_of_memory(A_PLAN),
    ):
        make_error()


def test_other_errors_are_not_taken_for_lack_of_memory():
    with pytest.raises(RuntimeError, match="shapes"), explained_out_of_memory(A_PLAN):
        raise RuntimeError("shapes do not fit")


@pytest.mark.skipif(not torch.backends.mkl.is_available() and free_memory_bytes(CPU) is None, reason="needs Linux")
def test_guard_speaks_once_a_process_holds_more_than_it_may():
    assert MemoryGuard(None, CPU).excess() is None
    assert MemoryGuard(2**50, CPU).excess() is None
    assert "max_memory is 1 MiB" in MemoryGuard(2**20, CPU).excess()


def test_guard_sees_a_peak_that_is_over_again(monkeypatch):
    guard = MemoryGuard(memory._status()["VmRSS"] + 2**26, CPU)
    assert guard.excess() is None
    block = torch.ones(2**25)
    del block
    assert "The process took" in guard.excess()


def test_pages_of_the_base_file_are_not_the_programs(tiny_llama_path):
    file = GGUFFile.open(tiny_llama_path)
    before = memory._mapped_bytes(file.paths)
    assert sum(int(tensor.blocks.sum()) for tensor in file.tensors.values()) > 0
    assert before <= memory._mapped_bytes(file.paths) and memory._mapped_bytes(file.paths) > 100_000
    assert memory._mapped_bytes([tiny_llama_path.with_name("other")]) == 0


def test_limit_of_a_gpu_is_the_allocators(monkeypatch):
    class Properties:
        total_memory = 100 * 2**30

    fractions = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    limit_device_memory("25GiB", torch.device("cuda"))
    limit_device_memory("250GiB", torch.device("cuda"))
    limit_device_memory("25GiB", CPU)
    limit_device_memory(None, torch.device("cuda"))
    assert fractions == [0.25, 1.0]


def test_free_memory_is_plausible():
    free = free_memory_bytes(CPU)
    assert free is None or 2**24 < free < 2**50
