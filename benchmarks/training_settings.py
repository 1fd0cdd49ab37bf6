"""The settings that `bench_training.py` measures: models, micro-batches, memory, what is trained and how."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from model_shapes import (
    Q3_K_IQ2_S,
    ModelShape,
    deepseek2_lite,
    gpt_oss_20b,
    mamba2_7b,
    nemotron_h_8b,
    qwen3moe_30b,
    qwen35moe_35b,
    qwen35moe_122b,
    qwen35moe_397b,
)
from synthetic import LLAMA_3_1_8B, LLAMA_3_3_70B, LlamaShape

from pyggtrain.adapters.targets import ALL_LINEAR
from pyggtrain.ops import workspace
from pyggtrain.ops.fused import Kept

KeptOf = Callable[[int], list[Kept]]
"""Number of layers -> what each keeps."""


def on_host(layers: int) -> list[Kept]:
    return [Kept(on_host=True)] * layers


def on_host_but(gate_up: int, weights: int = 0, on_card: int = 0) -> KeptOf:
    """All on the host; but gate and up, decoded weights, and activations on the card of so many last layers."""
    return lambda layers: [
        Kept(
            gate_up=layer >= layers - gate_up,
            weights=layer >= layers - weights,
            on_host=layer < layers - on_card,
        )
        for layer in range(layers)
    ]


def on_host_first(count: int) -> KeptOf:
    """The first layers' on the host, the last ones' on the device: their backward comes soonest."""
    return lambda layers: [Kept(on_host=layer < count) for layer in range(layers)]


def all_kept(layers: int) -> list[Kept]:
    """What fused halves keep; all else of a layer is computed again."""
    return [Kept()] * layers


def inputs(layers: int) -> list[Kept]:
    return [Kept(attention=False)] * layers


def inputs_on_host(layers: int) -> list[Kept]:
    return [Kept(attention=False, on_host=True)] * layers


def inputs_on_host_but(on_card: int, *, whole: int) -> KeptOf:
    """Inputs of halves, of so many first layers the layer's alone; those of the last layers on the card."""
    return lambda layers: [
        Kept(attention=False, on_host=layer < layers - on_card, halves=layer >= whole) for layer in range(layers)
    ]


def inputs_of_layers_on_host(layers: int) -> list[Kept]:
    """Of no half: layers are computed again as a whole."""
    return [Kept(attention=False, on_host=True, halves=False)] * layers


KEPT: dict[str, KeptOf] = {
    "all": all_kept,
    "all_on_host": on_host,
    "inputs": inputs,
    "inputs_on_host": inputs_on_host,
    "inputs_of_layers_on_host": inputs_of_layers_on_host,
}
"""What a person may choose in place of a setting's own."""

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


