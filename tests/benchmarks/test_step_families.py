"""Where a step's time goes, by the names of kernels as a profiler gives them."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from step_families import FAMILIES, FLOAT32_PRODUCTS, OTHER, break_down, device_intervals, family_of

NAMES = {
    "grouped_dequant_fwd_kernel": "experts",
    "grouped_matmul_kernel": "experts",
    "grouped_project_kernel": "LoRA products",
    "grouped_outer_kernel": "LoRA products",
    "lora_extend_kernel": "LoRA products",
    "dequantize_kernel": "dequantise",
    "dequant_matmul_bwd_kernel": "dense products",
    "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN": "dense products",
    "nvjet_sm90_tss_128x176_64x5_2x1_v_bz_splitK_NNT": "dense products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32>(...)": "dense products",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_kernel": FLOAT32_PRODUCTS,
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(...)": FLOAT32_PRODUCTS,
    "attention_bwd_dkv_kernel": "attention",
    "rope_kernel": "attention",
    "delta_rule_dqk_kernel": "delta rule",
    "delta_gates_bwd_kernel": "delta rule",
    "causal_conv1d_bwd_activation_kernel": "convolution",
    "gated_rms_norm_bwd_kernel": "norms",
    "rms_norm_fwd_kernel": "norms",
    "expert_swiglu_bwd_kernel": "activations",
    "expert_place_kernel": "routing",
    "combine_kernel": "routing",
    "void at::native::radixSortKVInPlace<2, -1, 32, 32, float, long, unsigned int>(...)": "routing",
    "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(...)": "routing",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, SoftMaxForwardEpilogue>(...)": "routing",
    "void (anonymous namespace)::cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>(...)": "loss",
    "cross_entropy_kernel": "loss",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float>>": "optimiser",
    "void kOptimizerStatic8bit2StateBlockwise<float, 3, 256, 1>(...)": "optimiser",
    "adamw_8bit_kernel": "optimiser",
    "exact_matmul_kernel": FLOAT32_PRODUCTS,
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "Memset (Device)": "copies",
    "copy_columns_kernel": "copies",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<direct_copy_kernel_cuda>>": "copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<MulFunctor>>": OTHER,
}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_told_apart_by_name(name: str) -> None:
    assert family_of(name) == NAMES[name]


def test_every_kernel_of_this_project_has_a_family() -> None:
    source = Path(__file__).parents[2] / "kernels"
    names = {
        line.removeprefix("def ").partition("(")[0]
        for path in source.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def ") and line.partition("(")[0].endswith("_kernel")
    }
    assert "rms_norm_fwd_kernel" in names
    assert {name for name in names if family_of(name) == OTHER} == set()
    assert {family_of(name) for name in names} <= set(FAMILIES)


@dataclass
class Event:
    name: str
    device_type: object
    is_user_annotation: bool
    time_range: object


def test_only_what_ran_on_the_device_counts() -> None:
    def event(name: str, device: str, *, is_range: bool = False) -> Event:
        return Event(name, SimpleNamespace(name=device), is_range, SimpleNamespace(start=0.0, end=1.0))

    events = [
        event("aten::mm", "CPU"),
        event("Optimizer.step#AdamW.step", "CUDA", is_range=True),
        event("void at::native::elementwise_kernel<{lambda(float)#1}>", "CUDA"),
    ]
    assert device_intervals(events) == [("void at::native::elementwise_kernel<{lambda(float)#1}>", 0.0, 1.0)]


def test_idle_is_when_nothing_ran() -> None:
    found = break_down(
        [("rms_norm_fwd_kernel", 0.0, 2000.0), ("Memcpy DtoH", 1000.0, 3000.0), ("what", 5000.0, 6000.0)], 10.0
    )
    assert found["kernels_ms"] == 5.0 and found["idle_ms"] == 6.0 and found["idle_share"] == 0.6
    assert list(found["families"]) == ["norms", "copies", OTHER]
    assert found["families"]["norms"] == {"ms": 2.0, "share": 0.2}
    assert found["largest_others"] == {"what": 1.0}


def test_real_profile_has_no_device_events_on_a_cpu() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert device_intervals(profiler.events()) == []
