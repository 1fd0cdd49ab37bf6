"""What a run would need, from the header of its base alone: every setting, the one to take, the next step up."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pyggtrain.errors import ConfigError
from pyggtrain.gguf import GGUFFile
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.data import longest_row
from pyggtrain.training.gpu_memory import FusedSizes, RehearsedOnGpu, fused_settings, num_vocab_of
from pyggtrain.training.memory import (
    MemoryPlan,
    Planner,
    RehearsedNeed,
    fastest_of,
    free_memory_bytes,
    host_free_bytes,
    mib,
    relative_time,
    with_a_workspace_that_fits,
)
from pyggtrain.training.objectives import Document
from pyggtrain.training.prepare import check_fp8, choose_device, compute_dtype, lora_config
from pyggtrain.training.rehearse import Rehearsal


@dataclass(frozen=True)
class RunPlan:
    """The settings of a run with their need, fastest first.

    Attributes:
        model: file and architecture, for a person.
        device: where it would compute.
        num_parameters: trained numbers.
        row_tokens: of the longest row.
        step_rows: rows of an optimiser step.
        plans: one for each setting.
        times: expected time of a token in each; only the order counts.
        chosen: the fastest that fits (see `memory.fastest_of`), None if none does.
    """

    model: str
    device: str
    num_parameters: int
    row_tokens: int
    step_rows: int
    plans: tuple[MemoryPlan, ...]
    times: tuple[float, ...]
    chosen: MemoryPlan | None

    @property
    def next_up(self) -> MemoryPlan | None:
        """The next faster setting than the chosen one; the leanest if none fits; None if the fastest fits."""
        if self.chosen is None:
            return min(self.plans, key=lambda plan: plan.missing_bytes)
        place = self.plans.index(self.chosen)
        return self.plans[place - 1] if place else None

    def facts(self) -> dict[str, str]:
        """Name -> value, for a person."""
        bounds = self.plans[0].bounds()
        return {
            "model": self.model,
            "trainable": f"{self.num_parameters:,} parameters",
            "rows": f"of {self.row_tokens:,} tokens, {self.step_rows} to an optimiser step",
            "device": f"{self.device}; {bounds}" if bounds else self.device,
        }

    def part_rows(self) -> list[list[str]]:
        """A table: each part of the chosen setting (or of the leanest) at the peak of a step."""
        plan = self.chosen or self.next_up
        assert plan is not None
        rows = [[name, mib(num_bytes)] for name, num_bytes in plan.parts.items()]
        host = [["beside it, on the host", mib(plan.host_bytes)]] if plan.host_bytes else []
        return [["part", "at the peak"], *rows, ["total", mib(plan.total_bytes)], *host]

    def setting_rows(self) -> list[list[str]]:
        """A table: each setting, fastest first."""
        fastest = min(self.times)
        rows = [
            [
                plan.policy,
                f"{plan.micro_batch_size} x {self.row_tokens}",
                f"{time / fastest:.2f}",
                mib(plan.total_bytes),
                "yes" if plan.fits else f"no, short of {plan.shortage()}",
                "<- chosen" if plan is self.chosen else "",
            ]
            for plan, time in zip(self.plans, self.times, strict=True)
        ]
        return [["gradient_checkpointing", "micro-batch", "time", "peak", "fits", ""], *rows]

    def verdict(self) -> str:
        """One sentence: what to take, and what the next step up would need."""
        up = self.next_up
        if self.chosen is None:
            assert up is not None
            return f"Nothing fits: {up.need()}; {up.bounds()}. {up.advice()}"
        if not self.chosen.fits:
            return f"Nothing fits the host. {self.chosen.warning()}"
        if up is None:
            return "The fastest setting fits."
        return (
            f"Next step up: gradient_checkpointing={up.policy} with {up.micro_batch_size} rows needs "
            f"{mib(up.total_bytes)}, {up.shortage()} more than there is."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, sizes in bytes."""

        times = dict(zip(map(id, self.plans), self.times, strict=True))

        def described(plan: MemoryPlan) -> dict[str, Any]:
            return {
                "gradient_checkpointing": plan.policy,
                "per_device_train_batch_size": plan.micro_batch_size,
                "gradient_accumulation_steps": self.step_rows // plan.micro_batch_size,
                "num_tokens": plan.num_tokens,
                "parts": plan.parts,
                "total_bytes": plan.total_bytes,
                "missing_bytes": plan.missing_bytes,
                "host_bytes": plan.host_bytes,
                "missing_on_host_bytes": plan.missing_on_host_bytes,
                "relative_time": round(times[id(plan)], 3),
            }

        return {
            "device": self.device,
            "num_parameters": self.num_parameters,
            "limit_bytes": self.plans[0].limit_bytes,
            "free_bytes": self.plans[0].free_bytes,
            "host_free_bytes": self.plans[0].host_free_bytes,
            "settings": [described(plan) for plan in self.plans],
            "chosen": None if self.chosen is None else described(self.chosen),
        }


