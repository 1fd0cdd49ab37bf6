"""Tiny random models of experts with a real tokenizer, as tests of export and serving need them."""

from pathlib import Path

import torch

from pyggtrain.gguf import GGUFFile, QuantTensor, quantize_tensor, typed_metadata, write_gguf

WIDTH, HEADS, KV_HEADS, HEAD, FF, EXPERTS, LAYERS = 64, 4, 2, 16, 64, 4, 2


def write_experts(
    path: Path, architecture: str, tokenizer: GGUFFile, type: str = "F32", *, is_tied: bool = False
) -> Path:
    """A random model of experts with a real tokenizer.

    Args:
        path: the file to write.
        architecture: "qwen3moe", "llama" (Mixtral), "gpt-oss", or "qwen2moe", which has a shared expert too.
        tokenizer: the file whose tokenizer it gets.
        type: of the layers' matrices.
        is_tied: the embedding is the head as well.
    """
    generator = torch.Generator().manual_seed(3)

    def matrix(name: str, *shape: int, type: str = type) -> QuantTensor:
        return quantize_tensor(name, torch.randn(shape, generator=generator) * shape[-1] ** -0.5 * 1.5, type)

    def vector(name: str, *shape: int, mean: float = 0.0) -> QuantTensor:
        return quantize_tensor(name, mean + 0.1 * torch.randn(shape, generator=generator), "F32")

    vocabulary = tokenizer.tensors["token_embd.weight"].shape[0]
    tensors = [
        quantize_tensor("token_embd.weight", torch.randn(vocabulary, WIDTH, generator=generator), "F32"),
        *([] if is_tied else [matrix("output.weight", vocabulary, WIDTH, type="F32")]),
        vector("output_norm.weight", WIDTH, mean=1),
    ]
    is_gpt_oss = architecture == "gpt-oss"
    for layer in range(LAYERS):
        rows = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
        block = f"blk.{layer}."
        tensors += [matrix(f"{block}{name}.weight", size, WIDTH) for name, size in rows.items()]
        tensors += [
            vector(f"{block}attn_norm.weight", WIDTH, mean=1),
            vector(f"{block}{'post_attention_norm' if is_gpt_oss else 'ffn_norm'}.weight", WIDTH, mean=1),
            matrix(f"{block}attn_output.weight", WIDTH, HEADS * HEAD),
            matrix(f"{block}ffn_gate_inp.weight", EXPERTS, WIDTH, type="F32"),
            matrix(f"{block}ffn_gate_exps.weight", EXPERTS, FF, WIDTH),
            matrix(f"{block}ffn_up_exps.weight", EXPERTS, FF, WIDTH),
            matrix(f"{block}ffn_down_exps.weight", EXPERTS, WIDTH, FF),
        ]
        if architecture == "qwen3moe":
            tensors += [vector(f"{block}attn_{name}_norm.weight", HEAD, mean=1) for name in "qk"]
        if architecture in ("gpt-oss", "qwen2moe"):
            tensors += [vector(f"{block}{name}.bias", size) for name, size in rows.items()]
        if architecture == "qwen2moe":
            tensors += [
                vector(f"{block}ffn_gate_inp_shexp.weight", WIDTH),
                matrix(f"{block}ffn_gate_shexp.weight", FF, WIDTH),
                matrix(f"{block}ffn_up_shexp.weight", FF, WIDTH),
                matrix(f"{block}ffn_down_shexp.weight", WIDTH, FF),
            ]
        if is_gpt_oss:
            tensors += [
                vector(f"{block}attn_output.bias", WIDTH),
                vector(f"{block}attn_sinks.weight", HEADS),
                vector(f"{block}ffn_gate_inp.bias", EXPERTS),
                vector(f"{block}ffn_gate_exps.bias", EXPERTS, FF),
                vector(f"{block}ffn_up_exps.bias", EXPERTS, FF),
                vector(f"{block}ffn_down_exps.bias", EXPERTS, WIDTH),
            ]
    keys = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "expert_feed_forward_length": FF,
        "expert_shared_feed_forward_length": FF,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 8,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
        "vocab_size": vocabulary,
    }
    words = {key: value for key, value in typed_metadata(tokenizer).items() if key.startswith("tokenizer.")}
    write_gguf(
        path,
        {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in keys.items()}}
        | words,
        tensors,
    )
    return path
