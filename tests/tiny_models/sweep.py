"""Every architecture of the pinned llama.cpp, as a tiny model: imported, compared with llama.cpp, trained a little.

    python tests/tiny_models/sweep.py              all of them; writes pyggtrain/graph/architectures.json
    python tests/tiny_models/sweep.py 'qwen|gpt'   those whose names match; only their entries are written

The file that it writes is what `pyggtrain architectures` and README say, and tests/graph/test_architectures.py holds it
against what it finds itself.
"""

import json
import re
import sys
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from check import Findings, check
from tiny_models import NoModelError, generate, table

from pyggtrain.errors import PyggtrainError

RESULTS = Path(__file__).parents[2] / "pyggtrain" / "graph" / "architectures.json"


@dataclass
class Outcome:
    """What became of one tiny model.

    Attributes:
        architecture, kind: which.
        why: why it is not served, or "".
        findings: what was measured, if it could be imported.
    """

    architecture: str
    kind: str
    why: str
    findings: Findings | None


def examine(architecture: str, kind: str) -> Outcome:
    """Make the tiny model and check it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = generate(architecture, kind, Path(folder))
        except NoModelError as error:
            return Outcome(architecture, kind, f"no tiny model: {error}", None)
        try:
            findings = check(path)
        except PyggtrainError as error:
            why = str(error).replace(f"{path}: ", "").replace(str(path), "it")
            return Outcome(architecture, kind, re.sub(r"\S*/llama\.cpp/", "", why), None)
    return Outcome(architecture, kind, "; ".join(findings.faults()), findings)


def start(wanted: list[tuple[str, str]], *, num_processes: int = 2) -> dict[tuple[str, str], "Future[Outcome]"]:
    """Begin to examine them all, in processes of their own."""
    pool = ProcessPoolExecutor(num_processes)
    futures = {item: pool.submit(examine, *item) for item in wanted}
    pool.shutdown(wait=False)
    return futures


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """What is kept of the outcomes of one architecture: of each model what is in the way, and the worst numbers."""
    findings = [outcome.findings for outcome in outcomes if not outcome.why and outcome.findings is not None]
    kept: dict[str, Any] = {"models": {outcome.kind: outcome.why for outcome in outcomes}}
    if findings:
        adapter_errors = [error for found in findings for error in found.adapter_errors.values()]
        kept["error"] = float(f"{max(found.error for found in findings):.1e}")
        kept["adapter_error"] = float(f"{max([0.0, *adapter_errors]):.1e}")
        kept["trained"] = sorted({kind for found in findings for kind in found.effects})
    return kept


def _record(architecture: str, kept: dict[str, Any]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[architecture] = kept
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def main() -> int:
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    wanted = [item for item in table() if re.search(pattern, "-".join(item))]
    outcomes: dict[str, list[Outcome]] = {}
    for item, future in start(wanted).items():
        error = future.exception()
        outcome = future.result() if error is None else Outcome(*item, f"{type(error).__name__}: {error}", None)
        outcomes.setdefault(item[0], []).append(outcome)
        _record(item[0], summary(outcomes[item[0]]))
        found = outcome.findings
        numbers = (
            ""
            if found is None
            else f"{found.error:8.1e} {max([0.0, *found.adapter_errors.values()]):8.1e} "
            f"{min([9.0, *found.effects.values()]):8.1e} {max([0.0, *found.slope_errors.values()]):8.1e} "
            f"{len(found.effects):3} {found.seconds:5.1f} s "
        )
        print(f"{'-'.join(item):24} {numbers}{outcome.why[:300]}", flush=True)
        if len(wanted) == 1 and found is not None:
            print(json.dumps(asdict(found), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
