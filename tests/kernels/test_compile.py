"""Every kernel compiles for a GPU, checked where there is none: the interpreter accepts programs that the compiler
refuses.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    # a process of its own: this one has defined its kernels for the interpreter
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, PROGRAM, "--quick"]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
