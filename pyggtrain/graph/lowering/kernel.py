"""Types of the table: what a lowering is, and what it gives."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from pyggtrain.graph.ir import Graph, Node

# (frame, value of each source or None) -> value of the node.
Kernel: TypeAlias = Callable[..., torch.Tensor]
Lowering: TypeAlias = Callable[[Graph, Node], Kernel]
