"""How many cores this process may use."""

import os


def num_usable_cores() -> int:
    """Cores of this process: containers and taskset give it fewer than the machine has, but only Linux tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
