"""How much memory a run will need, measured on the model itself before training, and the checkpoint policy that fits.

No formula knows every architecture. So one small micro-batch goes forward and backward while every tensor that torch
makes is counted. The count is proportional to the tokens (SmolLM2-135M, all policies: 64 and 128 tokens give the same
bytes for a token to 0.01 %). This also proves before step 1 that backward works for every layer of this model on this
device.
"""

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyggtrain.errors import UnsupportedError
from pyggtrain.nn import POLICIES, Batch, Model
from pyggtrain.ops import workspace
from pyggtrain.ops.linear_cross_entropy import default_chunk

_PROBE_TOKENS = 32
# glibc's malloc.h, and the largest threshold that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_MMAP_THRESHOLD = 32 << 20
# How much more than the tensors the C library's allocator holds on to. Measured with glibc and SmolLM2-135M, 512
# tokens: 1.21 to 1.95 times for tensors below 32 MiB; larger ones, as larger models have, go back to the system at
# once.
_ALLOCATOR_FACTOR = 1.25
# Share of the free memory that may be planned for; the rest is for what other programs take meanwhile.
_USABLE = 0.9


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the peak of a step.

    Attributes:
        policy: which activations are kept, see `nn.checkpointing`.
        num_tokens: of the longest micro-batch.
        base_bytes: the base file, mapped (CPU) or uploaded (GPU).
        adapter_bytes: weights, gradients and two moments of the adapter.
        activation_bytes: everything else that torch holds at the peak of the longest micro-batch.
        buffer_bytes: dequantised rows and logits of one chunk.
        free_bytes: free memory of the device when it was planned; None if the system does not tell.
    """

    policy: str
    num_tokens: int
    base_bytes: int
    adapter_bytes: int
    activation_bytes: int
    buffer_bytes: int
    free_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """All of it; the program itself (Python and torch, 300 MiB or so) comes on top."""
        return self.base_bytes + self.adapter_bytes + self.activation_bytes + self.buffer_bytes

    def need(self) -> str:
        """What the longest micro-batch takes, as a sentence without its end."""
        need = mib(self.total_bytes - self.base_bytes)
        return f"A micro-batch of {self.num_tokens} tokens needs about {need} with gradient_checkpointing={self.policy}"

    def advice(self) -> str:
        """What to lower when that is too much."""
        other = "" if self.policy == "layers" else ", or set gradient_checkpointing to layers"
        return f"Lower per_device_train_batch_size, max_seq_length or r{other}."

    @property
    def fits(self) -> bool:
        """Whether it lies within the free memory. The base file does not count: it is loaded or gives way."""
        return (
            self.free_bytes is None
            or _ALLOCATOR_FACTOR * (self.total_bytes - self.base_bytes) <= _USABLE * self.free_bytes
        )


def tune_allocator(policy: str) -> None:
    """Make glibc's allocator fit a checkpoint policy, for this process; with another C library nothing happens.

    A step makes and frees thousands of blocks of some MiB. Given back to the system and taken again, each costs its
    page
    faults: with blocks of 1 MiB returned at once, a step of 1024 tokens took 5.9 s instead of 4.4 (SmolLM2-135M, two
    threads). So freed memory is kept for the next step, but under "layers", which is chosen where memory is short:
    there it goes back, and the same step peaks at 465 MiB instead of 708.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if policy == "layers":
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    else:
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def plan_memory(
    model: Model,
    row: Sequence[int],
    *,
    policy: str,
    num_tokens: int,
    num_parameters: int,
    num_vocab: int,
    base_bytes: int,
    device: torch.device,
) -> MemoryPlan:
    """Measure what a token costs and predict the peak; set the model's checkpoint policy.

    Args:
        model: with its adapter attached.
        row: token ids of a training row.
        policy: one of `nn.checkpointing.POLICIES`, or "auto": the fastest that fits.
        num_tokens: of the longest micro-batch of the run.
        num_parameters: trained numbers.
        num_vocab: width of the logits.
        base_bytes: size of the base file.
        device: of the model.

    Raises:
        UnsupportedError: a step does not fit whatever the policy; says what to lower.
    """
    free_bytes = free_memory_bytes(device)
    chunk_bytes = 4 * num_vocab * min(num_tokens, default_chunk(num_vocab, num_tokens))
    plan = None
    for candidate in POLICIES if policy == "auto" else (policy,):
        model.checkpoint_policy = candidate
        per_token = _peak_bytes(model, row, device) / _PROBE_TOKENS
        plan = MemoryPlan(
            policy=candidate,
            num_tokens=num_tokens,
            base_bytes=base_bytes,
            adapter_bytes=16 * num_parameters,
            activation_bytes=round(per_token * num_tokens),
            buffer_bytes=chunk_bytes + workspace.limit_bytes(),
            free_bytes=free_bytes,
        )
        if plan.fits:
            return plan
    assert plan is not None and free_bytes is not None
    raise UnsupportedError(f"{plan.need()}; free are {mib(free_bytes)}. {plan.advice()}")


@contextlib.contextmanager
def explained_out_of_memory(plan: MemoryPlan) -> Iterator[None]:
    """Turn running out of memory into an UnsupportedError that holds the estimate and says what to lower."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UnsupportedError(f"Out of memory. {plan.need()}. {plan.advice()}") from error
    except RuntimeError as error:
        # On the CPU torch has no class of its own for it.
        if "can't allocate memory" not in str(error):
            raise
        raise UnsupportedError(f"Out of memory. {plan.need()}. {plan.advice()}") from error


def free_memory_bytes(device: torch.device) -> int | None:
    """Return the memory that this process may still take: of the GPU, or of the machine and its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
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


def mib(num_bytes: float) -> str:
    """Return a size as "1,234 MiB"."""
    return f"{num_bytes / 2**20:,.0f} MiB"


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages made while it is active; those of `known` tensors are there already."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._alive = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes == 0 or address in self._alive:
            return
        self._alive.add(address)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, address, num_bytes)

    def _forget(self, address: int, num_bytes: int) -> None:
        self._alive.discard(address)
        self.live_bytes -= num_bytes


def _peak_bytes(model: Model, row: Sequence[int], device: torch.device) -> int:
    """Return the peak of tensors made by forward and backward over a few tokens of `row`."""
    ids = (list(row) * -(-_PROBE_TOKENS // len(row)))[:_PROBE_TOKENS]
    batch = Batch.from_documents([(ids, ids)]).to(device)
    # Gradients have to be there already: made one by one during backward they would hide when the peak of the
    # activations is.
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    known = [*model.parameters(), *model.buffers()]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        model.loss(batch)[0].backward()  # type: ignore[no-untyped-call]
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with _LiveBytes([*known, *gradients]) as live:
            model.loss(batch)[0].backward()  # type: ignore[no-untyped-call]
        peak = live.peak_bytes
    model.zero_grad(set_to_none=True)
    return peak
