"""`pyggtrain selftest`: the table, the exit code, and the GPU kernels in Triton's interpreter."""

import json
import os
import subprocess
import sys

import pytest

from pyggtrain import _bridge
from pyggtrain.cli import main


def test_table_says_what_ran_and_what_did_not(capsys, monkeypatch):
    # The test run sets it, for the kernels' own tests.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["selftest", "--device", "cpu", "--kernels", "ggml dequantize"]) == 0
    text = capsys.readouterr().out
    assert "llama.cpp" in text and "ggml dequantize  cpu" in text and "GPU kernels were not run" in text


def test_failure_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(_bridge, "dequantize", lambda *arguments: arguments[2].zero_())
    assert main(["selftest", "--device", "cpu", "--kernels", "ggml dequantize", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and len(found["results"][0]["failures"]) > 20


def test_unknown_kernel_is_named(capsys):
    assert main(["selftest", "--kernels", "atention"]) == 2
    assert "there is no atention; there are ggml dequantize, quant_linear" in capsys.readouterr().err


@pytest.mark.slow
def test_gpu_kernels_run_in_the_interpreter(tmp_path):
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    command = ["-m", "pyggtrain", "selftest", "--device", "cpu", "--kernels", "rms_norm", "swiglu", "rope", "--json"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert {result["kernel"]: result["where"] for result in results} == dict.fromkeys(
        ["rms_norm", "swiglu", "rope"], "interpreter"
    )
