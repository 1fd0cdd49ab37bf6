"""Fixtures for the operations: quantised weights with their exact values, and poisoned memory."""

from collections.abc import Callable, Iterator

import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.gguf import QuantTensor, quantize_tensor
from pyggtrain.ops import workspace

Weight = tuple[QuantTensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Every `empty` tensor starts as NaN, so an output that is not fully written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _default_workspace() -> Iterator[None]:
    yield
    workspace.set_limit_bytes(workspace.DEFAULT_LIMIT_BYTES)


@pytest.fixture
def make_weight() -> Callable[..., Weight]:
    """(type, rows, columns, seed=0) -> a random quantised weight and its exact values in float64."""

    def make(type: str, num_rows: int, num_columns: int, seed: int = 0) -> Weight:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(num_rows, num_columns, generator=generator)
        imatrix = torch.ones(num_columns) if _bridge.quant_types()[type].needs_imatrix else None
        weight = quantize_tensor("blk.0.attn_q.weight", values, type, imatrix=imatrix)
        exact = torch.empty(num_rows, num_columns)
        _bridge.dequantize(type, weight.blocks, exact, 1)
        return weight, exact.double()

    return make


@pytest.fixture
def earned() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Assert that a result is as near to the float64 reference as plain torch in float32 is.

    Error (root mean square) at most twice that of plain torch, plus a floor: one unit in the last place at the result's
    own size.
    """

    def check(result: torch.Tensor, plain: torch.Tensor, reference: torch.Tensor) -> None:
        assert result.shape == reference.shape
        assert torch.isfinite(result).all()

        def rms(x: torch.Tensor) -> float:
            return float(x.double().pow(2).mean().sqrt())

        floor = rms(reference) * torch.finfo(torch.float32).eps
        assert rms(result.double() - reference) <= 2 * rms(plain.double() - reference) + floor

    return check
