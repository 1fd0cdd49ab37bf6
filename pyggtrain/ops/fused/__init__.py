"""The two halves of a transformer layer as one operation each: forward and backward written out.

A chain of small operations keeps every result for backward, and passes over memory once for each. Here forward keeps
little (`Kept`), backward makes the rest again, and what can be done in one pass is: residual sums inside norms,
low-rank pairs inside the big products (`kernels/lora.py`).

    attention_block   x + output(attention(rope(qkv(norm(x)))))
    delta_block       x + output(gated_norm(delta_rule(conv(qkv(norm(x)))), gate(norm(x))))
    feed_forward      x + down(silu(gate(y)) ∘ up(y)),  y = norm(x)
    expert_feed_forward   x + Σ_j w_j down_j(silu(gate_j(y)) ∘ up_j(y)) with the experts that a router chose

On a GPU everything runs in the dtype of x (bfloat16 or float16) with sums in float32; gradients of pairs are float32,
as their masters are. The operations are made of kernels and library products only, so in float32 they also run on a CPU
under Triton's interpreter, which is how CI tests them. `cpu.py` has the same halves for a CPU, made of the bridge's and
torch's own products.
"""

from pyggtrain.ops.fused.attention_block import AttentionBlock, attention_block
from pyggtrain.ops.fused.cpu import can_fuse_on_cpu, cpu_attention_block, cpu_feed_forward
from pyggtrain.ops.fused.delta_block import DeltaBlock, delta_block
from pyggtrain.ops.fused.expert_feed_forward import ExpertFeedForward, expert_feed_forward
from pyggtrain.ops.fused.feed_forward import FeedForward, feed_forward
from pyggtrain.ops.fused.kept import Kept
from pyggtrain.ops.fused.linear_group import LinearGroup, Pair

__all__ = [
    "AttentionBlock",
    "DeltaBlock",
    "ExpertFeedForward",
    "FeedForward",
    "Kept",
    "LinearGroup",
    "Pair",
    "attention_block",
    "can_fuse_on_cpu",
    "cpu_attention_block",
    "cpu_feed_forward",
    "delta_block",
    "expert_feed_forward",
    "feed_forward",
]
