"""What a run would need, from the header of its base alone: every setting, the one to take, the next step up."""

from dataclasses import dataclass
from typing import Any

from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.data import longest_row
from pyggtrain.training.memory import MemoryPlan, Planner, RehearsedNeed, mib, relative_time
from pyggtrain.training.objectives import Document
from pyggtrain.training.prepare import choose_device, lora_config
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
        chosen: the fastest that fits, None if none does.
    """

    model: str
    device: str
    num_parameters: int
    row_tokens: int
    step_rows: int
    plans: tuple[MemoryPlan, ...]
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
        return [["part", "at the peak"], *rows, ["total", mib(plan.total_bytes)]]

    def setting_rows(self) -> list[list[str]]:
        """A table: each setting, fastest first."""
        fastest = min(self._time(plan) for plan in self.plans)
        rows = [
            [
                plan.policy,
                f"{plan.micro_batch_size} x {self.row_tokens}",
                f"{self._time(plan) / fastest:.2f}",
                mib(plan.total_bytes),
                "yes" if plan.fits else f"no, {mib(plan.missing_bytes)} short",
                "<- chosen" if plan is self.chosen else "",
            ]
            for plan in self.plans
        ]
        return [["gradient_checkpointing", "micro-batch", "time", "peak", "fits", ""], *rows]

    def verdict(self) -> str:
        """One sentence: what to take, and what the next step up would need."""
        up = self.next_up
        if self.chosen is None:
            assert up is not None
            return f"Nothing fits: {up.need()}; {up.bounds()}. {up.advice()}"
        if up is None:
            return "The fastest setting fits."
        return (
            f"Next step up: gradient_checkpointing={up.policy} with {up.micro_batch_size} rows needs "
            f"{mib(up.total_bytes)}, {mib(up.missing_bytes)} more than there is."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, sizes in bytes."""

        def described(plan: MemoryPlan) -> dict[str, Any]:
            return {
                "gradient_checkpointing": plan.policy,
                "per_device_train_batch_size": plan.micro_batch_size,
                "gradient_accumulation_steps": self.step_rows // plan.micro_batch_size,
                "num_tokens": plan.num_tokens,
                "parts": plan.parts,
                "total_bytes": plan.total_bytes,
                "missing_bytes": plan.missing_bytes,
                "relative_time": round(self._time(plan), 3),
            }

        return {
            "device": self.device,
            "num_parameters": self.num_parameters,
            "limit_bytes": self.plans[0].limit_bytes,
            "free_bytes": self.plans[0].free_bytes,
            "settings": [described(plan) for plan in self.plans],
            "chosen": None if self.chosen is None else described(self.chosen),
        }

    def _time(self, plan: MemoryPlan) -> float:
        return relative_time(plan.policy, plan.num_tokens, plan.device_type)


def plan_run(config: TrainConfig) -> RunPlan:
    """Plan a run whose rows are all as long as they may be. Nothing but the file's header is read.

    Raises:
        GGUFError, UnsupportedError: the base file, or a weight that an adapter cannot train.
        ConfigError: settings that do not fit model or device.
    """
    base, device = GGUFFile.open(config.model), choose_device(config.device)
    if device.type != "cpu":
        raise UnsupportedError(
            f"device: {device} is planned by measuring the loaded model: `pyggtrain train --dry-run` shows that plan. "
            "For a CPU set device to cpu."
        )
    rehearsal = Rehearsal(base, config, lora_config(config))
    length = longest_row(config, base)
    row: Document = ([0] * length, [0] * length)
    # A preference pair is two documents.
    num_documents = 1 if config.method == "sft" else 2
    planner = Planner(RehearsedNeed(rehearsal), config, device, lambda size: [row] * (size * num_documents))
    plans = tuple(planner.plan(*setting) for setting in planner.settings)
    return RunPlan(
        model=f"{base.path} ({base.architecture}, {mib(base.file_bytes)})",
        device=str(device),
        num_parameters=rehearsal.num_parameters,
        row_tokens=length,
        step_rows=config.step_rows,
        plans=plans,
        chosen=planner.fastest(),
    )
