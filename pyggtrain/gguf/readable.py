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


def check_readable(path: Path) -> None:
    """Let llama.cpp read a model's header in a child process: 0.3 s or so.

    llama.cpp asserts what it expects of a file, and an assertion ends the process. Afterwards the same file can be
    given to it here.

    Raises:
        GGUFError: llama.cpp aborted or refused, with its reason.
    """
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    if search_path := environment.get("PYTHONPATH"):
        # The child works elsewhere, so that no folder shadows the package.
        folders = [os.path.abspath(folder) for folder in search_path.split(os.pathsep) if folder]
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    with tempfile.TemporaryDirectory() as folder:
        try:
            child = subprocess.run(
                [sys.executable, "-c", _READ, os.path.abspath(path)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise GGUFError(f"{path}: llama.cpp was still reading its header after {_TIMEOUT_S} s.") from None
    if child.returncode:
        reason = " ".join(child.stderr.decode(errors="replace").splitlines()[-3:]).strip()
        how = f"aborts (signal {-child.returncode}) on" if child.returncode < 0 else "cannot read"
        raise GGUFError(
            f"{path}: llama.cpp {how} this file's header: {reason} "
            "Convert the model again, or take it from another source."
        )
