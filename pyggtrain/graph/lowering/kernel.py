"""Types of the table: what a lowering is, and what it gives.

In a run in half precision values are in the run's dtype or, where an operation computes in float32 or reads a float32
weight of equal size, in float32. Products and attention round what they read (`Frame.rounded`).
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

from pyggtrain.graph.ir import Graph, Node

# (frame, value of each source or None) -> value of the node.
Kernel: TypeAlias = Callable[..., torch.Tensor]
Lowering: TypeAlias = Callable[[Graph, Node], Kernel]
