"""Which activations of a layer are kept for backward, and which are computed again.

Where a layer runs as two fused halves (`nn.fused_layer`), `kept_by` says what each keeps besides its input and its
low-rank products:

* "none": what it cannot make again without a product: q, k, v and attention's output; gate and up.
* "matmuls": the same without gate and up.
* "layers": nothing.
* "offload": as "matmuls", in pinned host memory (`nn.host_stash`): nothing is left on a GPU but the layer at work.

Where it runs as single operations, through `run_layer`:

* "none": everything the operations save.
* "matmuls": the results of matrix products and attention are kept, and the element-wise work between them (norms,
  rotation, SwiGLU) is computed again from them.
* "layers": only the layer's input is kept; its products are computed again, all but the last: a layer that ends in a
  product with a residual inside (`ops.quant_linear`, `residual_TN`) has its output kept, which is the next layer's
  input and costs nothing.

What each takes of memory and time is in docs/numerics.md.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pyggtrain.ops.fused import Kept

POLICIES = ("none", "matmuls", "layers")
GPU_POLICIES = (*POLICIES, "offload")

_KEPT = {
    "none": Kept(gate_up=True),
    "matmuls": Kept(),
    "layers": Kept(attention=False),
    "offload": Kept(on_host=True),
}

# Position of `residual_TN` among the arguments.
_RESIDUAL = {torch.ops.pyggtrain.quant_linear.default: 5, torch.ops.pyggtrain.lora_linear.default: 9}
_KEPT_BY_MATMULS = {
    *_RESIDUAL,
    torch.ops.pyggtrain.expert_linear.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT_BY_MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_layer_output(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_output = op in _RESIDUAL and args[_RESIDUAL[op]] is not None
    return CheckpointPolicy.MUST_SAVE if is_output else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS = {
    "matmuls": partial(create_selective_checkpoint_contexts, _keep_matmuls),
    "layers": partial(create_selective_checkpoint_contexts, _keep_layer_output),
}


def kept_by(policy: str, num_layers: int) -> list[Kept]:
    """What each fused layer keeps under a policy, first layer first.

    The matrix products of a fused layer's feed-forward half are the largest activations by far, so "matmuls" keeps
    there those of attention only, and "layers" keeps the inputs of both halves.

    Raises:
        ValueError: no such policy.
    """
    if policy not in _KEPT:
        raise ValueError(f"checkpoint policy {policy!r}: needed one of {', '.join(GPU_POLICIES)}")
    return [_KEPT[policy]] * num_layers


def run_layer(layer: Callable[..., Any], *inputs: Any, policy: str, is_random: bool = True) -> Any:
    """layer(*inputs), keeping for backward what `policy` says. Values and gradients are the same under every policy.

    Args:
        layer: a layer of a model.
        policy: "none", "matmuls" or "layers".
        is_random: it draws random numbers, which have to come again. Their state must not be asked for while a CUDA
            graph is captured.

    Raises:
        ValueError: another policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"checkpoint policy {policy!r}: needed one of {', '.join(POLICIES)}")
    if policy == "none" or not torch.is_grad_enabled():
        return layer(*inputs)
    return checkpoint(layer, *inputs, use_reentrant=False, context_fn=_CONTEXTS[policy], preserve_rng_state=is_random)
