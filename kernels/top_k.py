"""The k largest numbers of each row: their columns, the largest first, of equal ones the leftmost first.

That is what a stable descending sort has in its first k columns, without the sort: a router takes 8 of 256 columns. k
times the largest is taken and struck out. A number and its column are one integer, so that a single maximum finds both:

    key = order(x) 2^32 + (BE - 1 - column)

where order(x) is the integer that compares as the float32 x does: its bits, all but the sign turned where it is
negative. As in torch's sort, 0 and -0 are equal and NaN is larger than anything.

One warp for each row, all in registers: up to 1024 columns, k up to 32. Nothing comes from the host.
"""

import torch
import triton
import triton.language as tl

# below any key
STRUCK = tl.constexpr(-(2**63))


@triton.jit
def top_k_kernel(p_x, p_ids, x_stride, E, K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BE)
    o_k = tl.arange(0, BK)
    b_x = tl.load(p_x + o_t * x_stride + o_e, mask=o_e < E, other=0.0).to(tl.float32)
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    b_order = tl.where(b_x != b_x, 0x7FFFFFFF, tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits))
    b_key = b_order.to(tl.int64) * 4294967296 + (BE - 1 - o_e)
    b_key = tl.where(o_e < E, b_key, STRUCK)
    b_ids = tl.zeros([BK], tl.int32)
    for k in range(K):
        largest = tl.max(b_key, 0)
        b_ids = tl.where(o_k == k, BE - 1 - (largest & (BE - 1)).to(tl.int32), b_ids)
        b_key = tl.where(b_key == largest, STRUCK, b_key)
    tl.store(p_ids + o_t * K + o_k, b_ids, mask=o_k < K)


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """The columns of the k largest numbers of each row.

    Args:
        x: [T, E] in float32, float16 or bfloat16, E <= 1024; rows may lie any distance apart.
        k: at most E and at most 32.

    Returns:
        int32 [T, k], the largest first, of equal ones the leftmost first.
    """
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} with strides {x.stride()}; "
            "needed: [T, E] in at most 32 bits with unit column stride."
        )
    num_tokens, num_columns = x.shape
    if not 0 < k <= min(num_columns, MAX_CHOSEN) or num_columns > MAX_COLUMNS:
        raise ValueError(
            f"{k} of {num_columns} columns are wanted; needed: at most {MAX_CHOSEN} of at most {MAX_COLUMNS}."
        )
    ids = torch.empty(num_tokens, k, dtype=torch.int32, device=x.device)
    if num_tokens:
        padded = max(32, triton.next_power_of_2(num_columns))
        sizes = {"K": k, "BE": padded, "BK": triton.next_power_of_2(k)}
        top_k_kernel[(num_tokens,)](x, ids, x.stride(0), num_columns, **sizes, num_warps=1)
    return ids


MAX_COLUMNS = 1024
MAX_CHOSEN = 32
