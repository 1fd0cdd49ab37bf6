"""How much memory a run will need, told before anything is loaded, and the fastest setting that fits.

On a CPU the need is not estimated by a formula: the run's own first steps are rehearsed without memory
(`training.rehearse`). What the C library's allocator holds beyond that is a measured share (docs/plan.md).
"""

import contextlib
import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from pyggtrain.errors import UnsupportedError
from pyggtrain.nn import GPU_POLICIES, POLICIES, Batch, Model
from pyggtrain.ops import workspace
from pyggtrain.training.config import TrainConfig, size_in_bytes
from pyggtrain.training.objectives import Document, Objective
from pyggtrain.training.optimizers import PAGED, device_bytes, host_bytes
from pyggtrain.training.rehearse import ACTIVATIONS, ADAPTER, BASE, GRADIENTS, OPTIMISER, Rehearsal

logger = logging.getLogger(__name__)

# glibc's malloc.h, and the largest threshold that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_MMAP_THRESHOLD = 32 << 20
# Policy -> (mmap threshold, trim threshold) of the C library. 128 KiB is glibc's own trim threshold.
_THRESHOLDS = {"layers": (1 << 20, 128 << 10)}
_KEEPING = (_MAX_MMAP_THRESHOLD, 1 << 30)
# What malloc holds beyond what is in use: holes that fit no later block, as a share of all that comes and goes
# (docs/plan.md).
ALLOCATOR_SHARE = {"none": 0.25, "matmuls": 0.55, "layers": 0.17}
# Under "matmuls", halves that make gate and up again by themselves leave fewer holes than torch's checkpoints.
FUSED_MATMULS_SHARE = 0.3
# Tokens of the two micro-batches that are measured on a GPU.
_PROBE_TOKENS = 128, 512
# What a first step brings in besides tensors: code of the libraries, buffers of the matrix products.
_FIRST_STEP_BYTES = 24 << 20
# Share of the free memory that may be planned for; the rest is for what other programs take meanwhile.
USABLE = 0.9
# Share of the need from which on it is worth a step's time to keep gradients and moments on the host.
_MUCH = 0.1
ALLOCATOR, PROGRAM = "allocator", "program"
# Into which a GPU decodes weights, bytes. The second was as fast with the experts that it is for (`1x2048_moe20`,
# docs/performance.md); a large head then falls into twice as many parts.
_WORKSPACES = (workspace.DEFAULT_GPU_LIMIT_BYTES, 192 << 20)
_T = TypeVar("_T")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the peak of a run with one setting.

    Attributes:
        policy: which activations are kept, see `nn.checkpointing`.
        micro_batch_size: rows of a micro-batch.
        num_tokens: of the longest micro-batch.
        device_type: "cpu" or "cuda".
        parts: name -> bytes, all at the moment when they are the most together.
        limit_bytes: what the user allows; None: no limit was set.
        free_bytes: free memory of the device when it was planned, on a GPU beside base and adapter; None if the system
            does not tell.
        host_bytes: what waits in the host's memory while a GPU computes.
        host_free_bytes: free memory of the host of a GPU; None: not known.
        can_page: gradients and the optimiser's state are on a GPU, and could wait on the host.
        degree: how sure the numbers are, as words before them: "at most" where they are upper bounds (see
            `training.memory_bound`), "at least" where a part is not known.
    """

    policy: str
    micro_batch_size: int
    num_tokens: int
    device_type: str
    parts: dict[str, int]
    limit_bytes: int | None
    free_bytes: int | None
    degree: str = "about"
    host_bytes: int = 0
    host_free_bytes: int | None = None
    can_page: bool = False

    @property
    def total_bytes(self) -> int:
        """All of it: what the process holds on a CPU (its largest resident set), or what torch holds on a GPU."""
        return sum(self.parts.values())

    @property
    def new_bytes(self) -> int:
        """What the run will take from the free memory. On a CPU the program is there already, and the pages of the base
        file give way; on a GPU base and adapter are.
        """
        held = (BASE, PROGRAM) if self.device_type == "cpu" else (BASE, ADAPTER)
        return self.total_bytes - sum(self.parts.get(name, 0) for name in held)

    @property
    def missing_bytes(self) -> int:
        """How much more memory the setting needs than it may have; 0: it fits."""
        over_limit = 0 if self.limit_bytes is None else self.total_bytes - self.limit_bytes
        over_free = 0 if self.free_bytes is None else self.new_bytes - int(USABLE * self.free_bytes)
        return max(0, over_limit, over_free)

    @property
    def missing_on_host_bytes(self) -> int:
        """The same of the host's memory."""
        return 0 if self.host_free_bytes is None else max(0, self.host_bytes - int(USABLE * self.host_free_bytes))

    @property
    def fits(self) -> bool:
        """Whether it stays below the limit and within the free memory, the host's too."""
        return self.missing_bytes == self.missing_on_host_bytes == 0

    def shortage(self) -> str:
        """What is missing, as a part of a sentence."""
        missing = [mib(self.missing_bytes)] if self.missing_bytes else []
        if self.missing_on_host_bytes:
            missing.append(f"{mib(self.missing_on_host_bytes)} on the host")
        return " and ".join(missing)

    def need(self) -> str:
        """What the longest micro-batch takes, as a sentence without its end."""
        return (
            f"A micro-batch of {self.num_tokens} tokens needs {self.degree} {mib(self.new_bytes)} "
            f"({mib(self.total_bytes)} in all{self._on_host()}) with gradient_checkpointing={self.policy}"
        )

    def _on_host(self) -> str:
        return f", and {mib(self.host_bytes)} on the host" if self.host_bytes else ""

    def bounds(self) -> str:
        """What it may take, as a part of a sentence."""
        beside = "" if self.device_type == "cpu" else " beside base and adapter"
        free = "" if self.free_bytes is None else f"free are {mib(self.free_bytes)}{beside}"
        limit = "" if self.limit_bytes is None else f"max_memory is {mib(self.limit_bytes)}"
        host = "" if self.host_free_bytes is None else f"free on the host are {mib(self.host_free_bytes)}"
        return ", ".join(filter(None, (free, limit, host)))

    def warning(self) -> str:
        """What a person should know before a run whose host alone has too little."""
        return (
            f"What waits on the host takes {self.degree} {mib(self.host_bytes)}, and "
            f"{mib(self.host_free_bytes or 0)} are free there. Some virtual machines get memory only as it is used; if "
            "this one does not, the run will be stopped by the system. Lower max_seq_length or "
            "per_device_train_batch_size then."
        )

    def advice(self) -> str:
        """What to lower when that is too much."""
        other = ", or set gradient_checkpointing to layers" if self.policy in ("none", "matmuls") else ""
        paged = self.parts.get(GRADIENTS, 0) + self.parts.get(OPTIMISER, 0)
        if self.can_page and paged > _MUCH * self.total_bytes:
            other += f", or set optim to paged_adamw_8bit: gradients and optimiser take {mib(paged)}"
        return f"Lower per_device_train_batch_size, max_seq_length or r{other}."