@dataclass(frozen=True)
class Setting:
    """What one line of results measures.

    Attributes:
        documents, length: of a step's one micro-batch.
        max_gib: the allocator's cap; None: what the card has.
        kept: number of layers -> what each keeps.
        shape: of the model, or what makes it, for a number of layers.
        layers: of the model; None: all.
        compute: how the base weights' products are computed, as in `TrainConfig`.
        r, lora_alpha: of every pair.
        target_modules: which weights get one, as in `LoraConfig`.
        workspace_mib: into which weights are decoded; None: a llama head in `head_parts` parts, else the default.
        optim: as in `TrainConfig`.
    """

    documents: int
    length: int
    max_gib: float | None
    kept: KeptOf
    shape: LlamaShape | Callable[..., ModelShape] = LLAMA_3_1_8B
    layers: int | None = None
    compute: str = "auto"
    r: int = 16
    lora_alpha: float = 16.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    workspace_mib: int | None = None
    head_parts: int = 3
    optim: str = "adamw"

    @property
    def num_tokens(self) -> int:
        return self.documents * self.length

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return torch.float16 if self.compute == "fp16" else torch.bfloat16

    def make_shape(self) -> LlamaShape | ModelShape:
        if isinstance(self.shape, LlamaShape):
            return self.shape if self.layers is None else self.shape.with_layers(self.layers)
        return self.shape() if self.layers is None else self.shape(self.layers)

    @property
    def family(self) -> str:
        """Of models that are checked together: "dense" or "mixture" of experts."""
        shape = self.make_shape()
        return "mixture" if isinstance(shape, ModelShape) and shape.experts_used < 1 else "dense"

    @property
    def workspace_bytes(self) -> int:
        shape = self.make_shape()
        if self.workspace_mib is not None:
            return self.workspace_mib << 20
        if isinstance(shape, LlamaShape):
            return 2 * shape.embedding_length * -(-shape.vocabulary // self.head_parts)
        return workspace.DEFAULT_GPU_LIMIT_BYTES


qwen35moe_35b_small = partial(qwen35moe_35b, mix=Q3_K_IQ2_S)
_EXPERTS_ALONE: dict[str, Any] = {
    "shape": qwen3moe_30b,
    "r": 8,
    "target_modules": EXPERTS,
    # gate and up of all experts
    "workspace_mib": 768,
}
# The device keeps weights and pairs; gradients and moments wait on the host.
_PAGED: dict[str, Any] = {"optim": "paged_adamw_8bit"}

SETTINGS = {
    "4x2048_8gib": Setting(4, 2048, 7.8, on_host_but(2)),
    "4x2048_24gib": Setting(4, 2048, 24, on_host_but(32, on_card=10)),
    "4x2048_36gib": Setting(4, 2048, 36, on_host_but(32, weights=13, on_card=29), head_parts=1),
    "1x2048_6gib": Setting(1, 2048, 6.3, on_host_but(0, on_card=3)),
    "1x2048_13gib": Setting(1, 2048, 13.3, on_host_but(32, weights=3, on_card=32)),
    "1x8192_8gib": Setting(1, 8192, 7.8, on_host_but(2)),
    "1x80k_24gib": Setting(1, 80 * 1024, 24, on_host_but(2)),
    "1x350k_80gib": Setting(1, 350_000, 80, inputs_on_host_but(8, whole=17)),
    "4x2048_8gib_fp8": Setting(4, 2048, 7.8, on_host, compute="fp8"),
    "4x2048_24gib_fp8": Setting(4, 2048, 24, on_host_but(32), compute="fp8"),
    "4x2048_24gib_fp16": Setting(4, 2048, 24, on_host_but(32, weights=6), compute="fp16"),
    "1x2048_70b": Setting(1, 2048, 40, on_host, shape=LLAMA_3_3_70B),
    "1x2048_moe": Setting(1, 2048, 130, all_kept, shape=qwen3moe_30b),
    "1x2048_mla": Setting(1, 2048, 130, all_kept, shape=deepseek2_lite),
    "1x2048_mamba2": Setting(1, 2048, 130, all_kept, shape=mamba2_7b),
    "1x2048_hybrid": Setting(1, 2048, 130, all_kept, shape=nemotron_h_8b),
    "1x2048_experts": Setting(1, 2048, None, all_kept, **_EXPERTS_ALONE),
    "4x2048_experts": Setting(4, 2048, None, all_kept, **_EXPERTS_ALONE),
    "1x2048_experts_8layers": Setting(1, 2048, None, all_kept, layers=8, **_EXPERTS_ALONE),
    "4x2048_experts_8layers": Setting(4, 2048, None, all_kept, layers=8, **_EXPERTS_ALONE),
    "1x2048_experts_small": Setting(1, 2048, None, on_host, **_EXPERTS_ALONE | {"workspace_mib": 192}),
    "1x2048_moe20": Setting(1, 2048, 20, on_host, **_EXPERTS_ALONE | _PAGED | {"workspace_mib": 192}),
    "1x2048_gptoss": Setting(
        *(1, 2048, 14, on_host_first(20)),
        shape=gpt_oss_20b,
        r=8,
        target_modules=ATTENTION + EXPERTS,
        workspace_mib=704,
        **_PAGED,
    ),
    "1x2048_delta": Setting(1, 2048, 130, all_kept, shape=qwen35moe_35b, r=4),
    "4x2048_delta": Setting(4, 2048, 130, all_kept, shape=qwen35moe_35b, r=4),
    "1x2048_delta16": Setting(
        1, 2048, 16, on_host_first(38), shape=qwen35moe_35b_small, r=4, workspace_mib=256, **_PAGED
    ),
    "1x8192_delta20": Setting(1, 8192, 20, on_host_first(32), shape=qwen35moe_35b_small, r=4, **_PAGED),
    "4x2048_delta24": Setting(4, 2048, 24, on_host_first(22), shape=qwen35moe_35b_small, r=4, **_PAGED),
    "1x2048_delta122": Setting(1, 2048, 64, all_kept, shape=qwen35moe_122b, r=4, workspace_mib=1536, **_PAGED),
    # A layer's time for all 60; the whole file (148 GiB) fits no card.
    "1x2048_delta397": Setting(
        1, 2048, None, all_kept, shape=qwen35moe_397b, layers=4, r=4, workspace_mib=1536, **_PAGED
    ),
}
NATIVE_SETTINGS = [name for name, setting in SETTINGS.items() if isinstance(setting.shape, LlamaShape)]
