"""One optimiser step: exact normalisation by tokens, guard against numbers that are not finite, clipping, state."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch

from pyggtrain.training.config import TrainConfig
from pyggtrain.training.optim import NonFiniteError, Optimizer, StopRequested


@dataclass
class Rows:
    """Stands in for a micro-batch: each target adds `loss * weight.sum()` to the loss."""

    losses: list[float]

    @property
    def num_targets(self) -> int:
        return len(self.losses)

    @property
    def num_tokens(self) -> int:
        return len(self.losses) + 1


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))
        self.other = torch.nn.Parameter(torch.ones(4))
        self.num_calls = 0

    def loss(self, rows: Rows) -> tuple[torch.Tensor, int]:
        self.num_calls += 1
        factor = torch.tensor(rows.losses).sum()
        return (self.weight.mean() + 0 * self.other.sum()) * factor, rows.num_targets


@dataclass
class Objective:
    """Means over targets of the model's own loss."""

    model: Model
    metrics: tuple[str, ...] = ()

    def loss(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.loss(rows)[0], torch.zeros(0)


def config(**settings) -> TrainConfig:
    return TrainConfig(model="m", data=("d",), output="o", **settings)


def optimizer(model: Model, **settings) -> Optimizer:
    return Optimizer(dict(model.named_parameters()), config(**settings))


def step(optim: Optimizer, model: Model, *micro_batches: Rows, learning_rate: float = 0.1, **arguments):
    return optim.step(
        Objective(model),
        list(micro_batches),
        num_units=sum(rows.num_targets for rows in micro_batches),
        learning_rate=learning_rate,
        seeds=range(len(micro_batches)),
        **arguments,
    )


def test_loss_is_the_mean_over_tokens_and_not_over_micro_batches():
    model = Model()
    result = step(optimizer(model), model, Rows([1.0] * 2), Rows([3.0] * 8))
    assert result.loss == pytest.approx(2.6, abs=1e-6)


@pytest.mark.parametrize(
    "cuts",
    [
        [[1.0, 1.0, 3.0, 3.0, 3.0, 3.0]],
        [[1.0, 1.0], [3.0, 3.0, 3.0, 3.0]],
        [[1.0], [1.0, 3.0], [], [3.0], [3.0, 3.0]],
    ],
)
def test_gradients_and_step_do_not_depend_on_the_cuts(cuts):
    model, whole = Model(), Model()
    cut = step(optimizer(model, max_grad_norm=0), model, *map(Rows, cuts))
    one = step(optimizer(whole, max_grad_norm=0), whole, Rows([1.0, 1.0, 3.0, 3.0, 3.0, 3.0]))
    assert cut.loss == pytest.approx(14 / 6, rel=1e-6) and one.loss == pytest.approx(14 / 6, rel=1e-6)
    assert cut.grad_norm == pytest.approx(one.grad_norm, rel=1e-6)
    torch.testing.assert_close(model.weight, whole.weight, rtol=1e-6, atol=0)


def test_float16_divides_after_backward():
    """The same update and loss, and backward starts from a gradient that does not shrink with the number of targets."""
    model, plain = Model(), Model()
    started = []
    model.weight.register_hook(lambda gradient: started.append(gradient.abs().max().item()))
    rows = [Rows([1.0, 1.0, 3.0]), Rows([]), Rows([3.0] * 1000)]
    late = step(optimizer(model, max_grad_norm=0, compute="fp16"), model, *rows)
    early = step(optimizer(plain, max_grad_norm=0), plain, *rows)
    assert late.loss == pytest.approx(early.loss, rel=1e-6)
    assert late.grad_norm == pytest.approx(early.grad_norm, rel=1e-6)
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-6, atol=0)
    assert started == pytest.approx([5 / 6, 500.0])


def test_step_without_a_learnt_token_changes_nothing():
    model = Model()
    before = model.weight.detach().clone()
    result = step(optimizer(model), model, Rows([]), Rows([]))
    assert (result.loss, result.non_finite) == (0.0, None)
    assert torch.equal(model.weight, before) and model.num_calls == 0


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported():
    model, unclipped = Model(), Model()
    result = step(optimizer(model, max_grad_norm=0.5, adam_epsilon=1e6), model, Rows([10.0]), learning_rate=1e6)
    free = step(optimizer(unclipped, max_grad_norm=0, adam_epsilon=1e6), unclipped, Rows([10.0]), learning_rate=1e6)
    norm = 10.0 / 6 * math.sqrt(6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5) and free.grad_norm == pytest.approx(norm, rel=1e-5)
    # With a huge epsilon AdamW's step is proportional to the gradient.
    ratio = (1 - model.weight.detach()) / (1 - unclipped.weight.detach())
    torch.testing.assert_close(ratio, torch.full((2, 3), 0.5 / norm), rtol=1e-3, atol=0)


