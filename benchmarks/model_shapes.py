"""Models of other architectures in their true shapes and quant mixes (most of them like Q4_K_M): header, and names,
types and sizes of all tensors.

Sizes are those of the models' published configurations; names and keys those that llama.cpp reads.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

Layout = tuple[str, tuple[int, ...]]
"""ggml type and shape of a tensor."""
TypeOf = Callable[[int, int, str], str]
"""Layer, number of layers, kind of matrix -> ggml type."""


@dataclass(frozen=True)
class ModelShape:
    """A model file without numbers.

    Attributes:
        name: for a person.
        architecture: `general.architecture`.
        keys: metadata without the architecture in front.
        tensors: name -> (ggml type, shape).
        experts_used: share of the experts that a token passes.
    """

    name: str
    architecture: str
    keys: dict[str, Any]
    tensors: dict[str, Layout] = field(default_factory=dict)
    experts_used: float = 1.0

    @property
    def metadata(self) -> dict[str, Any]:
        keys = {f"{self.architecture}.{key}": value for key, value in self.keys.items()}
        return {"general.architecture": self.architecture, "tokenizer.ggml.model": "no_vocab", **keys}

    @property
    def vocabulary(self) -> int:
        return self.tensors["token_embd.weight"][1][0]


def flops_per_token(tensors: Mapping[str, Layout], experts_used: float = 1.0) -> float:
    """Of the products with weights in forward and backward of frozen ones: 4 for each number that a token meets."""
    total = 0.0
    for name, (type, shape) in tensors.items():
        is_matrix = len(shape) > 1 and not name.endswith(".bias")
        if is_matrix and name != "token_embd.weight" and (type != "F32" or "ffn_gate_inp" in name):
            total += prod(shape) * (experts_used if "_exps" in name else 1.0)
    return 4 * total


def more_bits(layer: int, count: int) -> bool:
    """Layers whose attn_v and ffn_down have Q6_K in Q4_K_M, as llama.cpp's quantiser chooses them."""
    return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2


def _q4_k_m(layer: int, count: int, kind: str) -> str:
    """Near Q4_K_M: Q4_K, of half the layers some matrices in Q6_K."""
    has_more = more_bits(layer, count) and ("_down" in kind or kind in ("attn_v", "attn_kv_a_mqa", "ssm_out"))
    return "Q6_K" if has_more else "Q4_K"


def _q3_k_iq2_s(layer: int, count: int, kind: str) -> str:
    """A mix of 3.3 bits: experts of the outer half of the layers in Q3_K, their down in Q4_K (outermost Q5_K), of the
    inner half in IQ2_S; of the rest what ends a half layer in Q4_K, and Q3_K.

    Experts and head have the types that a published file of Qwen3.6-35B-A3B has (13.28 GiB); of the rest it mixes Q3_K,
    Q4_K and Q5_K, so that the sizes come out the same.
    """
    from_edge = min(layer, count - 1 - layer)
    if kind.endswith("_exps"):
        if from_edge >= count // 4:
            return "IQ2_S"
        if kind != "ffn_down_exps":
            return "Q3_K"
        return "Q5_K" if from_edge < count // 40 else "Q4_K"
    return "Q4_K" if kind in ("attn_output", "ssm_out", "ffn_down_shexp") else "Q3_K"


@dataclass(frozen=True)
class Mix:
    """Types of a file.

    Attributes:
        name: for a person.
        embedding: of token_embd. The head is in Q6_K.
        type_of: of a layer's matrices.
    """

    name: str
    embedding: str
    type_of: TypeOf


Q4_K_M = Mix("Q4_K_M", "Q4_K", _q4_k_m)
Q3_K_IQ2_S = Mix("Q3_K and IQ2_S", "Q3_K", _q3_k_iq2_s)


def _base(vocabulary: int, width: int, embedding: str = "Q4_K", head: str = "Q6_K") -> dict[str, Layout]:
    return {
        "token_embd.weight": (embedding, (vocabulary, width)),
        "output.weight": (head, (vocabulary, width)),
        "output_norm.weight": ("F32", (width,)),
    }


def _linears(
    layer: int, count: int, sizes: dict[str, tuple[int, ...]], type_of: TypeOf = _q4_k_m
) -> Iterator[tuple[str, Layout]]:
    for kind, shape in sizes.items():
        if "norm" in kind or kind == "ffn_gate_inp":
            type = "F32"
        elif kind in ("attn_k_b", "attn_v_b"):
            # Their rows are shorter than a block of the K types.
            type = "Q8_0"
        elif shape[-1] % 256:
            type = "Q5_0"
        else:
            type = type_of(layer, count, kind)
        yield f"blk.{layer}.{kind}.weight", (type, shape)


