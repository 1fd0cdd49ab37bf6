"""Fixtures for kernels, which run compiled where there is a GPU, else in Triton's interpreter (`device`)."""

from collections.abc import Iterator

import pytest
import torch


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
