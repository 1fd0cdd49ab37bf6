"""Fixtures for kernels, which run compiled where there is a GPU, else in Triton's interpreter (`device`)."""

from collections.abc import Iterator

import pytest
import torch
from pyggtrain.kernels.reference.cases import dtypes_of, poisoned_memory


@pytest.fixture
def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return dtypes_of(device)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield
