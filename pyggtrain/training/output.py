"""Where a run writes: names beside the adapter, checks before training, atomic files."""

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyggtrain.errors import PyggtrainError


class OutputError(PyggtrainError):
    """A file cannot be written, or must not be."""


@dataclass(frozen=True)
class OutputFiles:
    """Files of one run; all lie beside the adapter and share its name."""

    adapter: Path

    @property
    def record(self) -> Path:
        """Settings, versions, hashes and results (JSON)."""
        return self._beside(".json")

    @property
    def metrics(self) -> Path:
        """One JSON line for each logged step."""
        return self._beside(".metrics.jsonl")

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files, if they are asked for."""
        return self._beside(".tensorboard")

    @property
    def checkpoint(self) -> Path:
        """Newest state of the run."""
        return self._beside(".checkpoint")

    @property
    def report(self) -> Path:
        """One page with loss plot, data, parity."""
        return self._beside(".report.html")

    @property
    def modelfile(self) -> Path:
        """What `ollama create` reads."""
        return self._beside(".Modelfile")

    @property
    def warning(self) -> Path:
        """Written when llama.cpp and pyggtrain disagree about the adapter."""
        return self._beside(".PARITY-FAILED.txt")

    def _beside(self, ending: str) -> Path:
        return self.adapter.with_name(self.adapter.name + ending)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path in the folder of `path`; on success flush it and rename it to `path`, otherwise remove it.

    A reader never meets half a file, and a file that was at `path` before stays whole if writing fails.

    Raises:
        OutputError: the file cannot be written; names the path, the bytes written and the bytes free.
    """
    temporary = path.with_name(f"{_temporary_prefix(path)}{secrets.token_hex(8)}.tmp")
    try:
        temporary.open("xb").close()
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written: {error.strerror}. Choose another folder or free space."
        ) from error
    try:
        with explained_write_errors(path, temporary):
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def explained_write_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn a failed write to `path` into an OutputError that names path, bytes written and bytes free."""
    try:
        yield
    # torch.save reports a failed write as RuntimeError.
    except (OSError, RuntimeError) as error:
        written = temporary.stat().st_size if temporary is not None and temporary.exists() else 0
        after = f" after {written:,} bytes" if temporary is not None else ""
        free = shutil.disk_usage(path.parent).free
        raise OutputError(
            f"{path}: writing failed{after} ({error}); {free:,} bytes are free there. "
            "Free space or choose another folder; a file that was there before is unchanged."
        ) from error


def remove_leftovers(files: OutputFiles) -> None:
    """Remove temporary files that an earlier process of the same run left behind when it was killed while writing."""
    for path in (files.adapter, files.record, files.metrics, files.checkpoint, files.report):
        for leftover in path.parent.glob(f"{_temporary_prefix(path)}*.tmp"):
            leftover.unlink(missing_ok=True)


def _temporary_prefix(path: Path) -> str:
    # A hash and not the name itself: names may be as long as the system allows, and no other run's name begins with it.
    return f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}-"


def write_text(path: Path, text: str) -> None:
    """Write a whole UTF-8 text file at once; see `atomic_path`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def check_output(files: OutputFiles, base: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse before training what could only fail, or destroy something, after it.

    Raises:
        OutputError: the adapter exists already, is the base file or a link to it, or its folder is missing or not
            writable; a checkpoint is there and would be lost, or is missing although `resume` was asked for.
    """
    adapter = files.adapter
    if adapter.exists() and base.exists() and adapter.samefile(base):
        raise OutputError(
            f"{adapter}: is the base file itself ({base}), which is never changed. Choose another output name."
        )
    if adapter.is_dir():
        raise OutputError(
            f"{adapter}: is a folder; needed: the name of the adapter file, for example {adapter / 'adapter.gguf'}"
        )
    if not adapter.parent.is_dir():
        raise OutputError(f"{adapter}: the folder {adapter.parent} does not exist. Make it first.")
    if not os.access(adapter.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{adapter}: the folder {adapter.parent} is not writable. Choose another one.")
    if adapter.suffix.lower() != ".gguf":
        raise OutputError(f"{adapter}: an adapter's name ends in .gguf; for example {adapter.name}.gguf")
    if resume:
        if not files.checkpoint.exists():
            raise OutputError(f"{files.checkpoint}: no checkpoint to resume from. Start the run without --resume.")
        return
    if overwrite:
        return
    if adapter.exists() or adapter.is_symlink():
        raise OutputError(f"{adapter}: exists already. Choose another name, or replace it with --overwrite.")
    if files.checkpoint.exists():
        raise OutputError(
            f"{files.checkpoint}: an earlier run to this output was not finished. "
            "Continue it with --resume, or discard it with --overwrite."
        )


def check_free_space(files: OutputFiles, num_parameters: int, *, keeps_best: bool = False) -> int:
    """Refuse a run whose files will not fit on the disk; return the bytes that it needs at most.

    Adapter: 4 bytes for each parameter. Checkpoint: 12 (weights and two moments), 4 more if the best weights are kept,
    and twice while the new one replaces the old.

    Raises:
        OutputError: names the folder, the bytes needed and the bytes free.
    """
    needed = (4 + 2 * (16 if keeps_best else 12)) * num_parameters + 16 * 2**20
    free = shutil.disk_usage(files.adapter.parent).free
    # The old checkpoint is already on the disk and will be replaced.
    if files.checkpoint.exists():
        needed -= min(needed, files.checkpoint.stat().st_size)
    if free < needed:
        raise OutputError(
            f"{files.adapter.parent}: {free:,} bytes are free; adapter and checkpoints of {num_parameters:,} "
            f"trainable parameters need {needed:,}. Free space, choose another folder, or lower r."
        )
    return needed


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut; Windows cannot open folders and orders renames itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
