"""Cross-entropy of logits, and of a quantised head without ever holding all logits.

    loss_t = logsumexp(z_t) - z_t[target_t],      dloss_t / dz_t = softmax(z_t) - onehot(target_t)

`cross_entropy_` replaces a chunk of logits by their gradient: nothing is saved, backward only scales.
`linear_cross_entropy` walks over tokens in chunks; per chunk it makes all logits from parts of the head (each part
dequantised into one workspace), takes loss and gradient, and multiplies back through the same parts:  dx = (softmax -
onehot) W.  The gradient is that of the *sum* of losses. Rows with target -100 have loss 0 and gradient 0; callers
should rather leave them out.

Sums and exponentials in float32. Each logit is read twice and written once. Loss and gradient use the logits in their
own dtype, as they were rounded by the matrix product.
"""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.dequant import dequantize
from pyggtrain.kernels.lora import mm_float32

IGNORED = -100


@triton.jit
def cross_entropy_kernel(
    p_logits, p_targets, p_losses, logits_stride, gradient_scale, V: tl.constexpr, BV: tl.constexpr
):
    o_t = tl.program_id(0).to(tl.int64)
    p_logits = p_logits + o_t * logits_stride
    o_v = tl.arange(0, BV)
    target = tl.load(p_targets + o_t).to(tl.int32)
    scale = tl.where(target < 0, 0.0, gradient_scale)

    # per lane a running maximum and a running sum, joined once at the end; the start is below any logit, and finite so
    # that its difference to itself is 0
    b_max = tl.full([BV], -1e38, tl.float32)
    b_sum = tl.zeros([BV], tl.float32)
    for start in range(0, V, BV):
        b_z = tl.load(p_logits + start + o_v, mask=start + o_v < V, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_max, b_z)
        b_sum = b_sum * tl.exp(b_max - b_new) + tl.exp(b_z - b_new)
        b_max = b_new
    maximum = tl.max(b_max, 0)
    total = tl.sum(b_sum * tl.exp(b_max - maximum), 0)
    inverse_total = 1.0 / total
    z_target = tl.load(p_logits + tl.maximum(target, 0)).to(tl.float32)
    # small losses of large logits keep their digits this way
    tl.store(p_losses + o_t, tl.where(target < 0, 0.0, tl.log(total) + (maximum - z_target)))

    # every lane must have read the target's logit before one of them overwrites it
    tl.debug_barrier()
    for start in range(0, V, BV):
        m_v = start + o_v < V
        b_z = tl.load(p_logits + start + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
        b_gradient = (tl.exp(b_z - maximum) * inverse_total - tl.where(start + o_v == target, 1.0, 0.0)) * scale
        tl.store(p_logits + start + o_v, b_gradient.to(p_logits.dtype.element_ty), mask=m_v)


def cross_entropy_(logits: torch.Tensor, targets: torch.Tensor, *, gradient_scale: float = 1.0) -> torch.Tensor:
    """Losses of a chunk; the logits become gradient_scale * dloss / dlogits.

    Args:
        logits: [C, V], any float dtype, columns side by side. Overwritten.
        targets: int64 [C], a column of each row, or -100 for a row that is not learnt.
        gradient_scale: factor on the gradient only.

    Returns:
        losses, float32 [C].
    """
    num_rows, num_columns = logits.shape
    if logits.stride(1) != 1 or targets.shape != (num_rows,) or targets.dtype != torch.int64:
        raise ValueError(
            f"logits are {list(logits.shape)} with strides {logits.stride()}, "
            f"targets {targets.dtype} {list(targets.shape)}; needed: unit column stride and int64 [{num_rows}]."
        )
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    cross_entropy_kernel[(num_rows,)](
        logits, targets, losses, logits.stride(0), gradient_scale, V=num_columns, BV=BLOCK, num_warps=NUM_WARPS
    )
    return losses


def linear_cross_entropy(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    targets: torch.Tensor,
    *,
    token_chunk: int,
    workspace: torch.Tensor,
    logits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gradient_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of x Wᵀ against targets and their gradient at x, in parts of tokens and of vocabulary.

    Args:
        x: [T, D] in the dtype of the matrix products.
        blocks: uint8 [V, row_bytes], the head W as ggml blocks of `type`.
        targets: int64 [T], -100 for rows that are not learnt.
        token_chunk: tokens whose logits are held at once, [token_chunk, V].
        workspace: [rows, D] in x's dtype, the part of W that is held as floats at once. As many rows as V: W is decoded
            once.
        logits: [token_chunk, V] in x's dtype, scratch; made if None.
        out: [T, D], where dx goes; made if None. May not be x.

    Returns:
        losses float32 [T], dx [T, D] = gradient_scale * dsum(losses) / dx. Parts of dx are added in float32.
    """
    num_tokens, width = x.shape
    vocabulary = blocks.shape[0]
    if workspace.dim() != 2 or workspace.shape[1] != width or workspace.dtype != x.dtype:
        raise ValueError(f"workspace is {workspace.dtype} {list(workspace.shape)}; needed: {x.dtype} [rows, {width}].")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if logits is None:
        logits = torch.empty(min(token_chunk, num_tokens), vocabulary, dtype=x.dtype, device=x.device)
    parts = [(first, min(first + workspace.shape[0], vocabulary)) for first in range(0, vocabulary, workspace.shape[0])]
    losses = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    decoded = None

    def head_part(first: int, last: int) -> torch.Tensor:
        nonlocal decoded
        if decoded != first:
            dequantize(blocks[first:last], type, out=workspace[: last - first])
            decoded = first
        return workspace[: last - first]

    for start in range(0, num_tokens, token_chunk):
        stop = min(start + token_chunk, num_tokens)
        chunk = logits[: stop - start]
        for first, last in parts:
            torch.mm(x[start:stop], head_part(first, last).t(), out=chunk[:, first:last])
        losses[start:stop] = cross_entropy_(chunk, targets[start:stop], gradient_scale=gradient_scale)
        # backwards, so that the part decoded last is used first
        total: torch.Tensor | None = None
        for first, last in reversed(parts):
            if len(parts) == 1:
                torch.mm(chunk, head_part(first, last), out=out[start:stop])
            else:
                part = mm_float32(chunk[:, first:last], head_part(first, last))
                total = part if total is None else total.add_(part)
        if total is not None:
            out[start:stop] = total
    return losses, out


# the fastest of six on an H200 (1024 rows of 128256)
BLOCK = 4096
NUM_WARPS = 8
