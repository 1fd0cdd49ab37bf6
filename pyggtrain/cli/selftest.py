"""`pyggtrain selftest`: what is there, and whether every kernel computes on it what its float64 reference says."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyggtrain.cli.tables import facts_table, table
from pyggtrain.cli.train import say
from pyggtrain.errors import ConfigError

if TYPE_CHECKING:
    from pyggtrain.validation.selftest import KernelResult, SelfTest


def run(arguments: Sequence[str]) -> int:
    """Run the kernels' cases and show the worst of each; return 0, or 1 if one failed."""
    parser = argparse.ArgumentParser(prog="pyggtrain selftest", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where kernels run (default: a GPU if there is one)")
    parser.add_argument("--kernels", nargs="+", default=(), metavar="NAME", help="only these kernels")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parsed = parser.parse_args(arguments)

    import torch

    from pyggtrain.validation.selftest import kernel_names, selftest

    if parsed.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: found 'cuda', but torch {torch.__version__} sees no CUDA device; needed: cpu")
    if unknown := [name for name in parsed.kernels if name not in kernel_names()]:
        raise ConfigError(f"kernels: there is no {', '.join(unknown)}; there are {', '.join(kernel_names())}")
    tested = selftest(parsed.device, parsed.kernels, report=_Progress())
    if parsed.json:
        print(json.dumps(dataclasses.asdict(tested) | {"passed": tested.passed}, indent=2))
    else:
        say(facts_table(tested.facts), "", *_lines(tested))
    return 0 if tested.passed else 1


class _Progress:
    """A line on stderr for every tenth of the tasks."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done * 10 // total > (done - 1) * 10 // total:
            seconds = time.monotonic() - self._started
            print(f"kernels: {done} of {total} groups of cases, {seconds:.0f} s", file=sys.stderr, flush=True)


def _lines(tested: "SelfTest") -> list[str]:
    rows = [["kernel", "on", "cases", "worst error / bound", "in", "ok"], *map(_row, tested.results)]
    failures = [failure for result in tested.results for failure in result.failures]
    products = [["product, rows up to", "chosen", "microseconds"], *map(_product_row, tested.products.items())]
    return [
        table(rows),
        *(["", table(products)] if tested.products else []),
        *(["", *failures] if failures else []),
        *(["", *tested.not_run] if tested.not_run else []),
    ]


def _product_row(product: tuple[str, dict[str, float]]) -> list[str]:
    key, times = product
    fastest_first = sorted(times, key=lambda way: times[way])
    return [key, fastest_first[0], ", ".join(f"{way} {times[way]:.1f}" for way in fastest_first)]


def _row(result: "KernelResult") -> list[str]:
    worst = result.worst
    share = "none ran" if worst is None else f"{worst.error:.2g} / {worst.bound:.2g}"
    place = "" if worst is None else f"{worst.name} of {result.worst_case}"
    return [result.kernel, result.where, str(result.num_cases), share, place, "yes" if result.passed else "NO"]