def fastest_of(plans: Iterable[MemoryPlan]) -> MemoryPlan | None:
    """The first of some plans that fits. Where the host alone has too little for any, the one that needs least of it,
    because that need not be true: some virtual machines get memory only as it is used. None: none fits.
    """
    of_host_alone = []
    for plan in plans:
        if plan.fits:
            return plan
        if not plan.missing_bytes:
            of_host_alone.append(plan)
    return min(of_host_alone, key=lambda plan: plan.host_bytes, default=None)


class Need(Protocol):
    """What tells how much memory a micro-batch needs. A device that plans in its own way has its own."""

    def parts(self, policy: str, documents: Sequence[Document]) -> dict[str, int]:
        """Name -> bytes at the peak of a step, all at the same moment.

        Args:
            policy: see `nn.checkpointing`.
            documents: of the longest micro-batch.
        """
        ...

    def host_bytes(self, policy: str, documents: Sequence[Document]) -> int:
        """What waits in the host's memory while a GPU computes; arguments as for `parts`."""
        ...


class RehearsedNeed:
    """A CPU's: the rehearsed step, the holes of the C library's allocator, and the program beside them."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal

    def parts(self, policy: str, documents: Sequence[Document]) -> dict[str, int]:
        """See `Need`."""
        trace = self._rehearsal.trace(policy, documents)
        parts = trace.peak()
        if _mallopt() is not None:
            passing = sum(num_bytes for name, num_bytes in parts.items() if name not in (ADAPTER, OPTIMISER))
            is_fused = policy == "matmuls" and self._rehearsal.is_fused
            parts[ALLOCATOR] = round((FUSED_MATMULS_SHARE if is_fused else ALLOCATOR_SHARE[policy]) * passing)
        parts[BASE] = parts.get(BASE, 0) + self._rehearsal.base_bytes
        # Read after the rehearsal, whose tensors without memory make torch import a hundred MiB of its compiler.
        parts[PROGRAM] = program_bytes(self._rehearsal.paths)
        return parts

    def host_bytes(self, policy: str, documents: Sequence[Document]) -> int:
        """See `Need`."""
        return 0


class MeasuredNeed:
    """A GPU's: the micro-batch itself runs on the loaded model, and torch's allocator counts. Two short ones before it
    tell how memory grows with the tokens, in case it does not fit.

    Args:
        objective: of the loaded model, with its adapter attached.
        parameters: that are trained.
        device: of the model.
        optim: as `TrainConfig.optim`.
    """

    def __init__(self, objective: Objective, model: Model, device: torch.device, optim: str = "adamw") -> None:
        self._objective, self._model, self._device, self._optim = objective, model, device, optim
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._adapter_bytes = 4 * sum(parameter.numel() for parameter in self._parameters)
        self._base_bytes = torch.cuda.memory_allocated(device) - self._adapter_bytes
        # By policy and tokens, of the micro-batches that ran.
        self._stashed: dict[tuple[str, int], int] = {}

    def parts(self, policy: str, documents: Sequence[Document]) -> dict[str, int]:
        """See `Need`."""
        self._model.checkpoint_policy = policy
        self._model.release_stash()
        few, many = _PROBE_TOKENS
        peaks = [self._peak_bytes(documents, num_tokens) for num_tokens in _PROBE_TOKENS]
        per_token = (peaks[1] - peaks[0]) / (many - few)
        num_tokens = sum(len(ids) for ids, _ in documents)
        gradients, optimiser = device_bytes(self._optim, self._adapter_bytes // 4)
        activations = self._activations(documents, max(0, round(peaks[0] + per_token * (num_tokens - few))))
        self._stashed[policy, num_tokens] = self._model.stashed_bytes
        return {
            BASE: self._base_bytes,
            ADAPTER: self._adapter_bytes,
            GRADIENTS: gradients,
            OPTIMISER: optimiser,
            ACTIVATIONS: activations,
        }

    def host_bytes(self, policy: str, documents: Sequence[Document]) -> int:
        """See `Need`: gradients, moments, and what activations took once `parts` has run."""
        stashed = self._stashed.get((policy, sum(len(ids) for ids, _ in documents)), 0)
        return host_bytes(self._optim, self._adapter_bytes // 4) + stashed

    def _activations(self, documents: Sequence[Document], foretold: int) -> int:
        """What the micro-batch takes; if it does not fit, at least what is free."""
        free = free_memory_bytes(self._device)
        if free is not None and foretold > 2 * free:
            return foretold
        try:
            return self._peak_bytes(documents, sum(len(ids) for ids, _ in documents))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return max(foretold, free or 0)
        finally:
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _peak_bytes(self, documents: Sequence[Document], num_tokens: int) -> int:
        """What a micro-batch of so many tokens takes at its peak, gradients left out."""
        length = num_tokens // len(documents)
        repeated = [(ids, -(-length // len(ids))) for ids, _ in documents]
        rows = [(list(ids) * times)[:length] for ids, times in repeated]
        batch = Batch.from_documents([(row, row) for row in rows]).to(self._device)
        hooks = []
        for parameter in self._parameters:
            if self._optim in PAGED:
                # Each leaves as soon as it is there.
                hook = parameter.register_post_accumulate_grad_hook(_forget_gradient)  # type: ignore[no-untyped-call]
                hooks.append(hook)
            else:
                # They have to be there already: made one by one during backward they would hide in the activations.
                parameter.grad = torch.zeros_like(parameter)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._objective.loss(batch)[0].backward()  # type: ignore[no-untyped-call]
        peak = torch.cuda.max_memory_allocated(self._device) - before
        for hook in hooks:
            hook.remove()
        self._forget_gradients()
        return peak


def _forget_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class Planner:
    """Plans for one model, adapter and device.

    Args:
        need: what tells how much memory a micro-batch needs.
        config: settings; "auto" and unset ones are the planner's to choose.
        device: where the run computes.
        longest: number of rows -> rows of the longest micro-batch of so many.
        to_load: what will still be put on a GPU, base and adapter, before a step is taken.
    """

    def __init__(
        self,
        need: Need,
        config: TrainConfig,
        device: torch.device,
        longest: Callable[[int], Sequence[Document]],
        *,
        to_load: int = 0,
    ) -> None:
        self._need, self._config, self._device, self._longest = need, config, device, longest
        self._plans: dict[tuple[str, int], MemoryPlan] = {}
        self._limit_bytes = None if config.max_memory is None else size_in_bytes(config.max_memory)
        free = free_memory_bytes(device)
        self._free_bytes = None if free is None else max(0, free - to_load)
        self._host_free_bytes = host_free_bytes(device)

    @cached_property
    def settings(self) -> list[tuple[str, int]]:
        """(policy, rows of a micro-batch) that the planner may choose from, the fastest first."""
        chosen = self._config.gradient_checkpointing
        all_policies = GPU_POLICIES if self._device.type == "cuda" else POLICIES
        policies = all_policies if chosen == "auto" else (chosen,)
        pairs = [(policy, size) for policy in policies for size in micro_batch_sizes(self._config)]
        return sorted(pairs, key=lambda pair: relative_time(pair[0], self._num_tokens(pair[1]), self._device.type))

    def plan(self, policy: str, micro_batch_size: int) -> MemoryPlan:
        """What a setting needs."""
        key = policy, micro_batch_size
        if key not in self._plans:
            documents = self._longest(micro_batch_size)
            self._plans[key] = MemoryPlan(
                policy=policy,
                micro_batch_size=micro_batch_size,
                num_tokens=sum(len(ids) for ids, _ in documents),
                device_type=self._device.type,
                parts=self._need.parts(policy, documents),
                limit_bytes=self._limit_bytes,
                free_bytes=self._free_bytes,
                host_bytes=self._need.host_bytes(policy, documents),
                host_free_bytes=self._host_free_bytes,
                can_page=self._device.type == "cuda" and self._config.optim not in PAGED,
            )
        return self._plans[key]

    def fastest(self) -> MemoryPlan | None:
        """The fastest setting that fits, None if none does; see `fastest_of`."""
        return fastest_of(self.plan(*setting) for setting in self.settings)

    def choose(self) -> MemoryPlan:
        """The fastest setting that fits, with a warning if the host may have too little for it.

        Raises:
            UnsupportedError: none does; says what the leanest one needs and what to lower.
        """
        chosen = self.fastest()
        if chosen is not None:
            if not chosen.fits:
                logger.warning(chosen.warning())
            return chosen
        leanest = min((self.plan(*setting) for setting in self.settings), key=lambda plan: plan.missing_bytes)
        raise UnsupportedError(f"{leanest.need()}; {leanest.bounds()}. {leanest.advice()}")

    def _num_tokens(self, micro_batch_size: int) -> int:
        return sum(len(ids) for ids, _ in self._longest(micro_batch_size))


def micro_batch_sizes(config: TrainConfig) -> list[int]:
    """Rows of a micro-batch that a planner may choose from, the largest first."""
    if config.max_memory is None or config.per_device_train_batch_size is not None:
        return [config.micro_batch_size]
    # Rows of a step stay as they are: only how they are cut up is free, and the result does not depend on it.
    return [size for size in range(config.step_rows, 0, -1) if config.step_rows % size == 0]


# Time of a step by policy, relative to "none": between what was measured (docs/plan.md).
# "offload" is chosen here only for models that are not two equal halves a layer (`gpu_memory.fused_settings` plans the
# others): "layers", with copies that no large product hides. Estimated.
_POLICY_TIME = {"none": 1.0, "matmuls": 1.07, "layers": 1.33, "offload": 1.45}
# Tokens that take as long as what each micro-batch costs beside its tokens: every weight is decoded anew.
_OVERHEAD_TOKENS = {"cpu": 64, "cuda": 220}


def relative_time(policy: str, num_tokens: int, device_type: str) -> float:
    """Expected time of a token in a setting, 1 without recomputing in endless micro-batches. Only the order counts."""
    return _POLICY_TIME[policy] * (1 + _OVERHEAD_TOKENS[device_type] / num_tokens)


class MemoryGuard:
    """Tells when a run takes more than it may.

    On a GPU the allocator itself refuses. A CPU process has no such border: RLIMIT_AS counts the mapped base file and
    address space that is never used, so a limit there would stop runs that fit, and past the real memory the system
    swaps without a word. So the process's own largest size is read after each step.

    Args:
        limit_bytes: most resident memory; None: no limit.
        device: where the run computes.
    """

    def __init__(self, limit_bytes: int | None, device: torch.device) -> None:
        self._limit_bytes = limit_bytes if device.type == "cpu" and sys.platform == "linux" else None
        if self._limit_bytes is not None:
            # Forget what loading took: the kernel begins a new maximum here.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def excess(self) -> str | None:
        """A sentence on what was overstepped, None if nothing was."""
        if self._limit_bytes is None:
            return None
        status = _status()
        held = status["VmHWM"] + status.get("VmSwap", 0)
        if held <= self._limit_bytes:
            return None
        swapped = f", {mib(status['VmSwap'])} of it swapped out" if status.get("VmSwap") else ""
        return f"The process took {mib(held)}{swapped}, max_memory is {mib(self._limit_bytes)}."


def with_a_workspace_that_fits(plan: Callable[[], _T], fits: Callable[[_T], bool]) -> _T:
    """A plan for a GPU with the largest workspace with which something fits, which the run then has. Where nothing
    does, the plan with the usual one.

    Args:
        plan: makes it, with the workspace as it is set.
        fits: whether it names a setting that fits.
    """
    usual, *smaller = _WORKSPACES
    workspace.set_limit_bytes(usual, "cuda")
    first = plan()
    if fits(first):
        return first
    for size in smaller:
        workspace.set_limit_bytes(size, "cuda")
        if fits(other := plan()):
            logger.info("weights are decoded in parts of %s, for nothing fits otherwise", mib(size))
            return other
    workspace.set_limit_bytes(usual, "cuda")
    return first


def join_free_device_memory() -> None:
    """Let torch's allocator on a GPU grow and join its segments, unless the user has set it up otherwise.

    Without it, 0.1 to 0.7 GiB were reserved and of no use when steps of an 8B model ran out of memory (H200). Set
    before the first weight is there; torch reads its environment variable earlier than we can set it.
    """
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        with warnings.catch_warnings():
            # The name that replaces it does not exist in the older of the torch versions that we run on.
            warnings.simplefilter("ignore", FutureWarning)
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def limit_device_memory(max_memory: str | None, device: torch.device) -> None:
    """Make torch's allocator refuse what goes beyond `max_memory` on a GPU; on a CPU `MemoryGuard` watches."""
    limit_bytes = None if max_memory is None else size_in_bytes(max_memory)
    if limit_bytes is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)


