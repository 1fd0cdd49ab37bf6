"""What is there on this machine, and whether every kernel computes on it what its float64 reference says.

The cases and tolerances are the tests' own (`kernels/reference`), so a machine that nobody has tested is tested by its
owner in a minute. On a GPU the cases run in many processes (`kernel_workers`), because compiling a kernel takes seconds
of one processor.
"""

import ctypes
import importlib.util
import os
import platform
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata

import torch

from pyggtrain import _bridge
from pyggtrain.kernels.reference.cases import poisoned_memory, random_blocks
from pyggtrain.kernels.reference.comparison import Comparison
from pyggtrain.ops import mmq, product_choice, quant_matmul
from pyggtrain.validation.kernel_cases import Case, Outcome, cpu_cases, gpu_cases, run_case
from pyggtrain.validation.kernel_workers import Report, num_workers_for, run_in_workers

# What the table of products shows: some types of each kind, from one row to where the library always wins.
_PRODUCT_TYPES = ("Q4_K", "Q6_K", "Q8_0", "IQ2_XXS")
_PRODUCT_SHAPE = (14336, 4096)
_PRODUCT_ROWS = (1, 16, 128, 2048)


@dataclass(frozen=True)
class KernelResult:
    """A kernel on all its cases.

    Attributes:
        kernel: its name.
        where: "cpu", "cuda" or "interpreter".
        num_cases: cases, each dtype counted by itself.
        worst: the comparison that came nearest to its bound, or overstepped it most.
        worst_case: where that was.
        failures: every case that failed, with what was found; an exception counts as one.
    """

    kernel: str
    where: str
    num_cases: int
    worst: Comparison | None
    worst_case: str
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class SelfTest:
    """Outcome of a self-test.

    Attributes:
        facts: what is there, name -> value.
        results: one for each kernel.
        not_run: what was left out and why, a sentence each.
        products: on a GPU, every product measured there so far -> its ways -> microseconds (`ops/product_choice`).
    """

    facts: dict[str, str]
    results: tuple[KernelResult, ...]
    not_run: tuple[str, ...]
    products: dict[str, dict[str, float]]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


def selftest(
    device: str | None = None,
    kernels: Sequence[str] = (),
    *,
    num_workers: int | None = None,
    report: Report = lambda done, total: None,
) -> SelfTest:
    """Run every kernel's cases.

    Args:
        device: "cuda", "cpu", or None: a GPU if there is one. On a CPU, GPU kernels run only in Triton's interpreter,
            that is with TRITON_INTERPRET=1.
        kernels: only these; empty: all, and the choice among products is measured too.
        num_workers: processes on a GPU; None: one for each processor, as far as the card's memory goes.
        report: is told about progress on a GPU.
    """
    has_gpu = torch.cuda.is_available()
    where = torch.device(device or ("cuda" if has_gpu else "cpu"))
    not_run = []
    products: dict[str, dict[str, float]] = {}
    results: list[KernelResult] = []
    is_interpreted = where.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    has_triton = importlib.util.find_spec("triton") is not None
    if where.type == "cpu" or not has_triton:
        results += _run_here(cpu_cases(), "cpu", kernels)
    if not has_triton:
        not_run.append("GPU kernels were not run: Triton is not installed.")
    elif is_interpreted:
        results += _run_here(gpu_cases(where), "interpreter", kernels)
    elif where.type == "cpu":
        reason = "a CPU was asked for" if has_gpu else "torch sees no GPU"
        not_run.append(
            f"GPU kernels were not run: {reason}. With TRITON_INTERPRET=1 they run on the CPU, in Triton's interpreter."
        )
    else:
        # What the CPU computes is tested while other processes compile.
        with ThreadPoolExecutor(1) as thread:
            on_cpu = thread.submit(_run_here, cpu_cases(), "cpu", kernels)
            outcomes = run_in_workers(
                _wanted(gpu_cases(where), kernels),
                () if kernels else _products(),
                device=where,
                num_workers=num_workers or num_workers_for(where),
                report=report,
            )
            results += on_cpu.result()
        results += [_result(name, where.type, found) for name, found in outcomes.items()]
        products = {} if kernels else _measure_products(where)
        if not mmq.types():
            not_run.append("MMQ was not run: it is not in this build (-Ccmake.define.PYGGTRAIN_CUDA=ON adds it).")
    return SelfTest(facts(), tuple(results), tuple(not_run), products)


