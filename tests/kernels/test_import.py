"""What may be imported where there is neither Triton nor a GPU."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys

sys.modules["triton"] = None
import pyggtrain.kernels
from pyggtrain.kernels.attention.mask import AttentionMask
from pyggtrain.kernels.dequant import DECODERS, check_blocks, dequantize
from pyggtrain.kernels.dequant.grids import GRIDS
from pyggtrain.kernels.reference import attention, cross_entropy, dequant, experts, lora, moe_routing
from pyggtrain.kernels.reference import rms_norm, rope, swiglu
from pyggtrain.kernels.gated_delta_rule.chunks import Chunks
from pyggtrain.kernels.reference import attention, cross_entropy, dequant, lora, rms_norm, rope, swiglu
from pyggtrain.kernels.reference import causal_conv1d, delta_gates, gated_delta_rule, gated_rms_norm
from pyggtrain.kernels.reference.cases import random_blocks

import torch

assert not torch.cuda.is_initialized()
blocks = random_blocks("Q4_K", 2, 256, generator=torch.Generator().manual_seed(0))
dequant.dequantize(blocks, "Q4_K")
try:
    dequantize(blocks, "Q4_K")
except ImportError as error:
    assert "triton" in str(error)
else:
    raise AssertionError("a kernel ran without Triton")
"""


def test_references_and_tables_need_neither_triton_nor_a_gpu(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
