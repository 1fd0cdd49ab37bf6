"""Tiny gated delta net hybrids (qwen35, qwen35moe, qwen3next) in several patterns of layers, all F32."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyggtrain.gguf import QuantTensor, quantize_tensor, write_gguf
from pyggtrain.nn import Batch

WIDTH, HEADS, KV_HEADS, HEAD, FF, VOCAB, EXPERTS, USED = 64, 4, 2, 32, 48, 96, 6, 2
CONTEXT = 4096


@dataclass(frozen=True)
class Tiny:
    """A tiny model.

    Attributes:
        is_recurrent: of each layer, whether it is a gated delta net; the others are full attention.
        key_heads, value_heads, state: of the delta nets. taps: of their convolution.
        has_list: the pattern is written layer by layer; else as an interval, which then must be one.
        is_tied: the head is the embedding.
        has_fused_experts: gate and up of all experts are one tensor.
        decay: size of the log decays' factor.
    """

    architecture: str
    is_recurrent: tuple[bool, ...]
    key_heads: int
    value_heads: int
    state: int
    taps: int = 4
    has_list: bool = False
    is_tied: bool = False
    has_fused_experts: bool = False
    decay: float = 1.0

    @property
    def id(self) -> str:
        pattern = "".join("G" if is_recurrent else "A" for is_recurrent in self.is_recurrent)
        return f"{self.architecture}_{pattern}_{self.value_heads}of{self.key_heads}x{self.state}"


TINY = (
    Tiny("qwen35", (True, True, True, False), 2, 4, 32, is_tied=True),
    Tiny("qwen35", (False, True, False), 1, 3, 64, taps=3, has_list=True),
    Tiny("qwen35moe", (True, False, True, False), 2, 4, 32),
    Tiny("qwen35moe", (False, True, True, False, True), 2, 2, 64, has_list=True, has_fused_experts=True),
    Tiny("qwen3next", (True, True, True, False), 2, 4, 32),
)


def shapes_of(tiny: Tiny, layer: int) -> dict[str, tuple[int, ...]]:
    keys, values = tiny.key_heads * tiny.state, tiny.value_heads * tiny.state
    shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (WIDTH,), "post_attention_norm.weight": (WIDTH,)}
    if not tiny.is_recurrent[layer]:
        shapes |= {
            "attn_q.weight": (2 * HEADS * HEAD, WIDTH),
            "attn_k.weight": (KV_HEADS * HEAD, WIDTH),
            "attn_v.weight": (KV_HEADS * HEAD, WIDTH),
            "attn_output.weight": (WIDTH, HEADS * HEAD),
            "attn_q_norm.weight": (HEAD,),
            "attn_k_norm.weight": (HEAD,),
        }
    else:
        shapes |= {
            "attn_qkv.weight": (2 * keys + values, WIDTH),
            "attn_gate.weight": (values, WIDTH),
            "ssm_conv1d.weight": (2 * keys + values, tiny.taps),
            "ssm_dt.bias": (tiny.value_heads,),
            "ssm_a": (tiny.value_heads,),
            "ssm_norm.weight": (tiny.state,),
            "ssm_out.weight": (WIDTH, values),
        }
        if tiny.architecture == "qwen3next":
            shapes["ssm_ba.weight"] = (2 * tiny.value_heads, WIDTH)
        else:
            shapes |= {f"ssm_{gate}.weight": (tiny.value_heads, WIDTH) for gate in ("alpha", "beta")}
    if tiny.architecture == "qwen35":
        return shapes | {
            "ffn_gate.weight": (FF, WIDTH),
            "ffn_up.weight": (FF, WIDTH),
            "ffn_down.weight": (WIDTH, FF),
        }
    experts: dict[str, tuple[int, ...]] = (
        {"ffn_gate_up_exps.weight": (EXPERTS, 2 * FF, WIDTH)}
        if tiny.has_fused_experts
        else {f"ffn_{name}_exps.weight": (EXPERTS, FF, WIDTH) for name in ("gate", "up")}
    )
    return shapes | experts | {
        "ffn_gate_inp.weight": (EXPERTS, WIDTH),
        "ffn_down_exps.weight": (EXPERTS, WIDTH, FF),
        "ffn_gate_inp_shexp.weight": (WIDTH,),
        "ffn_gate_shexp.weight": (FF, WIDTH),
        "ffn_up_shexp.weight": (FF, WIDTH),
        "ffn_down_shexp.weight": (WIDTH, FF),
    }  # fmt: skip


def write_delta(tiny: Tiny, path: Path, gain: float = 1.0) -> Path:
    """Write a random file.

    Args:
        gain: size of what a matrix gives for numbers of size 1. At 1 a layer moves what passes it by its own size, and
            rounding grows from layer to layer as it does in no trained model. A tied head is made less sure of its
            input's own token by the square of it.
    """
    generator = torch.Generator().manual_seed(1)

    def tensor(name: str, shape: tuple[int, ...]) -> QuantTensor:
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
            if name == "output_norm.weight" and tiny.is_tied:
                values = values * gain**2
        elif name.endswith("ssm_a"):
            values = -tiny.decay * values.abs()
        elif "conv1d" in name:
            values = values * 0.5
        elif name != "token_embd.weight":
            values = values * gain / shape[-1] ** 0.5
        return quantize_tensor(name, values, "F32")

    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    if not tiny.is_tied:
        shapes["output.weight"] = (VOCAB, WIDTH)
    num_layers = len(tiny.is_recurrent)
    for layer in range(num_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in shapes_of(tiny, layer).items()}
    keys: dict[str, Any] = {
        "block_count": num_layers,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e4,
        "rope.dimension_count": HEAD // 2,
        "rope.dimension_sections": [3, 3, 2, 0],
        "ssm.conv_kernel": tiny.taps,
        "ssm.state_size": tiny.state,
        "ssm.group_count": tiny.key_heads,
        "ssm.time_step_rank": tiny.value_heads,
        "ssm.inner_size": tiny.value_heads * tiny.state,
        "vocab_size": VOCAB,
    }
    if tiny.has_list:
        keys["attention.recurrent_layers"] = list(tiny.is_recurrent)
    else:
        keys["full_attention_interval"] = tiny.is_recurrent.index(False) + 1
    if tiny.architecture != "qwen35":
        keys |= {
            "expert_count": EXPERTS,
            "expert_used_count": USED,
            "expert_feed_forward_length": FF,
            "expert_shared_feed_forward_length": FF,
        }
    write_gguf(
        path,
        {"general.architecture": tiny.architecture, "tokenizer.ggml.model": "no_vocab"}
        | {f"{tiny.architecture}.{key}": value for key, value in keys.items()},
        [tensor(name, shape) for name, shape in shapes.items()],
    )
    return path


def batch_of(*lengths: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return Batch.from_documents([(tokens, tokens) for tokens in ids])
