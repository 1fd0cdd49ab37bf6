"""Tiny models whose layers are the two halves that `ops.fused` knows, without what llama.cpp's fixture adds to all of
its models (a scale of its own for each matrix).
"""

from pathlib import Path

import torch

from pyggtrain.gguf import QuantTensor, quantize_tensor, write_gguf

WIDTH, HEADS, KV_HEADS, HEAD, FF, VOCAB = 64, 4, 2, 16, 96, 96
QKV = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
COMMON = {
    "attn_norm.weight": (WIDTH,),
    "attn_output.weight": (WIDTH, HEADS * HEAD),
    "ffn_norm.weight": (WIDTH,),
    "ffn_down.weight": (WIDTH, FF),
}
DENSE = {
    **COMMON,
    **{f"{name}.weight": (size, WIDTH) for name, size in QKV.items()},
    "ffn_gate.weight": (FF, WIDTH),
    "ffn_up.weight": (FF, WIDTH),
}
BIASES = {f"{name}.bias": (size,) for name, size in QKV.items()}
HEAD_NORMS = {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
# Metadata, tensors of each layer.
Layer = tuple[dict[str, object], dict[str, tuple[int, ...]]]
LAYERS: dict[str, Layer] = {
    "llama": ({}, DENSE),
    "qwen2": ({}, DENSE | BIASES),
    "qwen3": ({"attention.key_length": HEAD, "attention.value_length": HEAD}, DENSE | HEAD_NORMS),
    # One matrix for q, k and v, and one for gate and up.
    "phi3": (
        {"attention.sliding_window": 0},
        COMMON | {"attn_qkv.weight": (sum(QKV.values()), WIDTH), "ffn_up.weight": (2 * FF, WIDTH)},
    ),
}


def write_dense(path: Path, architecture: str, layer: Layer | None = None) -> Path:
    """Two layers with random weights near real scale, all F32.

    Args:
        path: of the file.
        architecture: of the file.
        layer: metadata, tensors of each layer; None: those in `LAYERS`.
    """
    keys, inside = layer or LAYERS[architecture]
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
