"""What torch's allocator gave out."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def allocated_peak() -> Callable[[Callable[[], object]], int]:
    """allocated_peak(run): the most bytes above what there was, by the allocator's own account."""

    def measure(run: Callable[[], object]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run()
        events = sorted(
            (event.start_ns(), event.nbytes())
            for event in profile.profiler.kineto_results.events()  # type: ignore[union-attr]
            if event.name() == "[memory]"
        )
        live = peak = 0
        for _, num_bytes in events:
            live += num_bytes
            peak = max(peak, live)
        return peak

    return measure
