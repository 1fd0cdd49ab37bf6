"""The state of a run in one file, written atomically, so that resuming is continuing.

What is stored: adapter weights, what the optimiser keeps, held-out losses and the weights that had the best one, the
number of finished optimiser steps, and what the run was made from (settings, hash of the base file, hash of the
encoded rows). Nothing else is needed: the order of rows, the learning rate and the generators of dropout are
functions of seed and step. A checkpoint lies between two optimiser steps; micro-batches of a step that was cut short
are computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pyggtrain.errors import ConfigError
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.output import atomic_path

_FORMAT = 2

NOT_PART_OF_THE_RUN = frozenset(
    {
        # Contents of files are compared by hash, so that they may be moved.
        "model",
        "data",
        "eval_data",
        "output",
        # Its weights are in the checkpoint.
        "init_adapter",
        # These have no influence on the adapter's values.
        "overwrite",
        "resume",
        "device",
        "gradient_checkpointing",
        # What it decides, the size of micro-batches, is compared.
        "max_memory",
        "num_threads",
        # The layers of each process, which they decide, are compared.
        "tensor_split",
        "ddp_timeout",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "report_to",
        "run_name",
        "verify",
        "verify_tokens",
        "runtime",
        "sample_prompts",
    }
)
"""Settings that may differ when a run is resumed; `eval_steps` only while held-out losses decide nothing."""


@dataclass(frozen=True)
class Origin:
    """What a run is made from; two runs with equal origin take the same steps.

    Attributes:
        settings: settings that decide the result, and other facts that do, by name.
        base_sha256: hash of the base file's header and of samples of its weights.
        data_sha256: hash of the training rows' token ids and labels, in file order.
        num_steps: optimiser steps of the whole run.
    """

    settings: dict[str, Any]
    base_sha256: str
    data_sha256: str
    num_steps: int

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        base_sha256: str,
        data_sha256: str,
        num_steps: int,
        *,
        held_out_sha256: str | None = None,
        num_processes: int = 1,
        layers: str | None = None,
    ) -> "Origin":
        """Take from `config` the settings that decide the result; held-out rows only if their losses decide something.

        Args:
            held_out_sha256: hash of the rows of `eval_data`; None if held-out rows are part of the data.
            num_processes: that share the rows.
        """
        free = NOT_PART_OF_THE_RUN
        facts: dict[str, Any] = {"number of processes": num_processes}
        if layers is not None:
            facts["layers of the processes"] = layers
        if config.early_stopping_patience is not None or config.load_best_model_at_end:
            free = free - {"eval_steps"}
            facts["hash of eval_data"] = held_out_sha256
        settings = {name: value for name, value in config.to_dict().items() if name not in free}
        return cls({**settings, **facts}, base_sha256, data_sha256, num_steps)

    def differences(self, stored: "Origin") -> list[str]:
        """Return one line for each thing that differs from a stored origin."""
        lines = []
        if self.base_sha256 != stored.base_sha256:
            lines.append(
                f"model: hash of the file {self.base_sha256[:12]}..., the checkpoint has {stored.base_sha256[:12]}..."
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
        evaluations: what `Evaluations.state_dict` returned.
        loss: mean training loss of the last logged steps.
    """

    step: int
    started: str
    origin: Origin
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    evaluations: dict[str, Any]
    loss: float


def on_cpu(checkpoint: Checkpoint) -> Checkpoint:
    """The same with what the optimiser keeps on the CPU, to be sent to another process."""
    state = {
        name: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in kept.items()}
        for name, kept in checkpoint.optimizer["state"].items()
    }
    return replace(checkpoint, optimizer={**checkpoint.optimizer, "state": state})


def joined(parts: Sequence[Checkpoint]) -> Checkpoint:
    """One checkpoint of those of processes that have parts of a model; all else is the same in each."""
    first = parts[0]
    best = [part.evaluations["best_parameters"] for part in parts]
    return replace(
        first,
        parameters={name: value for part in parts for name, value in part.parameters.items()},
        optimizer={
            **first.optimizer,
            "state": {name: kept for part in parts for name, kept in part.optimizer["state"].items()},
        },
        evaluations={
            **first.evaluations,
            "best_parameters": None if best[0] is None else {k: v for part in best for k, v in part.items()},
        },
    )


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path` at once.

    Raises:
        OutputError: the disk is full or the folder not writable; an older checkpoint at `path` is unchanged.
    """
    state = {**vars(checkpoint), "format": _FORMAT, "origin": vars(checkpoint.origin)}
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint. Only tensors and plain values are read, never code.

    Raises:
        ConfigError: not a checkpoint of this version.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if (found := state.pop("format")) != _FORMAT:
            raise ValueError(f"format {found}, needed {_FORMAT}")
        return Checkpoint(**{**state, "origin": Origin(**state["origin"])})
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
