"""What forward keeps of a layer for backward."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """What a layer keeps besides the inputs of its two halves. For T tokens, in numbers of x's dtype:

    Attributes:
        attention: q, k, v after rotation and attention's output, T (2 H + 2 N) K, or what the first half of a gated
            delta net has in their place (`delta_block`). Else they are computed again.
        gate_up: gate and up, 2 T F. Else computed again.
        weights: the layer's weights, decoded. Else they are decoded again.
        on_host: all that is kept (the halves' inputs too, gate_up and weights not) waits in pinned host memory.
        halves: the inputs of both halves. Else only the layer's, T D, and backward computes the layer again as a whole
            (`nn.whole_layer`): what is said of attention, gate_up and weights counts for nothing.
    """

    attention: bool = True
    gate_up: bool = False
    weights: bool = False
    on_host: bool = False
    halves: bool = True
