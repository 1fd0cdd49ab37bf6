import json
import math

import pytest

from pyggtrain.validation.parity_report import Check, ParityReport


def report(*checks: Check, notes: tuple[str, ...] = ()) -> ParityReport:
    return ParityReport(
        base="model.gguf",
        adapter="adapter.gguf",
        runtime="llama.cpp abc in the bridge",
        mode="statistical",
        num_documents=2,
        num_tokens=64,
        num_positions=64,
        checks=checks,
        first_difference=None,
        notes=notes,
    )


@pytest.mark.parametrize(
    ("value", "comparison", "passed"),
    [
        (1.0, "at most", True),
        (1.5, "at most", False),
        (1.5, "more than", True),
        (1.0, "more than", False),
        (1.0, "equal to", True),
        (0.5, "equal to", False),
        (math.nan, "at most", False),
        (math.nan, "more than", False),
        (math.nan, "equal to", False),
    ],
)
def test_a_check_keeps_its_bound_or_fails(value: float, comparison: str, passed: bool) -> None:
    assert Check("x", value, 1.0, comparison).passed is passed  # type: ignore[arg-type]
    assert report(Check("x", value, 1.0, comparison)).passed is passed  # type: ignore[arg-type]


def test_one_broken_bound_fails_the_report() -> None:
    kept, broken, shown = Check("a", 1.0, 2.0), Check("b", 3.0, 2.0), Check("c", 9.0)
    assert report(kept, shown).passed
    assert not report(kept, broken, shown).passed
    assert "FAILED" in report(kept, broken).table()
    assert "FAILED" not in report(kept, shown).table()


def test_rows_show_value_bound_and_verdict() -> None:
    rows = report(
        Check("KL", 1.234e-3, 0.5, unit="nats"), Check("pairs", 210, 210, "equal to"), Check("top", 0.956, unit="%")
    ).rows()
    assert rows == [
        ["check", "found", "needed", ""],
        ["KL", "1.23e-03 nats", "<= 0.5000 nats", "ok"],
        ["pairs", "210", "= 210", "ok"],
        ["top", "95.6 %", "", ""],
    ]


def test_json_holds_everything_and_is_standard_even_with_nan() -> None:
    text = report(Check("a", math.nan, 1.0), Check("b", 2.0, 3.0), notes=("left out",)).to_json()
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["passed"] is False
    assert data["checks"][0] == {
        "name": "a", "value": None, "bound": 1.0, "comparison": "at most", "unit": "", "passed": False
    }  # fmt: skip
    assert data["notes"] == ["left out"]
    assert data["num_tokens"] == 64
