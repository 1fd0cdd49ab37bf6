"""How the command ends: one of torchrun's processes without taking Python apart, any other as Python does."""

import os
import subprocess
import sys

import pytest

# What runs at the end does so either way; what stands behind the command only where it returns.
CHILD = """
import atexit, sys
from pyggtrain.cli import main

atexit.register(print, "at the end")
sys.argv = ["pyggtrain", "info", "missing.gguf"]
code = main()
print("returned")
sys.exit(code)
"""


@pytest.mark.parametrize(("world_size", "printed"), [("1", "returned\nat the end\n"), ("2", "at the end\n")])
def test_exit_code_and_functions_at_the_end_are_kept(world_size: str, printed: str) -> None:
    environment = {**os.environ, "WORLD_SIZE": world_size}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, printed)
    assert "missing.gguf" in done.stderr
