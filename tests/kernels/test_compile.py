"""Every kernel compiles for a GPU, checked where there is none: the interpreter accepts programs that the compiler
refuses.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pyggtrain.kernels.attention.backward import (
    BACKWARD_KV_TILES,
    BACKWARD_Q_TILES,
    attention_bwd_dkv_kernel,
    attention_bwd_dq_kernel,
    attention_bwd_rows_kernel,
)
from pyggtrain.kernels.attention.forward import FORWARD_TILES, attention_fwd_kernel
from pyggtrain.kernels.causal_conv1d import (
    causal_conv1d_bwd_activation_kernel,
    causal_conv1d_bwd_kernel,
    causal_conv1d_fwd_kernel,
)
from pyggtrain.kernels.cross_entropy import cross_entropy_kernel
from pyggtrain.kernels.delta_gates import delta_gates_bwd_kernel, delta_gates_fwd_kernel
from pyggtrain.kernels.dequant import DECODERS
from pyggtrain.kernels.dequant.kernel import decoder_of, dequantize_kernel
from pyggtrain.kernels.expert_swiglu import expert_swiglu_bwd_kernel, expert_swiglu_fwd_kernel
from pyggtrain.kernels.grouped_dequant_matmul import grouped_dequant_bwd_kernel, grouped_dequant_fwd_kernel
from pyggtrain.kernels.grouped_lora import grouped_outer_kernel, grouped_project_kernel
from pyggtrain.kernels.grouped_matmul import grouped_matmul_kernel
from pyggtrain.kernels.gated_delta_rule.backward import (
    D_STATES_TILE,
    DQK_TILE,
    DU_TILE,
    DV_TILE,
    delta_rule_d_states_kernel,
    delta_rule_dqk_kernel,
    delta_rule_du_kernel,
    delta_rule_dv_kernel,
)
from pyggtrain.kernels.gated_delta_rule.forward import (
    OUTPUT_TILE,
    STATES_TILE,
    SYSTEM_TILE,
    W_U_TILE,
    delta_rule_inverse_kernel,
    delta_rule_output_kernel,
    delta_rule_states_kernel,
    delta_rule_system_kernel,
    delta_rule_w_u_kernel,
)
from pyggtrain.kernels.gated_rms_norm import gated_rms_norm_bwd_kernel, gated_rms_norm_fwd_kernel
from pyggtrain.kernels.dequant_matmul import dequant_matmul_bwd_kernel, dequant_matmul_fwd_kernel, sum_parts_kernel
from pyggtrain.kernels.fp8 import column_maximum_kernel, quantize_columns_kernel, quantize_rows_kernel
from pyggtrain.kernels.lora import lora_extend_kernel
from pyggtrain.kernels.moe_routing import combine_kernel, expert_count_kernel, expert_place_kernel
from pyggtrain.kernels.reference.cases import EXPERT_TYPES
from pyggtrain.kernels.rms_norm import rms_norm_bwd_kernel, rms_norm_fwd_kernel
from pyggtrain.kernels.rope import rope_kernel
from pyggtrain.kernels.swiglu import swiglu_bwd_kernel, swiglu_fwd_kernel


FLOATS = (
    *("eps", "scale", "scale0", "scale1", "scale2", "sin_sign", "gradient_scale", "softmax_scale", "softcap"),
    *("alpha", "offset", "limit"),
)


def compile(kernel, constants, *, float32=(), other=(), **options):
    pointers = dict.fromkeys((name for name in kernel.arg_names if name.startswith("p_")), "*bf16")
    pointers |= {name: "*fp32" for name in float32 if name in pointers}
    pointers |= {name: type for name, type in dict(other).items() if name in pointers}
    scalars = {name: "i32" for name in kernel.arg_names if name not in pointers and name not in constants}
    scalars |= {name: "fp32" for name in scalars if name in FLOATS}
    signature = {name: "constexpr" if name in constants else (pointers | scalars)[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


wide = dict(D=4096, BD=4096)
for has_residual in (False, True):
    compile(rms_norm_fwd_kernel, wide | dict(HAS_RESIDUAL=has_residual), float32=("p_weight", "p_inverse_rms"))
    compile(rms_norm_bwd_kernel, wide | dict(HAS_RESIDUAL=has_residual), float32=("p_weight", "p_inverse_rms"))
compile(swiglu_fwd_kernel, dict(BF=1024))
compile(swiglu_bwd_kernel, dict(BF=1024))
for is_neox in (False, True):
    compile(rope_kernel, dict(HALF=36, BP=64, PASSED=24, BK=32, IS_NEOX=is_neox, BH=8), float32=("p_cos", "p_sin"))
compile(cross_entropy_kernel, dict(V=9001, BV=4096), float32=("p_losses",), other={"p_targets": "*i64"})
pairs = ("p_a0", "p_a1", "p_a2", "p_b0", "p_b1", "p_b2")
compile(lora_extend_kernel, dict(P=64, BK=128, BN=64, NUM_A_PROGRAMS=32), float32=pairs)
masks = {"p_first_key": "*i32", "p_last_query": "*i32"}
kept = ("p_lse", "p_rows", "p_sinks")
for kernel, tiles in (
    (attention_fwd_kernel, FORWARD_TILES),
    (attention_bwd_dkv_kernel, BACKWARD_KV_TILES),
    (attention_bwd_dq_kernel, BACKWARD_Q_TILES),
):
    tile = tiles[64]
    heads = dict(GROUP=4, K=64, BK=64, BT=tile.queries, BS=tile.keys, HAS_SOFTCAP=True, PRECISION="tf32")
    heads |= dict(HAS_SINKS=True) if kernel is attention_fwd_kernel else {}
    compile(kernel, heads, float32=kept, other=masks, num_warps=tile.num_warps, num_stages=tile.num_stages)
compile(attention_bwd_rows_kernel, dict(K=128, BK=128, BT=64), float32=kept)
integers = dict.fromkeys(("p_ids", "p_counts", "p_slot", "p_bounds"), "*i32")
compile(expert_count_kernel, dict(BS=256, BC=64, BE=128), other=integers | {"p_ids": "*i64"})
compile(expert_place_kernel, dict(BS=256, BC=64, BP=64, BE=128), other=integers | {"p_ids": "*i64"})
compile(combine_kernel, dict(J=8, HAS_PROBS=True, HAS_RESIDUAL=True, BD=1024), float32=("p_probs",))
compile(expert_swiglu_fwd_kernel, dict(BF=1024, HAS_LIMIT=True))
compile(expert_swiglu_bwd_kernel, dict(BF=1024, HAS_LIMIT=True), float32=("p_probs", "p_d_probs"), other=integers)
factors = ("p_factor", "p_factor0", "p_factor1", "p_expert_scale", "p_bias", "p_gradient")
expert = dict(SLOTS_PER_ROW=8, TO_SLOTS=True, HAS_SCALE=True, HAS_BIAS=True, R=8, BR=16, BE=128, PRECISION="tf32")
for parts in (1, 2):
    constants = expert | dict(PARTS=parts, IS_EVEN=False, BM=128, BN=128, BK=64)
    compile(grouped_matmul_kernel, constants, float32=factors, other=integers, num_warps=8, num_stages=3)
thin = {name: expert[name] for name in ("SLOTS_PER_ROW", "R", "BR", "PRECISION")}
compile(grouped_project_kernel, thin | dict(BE=128, BM=64, BK=128), float32=factors, other=integers)
compile(grouped_outer_kernel, thin | dict(BM=32, BK=128), float32=factors, other=integers)
for type in EXPERT_TYPES:
    decoder = DECODERS[type]
    grid = "*fp32" if decoder.grid == "IQ4" else "*u8"
    other = integers | dict.fromkeys(("p_blocks", "p_blocks0", "p_blocks1"), "*u8") | {"p_grid": grid}
    constants = expert | dict(
        decode=decoder_of(type),
        BLOCK_BYTES=decoder.block_bytes,
        LANES_PER_BLOCK=decoder.block_size // 8 // decoder.runs,
        RUNS=decoder.runs,
        RUN_STRIDE=decoder.run_stride,
        BLOCKS=256 // decoder.block_size,
        BM=64,
    )
    compile(grouped_dequant_fwd_kernel, constants | dict(BN=64), float32=factors, other=other)
    del constants["HAS_BIAS"]
    compile(grouped_dequant_bwd_kernel, constants | dict(BN=32, PARTS=2), float32=factors, other=other)
gates = ("p_decay", "p_beta", "p_a", "p_dt", "p_d_decay", "p_d_beta", "p_alpha", "p_b", "p_d_alpha", "p_d_b")
tables = dict.fromkeys(("p_first_token", "p_cu_seqlens", "p_first_chunk"), "*i32")
for kernel, tile in (
    (delta_rule_system_kernel, SYSTEM_TILE),
    (delta_rule_w_u_kernel, W_U_TILE),
    (delta_rule_states_kernel, STATES_TILE),
    (delta_rule_output_kernel, OUTPUT_TILE),
    (delta_rule_du_kernel, DU_TILE),
    (delta_rule_d_states_kernel, D_STATES_TILE),
    (delta_rule_dv_kernel, DV_TILE),
    (delta_rule_dqk_kernel, DQK_TILE),
):
    sizes = dict(C=64, K=128, V=128, BV=tile.values, PRECISION="tf32x3")
    sizes = {name: size for name, size in sizes.items() if name in kernel.arg_names}
    options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    compile(kernel, sizes, float32=(*gates, "p_system", "p_inverse"), other=tables, **options)
compile(delta_rule_inverse_kernel, dict(C=64, PRECISION="tf32x3"), float32=("p_system",), num_warps=1)
for kernel in (causal_conv1d_fwd_kernel, causal_conv1d_bwd_activation_kernel, causal_conv1d_bwd_kernel):
    taps = dict(WIDTH=4, BW=4, BT=16, BC=128) | (dict(HAS_SILU=True) if kernel is causal_conv1d_fwd_kernel else {})
    compile(kernel, taps, float32=("p_weight",), other=tables)
for kernel in (gated_rms_norm_fwd_kernel, gated_rms_norm_bwd_kernel):
    compile(kernel, dict(V=128, BV=128, BR=16), float32=("p_weight",))
for kernel in (delta_gates_fwd_kernel, delta_gates_bwd_kernel):
    compile(kernel, dict(G=32, BG=32, BT=32), float32=gates)
for type, decoder in DECODERS.items():
    constants = dict(
        decode=decoder_of(type),
        BLOCK_BYTES=decoder.block_bytes,
        LANES_PER_BLOCK=decoder.block_size // 8 // decoder.runs,
        LANES_PER_ROW=512 // decoder.runs,
        RUNS=decoder.runs,
        RUN_STRIDE=decoder.run_stride,
        LANES=128,
    )
    grid = "*fp32" if decoder.grid == "IQ4" else "*u8"
    compile(dequantize_kernel, constants, other={"p_blocks": "*u8", "p_grid": grid})
# one for each number of runs, and one that reads a table
for type in ("TQ1_0", "Q4_K", "Q6_K", "IQ4_XS"):
    decoder = DECODERS[type]
    constants = dict(
        decode=decoder_of(type),
        BLOCK_BYTES=decoder.block_bytes,
        LANES_PER_BLOCK=decoder.block_size // 8 // decoder.runs,
        RUNS=decoder.runs,
        RUN_STRIDE=decoder.run_stride,
        ACCUMULATE=True,
        BT=16,
        BN=64,
        LANES=16 // decoder.runs,
    )
    pointers = {"p_blocks": "*u8", "p_grid": "*fp32" if decoder.grid == "IQ4" else "*u8"}
    compile(dequant_matmul_fwd_kernel, constants, other=pointers)
    compile(dequant_matmul_bwd_kernel, constants, other=pointers)
compile(sum_parts_kernel, dict(ACCUMULATE=True, BC=1024), float32=("p_parts",))
rounded = {"p_q": "*fp8e4nv", "p_scale": "*fp32", "p_largest": "*fp32"}
compile(quantize_rows_kernel, dict(LARGEST=448.0, BK=4096), other=rounded)
compile(column_maximum_kernel, dict(BN=128, BK=128), other=rounded)
compile(quantize_columns_kernel, dict(LARGEST=448.0, BN=64, BK=64), other=rounded)
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    # a process of its own: this one has defined its kernels for the interpreter
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    # from a file: Triton reads a kernel's source
    (tmp_path / "program.py").write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "program.py"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