def tune_allocator(policy: str) -> None:
    """Make glibc's allocator fit a checkpoint policy, for this process; with another C library nothing happens.

    A step makes and frees thousands of blocks of some MiB. Given back to the system and taken again, each costs its
    page faults: with blocks of 1 MiB returned at once, a step of 1024 tokens took 5.9 s instead of 4.4 (SmolLM2-135M,
    two threads). So freed memory is kept for the next step, but under "layers", which is chosen where memory is short:
    there it goes back, and the same step peaks at 465 MiB instead of 708.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return
    mmap_threshold, trim_threshold = _THRESHOLDS.get(policy, _KEEPING)
    mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
    mallopt(_M_TRIM_THRESHOLD, trim_threshold)


@contextlib.contextmanager
def explained_out_of_memory(plan: MemoryPlan) -> Iterator[None]:
    """Turn running out of memory into an UnsupportedError that holds the estimate and says what to lower."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UnsupportedError(f"Out of memory. {plan.need()}. {plan.advice()}") from error
    except RuntimeError as error:
        # On the CPU torch has no class of its own for it, nor for pinned memory that CUDA does not get from the host.
        if not any(text in str(error) for text in ("can't allocate memory", "CUDA error: out of memory")):
            raise
        raise UnsupportedError(f"Out of memory. {plan.need()}. {plan.advice()}") from error