def qwen3moe_30b(layers: int = 48) -> ModelShape:
    """Qwen3-30B-A3B: 128 experts of 768, 8 for each token."""
    width, heads, kv, head, experts, used, ff = 2048, 32, 4, 128, 128, 8, 768
    shape = ModelShape(
        "Qwen3-30B-A3B Q4_K_M",
        "qwen3moe",
        {
            "block_count": layers,
            "context_length": 32768,
            "embedding_length": width,
            "feed_forward_length": 6144,
            "attention.head_count": heads,
            "attention.head_count_kv": kv,
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
            "expert_count": experts,
            "expert_used_count": used,
            "expert_feed_forward_length": ff,
            "vocab_size": 151936,
        },
        _base(151936, width),
        used / experts,
    )
    for layer in range(layers):
        sizes = {
            "attn_norm": (width,),
            "attn_q": (heads * head, width),
            "attn_k": (kv * head, width),
            "attn_v": (kv * head, width),
            "attn_q_norm": (head,),
            "attn_k_norm": (head,),
            "attn_output": (width, heads * head),
            "ffn_norm": (width,),
            "ffn_gate_inp": (experts, width),
            "ffn_gate_exps": (experts, ff, width),
            "ffn_up_exps": (experts, ff, width),
            "ffn_down_exps": (experts, width, ff),
        }
        shape.tensors.update(_linears(layer, layers, sizes))
    return shape


def deepseek2_lite(layers: int = 27) -> ModelShape:
    """DeepSeek-V2-Lite: latent attention, 64 experts of 1408 (6 for each token) and two shared ones."""
    width, heads, latent, rope, nope, value = 2048, 16, 512, 64, 128, 128
    experts, used, ff, dense_ff = 64, 6, 1408, 10944
    shape = ModelShape(
        "DeepSeek-V2-Lite 16B Q4_K_M",
        "deepseek2",
        {
            "block_count": layers,
            "context_length": 32768,
            "embedding_length": width,
            "feed_forward_length": dense_ff,
            "leading_dense_block_count": 1,
            "attention.head_count": heads,
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": latent,
            "attention.key_length": latent + rope,
            "attention.value_length": latent,
            "attention.key_length_mla": nope + rope,
            "attention.value_length_mla": value,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": rope,
            "rope.freq_base": 10000.0,
            "expert_count": experts,
            "expert_used_count": used,
            "expert_shared_count": 2,
            "expert_feed_forward_length": ff,
            "expert_weights_scale": 1.0,
            "vocab_size": 102400,
        },
        _base(102400, width),
        used / experts,
    )
    for layer in range(layers):
        sizes: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q": (heads * (nope + rope), width),
            "attn_kv_a_mqa": (latent + rope, width),
            "attn_kv_a_norm": (latent,),
            "attn_k_b": (heads, latent, nope),
            "attn_v_b": (heads, value, latent),
            "attn_output": (width, heads * value),
            "ffn_norm": (width,),
        }
        if layer == 0:
            sizes |= {"ffn_gate": (dense_ff, width), "ffn_up": (dense_ff, width), "ffn_down": (width, dense_ff)}
        else:
            sizes |= {
                "ffn_gate_inp": (experts, width),
                "ffn_gate_exps": (experts, ff, width),
                "ffn_up_exps": (experts, ff, width),
                "ffn_down_exps": (experts, width, ff),
                "ffn_gate_shexp": (2 * ff, width),
                "ffn_up_shexp": (2 * ff, width),
                "ffn_down_shexp": (width, 2 * ff),
            }
        shape.tensors.update(_linears(layer, layers, sizes))
    return shape


