"""Learning rates against values worked out by hand."""

import math

import pytest

from pyggtrain.training.config import TrainConfig
from pyggtrain.training.schedule import learning_rate, num_decay_steps, num_warmup_steps


def config(**settings) -> TrainConfig:
    return TrainConfig(model="m", data=("d",), output="o", learning_rate=1.0, **settings)


def test_warm_up_rises_in_equal_parts_and_never_is_zero():
    rates = [learning_rate(step, config(warmup_steps=4, lr_scheduler_type="constant"), 10) for step in range(6)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_linear_falls_to_the_step_before_zero():
    rates = [learning_rate(step, config(warmup_steps=0, lr_scheduler_type="linear"), 5) for step in range(5)]
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_passes_one_half_in_the_middle():
    settings = config(warmup_steps=2, lr_scheduler_type="cosine")
    assert learning_rate(2, settings, 10) == pytest.approx(1.0)
    assert learning_rate(6, settings, 10) == pytest.approx(0.5)
    assert learning_rate(9, settings, 10) == pytest.approx((1 + math.cos(math.pi * 7 / 8)) / 2)


def test_wsd_stays_and_then_falls_along_a_root():
    settings = config(warmup_steps=1, lr_scheduler_type="wsd", num_decay_steps=3)
    rates = [learning_rate(step, settings, 8) for step in range(8)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0])
    assert rates[5:] == pytest.approx([1 - math.sqrt(1 / 4), 1 - math.sqrt(2 / 4), 1 - math.sqrt(3 / 4)])
    assert num_decay_steps(config(), 11) == 3
    constant = config(warmup_steps=1, lr_scheduler_type="wsd", num_decay_steps=0)
    assert [learning_rate(step, constant, 8) for step in range(1, 8)] == [1.0] * 7


def test_warmup_steps_win_over_the_ratio_which_rounds_up():
    assert num_warmup_steps(config(warmup_ratio=0.03), 50) == 2
    assert num_warmup_steps(config(warmup_ratio=0.5, warmup_steps=1), 50) == 1


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 100])
def test_rates_stay_within_zero_and_the_highest(kind, num_steps, warmup_steps):
    settings = config(lr_scheduler_type=kind, warmup_steps=warmup_steps)
    assert all(0 < learning_rate(step, settings, num_steps) <= 1 for step in range(num_steps))
