"""Log-probability of each target token at an output head, without ever holding all logits.

    log p[t] = z[t, target_t] - logsumexp(z[t]),   z = logits [T, V]

`linear_cross_entropy` makes its gradient in forward, so all it can give is a sum: whatever the caller multiplies it by
is the same for every token. Losses on whole answers (DPO, ORPO) weigh each document by a number that depends on all of
its tokens, and so is known only afterwards. Here the logits of a chunk of C tokens are computed in forward, dropped,
and computed again in backward, when the caller's gradient g [T] is at hand:

    dz[t] = g[t] (onehot(target_t) - softmax(z[t]))

From z on it is autograd's, so the head may be anything: quantised, with a low-rank pair, with a soft-cap behind it.
Logits take 8 C V bytes at the peak (z and one more of its size) whatever T is; the price against
`linear_cross_entropy` is one more product with the head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from pyggtrain.ops.linear_cross_entropy import IGNORED, default_chunk
from pyggtrain.ops.quant_matmul import HALF_DTYPES


class _TargetLogProbs(torch.autograd.Function):
    """Logits [C, V] and targets [C] -> log-probabilities [C]."""

    @staticmethod
    def forward(ctx: Any, z_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z_CV, targets_C)
        # logsumexp(z) would be rounded at the size of the largest logit; this way only differences are.
        z_max_C1 = z_CV.amax(dim=1, keepdim=True)
        log_sum_C1 = torch.sub(z_CV, z_max_C1).exp_().sum(dim=1, keepdim=True).log_()
        return (z_CV.gather(1, targets_C.unsqueeze(1)) - z_max_C1 - log_sum_C1).squeeze(1)

    @staticmethod
    def backward(ctx: Any, g_C: torch.Tensor) -> tuple[torch.Tensor, None]:
        z_CV, targets_C = ctx.saved_tensors
        dz_CV = torch.softmax(z_CV, dim=1).mul_(-g_C.unsqueeze(1))
        return dz_CV.scatter_add_(1, targets_C.unsqueeze(1), g_C.unsqueeze(1)), None


def log_probs(
    logits_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x_TD: torch.Tensor,
    targets_T: torch.Tensor,
    num_vocab: int,
    *,
    chunk: int | None = None,
) -> torch.Tensor:
    """Log-probability of each target in nats, with gradient.

    Args:
        logits_of: the head: (rows int64 [C], x_TD[rows] [C, D]) -> logits [C, V]. It runs twice for each chunk where
            gradients are enabled, with torch's generators in the same state.
        x_TD: float32 [T, D], the head's input.
        targets_T: int64 [T], the token to predict after each position, -100 where there is none.
        num_vocab: V.
        chunk: tokens whose logits exist at the same time. None: see `linear_cross_entropy.default_chunk`. The result
            does not depend on it beyond rounding.

    Returns:
        [T] in x's dtype (float32 where that is half precision); exactly 0 where there is no target, and the gradient of
        x is exactly 0 there.

    Raises:
        ValueError: shapes do not fit, or a target is outside the vocabulary.
    """
    if targets_T.shape != x_TD.shape[:1]:
        raise ValueError(f"targets have shape {tuple(targets_T.shape)}: needed [{x_TD.shape[0]}], one per row of x")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: needed at least 1 token")
    supervised = (targets_T != IGNORED).nonzero().squeeze(1)
    if supervised.shape[0] == 0:
        return x_TD.sum(dim=1) * 0
    targets = targets_T[supervised]
    lowest, highest = (int(bound) for bound in targets.aminmax())
    if lowest < 0 or highest >= num_vocab:
        raise ValueError(f"targets lie between {lowest} and {highest}: needed 0 to {num_vocab - 1}, or -100 for none")

    def of_chunk(rows: torch.Tensor, x_CD: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
        z_CV = logits_of(rows, x_CD)
        if z_CV.dtype in HALF_DTYPES:
            z_CV = z_CV.float()
        found: torch.Tensor = _TargetLogProbs.apply(z_CV, targets_C)  # type: ignore[no-untyped-call]
        return found

    found = []
    for rows in torch.split(supervised, chunk or default_chunk(num_vocab, supervised.shape[0])):
        inputs = rows, x_TD[rows], targets_T[rows]
        found.append(
            checkpoint(of_chunk, *inputs, use_reentrant=False) if torch.is_grad_enabled() else of_chunk(*inputs)
        )
    log_probs = torch.cat(found)
    return log_probs.new_zeros(x_TD.shape[0]).index_copy(0, supervised, log_probs)