def gpt_oss_20b(layers: int = 24) -> ModelShape:
    """gpt-oss-20b: 32 experts of 2880 (4 for each token), attention with sinks, in every other layer to the last 128
    tokens; biases everywhere. Types of the published MXFP4 file: experts in MXFP4, the other matrices in Q8_0.
    """
    width, heads, kv, head, experts, used, ff, vocabulary = 2880, 64, 8, 64, 32, 4, 2880, 201088
    shape = ModelShape(
        "gpt-oss-20b MXFP4",
        "gpt-oss",
        {
            "block_count": layers,
            "context_length": 131072,
            "embedding_length": width,
            "feed_forward_length": ff,
            "attention.head_count": heads,
            "attention.head_count_kv": kv,
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.sliding_window": 128,
            "rope.freq_base": 150000.0,
            "rope.dimension_count": head,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
            "expert_count": experts,
            "expert_used_count": used,
            "expert_feed_forward_length": ff,
            "vocab_size": vocabulary,
        },
        _base(vocabulary, width, "Q8_0", "Q8_0"),
        used / experts,
    )
    for layer in range(layers):
        matrices = {
            "attn_q": ("Q8_0", (heads * head, width)),
            "attn_k": ("Q8_0", (kv * head, width)),
            "attn_v": ("Q8_0", (kv * head, width)),
            "attn_output": ("Q8_0", (width, heads * head)),
            "ffn_gate_inp": ("F32", (experts, width)),
            "ffn_gate_exps": ("MXFP4", (experts, ff, width)),
            "ffn_up_exps": ("MXFP4", (experts, ff, width)),
            "ffn_down_exps": ("MXFP4", (experts, width, ff)),
        }
        for kind, (type, sizes) in matrices.items():
            shape.tensors[f"blk.{layer}.{kind}.weight"] = type, sizes
            shape.tensors[f"blk.{layer}.{kind}.bias"] = "F32", sizes[:-1]
        for kind, size in {"attn_norm": width, "post_attention_norm": width, "attn_sinks": heads}.items():
            shape.tensors[f"blk.{layer}.{kind}.weight"] = "F32", (size,)
    return shape


@dataclass(frozen=True)
class _DeltaSizes:
    """What differs between the models of architecture qwen35moe: D, H, G of the delta net, E, chosen of them, F."""

    width: int
    heads: int
    value_heads: int
    experts: int
    used: int
    ff: int


def qwen35moe_35b(layers: int = 40, mix: Mix = Q4_K_M) -> ModelShape:
    """Qwen3.6-35B-A3B: three gated delta nets and one gated attention in turn, 256 experts of 512 (8 for each token)
    and a shared one.
    """
    return _qwen35moe("Qwen3.6-35B-A3B", _DeltaSizes(2048, 16, 32, 256, 8, 512), layers, mix)


def qwen35moe_122b(layers: int = 48, mix: Mix = Q3_K_IQ2_S) -> ModelShape:
    """Qwen3.5-122B-A10B: the same, wider. The published width of 3072, 48 layers and 256 experts of 1024; 64 value and
    32 query heads follow from the sum, 122.1 billion weights, of which a token meets 9.8.
    """
    return _qwen35moe("Qwen3.5-122B-A10B", _DeltaSizes(3072, 32, 64, 256, 8, 1024), layers, mix)


def qwen35moe_397b(layers: int = 60, mix: Mix = Q3_K_IQ2_S) -> ModelShape:
    """Qwen3.5-397B-A17B: 512 experts of 1024 (10 for each token). Sizes as public training scripts give them; the 64
    value heads from their sum, 396.3 billion weights.
    """
    return _qwen35moe("Qwen3.5-397B-A17B", _DeltaSizes(4096, 32, 64, 512, 10, 1024), layers, mix)