def kernel_names() -> list[str]:
    """What can be named in `selftest(kernels=...)`."""
    names = list(cpu_cases())
    if importlib.util.find_spec("triton") is not None:
        names += gpu_cases(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return names


def facts() -> dict[str, str]:
    """What is there."""
    found = {
        "pyggtrain": metadata.version("pyggtrain"),
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": metadata.version("triton") if importlib.util.find_spec("triton") else "not installed",
        "llama.cpp": f"commit {_bridge.LLAMA_CPP_COMMIT}, built into pyggtrain",
        "bridge": _bridge.system_info(),
        "mmq": f"for {_bridge.CUDA_ARCHITECTURES}" if _bridge.CUDA_ARCHITECTURES else "not in this build",
        "threads": f"{torch.get_num_threads()} of torch",
    }
    if not torch.cuda.is_available():
        reason = "" if torch.version.cuda else ", which is built without CUDA"
        return found | {"gpu": f"none that torch sees{reason}"}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found[f"gpu {index}"] = (
            f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / 2**30:.1f} GiB, "
            f"{card.multi_processor_count} multiprocessors"
        )
    return found | {"cuda": f"{torch.version.cuda} of torch, driver for CUDA {_driver_version()}"}


def _driver_version() -> str:
    """What the driver itself says: not every torch can be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "unknown"
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return "unknown"
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _wanted(cases: dict[str, list[Case]], kernels: Sequence[str]) -> dict[str, list[Case]]:
    return {name: found for name, found in cases.items() if not kernels or name in kernels}


def _run_here(cases_of: dict[str, list[Case]], where: str, kernels: Sequence[str]) -> list[KernelResult]:
    with poisoned_memory():
        return [_result(name, where, map(run_case, cases)) for name, cases in _wanted(cases_of, kernels).items()]


def _result(kernel: str, where: str, outcomes: Iterable[Outcome]) -> KernelResult:
    """Sum up the outcomes of a kernel's cases."""
    worst, worst_case = None, ""
    failures = []
    num_cases = 0
    for outcome in outcomes:
        num_cases += 1
        if outcome.failure is not None:
            failures.append(f"{kernel} {outcome.case}: {outcome.failure}")
        for comparison in outcome.comparisons:
            if not comparison.passed:
                failures.append(
                    f"{kernel} {outcome.case}: {comparison.name} is {comparison.error:.3g} away, "
                    f"bound {comparison.bound:.3g}"
                )
            if worst is None or not comparison.share <= worst.share:
                worst, worst_case = comparison, outcome.case
    return KernelResult(kernel, where, num_cases, worst, worst_case, tuple(failures))


def _products() -> list[tuple[str, int, int, int]]:
    """Type, N, K and rows of the products whose kernels for few rows are worth compiling before they are timed."""
    few = [rows for rows in _PRODUCT_ROWS if rows <= product_choice.MAX_FUSED_ROWS]
    return [(type, *_PRODUCT_SHAPE, rows) for type in _PRODUCT_TYPES for rows in few]


def _measure_products(device: torch.device) -> dict[str, dict[str, float]]:
    """Let the choice be made for some products, and return all that were ever measured on this card."""
    num_rows, num_columns = _PRODUCT_SHAPE
    generator = torch.Generator(device).manual_seed(0)
    for type in _PRODUCT_TYPES:
        blocks = random_blocks(type, num_rows, num_columns, generator=generator)
        for num_tokens in _PRODUCT_ROWS:
            x = torch.zeros(num_tokens, num_columns, dtype=torch.bfloat16, device=device)
            dy = torch.zeros(num_tokens, num_rows, dtype=torch.bfloat16, device=device)
            quant_matmul.forward(x, blocks, type, compute="auto")
            quant_matmul.backward(dy, blocks, type, compute="auto", out=torch.empty_like(x))
    return product_choice.measured(device)
