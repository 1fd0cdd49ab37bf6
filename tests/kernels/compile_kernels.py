"""Compile every kernel for a GPU where there is none: the interpreter accepts programs that the compiler refuses.

    python tests/kernels/compile_kernels.py            all to machine code: one and a half minutes of one processor
    python tests/kernels/compile_kernels.py --quick    all to Triton's IR, and one kernel of each kind to machine code

Almost all that the compiler refuses (types, shapes, what must be a constant) it refuses on the way to its own IR, which
takes it a fortieth of the time; so the quick way is what tests/kernels/test_compile.py runs. Run the other one after
changing a kernel.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import triton
import triton.language as tl
from pyggtrain.kernels.adamw_8bit import adamw_8bit_kernel
from pyggtrain.kernels.attention.backward import (
    BACKWARD_TILES,
    attention_bwd_dkv_kernel,
    attention_bwd_dq_kernel,
    attention_bwd_rows_kernel,
    attention_bwd_sum_kernel,
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
from pyggtrain.kernels.dequant_matmul import dequant_matmul_bwd_kernel, dequant_matmul_fwd_kernel, sum_parts_kernel
from pyggtrain.kernels.exact_matmul import exact_matmul_kernel
from pyggtrain.kernels.expert_swiglu import expert_swiglu_bwd_kernel, expert_swiglu_fwd_kernel
from pyggtrain.kernels.fp8 import column_maximum_kernel, quantize_columns_kernel, quantize_rows_kernel
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
from pyggtrain.kernels.grouped_dequant_matmul import grouped_dequant_bwd_kernel, grouped_dequant_fwd_kernel
from pyggtrain.kernels.grouped_lora import grouped_outer_kernel, grouped_project_kernel
from pyggtrain.kernels.grouped_matmul import grouped_matmul_kernel
from pyggtrain.kernels.lora import lora_extend_kernel
from pyggtrain.kernels.moe_routing import combine_kernel, expert_count_kernel, expert_place_kernel
from pyggtrain.kernels.reference.cases import EXPERT_TYPES
from pyggtrain.kernels.rms_norm import rms_norm_bwd_kernel, rms_norm_fwd_kernel
from pyggtrain.kernels.rope import rope_kernel
from pyggtrain.kernels.swiglu import swiglu_bwd_kernel, swiglu_fwd_kernel
from pyggtrain.kernels.top_k import top_k_kernel
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

SM_90 = GPUTarget("cuda", 90, 32)
FLOATS = (
    *("eps", "scale", "scale0", "scale1", "scale2", "sin_sign", "gradient_scale", "softmax_scale", "softcap"),
    *("alpha", "offset", "limit", "step_size", "shrink", "beta1", "beta2", "root_correction2"),
)
# Row by row; tensor cores behind a pipeline; a decoder in front of them.
QUICK = ("rms_norm_fwd_kernel", "grouped_matmul_kernel", "dequant_matmul_fwd_kernel")

Configuration = tuple[ASTSource, dict[str, Any]]
"""A kernel with its types and constants, and the compiler's options."""


def configuration(
    kernel: JITFunction,
    *,
    float32: tuple[str, ...] = (),
    other: Mapping[str, str] | None = None,
    options: Mapping[str, int] | None = None,
    **constants: Any,
) -> Configuration:
    """A kernel whose pointers are bfloat16 but for those that are named, and whose other arguments are integers."""
    pointers = dict.fromkeys((name for name in kernel.arg_names if name.startswith("p_")), "*bf16")
    pointers |= {name: "*fp32" for name in float32 if name in pointers}
    pointers |= {name: type for name, type in (other or {}).items() if name in pointers}
    scalars = {name: "i32" for name in kernel.arg_names if name not in pointers and name not in constants}
    scalars |= {name: "fp32" for name in scalars if name in FLOATS}
    signature = {name: "constexpr" if name in constants else (pointers | scalars)[name] for name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants), dict(options or {})


def launched(tile: Any) -> dict[str, int]:
    """What a tile says of how its kernel is launched."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def decoding(type: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A decoder's constants and the types of its pointers."""
    decoder = DECODERS[type]
    constants = {
        "decode": decoder_of(type),
        "BLOCK_BYTES": decoder.block_bytes,
        "LANES_PER_BLOCK": decoder.block_size // 8 // decoder.runs,
        "RUNS": decoder.runs,
        "RUN_STRIDE": decoder.run_stride,
    }
    pointers = dict.fromkeys(("p_blocks", "p_blocks0", "p_blocks1"), "*u8")
    return constants, pointers | {"p_grid": "*fp32" if decoder.grid == "IQ4" else "*u8"}


def configurations() -> Iterator[Configuration]:
    """Every kernel."""
    yield from rows_and_loss()
    yield from optimisers()
    yield from attention()
    yield from experts()
    yield from delta_nets()
    yield from packed_weights()