def plan_run(config: TrainConfig) -> RunPlan:
    """Plan a run whose rows are all as long as they may be. Nothing but the file's header is read.

    A GPU need not be here: what it has is then `max_memory`.

    Raises:
        GGUFError, UnsupportedError: the base file, or a weight that an adapter cannot train.
        ConfigError: settings that do not fit model or device, or a GPU of unknown size.
    """
    base, device = GGUFFile.open(config.model), _device(config)
    is_here = device.type == "cpu" or torch.cuda.is_available()
    # Whether a card that is not here multiplies 8-bit floats is not known.
    dtype = compute_dtype(config if is_here or config.compute != "fp8" else replace(config, compute="bf16"), device)
    rehearsal = Rehearsal(base, config, lora_config(config), device, dtype)
    length = longest_row(config, base)
    row: Document = ([0] * length, [0] * length)
    # A preference pair is two documents.
    num_documents = 1 if config.method == "sft" else 2

    def longest(size: int) -> list[Document]:
        return [row] * (size * num_documents)

    if device.type == "cuda":
        check_fp8(config, base, is_fused=rehearsal.is_fused)
        of_model = _of_fused if rehearsal.is_fused else _of_any
        timed, chosen = with_a_workspace_that_fits(
            lambda: of_model(rehearsal, config, device, base, longest), lambda found: found[1] is not None
        )
    else:
        timed, chosen = _of_any(rehearsal, config, device, base, longest)
    return RunPlan(
        model=f"{base.path} ({base.architecture}, {mib(base.file_bytes)})",
        device=str(device) if is_here else f"{device}, which is not in this machine",
        num_parameters=rehearsal.num_parameters,
        row_tokens=length,
        step_rows=config.step_rows,
        plans=tuple(plan for plan, _ in timed),
        times=tuple(time for _, time in timed),
        chosen=chosen,
    )


_Timed = list[tuple[MemoryPlan, float]]
_Longest = Callable[[int], list[Document]]


def _of_fused(
    rehearsal: Rehearsal, config: TrainConfig, device: torch.device, base: GGUFFile, longest: _Longest
) -> tuple[_Timed, MemoryPlan | None]:
    """The settings of a model whose layers all run fused on a GPU, as a run chooses among them."""
    free = free_memory_bytes(device)
    settings = fused_settings(
        FusedSizes.of(rehearsal.model.fused_layers, num_vocab_of(base)),
        config,
        longest,
        base=rehearsal.base_bytes,
        num_parameters=rehearsal.num_parameters,
        free=None if free is None else max(0, free - _to_load(rehearsal)),
        host_free=host_free_bytes(device),
    )
    return [(one.plan, one.time) for one in settings], fastest_of(one.plan for one in settings)


def _of_any(
    rehearsal: Rehearsal, config: TrainConfig, device: torch.device, base: GGUFFile, longest: _Longest
) -> tuple[_Timed, MemoryPlan | None]:
    """The settings of a CPU's run, or of any model on a GPU."""
    is_gpu = device.type == "cuda"
    need = RehearsedOnGpu(rehearsal) if is_gpu else RehearsedNeed(rehearsal)
    planner = Planner(need, config, device, longest, to_load=_to_load(rehearsal) if is_gpu else 0)
    plans = [planner.plan(*setting) for setting in planner.settings]
    timed = [(plan, relative_time(plan.policy, plan.num_tokens, plan.device_type)) for plan in plans]
    return sorted(timed, key=lambda pair: pair[1]), planner.fastest()


def _to_load(rehearsal: Rehearsal) -> int:
    return rehearsal.base_bytes + 4 * rehearsal.num_parameters


def _device(config: TrainConfig) -> torch.device:
    """The device of the run; a GPU need not be here if `max_memory` says what it has.

    Raises:
        ConfigError: no such device, or a GPU that is not here and of unknown size.
        UnsupportedError: the operations do not run there.
    """
    if torch.cuda.is_available() or not config.device.startswith("cuda"):
        return choose_device(config.device)
    try:
        device = torch.device(config.device)
    except RuntimeError:
        return choose_device(config.device)
    if config.max_memory is None:
        raise ConfigError(
            f"device: found {config.device!r}, but torch {torch.__version__} sees no CUDA device, so how much memory "
            "there will be is not known. Set max_memory to what the card has for it, such as 16GiB, or device to cpu."
        )
    return device
