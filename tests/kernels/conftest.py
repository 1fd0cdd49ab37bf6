"""Kernels run compiled where there is a GPU, else in Triton's interpreter: the same tests, the same cases."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # read when a kernel is defined, that is at its module's import, so before any test module runs
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU with the interpreter, or the GPU; whichever this machine does not have is skipped."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("needs a GPU" if request.param == "cuda" else "kernels are compiled where there is a GPU")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture
def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Dtypes to test on a device. The interpreter truncates float32 to bfloat16 where hardware rounds to nearest."""
    return (torch.float32, torch.float16, torch.bfloat16) if device.type == "cuda" else (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty is full of NaN, so an element that a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
