"""The self-test finds what is wrong with a kernel, and says what it could not run."""

import pytest
import torch
from pyggtrain.kernels.reference.comparison import Comparison

from pyggtrain import _bridge
from pyggtrain.validation import selftest as module
from pyggtrain.validation.selftest import facts, kernel_names, selftest


def test_cpu_operations_are_right_and_gpu_kernels_are_named_as_not_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tested = selftest("cpu")
    assert tested.passed
    assert {result.kernel: result.where for result in tested.results} == {
        "ggml dequantize": "cpu",
        "quant_linear": "cpu",
    }
    assert all(result.worst is not None and result.num_cases >= 25 for result in tested.results)
    assert tested.not_run[0].startswith("GPU kernels were not run: ")


def test_wrong_numbers_are_found(monkeypatch):
    compiled = _bridge.dequantize

    def off_by_little(type, blocks, out, num_threads):
        compiled(type, blocks, out, num_threads)
        if type == "Q4_K":
            out[0, 0] += 1e-3

    monkeypatch.setattr(_bridge, "dequantize", off_by_little)
    tested = selftest("cpu", ["ggml dequantize"])
    (result,) = tested.results
    assert not tested.passed and not result.passed
    assert result.failures == ("ggml dequantize Q4_K: weights is 1 away, bound 0",)
    assert result.worst_case == "Q4_K"


def test_kernel_that_raises_fails_and_the_others_go_on(monkeypatch):
    def cases():
        def fail() -> list[Comparison]:
            raise RuntimeError("out of resources")

        return {"broken": [("case", fail)], "sound": [("case", lambda: [Comparison("y", 1.0, 2.0)])]}

    monkeypatch.setattr(module, "cpu_cases", cases)
    broken, sound = selftest("cpu", ["broken", "sound"]).results
    assert broken.failures == ("broken case: RuntimeError: out of resources",) and broken.worst is None
    assert sound.passed and sound.worst.share == 0.5


def test_nan_is_never_within_a_bound():
    nan = Comparison("y", float("nan"), 1.0)
    assert not nan.passed


def test_facts_name_what_decides_results():
    found = facts()
    assert torch.__version__ == found["torch"]
    assert _bridge.LLAMA_CPP_COMMIT in found["llama.cpp"]
    assert "CPU" in found["bridge"]


def test_every_kernel_has_a_name():
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    assert {"attention", "rms_norm", "dequantize", "ggml dequantize"} <= set(kernel_names())


@pytest.mark.parametrize("has_gpu", [False, True])
def test_mmq_has_a_name_where_it_can_run(has_gpu, monkeypatch):
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(module.mmq, "types", lambda: frozenset({"Q4_K"}))
    assert ("mmq" in kernel_names()) == has_gpu
