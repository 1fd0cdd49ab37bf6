"""Slots sorted by expert, and the sum of what the chosen experts of a token gave.

A router gives each of T tokens J experts, ids [T, J] in [0, E). A slot is one pair (t, j), number t J + j; S = T J.
What an expert multiplies has to lie together, so slots are sorted by expert, stably:

    slot [S]         the slot at each place of the order
    bounds [E + 1]   expert e has the places bounds[e] up to bounds[e + 1]

A counting sort in two launches: every program counts its own slots by expert, then finds from all counts where its own
begin. Nothing is read by the host, so the whole step can be a CUDA graph, and no place depends on which program came
first.

    combine       out[t] = residual[t] + Σ_j probs[t, j] y[t, j]

With probs left out it is the backward of handing one row to J experts. Sums in float32, in the order of j. What is
summed lies in the order of the slots: the kernels that multiply write there.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, eq=False)
class Routing:
    """Slots in the order of their experts; all int32 on the device of the ids.

    Attributes:
        slot: [S], the slot at each place.
        bounds: [E + 1], where each expert's places begin, and S.
        num_chosen: J.
    """

    slot: torch.Tensor
    bounds: torch.Tensor
    num_chosen: int

    @property
    def num_slots(self) -> int:
        return self.slot.shape[0]

    @property
    def num_experts(self) -> int:
        return self.bounds.shape[0] - 1


@triton.jit
def expert_count_kernel(p_ids, p_counts, S, E, BS: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr):
    o_e = tl.arange(0, BE)
    counts = tl.zeros([BE], dtype=tl.int32)
    for first in range(0, BS, BC):
        o_s = tl.program_id(0) * BS + first + tl.arange(0, BC)
        b_id = tl.load(p_ids + o_s, mask=o_s < S, other=E).to(tl.int32)
        counts += tl.sum((b_id[:, None] == o_e[None, :]).to(tl.int32), 0)
    tl.store(p_counts + tl.program_id(0) * E + o_e, counts, mask=o_e < E)


@triton.jit
def expert_place_kernel(
    p_ids,
    p_counts,
    p_slot,
    p_bounds,
    S,
    E,
    num_programs,
    BS: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
):
    o_e = tl.arange(0, BE)
    before = tl.zeros([BE], dtype=tl.int32)
    total = tl.zeros([BE], dtype=tl.int32)
    for first in range(0, num_programs, BP):
        o_p = first + tl.arange(0, BP)[:, None]
        m_p = (o_p < num_programs) & (o_e < E)[None, :]
        b_count = tl.load(p_counts + o_p * E + o_e[None, :], mask=m_p, other=0)
        total += tl.sum(b_count, 0)
        before += tl.sum(tl.where(o_p < tl.program_id(0), b_count, 0), 0)
    start = tl.cumsum(total, 0) - total
    if tl.program_id(0) == 0:
        tl.store(p_bounds + o_e, start, mask=o_e < E)
        tl.store(p_bounds + E, S)
    next_place = start + before
    for first in range(0, BS, BC):
        o_s = tl.program_id(0) * BS + first + tl.arange(0, BC)
        b_id = tl.load(p_ids + o_s, mask=o_s < S, other=E).to(tl.int32)
        m_is = (b_id[:, None] == o_e[None, :]).to(tl.int32)
        b_place = tl.sum(m_is * (next_place[None, :] + tl.cumsum(m_is, 0) - 1), 1)
        m_s = (o_s < S) & (b_id >= 0) & (b_id < E)
        tl.store(p_slot + b_place, o_s, mask=m_s)
        next_place += tl.sum(m_is, 0)


@triton.jit
def combine_kernel(
    p_y,
    p_probs,
    p_residual,
    p_out,
    y_stride,
    residual_stride,
    out_stride,
    D,
    J: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BD: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_sum = tl.zeros([BD], dtype=tl.float32)
    if HAS_RESIDUAL:
        b_sum += tl.load(p_residual + o_t * residual_stride + o_d, mask=m_d).to(tl.float32)
    for j in tl.static_range(J):
        b_y = tl.load(p_y + (o_t * J + j) * y_stride + o_d, mask=m_d).to(tl.float32)
        if HAS_PROBS:
            b_y *= tl.load(p_probs + o_t * J + j).to(tl.float32)
        b_sum += b_y
    tl.store(p_out + o_t * out_stride + o_d, b_sum.to(p_out.dtype.element_ty), mask=m_d)


def sort_by_expert(ids: torch.Tensor, num_experts: int) -> Routing:
    """The order of the slots of ids [T, J], integers in [0, E), contiguous.

    An id that is no expert leaves its slot out, and one place of the order unwritten: callers check.
    """
    if ids.dim() != 2 or not ids.is_contiguous() or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids are {ids.dtype} {list(ids.shape)}; needed: contiguous int32 or int64 [T, J].")
    num_slots = ids.numel()
    slot = torch.empty(num_slots, dtype=torch.int32, device=ids.device)
    bounds = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    # Every program reads the counts of all: their number is bounded.
    length = max(SLOTS, triton.next_power_of_2(triton.cdiv(num_slots, MAX_PROGRAMS)))
    num_programs = max(1, triton.cdiv(num_slots, length))
    padded = max(16, triton.next_power_of_2(num_experts))
    chunk = min(length, max(16, TILE // padded))
    counts = torch.empty(num_programs, num_experts, dtype=torch.int32, device=ids.device)
    sizes = {"BS": length, "BC": chunk, "BE": padded}
    expert_count_kernel[(num_programs,)](ids, counts, num_slots, num_experts, **sizes)
    expert_place_kernel[(num_programs,)](
        ids, counts, slot, bounds, num_slots, num_experts, num_programs, BP=chunk, **sizes
    )
    return Routing(slot, bounds, ids.shape[1])


def combine(
    y: torch.Tensor,
    num_chosen: int,
    *,
    probs: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = residual[t] + Σ_j probs[t, j] y[t, j].

    Args:
        y: [T J, D], in the order of the slots, rows any distance apart.
        num_chosen: J.
        probs: [T, J] of any float dtype, contiguous; None: 1.
        residual: [T, D]; None: 0.
        out: [T, D], where the sum goes (it may be `residual`); made in y's dtype if None.

    Returns:
        out.
    """
    num_tokens, width = y.shape[0] // num_chosen, y.shape[1]
    out = y.new_empty(num_tokens, width) if out is None else out
    for name, tensor, num_rows in (
        ("y", y, num_tokens * num_chosen),
        ("residual", out if residual is None else residual, num_tokens),
        ("out", out, num_tokens),
    ):
        if tuple(tensor.shape) != (num_rows, width) or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} is {list(tensor.shape)} with strides {tensor.stride()}; "
                f"needed: [{num_rows}, {width}] with unit column stride."
            )
    if probs is not None and (probs.numel() != y.shape[0] or not probs.is_contiguous()):
        raise ValueError(f"probs are {list(probs.shape)}; needed: contiguous [{num_tokens}, {num_chosen}].")
    if out.numel() == 0:
        return out
    block = min(COLUMNS, triton.next_power_of_2(width))
    combine_kernel[(num_tokens, triton.cdiv(width, block))](
        y,
        y if probs is None else probs,
        out if residual is None else residual,
        out,
        y.stride(0),
        out.stride(0) if residual is None else residual.stride(0),
        out.stride(0),
        width,
        J=num_chosen,
        HAS_PROBS=probs is not None,
        HAS_RESIDUAL=residual is not None,
        BD=block,
    )
    return out


SLOTS = 256
MAX_PROGRAMS = 256
# Elements of the table "slot is of expert" that a program holds at once.
TILE = 8192
COLUMNS = 1024
