"""Learning rate as a pure function of the step, so that resuming needs no state."""

import math

from pyggtrain.training.config import TrainConfig


def num_warmup_steps(config: TrainConfig, num_steps: int) -> int:
    """Return the steps of warm-up: `warmup_steps` if given, else `warmup_ratio` of `num_steps`, rounded up."""
    return config.warmup_steps if config.warmup_steps is not None else math.ceil(config.warmup_ratio * num_steps)


def num_decay_steps(config: TrainConfig, num_steps: int) -> int:
    """Return the steps of the fall at the end of "wsd": `num_decay_steps` if given, else a fifth, rounded up."""
    return config.num_decay_steps if config.num_decay_steps is not None else math.ceil(num_steps / 5)


def learning_rate(step: int, config: TrainConfig, num_steps: int) -> float:
    """Return the learning rate of optimiser step `step` (0 is the first) of `num_steps`.

    With w warm-up steps, p = (step - w) / (num_steps - w), and for "wsd" d steps of decay:

        step < w:   highest * (step + 1) / (w + 1)
        cosine:     highest * (1 + cos(pi p)) / 2
        linear:     highest * (1 - p)
        constant:   highest
        wsd:        highest until num_steps - d, then highest * (1 - sqrt((step - num_steps + d + 1) / (d + 1)))

    Unlike in transformers' schedules no step is spent on a learning rate of zero. The fall of "wsd" is Hägele et al.
    2024 (2405.18392), section 3.3.
    """
    warmup = num_warmup_steps(config, num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    if config.lr_scheduler_type == "cosine":
        return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1 - progress)
    if config.lr_scheduler_type == "wsd":
        decay = num_decay_steps(config, num_steps)
        fallen = max(0, step - num_steps + decay + 1)
        return config.learning_rate * (1 - math.sqrt(fallen / (decay + 1)))
    return config.learning_rate
