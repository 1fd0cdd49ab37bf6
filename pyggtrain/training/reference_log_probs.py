"""DPO's reference, computed once: log p(answer) of all pairs under the base model, kept in the cache folder.

The base model never changes, so neither does its opinion of a row. The key is a hash of the base file (header and
samples), of the rows' tokens and labels, and of how products are computed. TRL calls it precompute_ref_log_probs.
"""

import hashlib
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyggtrain.adapters.lora import adapter_off
from pyggtrain.cache_folder import cache_folder
from pyggtrain.errors import DataError
from pyggtrain.nn import Batch, Model
from pyggtrain.training.objectives import document_sums
from pyggtrain.training.pipeline import Pipeline
from pyggtrain.training.processes import Processes

logger = logging.getLogger(__name__)

_FORMAT = 1
# Micro-batches that are on the way through the processes of a split model at the same time.
_AT_ONCE = 8


@dataclass(frozen=True)
class ReferencedPair:
    """A preference pair with what the base model thinks of it.

    Attributes:
        pair: the pair.
        reference: log p of the chosen answer and of the rejected one, in nats.
    """

    pair: Any
    reference: tuple[float, float]

    @property
    def chosen(self) -> Any:
        return self.pair.chosen

    @property
    def rejected(self) -> Any:
        return self.pair.rejected

    @property
    def num_tokens(self) -> int:
        """Tokens of both answers with their prompts."""
        return int(self.pair.num_tokens)

    @property
    def num_learnt(self) -> int:
        """Tokens of both answers."""
        return int(self.pair.num_learnt)


class ReferencedPairs(Sequence[ReferencedPair]):
    """Pairs with their reference.

    Args:
        pairs: the pairs.
        reference: float64 [N, 2].
    """

    def __init__(self, pairs: Sequence[Any], reference: "np.ndarray[Any, Any]") -> None:
        self._pairs, self._reference = pairs, reference

    @property
    def lengths(self) -> "np.ndarray[Any, Any]":
        """Tokens of each, int64 [N]."""
        lengths = getattr(self._pairs, "lengths", None)
        return np.array([pair.num_tokens for pair in self._pairs], dtype=np.int64) if lengths is None else lengths

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ReferencedPairs(self._pairs[index], self._reference[index])
        chosen, rejected = self._reference[index]
        return ReferencedPair(self._pairs[index], (float(chosen), float(rejected)))


@dataclass(frozen=True, eq=False)
class ReferenceModel:
    """What computes the reference.

    Attributes:
        model: with its adapter attached, which is switched off meanwhile.
        base_sha256: hash of the base file.
        compute: what else decides the numbers, as text.
        micro_batch_size: pairs at a time.
        device: of the model.
        processes: that share the pairs, or the layers.
        pipeline: computes where the layers are split; None: each process has the whole model.
    """

    model: Model
    base_sha256: str
    compute: str
    micro_batch_size: int
    device: torch.device
    processes: Processes
    pipeline: Pipeline | None

    def of(self, pairs: Sequence[Any]) -> ReferencedPairs:
        """Pairs with their reference, computed now or found in the cache.

        Raises:
            DataError: the cache folder cannot be written.
            ProcessLostError: another process ended.
        """
        folder = cache_folder() / "reference"
        path = folder / f"{_key(pairs, self.base_sha256, self.compute)}.npy"
        known = _read(path, len(pairs))
        # Computing is the work of all processes, so all of them do it or none.
        if not all(self.processes.all_gather(known is not None)):
            known = self._computed(pairs)
            if self.processes.is_first:
                _write(folder, path, known)
        assert known is not None, "computed or read"
        return ReferencedPairs(pairs, known)

    def _computed(self, pairs: Sequence[Any]) -> "np.ndarray[Any, Any]":
        """float64 [N, 2]."""
        starts = range(0, len(pairs), self.micro_batch_size)
        own = starts[self.processes.replica :: self.processes.num_replicas]
        found: list[torch.Tensor] = []
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), adapter_off(self.model):
                if self.pipeline is None:
                    for start in own:
                        batch = self._batch(pairs, start)
                        found.append(document_sums(self.model.log_probs(batch), batch).cpu())
                else:
                    for first in range(0, len(own), _AT_ONCE):
                        some = [self._batch(pairs, start) for start in own[first : first + _AT_ONCE]]
                        self.pipeline.add_document_log_probs(some, found)
        finally:
            self.model.train(was_training)
        sums = np.zeros((len(pairs), 2))
        # Where the layers are split, the last process alone has found something.
        for part in self.processes.all_gather([(start, part.numpy()) for start, part in zip(own, found, strict=False)]):
            for start, values in part:
                sums[start : start + self.micro_batch_size] = values.reshape(-1, 2)
        return sums

    def _batch(self, pairs: Sequence[Any], start: int) -> Batch:
        some = [pairs[index] for index in range(start, min(start + self.micro_batch_size, len(pairs)))]
        documents = [(answer.input_ids, answer.labels) for pair in some for answer in (pair.chosen, pair.rejected)]
        return Batch.from_documents(documents).to(self.device)


def _write(folder: Path, path: Path, known: "np.ndarray[Any, Any]") -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{secrets.token_hex(8)}.tmp"
        with temporary.open("wb") as file:
            np.save(file, known)
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(
            f"{folder}: the reference of the pairs cannot be written: {error.strerror or error}. Free space there, or "
            "let the environment variable PYGGTRAIN_CACHE_DIR name another folder."
        ) from error


def _read(path: Path, num_pairs: int) -> "np.ndarray[Any, Any] | None":
    if not path.exists():
        return None
    try:
        known: np.ndarray[Any, Any] = np.load(path)
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged (%s); the reference is computed again", path, error)
        return None
    return known if known.shape == (num_pairs, 2) else None


def _key(pairs: Sequence[Any], base_sha256: str, compute: str) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {base_sha256} {compute}".encode())
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            digest.update(answer.num_tokens.to_bytes(8, "little"))
            digest.update(answer.input_ids)
            digest.update(answer.labels)
    return digest.hexdigest()
