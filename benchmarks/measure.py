"""Timing on a GPU, and the line that every benchmark appends: what was measured, on what, with which versions."""

import json
import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def time_ms(run: Callable[[int], Any], *, repeats: int = 30, warm_up: int = 3) -> dict[str, float]:
    """Device time of `run(i)` in ms: median with 20th and 80th percentile over `repeats` calls.

    `run` receives the number of the call, so that it can rotate over inputs that together do not fit the cache.
    """
    for i in range(warm_up):
        run(i)
    # everything is queued behind a pause of some milliseconds, so that the time to launch from Python is not measured
    torch.cuda._sleep(30_000_000)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for i, (start, end) in enumerate(events):
        start.record()
        run(i)
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return {"ms": statistics.median(times), "p20_ms": times[len(times) // 5], "p80_ms": times[len(times) * 4 // 5]}


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes per second that a device-to-device copy moves, read and written both counted."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / time_ms(lambda i: target.copy_(source))["ms"] * 1e3


def environment() -> dict[str, str]:
    """Card, driver-independent versions and commit of a run."""
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "not committed",
    }


def append_line(path: Path | None, line: dict[str, Any]) -> None:
    """Print one result and append it to a jsonl file, if one is given."""
    text = json.dumps(line)
    print(text, flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(text + "\n")