def test_step_is_that_of_adamw_with_decay():
    model = Model()
    step(optimizer(model, weight_decay=0.5, max_grad_norm=0), model, Rows([6.0]), learning_rate=0.1)
    expected = 1 - 0.1 * 0.5 - 0.1 * 1.0 / (1.0 + 1e-8)
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), expected))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_is_skipped_counted_and_named(bad):
    model = Model()
    optim = optimizer(model)
    step(optim, model, Rows([1.0]))
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optim.state_dict()["state"])
    result = step(optim, model, Rows([1.0]), Rows([bad]))
    assert result.non_finite == "weight"
    assert optim.num_skipped == 1
    torch.testing.assert_close(model.state_dict(), before[0], rtol=0, atol=0)
    torch.testing.assert_close(optim.state_dict()["state"], before[1], rtol=0, atol=0)


def test_finite_loss_with_nan_gradient_is_found():
    model = Model()
    model.other.register_hook(lambda gradient: gradient * math.nan)
    result = step(optimizer(model), model, Rows([1.0]))
    assert math.isfinite(result.loss)
    assert result.non_finite == "other"
    assert torch.equal(model.weight, torch.ones(2, 3))


def test_run_stops_after_several_skips_in_a_row_and_a_good_step_resets_the_count():
    model = Model()
    optim = optimizer(model)
    for _ in range(Optimizer.max_skipped_in_a_row - 1):
        step(optim, model, Rows([math.nan]))
    step(optim, model, Rows([1.0]))
    for _ in range(Optimizer.max_skipped_in_a_row - 1):
        step(optim, model, Rows([math.nan]))
    with pytest.raises(NonFiniteError, match="weight: 5 optimiser steps in a row"):
        step(optim, model, Rows([math.nan]))
    assert torch.isfinite(model.weight).all()


def test_stop_between_micro_batches_changes_nothing():
    model = Model()
    optim = optimizer(model)
    answers = iter([False, True])
    with pytest.raises(StopRequested):
        step(optim, model, Rows([1.0]), Rows([1.0]), should_stop=lambda: next(answers))
    assert model.num_calls == 1
    assert torch.equal(model.weight, torch.ones(2, 3)) and model.weight.grad is None


def test_bfloat16_weights_are_refused():
    # 8 bits of precision: updates below 0.4 % of a weight would round to nothing.
    with pytest.raises(TypeError, match=r"w is torch\.bfloat16"):
        Optimizer({"w": torch.zeros(2, dtype=torch.bfloat16)}, config())


def test_small_learning_rates_move_every_weight():
    model = Model()
    optim = optimizer(model, learning_rate=1e-5)
    for _ in range(50):
        step(optim, model, Rows([1.0]), learning_rate=1e-5)
    assert (model.weight - 1).abs().min() > 1e-4
    assert all(moments["exp_avg"].dtype == torch.float32 for moments in optim.state_dict()["state"].values())


def test_state_continues_bit_for_bit():
    model = Model()
    optim = optimizer(model)
    for _ in range(3):
        step(optim, model, Rows([1.0, 2.0]))
    twin = Model()
    twin.load_state_dict(model.state_dict())
    restored = optimizer(twin)
    restored.load_state_dict(copy.deepcopy(optim.state_dict()))
    for _ in range(3):
        step(optim, model, Rows([2.0]))
        step(restored, twin, Rows([2.0]))
    assert torch.equal(model.weight, twin.weight)


def test_dropout_seed_belongs_to_the_micro_batch():
    class Noisy(Model):
        def loss(self, rows):
            self.drawn = torch.rand(1)
            return super().loss(rows)

    first, second = Noisy(), Noisy()
    optimizer(first).step(Objective(first), [Rows([1.0])], num_units=1, learning_rate=0.1, seeds=[7])
    torch.rand(100)
    optimizer(second).step(Objective(second), [Rows([1.0])], num_units=1, learning_rate=0.1, seeds=[7])
    assert torch.equal(first.drawn, second.drawn)
