"""Cases shared among processes: the same outcomes as in one, and a process that dies takes its task only."""

import os
import signal
import subprocess

import pytest
import torch

from pyggtrain.validation import kernel_workers as module
from pyggtrain.validation.kernel_cases import Outcome, gpu_cases, run_case

pytest.importorskip("triton", reason="Triton has no build for this platform")
CPU = torch.device("cpu")


@pytest.mark.slow
def test_workers_find_what_one_process_finds():
    cases = {name: gpu_cases(CPU)[name][:2] for name in ("swiglu", "rope")}
    reported = []
    found = module.run_in_workers(
        cases, (), device=CPU, num_workers=2, report=lambda done, total: reported.append((done, total))
    )
    assert found == {name: [run_case(case) for case in listed] for name, listed in cases.items()}
    assert reported == [(1, 2), (2, 2)]


@pytest.mark.slow
def test_process_that_dies_fails_its_task_and_another_goes_on(monkeypatch):
    cases = {"swiglu": gpu_cases(CPU)["swiglu"]}
    started = []
    popen = subprocess.Popen

    def start(*arguments, **options):
        worker = popen(*arguments, **options)
        started.append(worker)
        if len(started) == 1:
            os.kill(worker.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(module.subprocess, "Popen", start)
    found = module.run_in_workers(cases, (), device=CPU, num_workers=1, report=lambda done, total: None)["swiglu"]
    assert len(started) == 2 and len(found) == len(cases["swiglu"])
    failed = [outcome for outcome in found if outcome.failure is not None]
    assert failed and failed[0].failure.startswith("its process ended with -9")
    assert all(comparison.passed for outcome in found for comparison in outcome.comparisons)
    assert any(outcome.comparisons for outcome in found)


def test_tasks_hold_each_case_once_and_kernels_take_turns():
    cases = {"dequantize": [], "rope": []}
    cases["dequantize"] = [
        (f"{type}_{shape} float16", None) for type in ("Q4_0", "IQ2_XXS") for shape in ("1x1", "9x4")
    ]
    cases["rope"] = [(f"{case} {dtype}", None) for case in ("a", "b") for dtype in ("float32", "float16")]
    assert module._tasks(cases, [("Q4_K", 8, 256, 1)]) == [
        {"kernel": "dequantize", "cases": [0, 1]},
        {"kernel": "rope", "cases": [0, 1]},
        {"product": ["Q4_K", 8, 256, 1]},
        {"kernel": "dequantize", "cases": [2, 3]},
        {"kernel": "rope", "cases": [2, 3]},
    ]


def test_an_exception_is_an_outcome():
    def fail():
        raise RuntimeError("out of resources")

    assert run_case(("case", fail)) == Outcome("case", (), "RuntimeError: out of resources")
