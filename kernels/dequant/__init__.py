"""Dequantisation: ggml blocks [rows, row_bytes] -> float [rows, K], bit-equal to ggml's own float32 values.

Every type is one file beside this one with one device function `decode(p_block, o_lane, p_grid)`, plus one line in
`DECODERS`. A lane of `decode` makes `runs` runs of 8 consecutive weights, `run_stride` weights apart: as many as share
their packed bytes (the two halves of a nibble byte, the four quarters of a 2-bit byte), so that bytes and scales are
read once. The same decoders feed the dequantisation kernel (kernel.py) and any kernel that wants a tile of weights
without writing it out.

Arithmetic is ggml's, in its order, in float32. A product of a half, a scale of up to 8 bits and a quant of up to 8 bits
is exact in float32, so contracting multiply and add cannot change a bit. Block layouts: ggml/src/ggml-common.h,
arithmetic: ggml/src/ggml-quants.c of llama.cpp 0c1e57098.
"""

from dataclasses import dataclass

import torch

from pyggtrain.errors import UnsupportedError


@dataclass(frozen=True)
class Decoder:
    """Shape of one ggml type: `block_size` weights in `block_bytes` bytes, and how a lane walks over them."""

    block_size: int
    block_bytes: int
    runs: int
    run_stride: int
    grid: str | None = None
    """Name of the table in grids.py that `decode` reads, if any."""

    @property
    def alignment(self) -> int:
        """Bytes to which all blocks are aligned if the first is, at most 16: the widest load that `decode` may use."""
        return min(self.block_bytes & -self.block_bytes, 16)


DECODERS: dict[str, Decoder] = {
    "Q1_0": Decoder(128, 18, runs=2, run_stride=16),
    "Q2_0": Decoder(64, 18, runs=2, run_stride=16),
    "Q4_0": Decoder(32, 18, runs=2, run_stride=16),
    "Q4_1": Decoder(32, 20, runs=2, run_stride=16),
    "Q5_0": Decoder(32, 22, runs=2, run_stride=16),
    "Q5_1": Decoder(32, 24, runs=2, run_stride=16),
    "Q8_0": Decoder(32, 34, runs=2, run_stride=16),
    "Q2_K": Decoder(256, 84, runs=4, run_stride=32),
    "Q3_K": Decoder(256, 110, runs=4, run_stride=32),
    "Q4_K": Decoder(256, 144, runs=2, run_stride=32),
    "Q5_K": Decoder(256, 176, runs=2, run_stride=32),
    "Q6_K": Decoder(256, 210, runs=4, run_stride=32),
    "IQ1_S": Decoder(256, 50, runs=2, run_stride=16, grid="IQ1"),
    "IQ1_M": Decoder(256, 56, runs=2, run_stride=16, grid="IQ1"),
    "IQ2_XXS": Decoder(256, 66, runs=2, run_stride=16, grid="IQ2_XXS"),
    "IQ2_XS": Decoder(256, 74, runs=2, run_stride=16, grid="IQ2_XS"),
    "IQ2_S": Decoder(256, 82, runs=2, run_stride=16, grid="IQ2_S"),
    "IQ3_XXS": Decoder(256, 98, runs=2, run_stride=16, grid="IQ3_XXS"),
    "IQ3_S": Decoder(256, 110, runs=2, run_stride=16, grid="IQ3_S"),
    "IQ4_NL": Decoder(32, 18, runs=2, run_stride=16, grid="IQ4"),
    "IQ4_XS": Decoder(256, 136, runs=2, run_stride=16, grid="IQ4"),
    "TQ1_0": Decoder(256, 54, runs=1, run_stride=8),
    "TQ2_0": Decoder(256, 66, runs=4, run_stride=32),
    "MXFP4": Decoder(32, 17, runs=2, run_stride=16),
    "NVFP4": Decoder(64, 36, runs=2, run_stride=8),
}

OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_blocks(blocks: torch.Tensor, type: str) -> tuple[int, int]:
    """Check that `blocks` holds whole rows of `type` and return (rows, K).

    Raises:
        UnsupportedError: no decoder for `type`.
        ValueError: not a contiguous uint8 matrix, or a row is not a whole number of blocks.
    """
    if type not in DECODERS:
        raise UnsupportedError(
            f"Quant type {type} has no dequantisation kernel. Kernels exist for: {', '.join(DECODERS)}."
        )
    decoder = DECODERS[type]
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or not blocks.is_contiguous():
        raise ValueError(
            f"blocks of {type} are {blocks.dtype} {list(blocks.shape)} with strides {blocks.stride()}; "
            f"needed: contiguous uint8 [rows, row_bytes]."
        )
    rows, row_bytes = blocks.shape
    if row_bytes == 0 or row_bytes % decoder.block_bytes:
        raise ValueError(
            f"blocks of {type} have rows of {row_bytes} bytes; "
            f"needed: a multiple of {decoder.block_bytes} bytes ({decoder.block_size} weights)."
        )
    return rows, row_bytes // decoder.block_bytes * decoder.block_size


def dequantize(
    blocks: torch.Tensor, type: str, *, dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Weights of ggml blocks as floats: out[n, k] = round_dtype(ggml's float32 value).

    Args:
        blocks: uint8 [rows, row_bytes], contiguous, on a GPU. The first byte must be aligned as the type's blocks are.
        type: ggml's name of the type, such as "Q4_K".
        dtype: float32, bfloat16 or float16; rounding is to nearest, ties to even. Ignored when `out` is given.
        out: [rows, K] of one of these dtypes on the same device, rows contiguous and any distance apart; made if None.

    Returns:
        `out`, [rows, K].

    Raises:
        UnsupportedError: no kernel for `type`.
        ValueError: a shape, dtype, stride, alignment or device does not fit.
    """
    from pyggtrain.kernels.dequant.kernel import launch

    rows, num_columns = check_blocks(blocks, type)
    if out is None:
        out = torch.empty(rows, num_columns, dtype=dtype, device=blocks.device)
    if (
        tuple(out.shape) != (rows, num_columns)
        or out.dtype not in OUTPUT_DTYPES
        or out.stride(1) != 1
        or out.device != blocks.device
    ):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} with strides {out.stride()} on {out.device}; "
            f"needed: [{rows}, {num_columns}] with unit column stride on {blocks.device}, one of {OUTPUT_DTYPES}."
        )
    launch(blocks, type, out)
    return out
