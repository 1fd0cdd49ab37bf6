"""y = silu(gate) ∘ up with silu(g) = g sigmoid(g) (Shazeer 2020, eq. 6).

Gradient. With g = gate, u = up, and s = sigmoid(g):

    d_gate = dy ∘ u ∘ s (1 + g (1 - s))
    d_up   = dy ∘ g s

Saved: gate and up, nothing else.
"""

from typing import Any

import torch

from pyggtrain.ops.operation import operation


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def cpu_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) ∘ up, without autograd."""
    return torch.nn.functional.silu(gate).mul_(up)


def cpu_swiglu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, d_gate: torch.Tensor, d_up: torch.Tensor
) -> None:
    """Write d_gate and d_up; `dy` is overwritten."""
    torch.mul(torch.nn.functional.silu(gate), dy, out=d_up)
    torch.ops.aten.silu_backward.grad_input(dy.mul_(up), gate, grad_input=d_gate)


@operation("swiglu")
def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gate.is_cuda:
        from pyggtrain.kernels.swiglu import swiglu_forward

        return swiglu_forward(*(_rows(part) for part in (gate, up))).view(gate.shape)
    return cpu_swiglu(gate, up)


@_swiglu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate)


@operation("swiglu_backward")
def _swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if gate.is_cuda:
        from pyggtrain.kernels.swiglu import swiglu_backward

        d_gate, d_up, _ = swiglu_backward(*(_rows(part) for part in (dy, gate, up)))
        return d_gate.view(gate.shape), d_up.view(up.shape)
    d_gate = torch.ops.aten.silu_backward(dy * up, gate)
    d_up = torch.nn.functional.silu(gate).mul_(dy)
    return d_gate, d_up


@_swiglu_backward.register_fake
def _(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(dy), torch.empty_like(gate)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: torch.Tensor) -> Any:
    return _swiglu_backward(dy, *ctx.saved_tensors)


_swiglu.register_autograd(_backward, setup_context=_save)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) ∘ up, both float32 [..., F]; on a GPU also bfloat16 or float16."""
    y: torch.Tensor = _swiglu(gate, up)
    return y
