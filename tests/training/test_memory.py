"""The memory plan: right for other lengths than the probed one, the fastest policy that fits, refusal with advice."""

import pytest
import torch

from pyggtrain import models
from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import POLICIES, Batch
from pyggtrain.training import memory
from pyggtrain.training.memory import explained_out_of_memory, free_memory_bytes, plan_memory

ROW = [5, 17, 3, 80, 41]
CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_llama_path):
    model = models.load(GGUFFile.open(tiny_llama_path))
    attach(model, LoraConfig(r=4), seed=1)
    return model.train()


def plan(model, policy: str = "auto", num_tokens: int = 500) -> memory.MemoryPlan:
    return plan_memory(
        model,
        ROW,
        policy=policy,
        num_tokens=num_tokens,
        num_parameters=1000,
        num_vocab=96,
        base_bytes=2**30,
        device=CPU,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_prediction_holds_for_a_longer_micro_batch(model, policy):
    predicted = plan(model, policy).activation_bytes
    ids = (ROW * 100)[:500]
    known = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        known.append(parameter.grad)
    with memory._LiveBytes(known) as live:
        model.loss(Batch.from_documents([(ids, ids)]))[0].backward()
    assert predicted == pytest.approx(live.peak_bytes, rel=0.05)
    # Nothing that was counted is still there.
    assert live.live_bytes == 0


def test_recomputing_costs_less_memory(model):
    none, matmuls, layers = (plan(model, policy).activation_bytes for policy in POLICIES)
    assert none > matmuls > layers > 0


def test_auto_takes_the_fastest_policy_that_fits(model, monkeypatch):
    needs = {policy: plan(model, policy).total_bytes - 2**30 for policy in POLICIES}
    for policy, need in needs.items():
        monkeypatch.setattr(memory, "free_memory_bytes", lambda device, need=need: int(need * 1.25 / 0.9) + 100)
        assert plan(model).policy == model.checkpoint_policy == policy


def test_step_that_cannot_fit_is_refused_with_advice(model, monkeypatch):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 2**20)
    with pytest.raises(
        UnsupportedError, match=r"500 tokens needs about \d+ MiB .*; free are 1 MiB. Lower per_device_train_b"
    ):
        plan(model)
    with pytest.raises(UnsupportedError, match="or set gradient_checkpointing to layers"):
        plan(model, "none")


@pytest.mark.parametrize(
    "make_error",
    [
        lambda: torch.empty(2**55, dtype=torch.uint8),
        lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
        lambda: (_ for _ in ()).throw(MemoryError()),
    ],
)
def test_out_of_memory_tells_the_estimate_and_what_to_lower(model, make_error):
    with (
        pytest.raises(
            UnsupportedError, match=r"Out of memory. A micro-batch of 500 tokens needs about .* Lower per_dev"
        ),
        explained_out_of_memory(plan(model)),
    ):
        make_error()


def test_other_errors_are_not_taken_for_lack_of_memory(model):
    with pytest.raises(RuntimeError, match="shapes"), explained_out_of_memory(plan(model)):
        raise RuntimeError("shapes do not fit")


def test_unknown_free_memory_refuses_nothing(model, monkeypatch):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: None)
    assert plan(model, num_tokens=10**9).policy == "none"


def test_probing_leaves_the_model_as_it_was(model):
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan(model)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_free_memory_is_plausible():
    free = free_memory_bytes(CPU)
    assert free is None or 2**24 < free < 2**50
