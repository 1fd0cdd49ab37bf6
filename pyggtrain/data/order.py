"""The order in which examples are seen: shuffled anew each epoch, and a pure function of seed and epoch.

So the state of the data is one integer, the number of optimiser steps done: a resumed run goes on where it stopped,
with nothing to store or replay.
"""

import random
from functools import lru_cache


@lru_cache(maxsize=2)
def epoch_order(num_examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Indices of the examples in the order of one epoch: a permutation, equal on every machine and Python version.

    Sorting by random keys and not `random.shuffle`: Python promises to keep the numbers of `random()` for a seed, but
    not the algorithm of `shuffle`.
    """
    rng = random.Random(f"{seed}:{epoch}")
    keys = [rng.random() for _ in range(num_examples)]
    return tuple(sorted(range(num_examples), key=keys.__getitem__))
