"""Tiny models of two layers that `ops.fused` knows, dense or with a mixture of experts, without what llama.cpp's own
fixture adds to all of its models (a scale for each matrix).
"""

from pathlib import Path

import torch

from pyggtrain.gguf import QuantTensor, quantize_tensor, write_gguf

WIDTH, HEADS, KV_HEADS, HEAD, FF, VOCAB = 64, 4, 2, 16, 96, 96
EXPERTS, CHOSEN, EXPERT_FF = 5, 3, 32
QKV = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
COMMON = {"attn_norm.weight": (WIDTH,), "attn_output.weight": (WIDTH, HEADS * HEAD), "ffn_norm.weight": (WIDTH,)}
ATTENTION = COMMON | {f"{name}.weight": (size, WIDTH) for name, size in QKV.items()}
DENSE = ATTENTION | {
    "ffn_gate.weight": (FF, WIDTH),
    "ffn_up.weight": (FF, WIDTH),
    "ffn_down.weight": (WIDTH, FF),
}
BIASES = {f"{name}.bias": (size,) for name, size in QKV.items()}
HEAD_SIZES = {"attention.key_length": HEAD, "attention.value_length": HEAD}
HEAD_NORMS = {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
MIXTURE = ATTENTION | {
    "ffn_gate_inp.weight": (EXPERTS, WIDTH),
    "ffn_gate_exps.weight": (EXPERTS, EXPERT_FF, WIDTH),
    "ffn_up_exps.weight": (EXPERTS, EXPERT_FF, WIDTH),
    "ffn_down_exps.weight": (EXPERTS, WIDTH, EXPERT_FF),
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp.weight": (WIDTH,),
    "ffn_gate_shexp.weight": (EXPERT_FF, WIDTH),
    "ffn_up_shexp.weight": (EXPERT_FF, WIDTH),
    "ffn_down_shexp.weight": (WIDTH, EXPERT_FF),
}
BIASES_EVERYWHERE = BIASES | {
    "attn_output.bias": (WIDTH,),
    "attn_sinks.weight": (HEADS,),
    "ffn_gate_inp.bias": (EXPERTS,),
    "ffn_gate_exps.bias": (EXPERTS, EXPERT_FF),
    "ffn_up_exps.bias": (EXPERTS, EXPERT_FF),
    "ffn_down_exps.bias": (EXPERTS, WIDTH),
}
EXPERT_SIZES = {"expert_count": EXPERTS, "expert_used_count": CHOSEN, "expert_feed_forward_length": EXPERT_FF}

# Metadata, tensors of each layer.
Layer = tuple[dict[str, object], dict[str, tuple[int, ...]]]
# By architecture.
LAYERS: dict[str, Layer] = {
    "llama": ({}, DENSE),
    "qwen2": ({}, DENSE | BIASES),
    "qwen3": ({**HEAD_SIZES}, DENSE | HEAD_NORMS),
    # One matrix for q, k and v, and one for gate and up.
    "phi3": (
        {"attention.sliding_window": 0},
        COMMON
        | {"attn_qkv.weight": (sum(QKV.values()), WIDTH)}
        | {"ffn_up.weight": (2 * FF, WIDTH), "ffn_down.weight": (WIDTH, FF)},
    ),
}
MIXTURES: dict[str, Layer] = {
    "llama": (EXPERT_SIZES | {"feed_forward_length": EXPERT_FF}, MIXTURE),
    "gpt-oss": (
        EXPERT_SIZES | HEAD_SIZES | {"attention.sliding_window": 8},
        {name.replace("ffn_norm", "post_attention_norm"): shape for name, shape in MIXTURE.items()} | BIASES_EVERYWHERE,
    ),
    "qwen2moe": (EXPERT_SIZES | {"expert_shared_feed_forward_length": EXPERT_FF}, MIXTURE | SHARED_EXPERT),
    "qwen3moe": (EXPERT_SIZES | HEAD_SIZES, MIXTURE | HEAD_NORMS),
}


def write_layers(path: Path, architecture: str, layer: Layer) -> Path:
    """A model with random weights near real scale, all F32.

    Args:
        path: of the file.
        architecture: of the file.
        layer: what each of its two layers is.
    """
    keys, inside = layer
    generator = torch.Generator().manual_seed(1)

    def tensor(name: str, shape: tuple[int, ...]) -> QuantTensor:
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif name != "token_embd.weight" and not name.endswith("bias"):
            values = 1.2 * values / shape[-1] ** 0.5
        return quantize_tensor(name, values, "F32")

    outside = {"token_embd.weight": (VOCAB, WIDTH), "output.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    shapes = outside | {f"blk.{index}.{name}": shape for index in range(2) for name, shape in inside.items()}
    metadata = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "vocab_size": VOCAB,
        **keys,
    }
    typed = {f"{architecture}.{key}": value for key, value in metadata.items()}
    write_gguf(
        path,
        {"general.architecture": architecture, **typed, "tokenizer.ggml.model": "no_vocab"},
        [tensor(name, shape) for name, shape in shapes.items()],
    )
    return path
