"""A GPU's program runs without memory and without a GPU, tells every buffer, and leaves everything as it was."""

import subprocess
import sys

import pytest
import torch

from pyggtrain import _bridge, ops
from pyggtrain.gguf import QuantTensor
from pyggtrain.ops.attention import Documents
from pyggtrain.ops.gpu_rehearsal import GPU, gpu_rehearsal
from pyggtrain.ops.rehearsal import without_memory

pytest.importorskip("triton", reason="Triton has no build for this platform")


class Made:
    """What a rehearsal tells: sizes by operation, and what was sent to the host."""

    def __init__(self) -> None:
        self.sizes: list[tuple[str, int]] = []
        self.sent = 0
        self.places: dict[int, int] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}

    def new(self, storage: torch.UntypedStorage, operation: str) -> None:
        if storage.nbytes() and storage._cdata not in self._kept:
            self._kept[storage._cdata] = storage
            self.sizes.append((operation, storage.nbytes()))

    def send(self, num_bytes: int, place: int, size: int) -> None:
        self.sent += num_bytes
        self.places[place] = size


@pytest.fixture
def made() -> Made:
    return Made()


def on_gpu(weight: QuantTensor) -> QuantTensor:
    blocks = torch.empty(weight.blocks.shape, dtype=torch.uint8, device="cuda")
    return QuantTensor(weight.name, weight.type, weight.shape, blocks)


def test_tensors_say_that_they_lie_on_a_gpu(made):
    with gpu_rehearsal(made.new):
        for x in (torch.empty(3, device="cuda"), torch.ones(3).to("cuda"), torch.tensor([1, 2], device=GPU)):
            assert x.is_cuda and x.device == GPU
            assert x.new_zeros(2).is_cuda and (x + 1).is_cuda and torch.empty_like(x).is_cuda
            assert x.cpu().device.type == "cpu"
        assert not torch.ones(3).is_cuda and torch.ones(3).tolist() == [1, 1, 1]


def test_the_hosts_memory_is_not_counted(made):
    with gpu_rehearsal(made.new, made.send):
        small, large = torch.arange(4), torch.empty(2**20)
        pinned = torch.empty(2**20, dtype=torch.uint8, pin_memory=True)
        assert large.device == pinned.device == torch.device("cpu")
        assert large.mul(2).device.type == "cpu" and small.tolist() == [0, 1, 2, 3]
        assert made.sizes == []
        there = pinned.to("cuda")
        assert there.is_cuda and made.sizes == [("", 2**20)]
        pinned[:100].copy_(there[:100])
    assert made.sent == 100 and made.places == {pinned.untyped_storage()._cdata: 2**20}


def test_everything_is_as_before_afterwards(make_weight):
    weight, exact = make_weight("Q4_1", 8, 32)
    before = (torch.empty, torch.Tensor.to, torch.cuda.Stream, _bridge.dequantize, vars(torch.Tensor).get("is_cuda"))
    with gpu_rehearsal(lambda storage, operation: None):
        ops.quant_linear(torch.empty(4, 32, device="cuda"), on_gpu(weight))
    after = (torch.empty, torch.Tensor.to, torch.cuda.Stream, _bridge.dequantize, vars(torch.Tensor).get("is_cuda"))
    assert before == after
    assert torch.equal(ops.dequantize(weight).double(), exact)
    assert not without_memory(weight.blocks).is_cuda


def test_a_gpus_own_program_runs(make_weight, made):
    weight, _ = make_weight("Q4_K", 48, 256)
    with gpu_rehearsal(made.new):
        x = torch.empty(200, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        bare = on_gpu(weight)
        made.sizes.clear()
        y = ops.quant_linear(x, bare)
        assert y.dtype == torch.bfloat16 and y.is_cuda
        y.sum().backward()
    # The result and the decoded weight, both in bfloat16, in both directions.
    sizes = [num_bytes for operation, num_bytes in made.sizes if operation.startswith("quant_linear")]
    assert sorted(sizes) == sorted(2 * [2 * 48 * 256] + [2 * 200 * 48, 2 * 200 * 256])


@pytest.mark.parametrize("bounds", [[0, 512, 1024], [0, 300, 1024]], ids=["cudnn", "own"])
def test_attention_makes_no_scores(bounds, made):
    documents = Documents(torch.tensor(bounds, dtype=torch.int32))
    with gpu_rehearsal(made.new):
        q, k, v = (
            torch.empty(1024, heads, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for heads in (4, 2, 2)
        )
        ops.attention(q, k, v, documents, softmax_scale=1.0).sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape
    largest = max(num_bytes for _, num_bytes in made.sizes)
    # The gradient of q summed in float32; scores of a document would be 4 x 512 x 512 numbers.
    assert largest <= 4 * q.numel() < 4 * 4 * 512 * 512


def test_numbers_that_only_a_run_would_know_are_assumed():
    with gpu_rehearsal(lambda storage, operation: None):
        x = torch.zeros(5, device="cuda")
        assert float(x.sum()) == 1.0 and x.tolist() == [1.0] * 5
        assert (x != 0).nonzero().shape == (5, 1)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from pyggtrain import ops
from pyggtrain.gguf import QuantTensor
from pyggtrain.ops.gpu_rehearsal import gpu_rehearsal
sizes = []
with gpu_rehearsal(lambda storage, operation: sizes.append(storage.nbytes())):
    blocks = torch.empty(48, 144, dtype=torch.uint8, device="cuda")
    x = torch.empty(200, 256, dtype=torch.bfloat16, device="cuda")
    ops.quant_linear(x, QuantTensor("w", "Q4_K", (48, 256), blocks))
assert 2 * 48 * 256 in sizes
assert not [name for name in sys.modules if name.startswith("pyggtrain.kernels.dequant")]
assert sys.modules["triton"] is None
"""


def test_triton_need_not_be_there():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
