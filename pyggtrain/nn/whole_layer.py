"""A layer of fused halves of which only the input is kept: backward computes it again as a whole."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from pyggtrain.nn.host_stash import HostStash
from pyggtrain.ops.fused import Kept

# What halves keep once they are computed again: their backward follows at once.
_KEPT_FOR_A_MOMENT = Kept()


def run_whole(layer: Callable[..., Any], *inputs: torch.Tensor, stash: HostStash | None) -> Any:
    """layer(*inputs, kept=what its halves keep), of which nothing is left until backward but its inputs.

    The halves go nowhere near the stash: what backward's own forward saves is wanted next, on the GPU.

    Args:
        layer: without random numbers.
        stash: where the inputs go; None: they stay.
    """
    if not torch.is_grad_enabled():
        return layer(*inputs, kept=_KEPT_FOR_A_MOMENT)
    with stash.part() if stash is not None else nullcontext():
        return checkpoint(layer, *inputs, kept=_KEPT_FOR_A_MOMENT, use_reentrant=False, preserve_rng_state=False)
