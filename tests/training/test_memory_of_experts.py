"""Memory of a run with many experts: foretold as it is, and bounded by what is trained, not by how many there are."""

from collections.abc import Callable
from pathlib import Path

import pytest
from dense_models import WIDTH
from expert_models import write_mixture
from tiny_models import generate

from pyggtrain import models
from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import POLICIES, Batch
from pyggtrain.ops import workspace
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.objectives import Supervised
from pyggtrain.training.optim import Optimizer
from pyggtrain.training.rehearse import Rehearsal

FF, RANK = 32, 8
STACKS = LoraConfig(r=RANK, target_modules=("ffn_*_exps",))


def write_mixtral(path: Path, num_experts: int) -> GGUFFile:
    return GGUFFile.open(write_mixture(path, "llama", num_ff=FF, num_experts=num_experts))


def config_for(file: GGUFFile, **settings: object) -> TrainConfig:
    return TrainConfig(model=str(file.path), data=("d",), output="a.gguf", r=RANK, **settings)  # type: ignore[arg-type]


def row(num_tokens: int) -> tuple[list[int], list[int]]:
    ids = [(7 * place) % 96 for place in range(num_tokens)]
    return ids, ids


@pytest.mark.parametrize("policy", POLICIES)
def test_the_plan_has_the_buffers_of_a_real_run(
    allocated_peak: Callable[[Callable[[], object]], int], policy: str, tmp_path: Path
) -> None:
    file = write_mixtral(tmp_path / "m.gguf", 16)
    config = config_for(file)
    traced = Rehearsal(file, config, STACKS).trace(policy, [row(130), row(70)]).peak()
    model = models.load(file)
    model.checkpoint_policy = policy
    adapter = attach(model, STACKS, seed=config.seed)
    model.train()
    batch = Batch.from_documents([row(130), row(70)])
    optimizer = Optimizer({str(index): half for index, half in enumerate(adapter.parameters())}, config)
    objective = Supervised(model)
    with workspace.set_aside():

        def step() -> None:
            optimizer.step(objective, [batch, batch], num_units=1, learning_rate=1e-4, seeds=[0, 0])

        real = allocated_peak(lambda: (step(), step())) + sum(traced.get(part, 0) for part in ("adapter", "base file"))
    # The rehearsal gives all tokens to 8 of 16 experts.
    assert sum(traced.values()) == pytest.approx(real, rel=0.05)


def test_a_trained_number_takes_four_bytes_twice_and_two_for_its_8_bit_moments(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    for num_experts in (128, 256):
        file = write_mixtral(tmp_path / f"{num_experts}.gguf", num_experts)
        peak = Rehearsal(file, config_for(file, optim="adamw_8bit"), STACKS).trace("layers", [row(64)]).peak()
        num_trained = 2 * 3 * num_experts * RANK * (WIDTH + FF)
        assert peak["adapter"] == 4 * num_trained
        # The gradient of one stack's pair may wait beside the sum that it goes into: one of six.
        assert 4 * num_trained <= peak["gradients"] <= 4 * num_trained * 7 / 6
        # Besides, each moment has a scale of four bytes for each 256 numbers.
        assert 2 * num_trained < peak["optimiser"] < 2.1 * num_trained


def test_what_lies_between_does_not_grow_with_the_number_of_experts(tmp_path: Path) -> None:
    between = {}
    for num_experts in (16, 256):
        file = write_mixtral(tmp_path / f"{num_experts}.gguf", num_experts)
        peak = Rehearsal(file, config_for(file), STACKS).trace("none", [row(256)]).peak()
        between[num_experts] = peak["activations"] + peak.get("workspace", 0)
    # Only a router's scores are as many as there are experts: 4 bytes for each, here in one form or two a layer.
    assert between[256] - between[16] < 2 * 2 * 256 * (256 - 16) * 4


@pytest.mark.parametrize("architecture", ["gpt-oss", "deepseek2", "glm4moe", "qwen2moe", "jamba", "llama4"])
def test_other_mixtures_are_planned_too(architecture: str, tmp_path: Path) -> None:
    file = GGUFFile.open(generate(architecture, "moe", tmp_path))
    config = config_for(file)
    shorter, longer = (
        Rehearsal(file, config, LoraConfig(r=2)).trace("layers", [row(64)] * count).peak() for count in (1, 3)
    )
    assert longer["adapter"] == shorter["adapter"] > 0
    assert 1.5 < longer["activations"] / shorter["activations"] < 4