def rows_and_loss() -> Iterator[Configuration]:
    for kernel in (rms_norm_fwd_kernel, rms_norm_bwd_kernel):
        for has_residual in (False, True):
            kept = ("p_weight", "p_inverse_rms")
            yield configuration(kernel, float32=kept, D=4096, BD=4096, HAS_RESIDUAL=has_residual)
    for kernel in (swiglu_fwd_kernel, swiglu_bwd_kernel):
        yield configuration(kernel, BF=1024)
    for is_neox in (False, True):
        sizes = {"HALF": 36, "BP": 64, "PASSED": 24, "BK": 32, "BH": 8}
        yield configuration(rope_kernel, float32=("p_cos", "p_sin"), IS_NEOX=is_neox, **sizes)
    yield configuration(cross_entropy_kernel, float32=("p_losses",), other={"p_targets": "*i64"}, V=9001, BV=4096)
    pairs = ("p_a0", "p_a1", "p_a2", "p_b0", "p_b1", "p_b2")
    yield configuration(lora_extend_kernel, float32=pairs, P=64, BK=128, BN=64, NUM_A_PROGRAMS=32)


def optimisers() -> Iterator[Configuration]:
    floats = (
        "p_parameter",
        "p_gradient",
        "p_table_m",
        "p_table_v",
        "p_scale_m",
        "p_scale_v",
        "p_divisor",
        "p_left_out",
    )
    for type in ("*u8", "*fp32"):
        moments = {"p_m": type, "p_v": type}
        sizes = {"IS_CODED": type == "*u8", "HAS_DIVISOR": True, "MAY_BE_LEFT_OUT": True, "BLOCK": 256, "BLOCKS": 4}
        yield configuration(adamw_8bit_kernel, float32=floats, other=moments, **sizes)


def attention() -> Iterator[Configuration]:
    masks = {"p_first_key": "*i32", "p_last_query": "*i32"}
    kept = ("p_lse", "p_rows", "p_sinks")
    together, alone = BACKWARD_TILES[64], BACKWARD_TILES[256]
    assert alone.v is not None
    for kernel, head_size, tile, own in (
        (attention_fwd_kernel, 64, FORWARD_TILES[64], {"HAS_SINKS": True}),
        (attention_fwd_kernel, 256, FORWARD_TILES[256], {"HAS_SINKS": False}),
        (attention_bwd_dkv_kernel, 64, together.k, {"num_parts": 1, "HAS_DK": True, "HAS_DV": True}),
        (attention_bwd_dkv_kernel, 256, alone.k, {"HAS_DK": True, "HAS_DV": False}),
        (attention_bwd_dkv_kernel, 256, alone.v, {"HAS_DK": False, "HAS_DV": True}),
        (attention_bwd_dq_kernel, 64, together.q, {}),
        (attention_bwd_dq_kernel, 256, alone.q, {}),
    ):
        heads = {"GROUP": 4, "K": head_size, "BK": head_size, "HAS_SOFTCAP": head_size == 64, "PRECISION": "tf32"}
        heads |= {"BT": tile.queries, "BS": tile.keys, "HEADS_FIRST": tile.heads_first, "IS_WRAPPED": tile.is_wrapped}
        floats = (*kept, *(() if "num_parts" in own else ("p_dk", "p_dv")))
        yield configuration(kernel, float32=floats, other=masks, options=launched(tile), **heads, **own)
    yield configuration(attention_bwd_sum_kernel, float32=("p_parts",), PARTS=8, K=256, BK=256, BT=8)
    yield configuration(attention_bwd_rows_kernel, float32=kept, K=128, BK=128, BT=64)


