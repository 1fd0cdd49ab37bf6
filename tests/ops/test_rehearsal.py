"""A rehearsal makes the buffers of the real run, computes nothing, and leaves everything as it was."""

import threading

import pytest
import torch

from pyggtrain import _bridge, ops
from pyggtrain.gguf import QuantTensor
from pyggtrain.ops import workspace
from pyggtrain.ops.rehearsal import rehearsal, without_memory


def bare(weight: QuantTensor) -> QuantTensor:
    return QuantTensor(weight.name, weight.type, weight.shape, without_memory(weight.blocks))


class Made:
    """What a rehearsal tells: (bytes, operation)."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[int, str]] = {}
        self._kept = []

    def __call__(self, storage, operation) -> None:
        if storage.nbytes() and storage._cdata not in self.storages:
            self._kept.append(storage)
            self.storages[storage._cdata] = storage.nbytes(), operation


def test_buffers_inside_an_operation_are_told(make_weight):
    weight, _ = make_weight("Q4_1", 48, 64)
    made = Made()
    with rehearsal(made):
        weight = bare(weight)
        y = ops.quant_linear(torch.empty(7, 64), weight, compute="exact")
    assert y.shape == (7, 48)
    del made.storages[weight.blocks.untyped_storage()._cdata]
    assert sorted(made.storages.values()) == sorted(
        [(4 * 7 * 64, ""), (4 * 7 * 48, "quant_linear"), (4 * 48 * 64, "quant_linear")]
    )


def test_compiled_code_still_runs_for_others(make_weight):
    weight, exact = make_weight("Q4_1", 8, 32)
    results = []

    def other() -> None:
        results.append(ops.dequantize(weight))

    with rehearsal(lambda storage, operation: None):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert torch.equal(results[0].double(), exact)


def test_everything_is_as_before_afterwards(make_weight):
    weight, _ = make_weight("Q8_0", 8, 32)
    x = torch.randn(3, 32)
    before = ops.quant_linear(x, weight, compute="exact")
    compiled, buffers = _bridge.dequantize, [buffer.data_ptr() for buffer in workspace.held()]
    with rehearsal(lambda storage, operation: None):
        ops.quant_linear(torch.empty(100, 32), bare(weight), compute="exact")
    assert _bridge.dequantize is compiled
    assert [buffer.data_ptr() for buffer in workspace.held()] == buffers
    assert torch.equal(ops.quant_linear(x, weight, compute="exact"), before)


def test_no_number_is_computed(monkeypatch, make_weight):
    weight, _ = make_weight("Q4_K", 8, 256)

    def refuse(*arguments) -> None:
        raise AssertionError("the bridge was called")

    for name in ("dequantize", "mul_mat"):
        monkeypatch.setattr(_bridge, name, refuse)
    with rehearsal(lambda storage, operation: None):
        x = torch.empty(5, 256, requires_grad=True)
        for compute in ("exact", "ggml"):
            ops.quant_linear(x, bare(weight), compute=compute).sum().backward()
        assert x.grad.shape == x.shape
    with pytest.raises(AssertionError, match="was called"):
        ops.quant_linear(torch.ones(5, 256), weight)


def test_what_decides_sizes_is_real():
    targets = torch.tensor([3, -100, 5])
    with rehearsal(lambda storage, operation: None):
        learnt = (targets != -100).nonzero().squeeze(1)
        assert learnt.tolist() == [0, 2]
        x = torch.empty(3, 4)[learnt]
        assert x.shape == (2, 4)


def test_numbers_that_only_a_run_would_know_are_assumed():
    with rehearsal(lambda storage, operation: None):
        assert float(torch.empty(())) == 1.0
        experts = torch.empty(10, dtype=torch.int64)
        assert torch.searchsorted(experts, torch.arange(5)).tolist() == [0, 2, 5, 7, 10]
