"""Every optimiser: what a step of it is, groups of LoRA+, and that its state continues bit for bit."""

import copy
import io

import pytest
import torch

from pyggtrain.errors import ConfigError
from pyggtrain.training import optimizers
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.optim import Optimizer
from pyggtrain.training.optimizers import OPTIMIZERS, check_optimizer, make_optimizer

NAMES = [pytest.param(name, id=name) for name in OPTIMIZERS]


def config(name: str = "adamw", **settings) -> TrainConfig:
    if name == "schedule_free_adamw":
        settings["lr_scheduler_type"] = "constant"
    return TrainConfig(model="m", data=("d",), output="o", optim=name, learning_rate=1e-2, **settings)


class Quadratic(torch.nn.Module):
    """Σ (w - target)², with one factor that is large enough for 8-bit moments and one that is not a multiple of 256."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.parts = torch.nn.ParameterDict(
            {
                "lora_a": torch.nn.Parameter(torch.randn(32, 200, generator=generator)),
                "lora_b": torch.nn.Parameter(torch.zeros(70, 9)),
            }
        )
        self.metrics: tuple[str, ...] = ()

    def loss(self, batch: "Batch") -> tuple[torch.Tensor, torch.Tensor]:
        loss = sum(((part - batch.target) ** 2).sum() for part in self.parts.values())
        assert isinstance(loss, torch.Tensor)
        return loss, torch.zeros(0)

    def named(self) -> dict[str, torch.nn.Parameter]:
        return {f"w.{name}": part for name, part in self.parts.items()}


class Batch:
    num_targets = 1

    def __init__(self, target: float) -> None:
        self.target = target


def steps(optimizer: Optimizer, model: Quadratic, numbers) -> None:
    for number in numbers:
        optimizer.step(model, [Batch(0.1 * number)], num_units=1, learning_rate=1e-2 / (1 + number), seeds=[number])


def bits(model: Quadratic) -> torch.Tensor:
    return torch.cat([part.detach().flatten() for part in model.parts.values()])


@pytest.mark.parametrize("name", NAMES)
def test_state_continues_bit_for_bit_through_a_file(name):
    model = Quadratic()
    optimizer = Optimizer(model.named(), config(name, loraplus_lr_ratio=4.0, weight_decay=0.1))
    steps(optimizer, model, range(5))
    file = io.BytesIO()
    torch.save({"weights": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    steps(optimizer, model, range(5, 9))

    other = Quadratic()
    other.load_state_dict(stored["weights"])
    resumed = Optimizer(other.named(), config(name, loraplus_lr_ratio=4.0, weight_decay=0.1))
    resumed.load_state_dict(stored["optimizer"])
    steps(resumed, other, range(5, 9))
    assert torch.equal(bits(other), bits(model))
    optimizer.finish()
    resumed.finish()
    assert torch.equal(bits(other), bits(model))


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_downhill(name):
    model = Quadratic()
    optimizer = Optimizer(model.named(), config(name))
    before = model.loss(Batch(0.5))[0].item()
    for _ in range(60):
        optimizer.step(model, [Batch(0.5)], num_units=1, learning_rate=3e-2, seeds=[0])
    optimizer.finish()
    assert model.loss(Batch(0.5))[0].item() < 0.6 * before


@pytest.mark.parametrize("name", NAMES)
def test_looking_at_the_saved_weights_changes_no_bit(name):
    model, other = Quadratic(), Quadratic()
    looking, straight = Optimizer(model.named(), config(name)), Optimizer(other.named(), config(name))
    for number in range(6):
        steps(looking, model, [number])
        steps(straight, other, [number])
        before = bits(model)
        with looking.saved_weights():
            seen = bits(model)
        assert torch.equal(bits(model), before)
        # The average of one step is that step.
        assert torch.equal(seen, before) == (name != "schedule_free_adamw" or number == 0)
    assert torch.equal(bits(model), bits(other))


def test_schedule_free_saves_the_average_of_its_steps():
    """One parameter by hand (Defazio et al. 2024, algorithm 1): x is the weighted mean of all z."""
    weight = torch.nn.Parameter(torch.tensor([[1.0]]))
    settings = config("schedule_free_adamw")
    optimizer = make_optimizer({"w.lora_a": weight}, settings)
    found = []
    for gradient in (1.0, -2.0, 0.5):
        weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        found.append(float(optimizer.state[weight]["z"]))
    optimizer.eval()
    assert weight.item() == pytest.approx(sum(found) / 3, rel=1e-5)


def test_8_bit_moments_are_near_those_of_adamw_and_a_quarter_of_their_size():
    model, other = Quadratic(), Quadratic()
    small, full = Optimizer(model.named(), config("adamw_8bit")), Optimizer(other.named(), config())
    for number in range(20):
        steps(small, model, [number])
        steps(full, other, [number])
    moved = (bits(other) - bits(Quadratic())).abs().mean()
    assert (bits(model) - bits(other)).abs().mean() < 0.02 * moved
    state = small.state_dict()["state"]["w.lora_a"]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    # One scale for each 256 numbers.
    assert state["absmax1"].shape == (25,)


def test_8_bit_moments_of_a_stack_of_experts_are_those_of_its_rows_as_one_matrix():
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(128, 4, 64, generator=generator)
    stack, matrix = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.reshape(512, 64).clone())
    steppers = [make_optimizer({"w.lora_a": half}, config("adamw_8bit")) for half in (stack, matrix)]
    for _ in range(3):
        gradient = torch.randn(128, 4, 64, generator=generator)
        # Nobody chose these.
        gradient[40:80] = 0
        stack.grad, matrix.grad = gradient, gradient.reshape(512, 64)
        for optimizer in steppers:
            optimizer.step()
    assert torch.equal(stack.reshape(512, 64), matrix)
    assert torch.equal(stack[40:80], start[40:80]) and (stack[:40] != start[:40]).all()
    assert steppers[0].state[stack]["state1"].dtype == torch.uint8


def test_step_of_muon_is_orthogonal():
    weight = torch.nn.Parameter(torch.zeros(8, 32))
    optimizer = make_optimizer({"w.lora_a": weight}, config("muon"))
    weight.grad = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    singular = torch.linalg.svdvals(weight.detach())
    # Newton-Schulz in bfloat16 brings singular values near 1 to within a third.
    assert float(singular.max() / singular.min()) < 2


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "schedule_free_adamw"])
def test_lora_plus_moves_b_faster_by_its_ratio(name):
    moved = {}
    for ratio in (1.0, 8.0):
        model = Quadratic()
        before = copy.deepcopy(model.state_dict())
        optimizer = Optimizer(model.named(), config(name, loraplus_lr_ratio=ratio))
        optimizer.step(model, [Batch(5.0)], num_units=1, learning_rate=1e-4, seeds=[0])
        moved[ratio] = {key: (value - before[key]).abs().mean() for key, value in model.state_dict().items()}
    torch.testing.assert_close(moved[8.0]["parts.lora_a"], moved[1.0]["parts.lora_a"])
    torch.testing.assert_close(moved[8.0]["parts.lora_b"], 8 * moved[1.0]["parts.lora_b"], rtol=1e-3, atol=0)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs the package bitsandbytes.*pyggtrain\[optimizers\]"):
        check_optimizer(config("adamw_8bit"))
    check_optimizer(config("adamw"))


def test_a_torch_without_muon_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"muon needs torch 2\.9"):
        check_optimizer(config("muon"))


def test_muon_refuses_stacks_of_experts_by_name():
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_up_exps\.weight\.lora_a has shape \[4, 2, 8\]"):
        make_optimizer({"blk.0.ffn_up_exps.weight.lora_a": torch.zeros(4, 2, 8, requires_grad=True)}, config("muon"))


def test_a_schedule_with_a_schedule_free_optimiser_is_refused():
    with pytest.raises(ConfigError, match="lr_scheduler_type: found 'cosine' with optim schedule_free_adamw"):
        TrainConfig(model="m", data=("d",), output="o", optim="schedule_free_adamw")
