"""Several processes that train one adapter together, started by torchrun.

Data parallel: every process holds the whole model and takes every n-th micro-batch of a step. (Where the layers are
split over the processes instead, all of them work on each micro-batch, see `training.pipeline`.) Gradients, losses and
a flag for "stop" travel in one flat tensor, summed over all processes, once a step. So every process runs the same
collectives in the same order, whatever its data: a process without a micro-batch, or one that was asked to stop, adds
zeros and does not keep the others waiting. A process that dies closes its connections, which ends the others' waiting
at once (gloo) or makes torchrun end them (NCCL); one that hangs is given up after `ddp_timeout`.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pyggtrain.errors import ConfigError, PyggtrainError

_T = TypeVar("_T")


class ProcessLostError(PyggtrainError):
    """Another process of the run ended or did not answer."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: number of this process; 0 writes files and talks to the user.
        count: of all processes.
        local_rank, local_count: the same among the processes of this machine.
        timeout_s: seconds that the others may keep this one waiting.
        is_split: the processes hold parts of one model, not copies of it.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    timeout_s: int = 0
    is_split: bool = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def replica(self) -> int:
        """Number of the copy of the model that this process belongs to."""
        return 0 if self.is_split else self.rank

    @property
    def num_replicas(self) -> int:
        """Copies of the model: each takes a share of the micro-batches."""
        return 1 if self.is_split else self.count

    def device(self, device: torch.device) -> torch.device:
        """The GPU of this process, if `device` names GPUs in general; else `device`."""
        if str(device) == "cuda" and self.count > 1:
            return torch.device("cuda", self.local_rank)
        return device

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Replace `values` by the sum over all processes, equal to the last bit on each of them."""
        if self.count > 1:
            with self.explained():
                dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any process."""
        return bool(self.sum_(torch.tensor(float(flag))) > 0) if self.count > 1 else flag

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Wait for all processes, and refuse to go on if a fact differs between them.

        Raises:
            ConfigError: names the fact and the processes.
        """
        if self.count == 1:
            return
        for rank, others in enumerate(self.all_gather(dict(facts))):
            for name, value in facts.items():
                if others[name] != value:
                    raise ConfigError(
                        f"{name}: process {rank} has {others[name]!r}, process {self.rank} has {value!r}. "
                        "All processes need the same command, files and versions."
                    )

    def gather(self, value: _T) -> list[_T] | None:
        """Return the values of all processes on the first one, None on the others."""
        if self.count == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.count if self.is_first else None
        with self.explained():
            dist.gather_object(value, gathered)
        return gathered

    def all_gather(self, value: _T) -> list[_T]:
        """Return the values of all processes on each of them."""
        if self.count == 1:
            return [value]
        gathered: list[Any] = [None] * self.count
        with self.explained():
            dist.all_gather_object(gathered, value)
        return gathered

    def leave(self) -> None:
        """End the work together; what a process does afterwards is its own matter."""
        if self.count > 1:
            with self.explained():
                dist.barrier()
            dist.destroy_process_group()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn what torch raises for a lost connection into a ProcessLostError."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        # What torch raises for a lost connection depends on the backend; all of it is a RuntimeError.
        except RuntimeError as error:
            raise ProcessLostError(
                f"process {self.rank} of {self.count}: another process ended, or did not answer within "
                f"{self.timeout_s} s ({str(error).splitlines()[0]}). The message of the process that ended first says "
                "why. Continue from the last checkpoint with --resume."
            ) from error


def join_processes(timeout_s: int, *, is_split: bool = False) -> Processes:
    """Join the processes that torchrun started; a process that was started alone stays alone.

    Args:
        timeout_s: seconds after which a process that does not answer is given up.
        is_split: they will hold parts of one model.

    Raises:
        ProcessLostError: the others did not come.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or "RANK" not in os.environ:
        return Processes()
    rank = int(os.environ["RANK"])
    processes = Processes(
        rank=rank,
        count=count,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_count=int(os.environ.get("LOCAL_WORLD_SIZE", count)),
        timeout_s=timeout_s,
        is_split=is_split,
    )
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if has_nccl:
        torch.cuda.set_device(processes.local_rank)
    with processes.explained():
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_nccl else "gloo", timeout=timedelta(seconds=timeout_s))
    return processes


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names and bytes: equal replicas have equal ones."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
