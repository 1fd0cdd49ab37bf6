"""Examples on disk, read through a memory map: a set larger than memory trains like a small one.

A store is a folder of plain little-endian arrays and one JSON file:

    ids.bin      int32 [T]      token ids of all examples, one after another
    learnt.bin   uint8 [T]      1 where the token has a label
    ends.bin     int64 [N]      where each example ends in the two above
    files.bin    int32 [N]      number of the file that the row came from
    lines.bin    int64 [N]      its line there
    store.json                  names of the files, sizes of the arrays, the report of the encoding

It is written under another name and renamed once it is whole and on the disk, so a reader never meets half of one.
"""

import dataclasses
import json
import os
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from pyggtrain.data.examples import NOT_LEARNT, Example, ExamplePair
from pyggtrain.data.report import EncodeReport

_ARRAYS = {"ids": "<i4", "learnt": "u1", "ends": "<i8", "files": "<i4", "lines": "<i8"}
_BUFFER_BYTES = 1 << 18


class ExampleStore:
    """The examples of one folder.

    Attributes:
        report: what happened to the rows.
        lengths: tokens of each example, int64 [N].
        files: number of the file that each example came from, int32 [N].
        file_names: of the training files, as messages name them.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError, ValueError or KeyError if the folder holds no whole store."""
        about = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        self.file_names: list[str] = about["files"]
        report = about["report"]
        report["dropped"] = [tuple(row) for row in report["dropped"]]
        report["lengths"] = tuple(report["lengths"])
        self.report = EncodeReport(**report)
        arrays = {}
        for name, dtype in _ARRAYS.items():
            path = folder / f"{name}.bin"
            if path.stat().st_size != about["bytes"][name]:
                raise ValueError(f"{path} has another size than was written")
            arrays[name] = np.memmap(path, dtype, mode="r")
        self._ids, self._learnt, self._lines = arrays["ids"], arrays["learnt"], arrays["lines"]
        self._ends: np.ndarray[Any, Any] = np.concatenate([[0], arrays["ends"]])
        self.files = np.asarray(arrays["files"])
        self.lengths = np.diff(self._ends)

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, index: int) -> Example:
        """One example, copied out of the map."""
        start, end = self._ends[index], self._ends[index + 1]
        ids = self._ids[start:end]
        labels = np.where(self._learnt[start:end], ids, np.int32(NOT_LEARNT))
        source = f"{self.file_names[self.files[index]]}:{self._lines[index]}"
        return Example(array("i", ids.tobytes()), array("i", labels.tobytes()), source)


class StoredExamples(Sequence[Example]):
    """Some examples of a store, in a given order; one may be there several times.

    Args:
        store: where they lie.
        indices: which ones, int64 [N].
    """

    def __init__(self, store: ExampleStore, indices: "np.ndarray[Any, Any]") -> None:
        self._store, self._indices = store, indices

    @property
    def lengths(self) -> "np.ndarray[Any, Any]":
        """Tokens of each, int64 [N], without reading them."""
        lengths: np.ndarray[Any, Any] = self._store.lengths[self._indices]
        return lengths

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> "StoredExamples": ...

    def __getitem__(self, index: int | slice) -> "Example | StoredExamples":
        if isinstance(index, slice):
            return StoredExamples(self._store, self._indices[index])
        return self._store.example(self._indices[index])

    def example(self, index: int) -> Example:
        """The same as `[index]`; see `StoredPairs.example`."""
        return self._store.example(self._indices[index])


class StoredPairs(Sequence[ExamplePair]):
    """Some preference pairs of a store, which holds each as two examples, chosen before rejected.

    Args:
        store: where they lie.
        indices: which pairs, int64 [N].
    """

    def __init__(self, store: ExampleStore, indices: "np.ndarray[Any, Any]") -> None:
        self._store, self._indices = store, indices

    @property
    def lengths(self) -> "np.ndarray[Any, Any]":
        """Tokens of both examples of each, int64 [N], without reading them."""
        lengths: np.ndarray[Any, Any] = self._store.lengths.reshape(-1, 2).sum(1)[self._indices]
        return lengths

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> ExamplePair: ...

    @overload
    def __getitem__(self, index: slice) -> "StoredPairs": ...

    def __getitem__(self, index: int | slice) -> "ExamplePair | StoredPairs":
        if isinstance(index, slice):
            return StoredPairs(self._store, self._indices[index])
        first = 2 * self._indices[index]
        return ExamplePair(self._store.example(first), self._store.example(first + 1))

    def example(self, index: int) -> Example:
        """The chosen one of a pair: what stands for it where one example is shown or compared."""
        return self._store.example(2 * self._indices[index])


class StoreWriter:
    """Writes examples one after another into a new folder.

    Args:
        folder: made here; must not exist.
        file_names: names that examples' sources begin with, in the order in which the files are read.
    """

    def __init__(self, folder: Path, file_names: Sequence[str]) -> None:
        folder.mkdir(parents=True)
        self._folder, self._file_names = folder, list(file_names)
        self._files = {name: (folder / f"{name}.bin").open("wb", buffering=_BUFFER_BYTES) for name in _ARRAYS}
        self._num_tokens = self._file_number = 0

    def add(self, example: Example) -> None:
        """Write one example.

        Raises:
            OSError: the disk is full.
        """
        name, _, line = example.source.rpartition(":")
        # Rows come in the order of the files, and two files may have one name.
        while self._file_names[self._file_number] != name:
            self._file_number += 1
        labels = np.frombuffer(example.labels, np.int32)
        self._num_tokens += len(labels)
        self._files["ids"].write(np.frombuffer(example.input_ids, np.int32).astype("<i4", copy=False).tobytes())
        self._files["learnt"].write((labels != NOT_LEARNT).tobytes())
        self._files["ends"].write(self._num_tokens.to_bytes(8, "little"))
        self._files["files"].write(self._file_number.to_bytes(4, "little"))
        self._files["lines"].write(int(line).to_bytes(8, "little"))

    def finish(self, report: EncodeReport, target: Path) -> None:
        """Bring everything to the disk and give the folder its final name; one that is there already stays.

        Raises:
            OSError: the disk is full.
        """
        sizes = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
            file.close()
        about = {"files": self._file_names, "bytes": sizes, "report": dataclasses.asdict(report)}
        with (self._folder / "store.json").open("w", encoding="utf-8") as json_file:
            json.dump(about, json_file, ensure_ascii=False)
            json_file.flush()
            os.fsync(json_file.fileno())
        try:
            self._folder.rename(target)
        except OSError:
            # Another process was faster and wrote the same.
            if not target.is_dir():
                raise

    def discard(self) -> None:
        """Remove what was written, unless it was finished."""
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
