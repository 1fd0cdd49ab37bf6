"""How near a result has to be to its float64 reference: one measure for tests and self-test."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Comparison:
    """One result of a case beside its reference.

    Attributes:
        name: of the result.
        error: how far it is away.
        bound: how far it may be; NaN is never within.
    """

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound

    @property
    def share(self) -> float:
        """Error as a share of the bound; 0 where both are 0."""
        return self.error / self.bound if self.bound else (0.0 if self.error == 0 else math.inf)


def as_close_as_torch(
    name: str,
    ours: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    *,
    terms: int = 1,
    magnitude: float | None = None,
) -> Comparison:
    """Error against float64 at most twice that of plain torch in the same dtype, plus a floor.

    The floor is half a rounding step, for the cases in which torch happens to hit a value exactly; and for sums of
    `terms` products, sqrt(terms) float32 steps, by which two orders of adding differ. Steps are those of `magnitude`,
    the size of the terms; without it, of the largest value.
    """
    error = (ours.double() - exact).abs().max().item()
    plain_error = (plain.double() - exact).abs().max().item()
    steps = torch.finfo(ours.dtype).eps / 2 + torch.finfo(torch.float32).eps * (terms**0.5 - 1)
    floor = steps * (exact.abs().max().item() if magnitude is None else magnitude)
    return Comparison(name, error, 2 * plain_error + floor)


def as_near_as_torch(name: str, ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> Comparison:
    """Root mean square error at most twice that of plain torch, plus one unit in the last place at the result's own
    size: for sums of so many terms that a largest error says little.
    """

    def rms(x: torch.Tensor) -> float:
        return float(x.double().pow(2).mean().sqrt())

    floor = rms(exact) * torch.finfo(ours.dtype).eps
    return Comparison(name, rms(ours.double() - exact), 2 * rms(plain.double() - exact) + floor)


def within(name: str, ours: torch.Tensor, exact: torch.Tensor, *, rtol: float, atol: float) -> Comparison:
    """Each element within atol + rtol |exact|: the error is the largest share of that, the bound 1."""
    share = (ours.double() - exact.double()).abs() / (atol + rtol * exact.double().abs())
    # A NaN is larger than any number here, and max() of an empty tensor is an error that no case deserves.
    return Comparison(name, share.max().item(), 1.0)


def relatively_close(name: str, ours: torch.Tensor, exact: torch.Tensor, *, bound: float) -> Comparison:
    """Norm of the difference over the norm of what is right."""
    return Comparison(name, ((ours.double() - exact).norm() / exact.norm()).item(), bound)


def same_bits(name: str, ours: torch.Tensor, exact: torch.Tensor) -> Comparison:
    """Equal to the last bit, -0 told from +0: the error is the number of elements that are not."""
    integers = torch.int32 if exact.dtype == torch.float32 else torch.int16
    if ours.dtype != exact.dtype or ours.shape != exact.shape:
        return Comparison(name, math.inf, 0.0)
    return Comparison(name, float((ours.contiguous().view(integers) != exact.contiguous().view(integers)).sum()), 0.0)
