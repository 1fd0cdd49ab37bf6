"""RMSNorm in float64. Same names, arguments and results as `pyggtrain.kernels.rms_norm`."""

import torch


def rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, s, inverse_rms. s is rounded to x's dtype, as the stream between layers is; the rest stays float64."""
    s = x if residual is None else (x.double() + residual.double()).to(x.dtype)
    inverse_rms = (s.double().square().mean(1) + eps).rsqrt()
    return s.double() * inverse_rms[:, None] * weight.double(), s, inverse_rms


def rms_norm_backward(
    dy: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    inverse_rms: torch.Tensor,
    *,
    d_residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """ds, term by term as in the kernel's docstring."""
    u = dy.double() * weight.double()
    r = inverse_rms.double()[:, None]
    ds = r * u - s.double() * r**3 * (u * s.double()).mean(1, keepdim=True)
    return ds if d_residual is None else ds + d_residual.double()
