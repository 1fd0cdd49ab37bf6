"""The result of a comparison with llama.cpp: for a screen, for report.html, and as JSON beside the adapter."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

Comparison = Literal["at most", "more than", "equal to"]

_SYMBOLS = {"at most": "<=", "more than": ">", "equal to": "="}


@dataclass(frozen=True)
class Check:
    """One number of the report.

    Attributes:
        name: What was measured.
        value: What was found.
        bound: What `value` is held against; None if the number is only shown.
        comparison: How it is held against the bound.
        unit: Of `value` and `bound`; empty for a count or ratio.
    """

    name: str
    value: float
    bound: float | None = None
    comparison: Comparison = "at most"
    unit: str = ""

    @property
    def passed(self) -> bool:
        """Whether the bound is kept; NaN keeps none."""
        if self.bound is None:
            return True
        if self.comparison == "at most":
            return self.value <= self.bound
        if self.comparison == "more than":
            return self.value > self.bound
        return self.value == self.bound


@dataclass(frozen=True)
class ParityReport:
    """Whether llama.cpp computes what was trained.

    Attributes:
        base: Path of the base model.
        adapter: Path of the adapter; None if only the base was compared.
        runtime: Which llama.cpp was compared, and how it computed.
        mode: "strict" (all-F32 file: near-equality) or "statistical" (llama.cpp's own noise is the yardstick).
        num_documents: Documents compared.
        num_tokens: Tokens in them.
        num_positions: Next-token distributions compared; fewer than the tokens if the runtime needs a request for each.
        checks: All numbers, in reading order.
        first_difference: Where the two sides part, in words; None if they agree.
        notes: What was left out or could not be proven, one sentence each.
    """

    base: str
    adapter: str | None
    runtime: str
    mode: Literal["strict", "statistical"]
    num_documents: int
    num_tokens: int
    num_positions: int
    checks: tuple[Check, ...]
    first_difference: str | None
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def rows(self) -> list[list[str]]:
        """Header row and one row per check: what, found, needed, verdict."""
        return [["check", "found", "needed", ""], *(_row(check) for check in self.checks)]

    def table(self) -> str:
        """The report as text of at most 110 columns."""
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        files = self.base if self.adapter is None else f"{self.base} + {self.adapter}"
        lines = [
            f"Parity with llama.cpp: {'passed' if self.passed else 'FAILED'} ({self.mode})",
            files,
            self.runtime,
            f"{self.num_positions} positions of {self.num_tokens} tokens in {self.num_documents} documents",
            "",
        ]
        for name, found, needed, verdict in rows:
            lines.append(f"  {name:<{widths[0]}}  {found:>{widths[1]}}  {needed:<{widths[2]}}  {verdict}".rstrip())
        if self.first_difference is not None:
            lines += ["", f"First difference: {self.first_difference}"]
        lines += ["", *(f"Note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)

    def to_json(self) -> str:
        """The whole report as JSON; a number that is not finite is written as null."""
        data = asdict(self)
        for check, entry in zip(self.checks, data["checks"], strict=True):
            entry["passed"] = check.passed
            entry["value"] = check.value if math.isfinite(check.value) else None
        return json.dumps({"passed": self.passed, **data}, indent=2, allow_nan=False)


def _row(check: Check) -> list[str]:
    if check.bound is None:
        return [check.name, _number(check.value, check.unit), "", ""]
    needed = f"{_SYMBOLS[check.comparison]} {_number(check.bound, check.unit)}"
    return [check.name, _number(check.value, check.unit), needed, "ok" if check.passed else "FAILED"]


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.1f} %"
    if math.isfinite(value) and value == int(value):
        text = f"{value:.0f}"
    else:
        text = f"{value:.4f}" if abs(value) >= 0.1 else f"{value:.2e}"
    return f"{text} {unit}".rstrip()