def _qwen35moe(name: str, sizes_of: _DeltaSizes, layers: int, mix: Mix) -> ModelShape:
    width, heads, experts, ff = sizes_of.width, sizes_of.heads, sizes_of.experts, sizes_of.ff
    kv, head, vocabulary = 2, 256, 248320
    key_heads, value_heads, state, taps = 16, sizes_of.value_heads, 128, 4
    keys, values = key_heads * state, value_heads * state
    shape = ModelShape(
        f"{name} {mix.name}",
        "qwen35moe",
        {
            "block_count": layers,
            "context_length": 32768,
            "embedding_length": width,
            "attention.head_count": heads,
            "attention.head_count_kv": kv,
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e7,
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
            "full_attention_interval": 4,
            "ssm.conv_kernel": taps,
            "ssm.state_size": state,
            "ssm.group_count": key_heads,
            "ssm.time_step_rank": value_heads,
            "ssm.inner_size": values,
            "expert_count": experts,
            "expert_used_count": sizes_of.used,
            "expert_feed_forward_length": ff,
            "expert_shared_feed_forward_length": ff,
            "vocab_size": vocabulary,
        },
        _base(vocabulary, width, mix.embedding),
        sizes_of.used / experts,
    )
    for layer in range(layers):
        sizes: dict[str, tuple[int, ...]] = {"attn_norm": (width,), "post_attention_norm": (width,)}
        others: dict[str, tuple[int, ...]] = {}
        if layer % 4 == 3:
            sizes |= {
                "attn_q": (2 * heads * head, width),
                "attn_k": (kv * head, width),
                "attn_v": (kv * head, width),
                "attn_output": (width, heads * head),
                "attn_q_norm": (head,),
                "attn_k_norm": (head,),
            }
        else:
            sizes |= {
                "attn_qkv": (2 * keys + values, width),
                "attn_gate": (values, width),
                "ssm_alpha": (value_heads, width),
                "ssm_beta": (value_heads, width),
                "ssm_norm": (state,),
                "ssm_out": (width, values),
            }
            others = {
                "ssm_conv1d.weight": (2 * keys + values, taps),
                "ssm_dt.bias": (value_heads,),
                "ssm_a": (value_heads,),
            }
        sizes |= {
            "ffn_gate_inp": (experts, width),
            "ffn_gate_exps": (experts, ff, width),
            "ffn_up_exps": (experts, ff, width),
            "ffn_down_exps": (experts, width, ff),
            "ffn_gate_shexp": (ff, width),
            "ffn_up_shexp": (ff, width),
            "ffn_down_shexp": (width, ff),
        }
        others["ffn_gate_inp_shexp.weight"] = (width,)
        shape.tensors.update(_linears(layer, layers, sizes, mix.type_of))
        shape.tensors.update({f"blk.{layer}.{name}": ("F32", size) for name, size in others.items()})
    return shape


_HEADS, _STATE, _GROUPS, _INNER = 128, 128, 8, 8192
_SSM = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": _INNER,
    "ssm.state_size": _STATE,
    "ssm.time_step_rank": _HEADS,
    "ssm.group_count": _GROUPS,
}


def _mamba2_layer(layer: int, layers: int, width: int) -> dict[str, Layout]:
    channels = _INNER + 2 * _GROUPS * _STATE
    sizes = {"attn_norm": (width,), "ssm_in": (_INNER + channels + _HEADS, width), "ssm_out": (width, _INNER)}
    others: dict[str, tuple[int, ...]] = {
        "ssm_conv1d.weight": (channels, 4),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (_HEADS,),
        "ssm_a": (_HEADS, 1),
        "ssm_d": (_HEADS, 1),
        "ssm_norm.weight": (_GROUPS, _INNER // _GROUPS),
    }
    return dict(_linears(layer, layers, sizes)) | {
        f"blk.{layer}.{name}": ("F32", shape) for name, shape in others.items()
    }


def mamba2_7b(layers: int = 64) -> ModelShape:
    """Mamba-Codestral-7B: Mamba-2 layers alone."""
    width, vocabulary = 4096, 32768
    keys = {
        "block_count": layers,
        "context_length": 32768,
        "embedding_length": width,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": vocabulary,
        **_SSM,
    }
    shape = ModelShape("Mamba-Codestral-7B Q4_K_M", "mamba2", keys, _base(vocabulary, width))
    for layer in range(layers):
        shape.tensors.update(_mamba2_layer(layer, layers, width))
    return shape


# Nemotron-H-8B: M is a Mamba-2 layer, - a feed-forward, * attention.
_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def nemotron_h_8b(layers: int = len(_NEMOTRON)) -> ModelShape:
    """Nemotron-H-8B: Mamba-2, attention and squared-ReLU feed-forward layers."""
    width, vocabulary, ff, heads, kv, head = 4096, 131072, 21504, 32, 8, 128
    kinds = _NEMOTRON[:layers]
    keys = {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": width,
        "feed_forward_length": [ff if kind == "-" else 0 for kind in kinds],
        "attention.head_count": heads,
        "attention.head_count_kv": [kv if kind == "*" else 0 for kind in kinds],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": vocabulary,
        **_SSM,
    }
    shape = ModelShape("Nemotron-H-8B Q4_K_M", "nemotron_h", keys, _base(vocabulary, width))
    for layer, kind in enumerate(kinds):
        if kind == "M":
            shape.tensors.update(_mamba2_layer(layer, layers, width))
            continue
        sizes: dict[str, tuple[int, ...]] = {"attn_norm": (width,)}
        if kind == "-":
            sizes |= {"ffn_up": (ff, width), "ffn_down": (width, ff)}
        else:
            sizes |= {"attn_q": (heads * head, width), "attn_k": (kv * head, width), "attn_v": (kv * head, width)}
            sizes |= {"attn_output": (width, heads * head)}
        shape.tensors.update(_linears(layer, layers, sizes))
    return shape
