"""The experts of a layer on a GPU through one fused operation, from the modules that hold their weights.

The norm and the router before them are other modules' business: any router that gives ids and weights will do.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from pyggtrain.nn.expert_linear import ExpertLinear
from pyggtrain.nn.host_stash import HostStash
from pyggtrain.ops.expert_product import ExpertStack
from pyggtrain.ops.fused import ExpertFeedForward, Kept, Pair, expert_feed_forward
from pyggtrain.ops.quant_matmul import HALF_DTYPES


@dataclass(frozen=True, eq=False)
class ExpertHalf:
    """Names for the modules of residual + Σ_j w[t, j] down(silu(gate(z[t])) ∘ up(z[t])), all of expert ids[t, j].

    Attributes:
        gate, up, down: as above.
        biases: of gate, up and down, float32 [E, N] each, or None.
        alpha, offset, limit: of the gated unit, see `kernels.expert_swiglu`; as they stand it is SwiGLU.
    """

    gate: ExpertLinear
    up: ExpertLinear
    down: ExpertLinear
    biases: tuple[torch.Tensor | None, ...] = (None, None, None)
    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None

    @property
    def linears(self) -> tuple[ExpertLinear, ...]:
        return self.gate, self.up, self.down

    def can_fuse(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the fused operation computes what the modules would, with the pairs as they are.

        Args:
            dtype: of z.
            device: where it lies: a GPU, or a CPU under Triton's interpreter.
        """
        if device.type == "cuda" and dtype not in HALF_DTYPES:
            return False
        pairs = self.gate.lora, self.up.lora
        ranks = {None if pair is None else pair.lora_a.shape[1] for pair in pairs}
        return len(ranks) == 1 and all(
            linear.compute in ("auto", "bf16") and not (linear.lora is not None and linear.lora.has_dropout)
            for linear in self.linears
        )

    def __call__(
        self,
        z_TD: torch.Tensor,
        ids_TJ: torch.Tensor,
        probs_TJ: torch.Tensor,
        residual_TD: torch.Tensor | None,
        kept: Kept,
        stash: HostStash | None = None,
    ) -> torch.Tensor:
        """[T, D]; arguments as for `ops.fused.expert_feed_forward`.

        Args:
            stash: where what is kept goes; None: it stays.
        """
        gate, up, down = (
            ExpertStack(linear.weight, linear.quant_type, bias=bias)
            for linear, bias in zip(self.linears, self.biases, strict=True)
        )
        loras = [linear.lora for linear in self.linears]
        scale_gate, scale_up, scale_down = (0.0 if lora is None else lora.scale for lora in loras)
        pairs: list[Pair] = [None if lora is None else (lora.lora_a, lora.lora_b) for lora in loras]
        scales = (scale_gate, scale_up, scale_down)
        block = ExpertFeedForward(gate, up, down, scales, self.alpha, self.offset, self.limit)
        with stash.part() if stash is not None else nullcontext():
            return expert_feed_forward(z_TD, ids_TJ, probs_TJ, block, pairs, kept=kept, residual_TD=residual_TD)