def experts() -> Iterator[Configuration]:
    integers = dict.fromkeys(("p_ids", "p_counts", "p_slot", "p_bounds"), "*i32")
    ids = integers | {"p_ids": "*i64"}
    yield configuration(expert_count_kernel, other=ids, BS=256, BC=64, BE=128)
    yield configuration(expert_place_kernel, other=ids, BS=256, BC=64, BP=64, BE=128)
    for experts in (32, 1024):
        sizes = {"K": 8, "BE": experts, "BK": 8}
        yield configuration(top_k_kernel, float32=("p_x",), other=integers, options={"num_warps": 1}, **sizes)
    for is_backward, rows in ((False, "*bf16"), (True, "*fp32")):
        tile = {"BM": 64, "BN": 64, "BK": 64, "DOT": tl.bfloat16}
        pointers = {"p_a": rows, "p_w": "*fp32", "p_y": "*bf16" if is_backward else "*fp32"}
        yield configuration(exact_matmul_kernel, other=pointers, IS_BACKWARD=is_backward, **tile)
    yield configuration(combine_kernel, float32=("p_probs",), J=8, HAS_PROBS=True, HAS_RESIDUAL=True, BD=1024)
    yield configuration(expert_swiglu_fwd_kernel, BF=1024, HAS_LIMIT=True)
    probs = ("p_probs", "p_d_probs")
    yield configuration(expert_swiglu_bwd_kernel, float32=probs, other=integers, BF=1024, HAS_LIMIT=True)
    factors = ("p_factor", "p_factor0", "p_factor1", "p_expert_scale", "p_bias", "p_bias0", "p_bias1", "p_gradient")
    thin = {"SLOTS_PER_ROW": 8, "R": 8, "BR": 16, "PRECISION": "tf32"}
    yield configuration(grouped_project_kernel, float32=factors, other=integers, BE=128, BM=64, BK=128, **thin)
    yield configuration(grouped_outer_kernel, float32=factors, other=integers, BM=32, BK=128, **thin)
    product = thin | {"TO_SLOTS": True, "HAS_SCALE": True, "BE": 128}
    tile = {"HAS_BIAS": True, "IS_EVEN": False, "BM": 128, "BN": 128, "BK": 64}
    options = {"num_warps": 8, "num_stages": 3}
    for parts, sides in ((1, 1), (1, 2), (2, 1)):
        constants = product | tile | {"PARTS": parts, "SIDES": sides}
        yield configuration(grouped_matmul_kernel, float32=factors, other=integers, options=options, **constants)
    for type in EXPERT_TYPES:
        decoder, pointers = decoding(type)
        constants = product | decoder | {"BLOCKS": 256 // DECODERS[type].block_size, "BM": 64}
        for kernel, own in (
            (grouped_dequant_fwd_kernel, {"HAS_BIAS": True, "BN": 64}),
            (grouped_dequant_bwd_kernel, {"BN": 32, "PARTS": 2}),
        ):
            yield configuration(kernel, float32=factors, other=integers | pointers, **constants, **own)


def delta_nets() -> Iterator[Configuration]:
    gates = ("p_decay", "p_beta", "p_a", "p_dt", "p_d_decay", "p_d_beta", "p_alpha", "p_b", "p_d_alpha", "p_d_b")
    kept = (*gates, "p_system", "p_inverse")
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
        sizes = {"C": 64, "K": 128, "V": 128, "BV": tile.values, "PRECISION": "tf32x3"}
        sizes = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        yield configuration(kernel, float32=kept, other=tables, options=launched(tile), **sizes)
    yield configuration(delta_rule_inverse_kernel, float32=kept, options={"num_warps": 1}, C=64, PRECISION="tf32x3")
    for kernel in (causal_conv1d_fwd_kernel, causal_conv1d_bwd_activation_kernel, causal_conv1d_bwd_kernel):
        taps = {"WIDTH": 4, "BW": 4, "BT": 16, "BC": 128}
        taps |= {"HAS_SILU": True} if kernel is causal_conv1d_fwd_kernel else {}
        yield configuration(kernel, float32=("p_weight",), other=tables, **taps)
    for kernel in (gated_rms_norm_fwd_kernel, gated_rms_norm_bwd_kernel):
        yield configuration(kernel, float32=("p_weight",), V=128, BV=128, BR=16)
    for kernel in (delta_gates_fwd_kernel, delta_gates_bwd_kernel):
        yield configuration(kernel, float32=gates, G=32, BG=32, BT=32)


def packed_weights() -> Iterator[Configuration]:
    for type in DECODERS:
        decoder, pointers = decoding(type)
        lanes = 512 // DECODERS[type].runs
        yield configuration(dequantize_kernel, other=pointers, LANES_PER_ROW=lanes, LANES=128, **decoder)
    # One for each number of runs, and one that reads a table.
    for type in ("TQ1_0", "Q4_K", "Q6_K", "IQ4_XS"):
        decoder, pointers = decoding(type)
        tile = {"ACCUMULATE": True, "BT": 16, "BN": 64, "LANES": 16 // DECODERS[type].runs}
        for kernel in (dequant_matmul_fwd_kernel, dequant_matmul_bwd_kernel):
            yield configuration(kernel, other=pointers, **tile, **decoder)
    yield configuration(sum_parts_kernel, float32=("p_parts",), ACCUMULATE=True, BC=1024)
    rounded = {"p_q": "*fp8e4nv", "p_scale": "*fp32", "p_largest": "*fp32"}
    yield configuration(quantize_rows_kernel, other=rounded, LARGEST=448.0, BK=4096)
    yield configuration(column_maximum_kernel, other=rounded, BN=128, BK=128)
    yield configuration(quantize_columns_kernel, other=rounded, LARGEST=448.0, BN=64, BK=64)


def to_ir(source: ASTSource, options: Mapping[str, Any]) -> None:
    """The first step of `triton.compile`, which cannot stop there."""
    backend = make_backend(SM_90)
    parsed = backend.parse_options({**options, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(SM_90, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


def main() -> None:
    arguments = sys.argv[1:]
    if arguments not in ([], ["--quick"]):
        sys.exit((__doc__ or "").strip())
    remaining = set(QUICK)
    for source, options in configurations():
        name = source.fn.__name__
        print(name, flush=True)
        if not arguments or name in remaining:
            assert triton.compile(source, target=SM_90, options=options).asm["cubin"]
            remaining.discard(name)
        else:
            to_ir(source, options)
    assert not remaining, remaining


if __name__ == "__main__":
    main()