def free_memory_bytes(device: torch.device) -> int | None:
    """Return the memory that this process may still take: of the GPU, None if it is not here, or of the machine and its
    control group.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))


def host_free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU's host; None for a CPU, whose memory is the device's own, and where the GPU is
    not in this machine.
    """
    is_here = device.type == "cuda" and torch.cuda.is_available()
    return free_memory_bytes(torch.device("cpu")) if is_here else None


def mib(num_bytes: float) -> str:
    """Return a size as "1,234 MiB"."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def program_bytes(paths: Sequence[Path]) -> int:
    """What the process holds now, without pages of the base file, and will hold of code and buffers; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    return _status()["VmRSS"] - _mapped_bytes(paths) + _FIRST_STEP_BYTES


def _mapped_bytes(paths: Sequence[Path]) -> int:
    """Resident bytes of this process's mappings of some files."""
    names = {str(path.resolve()) for path in paths}
    total, is_one = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        name, _, value = line.partition(":")
        if name == "Rss" and is_one:
            total += int(value.split()[0]) << 10
        elif " " in name:
            # A mapping's first line: addresses, rights, offset, device, inode, path.
            is_one = line.split(maxsplit=5)[-1] in names
    return total


def _status() -> dict[str, int]:
    """Sizes of this process in bytes, as Linux names them: VmRSS, VmHWM, VmSwap, ..."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}


def _mallopt() -> Callable[[int, int], int] | None:
    """glibc's mallopt, None with another C library."""
    return None if sys.platform != "linux" else getattr(ctypes.CDLL(None), "mallopt", None)
