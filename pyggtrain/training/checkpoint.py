"""The state of a run in one file, written atomically, so that resuming is continuing.

What is stored: adapter weights, AdamW moments, the number of finished optimiser steps, and what the run was made from
(settings, hash of the base file's header, hash of the encoded rows). Nothing else is needed: the order of rows, the
learning rate and the generators of dropout are functions of seed and step. A checkpoint lies between two optimiser
steps; micro-batches of a step that was cut short are computed again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyggtrain.errors import ConfigError
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.output import atomic_path

_FORMAT = 1

NOT_PART_OF_THE_RUN = frozenset(
    {
        # Contents of files are compared by hash, so that they may be moved.
        "model",
        "data",
        "eval_data",
        "output",
        # These have no influence on the adapter's values.
        "overwrite",
        "resume",
        "device",
        "gradient_checkpointing",
        "num_threads",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "verify",
        "verify_tokens",
        "runtime",
        "sample_prompts",
    }
)
"""Settings that may differ when a run is resumed."""


@dataclass(frozen=True)
class Origin:
    """What a run is made from; two runs with equal origin take the same steps.

    Attributes:
        settings: settings that decide the result.
        base_sha256: hash of the base file's header (metadata and tensor table).
        data_sha256: hash of the training rows' token ids and labels, in file order.
        num_steps: optimiser steps of the whole run.
    """

    settings: dict[str, Any]
    base_sha256: str
    data_sha256: str
    num_steps: int

    @classmethod
    def of(cls, config: TrainConfig, base_sha256: str, data_sha256: str, num_steps: int) -> "Origin":
        """Take from `config` the settings that decide the result."""
        settings = {name: value for name, value in config.to_dict().items() if name not in NOT_PART_OF_THE_RUN}
        return cls(settings, base_sha256, data_sha256, num_steps)

    def differences(self, stored: "Origin") -> list[str]:
        """Return one line for each thing that differs from a stored origin."""
        lines = []
        if self.base_sha256 != stored.base_sha256:
            lines.append(
                f"model: header hash {self.base_sha256[:12]}..., the checkpoint has {stored.base_sha256[:12]}..."
            )
        if self.data_sha256 != stored.data_sha256:
            lines.append(
                f"data: hash of the rows {self.data_sha256[:12]}..., the checkpoint has {stored.data_sha256[:12]}..."
            )
        for name in sorted(self.settings.keys() | stored.settings.keys()):
            now, then = self.settings.get(name), stored.settings.get(name)
            if now != then:
                lines.append(f"{name}: {now!r}, the checkpoint has {then!r}")
        if not lines and self.num_steps != stored.num_steps:
            lines.append(f"number of steps: {self.num_steps}, the checkpoint has {stored.num_steps}")
        return lines


@dataclass(frozen=True)
class Checkpoint:
    """State between two optimiser steps.

    Attributes:
        step: finished optimiser steps.
        started: when the run was started (ISO 8601, local time). Chat templates may write the date, and must write the
            same one after resuming.
        origin: what the run is made from.
        parameters: name -> float32 tensor on the CPU.
        optimizer: what `Optimizer.state_dict` returned.
    """

    step: int
    started: str
    origin: Origin
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path` at once.

    Raises:
        OutputError: the disk is full or the folder not writable; an older checkpoint at `path` is unchanged.
    """
    state = {
        "format": _FORMAT,
        "step": checkpoint.step,
        "started": checkpoint.started,
        "origin": vars(checkpoint.origin),
        "parameters": checkpoint.parameters,
        "optimizer": checkpoint.optimizer,
    }
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint. Only tensors and plain values are read, never code.

    Raises:
        ConfigError: not a checkpoint of this version.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format"] != _FORMAT:
            raise ValueError(f"format {state['format']}, needed {_FORMAT}")
        origin = Origin(**state["origin"])
        return Checkpoint(state["step"], state["started"], origin, state["parameters"], state["optimizer"])
    # What torch raises for a damaged file depends on where the damage lies.
    except Exception as error:
        raise ConfigError(
            f"{path}: not a readable checkpoint of this version ({error}). Start the run again with --overwrite."
        ) from error


def check_same_run(path: Path, stored: Origin, origin: Origin) -> None:
    """Refuse to continue a run with another base, other data or other settings.

    Raises:
        ConfigError: names each difference.
    """
    if differences := origin.differences(stored):
        raise ConfigError(
            "\n  - ".join([f"{path}: cannot resume, since the run is not the same:", *differences])
            + "\nRestore these, or start again with --overwrite."
        )
