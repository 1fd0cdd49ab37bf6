"""Whether llama.cpp can read a file without ending the process that it runs in, or taking all memory."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pyggtrain.errors import GGUFError

# Metadata, vocabulary and the tensors' places, as for a whole model; no weight is read and no memory taken for one.
_READ = """
import sys
from pyggtrain import _bridge
from pyggtrain.errors import PyggtrainError
from pyggtrain.child_memory import limit_memory
try:
    limit_memory(_bridge.MappedGGUF(sys.argv[1]).data_offset)
    _bridge.GraphSource(sys.argv[1], with_lora=False)
except PyggtrainError as error:
    sys.exit(str(error))
"""
_TIMEOUT_S = 600


class _Reading:
    """llama.cpp reads a model's header in a child process.

    Args:
        path: the model.
    """

    def __init__(self, path: Path) -> None:
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        if search_path := environment.get("PYTHONPATH"):
            # The child works elsewhere, so that no folder shadows the package.
            folders = [os.path.abspath(folder) for folder in search_path.split(os.pathsep) if folder]
            environment["PYTHONPATH"] = os.pathsep.join(folders)
        self._path = path
        self._folder = tempfile.TemporaryDirectory()
        self._child = subprocess.Popen(
            [sys.executable, "-c", _READ, os.path.abspath(path)],
            cwd=self._folder.name,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def check(self) -> None:
        """Wait for its end; raises GGUFError if llama.cpp aborted or refused, with its reason."""
        with self._folder, self._child:
            try:
                _, errors = self._child.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                raise GGUFError(f"{self._path}: llama.cpp was still reading its header after {_TIMEOUT_S} s.") from None
        code = self._child.returncode
        if code:
            reason = " ".join(errors.decode(errors="replace").splitlines()[-3:]).strip()
            how = f"aborts (signal {-code}) on" if code < 0 else "cannot read"
            raise GGUFError(
                f"{self._path}: llama.cpp {how} this file's header: {reason} "
                "Convert the model again, or take it from another source."
            )


_begun: dict[Path, _Reading] = {}


def begin_check(path: Path) -> None:
    """Start the child of `check_readable`, which then waits for it: while it reads, torch can be imported."""
    _begun[path] = _Reading(path)


def check_readable(path: Path) -> None:
    """Let llama.cpp read a model's header in a child process: 0.3 s or so.

    llama.cpp asserts what it expects of a file, and an assertion ends the process. Afterwards the same file can be
    given to it here.

    Raises:
        GGUFError: llama.cpp aborted or refused, with its reason.
    """
    (_begun.pop(path, None) or _Reading(path)).check()
