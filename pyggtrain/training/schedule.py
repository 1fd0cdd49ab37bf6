"""Learning rate as a pure function of the step, so that resuming needs no state."""

import math

from pyggtrain.training.config import TrainConfig


def num_warmup_steps(config: TrainConfig, num_steps: int) -> int:
    """Return the steps of warm-up: `warmup_steps` if given, else `warmup_ratio` of `num_steps`, rounded up."""
    return config.warmup_steps if config.warmup_steps is not None else math.ceil(config.warmup_ratio * num_steps)


def learning_rate(step: int, config: TrainConfig, num_steps: int) -> float:
    """Return the learning rate of optimiser step `step` (0 is the first) of `num_steps`.

    With w warm-up steps and p = (step - w) / (num_steps - w):

        step < w:   highest * (step + 1) / (w + 1)
        then:       highest * (1 + cos(pi p)) / 2,  highest * (1 - p),  or highest

    Unlike in transformers' schedules the first step is not spent on a learning rate of zero.
    """
    warmup = num_warmup_steps(config, num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    if config.lr_scheduler_type == "cosine":
        return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate
