"""Cross entropy of a linear head, summed over tokens, without ever holding all logits.

    z = x Wᵀ (+ s (x Aᵀ) Bᵀ)            logits [T, V]
    loss = Σ_t  logsumexp(z[t]) - z[t, target_t]

x [T, D], W [V, D] in blocks, A = lora_a [R, D], B = lora_b [V, R]. Tokens whose target is -100 are left out before
anything is computed: they reach neither the head nor the sum.

Logits exist for a chunk of C tokens at a time, so the peak is 4 C V bytes whatever T is. The gradient is made in
forward, while the chunk's logits are at hand (Liger Kernel and Cut Cross-Entropy do the same); backward only multiplies
it by what the caller does with the sum. With p = softmax(z) and e = p - onehot(target) [C, V]:

    dx = e W + m ∘ (dh A),  dh = s e B        (m the dropout mask)
    dA = dhᵀ (m ∘ x),       dB = s eᵀ h,  h = (m ∘ x) Aᵀ

Softmax runs in place, a few rows at a time so that they stay in cache (four times faster than torch's over the whole
chunk, measured). The loss comes out of it: with z_max the largest logit and p_max its probability,

    logsumexp(z) = z_max - log p_max

and p_max >= 1/V never underflows, where p_target may.

On a GPU logits are in x's dtype, loss and softmax come from one kernel (`kernels/cross_entropy.py`), and a chunk is
what the card's memory bears easily.
"""

from typing import Any

import torch

from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.ops import quant_matmul, workspace
from pyggtrain.ops.dequantize import FLOAT_TYPES
from pyggtrain.ops.lora_linear import low_rank_forward, product_of_gradient
from pyggtrain.ops.operation import operation

IGNORED = -100

# Logits of one chunk, in bytes, when the caller names no chunk. A third of the targets at a time keeps logits below
# what a step's activations take, and each chunk decodes the whole head twice, so three are few; below some 64 rows
# decoding costs more than multiplying.
MIN_CHUNK_BYTES = 16 * 2**20
MAX_CHUNK_BYTES = 64 * 2**20
ENOUGH_ROWS = 64
GPU_CHUNK_BYTES = 440 * 2**20
# Rows of logits worked on at a time: about this many numbers, 2 MiB, stay in a core's L2 cache.
_CACHED_LOGITS = 2**19


def default_chunk(num_vocab: int, num_targets: int) -> int:
    """Tokens whose float32 logits exist at the same time: a third of the targets, in 16 to 64 MiB; at least 1.

    Never fewer than 64 where these take no more than 64 MiB.
    """
    row_bytes = 4 * num_vocab
    most = max(1, MAX_CHUNK_BYTES // row_bytes)
    least = max(MIN_CHUNK_BYTES // row_bytes, min(ENOUGH_ROWS, most))
    return min(max(-(-num_targets // 3), least), most)


def gpu_chunk(num_vocab: int, num_targets: int, dtype: torch.dtype) -> int:
    """Tokens whose logits exist at the same time on a GPU: a third of the targets, at most 440 MiB of logits."""
    return max(1, min(-(-num_targets // 3), GPU_CHUNK_BYTES // (dtype.itemsize * num_vocab)))


def _losses_from_logits_(z_CV: torch.Tensor, targets_C: torch.Tensor, wants_gradient: bool) -> torch.Tensor:
    """Loss of each row [C]; with `wants_gradient`, z becomes softmax(z) - onehot(target)."""
    if z_CV.is_cuda:
        from pyggtrain.kernels.cross_entropy import cross_entropy_

        return cross_entropy_(z_CV, targets_C)
    losses_C = z_CV.new_empty(z_CV.shape[0])
    step = max(1, _CACHED_LOGITS // z_CV.shape[1])
    for first in range(0, z_CV.shape[0], step):
        z = z_CV[first : first + step]
        target = targets_C[first : first + step].unsqueeze(1)
        z_target = z.gather(1, target)
        if wants_gradient:
            z_max = z.amax(dim=1, keepdim=True)
            torch.softmax(z, dim=1, out=z)
            logsumexp = z_max.sub_(z.amax(dim=1, keepdim=True).log_())
            z.scatter_add_(1, target, z.new_full((), -1.0).expand(target.shape))
        else:
            logsumexp = torch.logsumexp(z, dim=1, keepdim=True)
        losses_C[first : first + step] = logsumexp.sub_(z_target).squeeze(1)
    return losses_C


class _LowRankHead:
    """The low-rank part of a head and its gradient, summed over chunks."""

    def __init__(self, lora_a_RD: torch.Tensor, lora_b_VR: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
        self.lora_a_RD = lora_a_RD.to(dtype)
        self.scaled_b_RV = (lora_b_VR * scale).t().to(dtype, memory_format=torch.contiguous_format)
        self.scale = scale
        self.d_lora_a_RD = torch.zeros_like(lora_a_RD)
        self.d_lora_b_RV = lora_b_VR.new_zeros(lora_b_VR.shape[1], lora_b_VR.shape[0])

    def logits(self, x_CD: torch.Tensor, *, out: torch.Tensor) -> None:
        """out = s (x Aᵀ) Bᵀ, keeping what `backward` of the same chunk needs."""
        self.x_CD = x_CD
        self.h_RC = low_rank_forward(x_CD, self.lora_a_RD, None)
        torch.mm(self.h_RC.t(), self.scaled_b_RV, out=out)

    def backward(self, e_CV: torch.Tensor, *, dx: torch.Tensor | None) -> None:
        """Add this chunk to dA and dB, and write its dh A to `dx`."""
        dh_RC = self.scaled_b_RV @ e_CV.t()
        self.d_lora_a_RD += product_of_gradient(dh_RC, self.x_CD)
        self.d_lora_b_RV.add_(product_of_gradient(self.h_RC, e_CV), alpha=self.scale)
        if dx is not None:
            torch.mm(dh_RC.t(), self.lora_a_RD, out=dx)


@operation("linear_cross_entropy")
def _linear_cross_entropy(
    x_TD: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    targets_T: torch.Tensor,
    lora_a_RD: torch.Tensor | None,
    lora_b_VR: torch.Tensor | None,
    scale: float,
    dropout_mask_TD: torch.Tensor | None,
    chunk: int,
    compute: str,
    needs_dx: bool,
    needs_lora: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, num_vocab = x_TD.shape[0], blocks.shape[0]
    is_frozen = lora_a_RD is None and needs_dx and type not in FLOAT_TYPES
    if x_TD.is_cuda and is_frozen and x_TD.dtype in quant_matmul.HALF_DTYPES:
        return _gpu_frozen_head(x_TD, blocks, type, targets_T, chunk)
    losses_T = x_TD.new_empty(num_tokens, dtype=torch.float32 if x_TD.is_cuda else None)
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if needs_dx else x_TD.new_empty(0)
    z_buffer = x_TD.new_empty(min(chunk, num_tokens), num_vocab)
    head = None if lora_a_RD is None or lora_b_VR is None else _LowRankHead(lora_a_RD, lora_b_VR, scale, x_TD.dtype)
    for first in range(0, num_tokens, chunk):
        rows = slice(first, min(first + chunk, num_tokens))
        x_CD, z_CV = x_TD[rows], z_buffer[: min(chunk, num_tokens - first)]
        if head is not None:
            head.logits(x_CD if dropout_mask_TD is None else x_CD * dropout_mask_TD[rows], out=z_CV)
        quant_matmul.forward(x_CD, blocks, type, compute=compute, out=z_CV, accumulate=head is not None)
        losses_T[rows] = _losses_from_logits_(z_CV, targets_T[rows], needs_dx or needs_lora)
        if head is not None and (needs_dx or needs_lora):
            head.backward(z_CV, dx=dx_TD[rows] if needs_dx else None)
            if needs_dx and dropout_mask_TD is not None:
                dx_TD[rows] *= dropout_mask_TD[rows]
        if needs_dx:
            quant_matmul.backward(z_CV, blocks, type, compute=compute, out=dx_TD[rows], accumulate=head is not None)
    loss_sum = losses_T.sum(dtype=torch.float64).to(losses_T.dtype)
    if head is None or not needs_lora:
        return loss_sum, dx_TD, x_TD.new_empty(0), x_TD.new_empty(0)
    return loss_sum, dx_TD, head.d_lora_a_RD, head.d_lora_b_RV.t().contiguous()


def _gpu_frozen_head(
    x_TD: torch.Tensor, blocks: torch.Tensor, type: str, targets_T: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decodes each part of the head once per chunk and direction, and adds the parts of dx in float32."""
    from pyggtrain.kernels.cross_entropy import linear_cross_entropy as chunked

    num_vocab, width = blocks.shape[0], x_TD.shape[1]
    rows = workspace.rows_per_chunk(num_vocab, width, x_TD.dtype, "cuda")
    losses_T, dx_TD = chunked(
        x_TD,
        blocks,
        type,
        targets_T,
        token_chunk=chunk,
        workspace=workspace.rows(rows, width, x_TD.device, x_TD.dtype),
    )
    return losses_T.sum(dtype=torch.float64).float(), dx_TD, x_TD.new_empty(0), x_TD.new_empty(0)


@_linear_cross_entropy.register_fake
def _(
    x_TD: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    targets_T: torch.Tensor,
    lora_a_RD: torch.Tensor | None,
    lora_b_VR: torch.Tensor | None,
    scale: float,
    dropout_mask_TD: torch.Tensor | None,
    chunk: int,
    compute: str,
    needs_dx: bool,
    needs_lora: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if needs_dx else x_TD.new_empty(0)
    loss_dtype = torch.float32 if x_TD.dtype in quant_matmul.HALF_DTYPES else x_TD.dtype
    d_lora_a_RD = torch.empty_like(lora_a_RD) if needs_lora and lora_a_RD is not None else x_TD.new_empty(0)
    d_lora_b_VR = torch.empty_like(lora_b_VR) if needs_lora and lora_b_VR is not None else x_TD.new_empty(0)
    return x_TD.new_empty((), dtype=loss_dtype), dx_TD, d_lora_a_RD, d_lora_b_VR


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.needs_dx, ctx.needs_lora = inputs[10], inputs[11]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, d_loss: torch.Tensor | None, *unused: None) -> tuple[torch.Tensor | None, ...]:
    if d_loss is None:
        return (None,) * 12
    dx_TD, d_lora_a_RD, d_lora_b_VR = ctx.saved_tensors
    return (
        dx_TD * d_loss if ctx.needs_dx else None,
        None,
        None,
        None,
        d_lora_a_RD * d_loss if ctx.needs_lora else None,
        d_lora_b_VR * d_loss if ctx.needs_lora else None,
        *(None,) * 6,
    )


_linear_cross_entropy.register_autograd(_backward, setup_context=_save)


def linear_cross_entropy(
    x_TD: torch.Tensor,
    weight: QuantTensor,
    targets_T: torch.Tensor,
    *,
    chunk: int | None = None,
    lora_a_RD: torch.Tensor | None = None,
    lora_b_VR: torch.Tensor | None = None,
    scale: float = 1.0,
    dropout_mask_TD: torch.Tensor | None = None,
    compute: str = "auto",
) -> tuple[torch.Tensor, int]:
    """Sum of the cross entropy, in nats, over the tokens that have a target.

    Args:
        x_TD: float32 [T, D], the head's input; on a GPU also bfloat16 or float16.
        weight: [V, D]; the head, or the embedding it is tied to.
        targets_T: int64 [T], the token to predict after each position, -100 where there is none. On a GPU the caller
            leaves out most of these: it knows which they are before the device does.
        chunk: tokens whose logits exist at the same time. None: see `default_chunk`. Loss and gradient do not depend
            on it beyond rounding.
        lora_a_RD, lora_b_VR, scale, dropout_mask_TD: low-rank update of the head, as in `lora_linear`.
        compute: for the logits, as in `quant_linear`.

    Returns:
        The sum (a scalar with gradient; 0 with zero gradient if no token has a target) and the number of tokens in it.
        Divide by the number of targets of the whole optimiser step, not of this call: a mean of means weighs short rows
        too much.

    Raises:
        ValueError: shapes or dtypes do not fit, or a target is outside the vocabulary.
    """
    num_vocab, width = weight.shape
    quant_matmul.check(x_TD, width, compute)
    if targets_T.shape != x_TD.shape[:1]:
        raise ValueError(f"targets have shape {tuple(targets_T.shape)}: needed [{x_TD.shape[0]}], one per row of x")
    if (lora_a_RD is None) != (lora_b_VR is None):
        raise ValueError("lora_a and lora_b of the head come together; only one was given")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: needed at least 1 token")
    if x_TD.is_cuda:
        # Counting targets here would make the host wait for the device.
        num_targets = targets_T.shape[0]
    else:
        supervised = (targets_T != IGNORED).nonzero().squeeze(1)
        num_targets = supervised.shape[0]
        if num_targets < targets_T.shape[0]:
            x_TD, targets_T = x_TD.index_select(0, supervised), targets_T.index_select(0, supervised)
            dropout_mask_TD = None if dropout_mask_TD is None else dropout_mask_TD.index_select(0, supervised)
    if num_targets == 0:
        return x_TD.sum(), 0
    if x_TD.is_cuda:
        is_known = (targets_T >= 0) & (targets_T < num_vocab) | (targets_T == IGNORED)
        torch._assert_async(is_known.all(), "a target lies outside the vocabulary")
    else:
        lowest, highest = (int(bound) for bound in targets_T.aminmax())
        if lowest < 0 or highest >= num_vocab:
            raise ValueError(
                f"targets lie between {lowest} and {highest}: needed 0 to {num_vocab - 1}, or -100 for none"
            )
    if chunk is None:
        chunk = gpu_chunk(num_vocab, num_targets, x_TD.dtype) if x_TD.is_cuda else default_chunk(num_vocab, num_targets)
    needs_grad = torch.is_grad_enabled()
    loss_sum, *_ = _linear_cross_entropy(
        x_TD,
        weight.blocks,
        weight.type,
        targets_T,
        lora_a_RD,
        lora_b_VR,
        scale,
        dropout_mask_TD,
        chunk,
        compute,
        needs_grad and x_TD.requires_grad,
        needs_grad and lora_a_RD is not None and lora_a_RD.requires_grad,
    )
    return loss_sum, num_targets
