"""What is there on this machine, and whether every kernel computes on it what its float64 reference says.

The cases and tolerances are the tests' own (`kernels/reference`), so a machine that nobody has tested is tested by its
owner in a minute.
"""

import importlib.util
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch

from pyggtrain import _bridge, ops
from pyggtrain.gguf import QuantTensor
from pyggtrain.kernels.dequant import DECODERS
from pyggtrain.kernels.reference import dequant as reference
from pyggtrain.kernels.reference.cases import (
    QUANT_LINEAR_CASES,
    QuantLinearCase,
    dtypes_of,
    poisoned_memory,
    random_blocks,
)
from pyggtrain.kernels.reference.comparison import Comparison, as_near_as_torch, relatively_close, same_bits
from pyggtrain.ops.quant_linear import quant_linear

# ggml rounds x to 8 bits: 0.5-0.7 % (docs/numerics.md), and 1.2 % for one row against weights of random bits.
_EIGHT_BIT_NOISE = 2e-2


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
    """

    facts: dict[str, str]
    results: tuple[KernelResult, ...]
    not_run: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


Case = tuple[str, Callable[[], list[Comparison]]]
"""Its name, and what runs it."""


def selftest(device: str | None = None, kernels: Sequence[str] = ()) -> SelfTest:
    """Run every kernel's cases.

    Args:
        device: "cuda", "cpu", or None: a GPU if there is one. On a CPU, GPU kernels run only in Triton's interpreter,
            that is with TRITON_INTERPRET=1.
        kernels: only these; empty: all.
    """
    has_gpu = torch.cuda.is_available()
    where = torch.device(device or ("cuda" if has_gpu else "cpu"))
    groups: list[tuple[str, str, list[Case]]] = [(name, "cpu", cases) for name, cases in _cpu_cases().items()]
    not_run = []
    is_interpreted = where.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is None:
        not_run.append("GPU kernels were not run: Triton is not installed.")
    elif where.type == "cpu" and not is_interpreted:
        reason = "a CPU was asked for" if has_gpu else "torch sees no GPU"
        not_run.append(
            f"GPU kernels were not run: {reason}. With TRITON_INTERPRET=1 they run on the CPU, in Triton's interpreter."
        )
    else:
        label = "interpreter" if is_interpreted else where.type
        groups += [(name, label, cases) for name, cases in _gpu_cases(where).items()]
    with poisoned_memory():
        results = tuple(_run(name, label, cases) for name, label, cases in groups if not kernels or name in kernels)
    return SelfTest(facts(), results, tuple(not_run))


def kernel_names() -> list[str]:
    """What can be named in `selftest(kernels=...)`."""
    names = list(_cpu_cases())
    if importlib.util.find_spec("triton") is not None:
        names += _gpu_cases(torch.device("cpu"))
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
    number: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return f"{number // 1000}.{number % 1000 // 10}"


def _run(kernel: str, where: str, cases: Sequence[Case]) -> KernelResult:
    worst, worst_case = None, ""
    failures = []
    for name, run in cases:
        try:
            comparisons = run()
        # A kernel that does not compile or aborts is what a self-test is there to tell.
        except Exception as error:  # noqa: BLE001
            failures.append(f"{kernel} {name}: {type(error).__name__}: {error}")
            continue
        for comparison in comparisons:
            if not comparison.passed:
                failures.append(
                    f"{kernel} {name}: {comparison.name} is {comparison.error:.3g} away, bound {comparison.bound:.3g}"
                )
            if worst is None or not comparison.share <= worst.share:
                worst, worst_case = comparison, name
    return KernelResult(kernel, where, len(cases), worst, worst_case, tuple(failures))


def _gpu_cases(device: torch.device) -> dict[str, list[Case]]:
    # Defines the kernels, which needs Triton.
    from pyggtrain.kernels.reference.checks import CHECKS

    return {
        kernel: [
            (f"{check.id} {str(dtype).removeprefix('torch.')}", partial(check.run, dtype, device))
            for check in checks
            for dtype in dtypes_of(device)
        ]
        for kernel, checks in CHECKS.items()
    }


def _cpu_cases() -> dict[str, list[Case]]:
    return {
        "ggml dequantize": [(type, partial(_check_dequantize, type)) for type in DECODERS],
        "quant_linear": [
            (f"{type}_{case.id}", partial(_check_quant_linear, type, case))
            for type in DECODERS
            for case in QUANT_LINEAR_CASES
        ],
    }


def _check_dequantize(type: str) -> list[Comparison]:
    """ggml's own decoder against the reference, bit by bit."""
    blocks = random_blocks(type, 9, 4 * DECODERS[type].block_size, generator=torch.Generator().manual_seed(0))
    exact = reference.dequantize(blocks, type, dtype=torch.float32)
    return [same_bits("weights", ops.dequantize(_weight(type, blocks)), exact)]


def _check_quant_linear(type: str, case: QuantLinearCase) -> list[Comparison]:
    """y = x Wᵀ and dx = dy W, with decoded weights and with ggml's 8-bit activations."""
    generator = torch.Generator().manual_seed(0)
    blocks = random_blocks(type, case.out_features, case.in_features, generator=generator)
    weight, exact = _weight(type, blocks), reference.dequantize(blocks, type, dtype=torch.float64)
    x = torch.randn(case.tokens, case.in_features, generator=generator)
    dy = torch.randn(case.tokens, case.out_features, generator=generator)
    leaf = x.clone().requires_grad_()
    y = quant_linear(leaf, weight, compute="exact")
    y.backward(dy)  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    expected = x.double() @ exact.t()
    return [
        as_near_as_torch("y", y.detach(), x @ exact.float().t(), expected),
        as_near_as_torch("dx", leaf.grad, dy @ exact.float(), dy.double() @ exact),
        relatively_close("y with ggml", quant_linear(x, weight, compute="ggml"), expected, bound=_EIGHT_BIT_NOISE),
    ]


def _weight(type: str, blocks: torch.Tensor) -> QuantTensor:
    columns = blocks.shape[1] // DECODERS[type].block_bytes * DECODERS[type].block_size
    return QuantTensor(name="blk.0.attn_q.weight", type=type, shape=(blocks.shape[0], columns), blocks=blocks)
