"""Held-out losses: the best one, patience, and that a run resumes with what it knew."""

import math

import pytest
import torch

from pyggtrain.errors import ConfigError
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.evaluation import Evaluations


def evaluations(**settings) -> Evaluations:
    return Evaluations(TrainConfig(model="m", data=("d",), output="o", **settings), has_held_out=True)


def add(history: Evaluations, *losses: float) -> list[bool]:
    over = []
    for loss in losses:
        step = len(history.losses)
        history.add(step, loss, {"w": torch.tensor([float(step)])})
        over.append(history.is_over)
    return over


@pytest.mark.parametrize(
    ("patience", "threshold", "losses", "over"),
    [
        (1, 0.0, [3.0, 2.0, 2.0], [False, False, True]),
        (2, 0.0, [3.0, 2.0, 2.5, 1.9, 2.0, 2.0], [False, False, False, False, False, True]),
        (2, 0.5, [3.0, 2.6, 2.4, 2.2, 2.0], [False, False, False, False, True]),
        (1, 0.0, [3.0, math.nan], [False, True]),
        (None, 0.0, [3.0, 4.0, 5.0], [False, False, False]),
    ],
)
def test_patience_counts_losses_in_a_row_that_are_no_better(patience, threshold, losses, over):
    history = evaluations(early_stopping_patience=patience, early_stopping_threshold=threshold)
    assert add(history, *losses) == over


def test_the_best_weights_are_kept_as_they_were():
    history = evaluations(load_best_model_at_end=True)
    weight = torch.tensor([0.0])
    for step, loss in enumerate([3.0, 1.0, math.nan, 1.0, 2.0]):
        weight.fill_(step)
        history.add(step, loss, {"w": weight})
    assert history.best_step == 1 and history.best_parameters["w"].tolist() == [1.0]


def test_weights_are_not_kept_unasked():
    history = evaluations()
    add(history, 1.0)
    assert history.best_parameters is None and history.best_step == 0


def test_state_continues():
    history = evaluations(load_best_model_at_end=True, early_stopping_patience=2)
    add(history, 3.0, 1.0, 2.0)
    restored = evaluations(load_best_model_at_end=True, early_stopping_patience=2)
    restored.load_state_dict(history.state_dict())
    assert restored.best_step == 1 and restored.best_parameters["w"].tolist() == [1.0]
    assert add(restored, 1.5) == [True]


@pytest.mark.parametrize("setting", [{"early_stopping_patience": 1}, {"load_best_model_at_end": True}])
def test_held_out_rows_are_needed(setting):
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}: needs held-out rows"):
        Evaluations(TrainConfig(model="m", data=("d",), output="o", **setting), has_held_out=False)
