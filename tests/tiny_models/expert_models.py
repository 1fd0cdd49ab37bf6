"""Tiny random models of experts: with a real tokenizer, as export and serving need them, or without."""

from pathlib import Path

import torch
from dense_models import HEAD, HEADS, QKV, WIDTH, write_two_layers

from pyggtrain.gguf import GGUFFile, QuantTensor, quantize_tensor, typed_metadata, write_gguf

ARCHITECTURES = ["llama", "gpt-oss", "qwen2moe", "qwen3moe"]
"""`llama` is Mixtral; `qwen2moe` has a shared expert with a gate, `gpt-oss` biases, sinks and a window in every other
layer.
"""
FF, EXPERTS, CHOSEN, LAYERS = 64, 4, 2, 2


def layer_of(
    architecture: str, *, num_ff: int = FF, num_experts: int = EXPERTS, num_chosen: int = CHOSEN
) -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    """Metadata, without the architecture's name before it, and the shapes of a layer's tensors."""
    norm = "post_attention_norm" if architecture == "gpt-oss" else "ffn_norm"
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{name}.weight": (size, WIDTH) for name, size in QKV.items()},
        "attn_norm.weight": (WIDTH,),
        "attn_output.weight": (WIDTH, HEADS * HEAD),
        f"{norm}.weight": (WIDTH,),
        "ffn_gate_inp.weight": (num_experts, WIDTH),
        "ffn_gate_exps.weight": (num_experts, num_ff, WIDTH),
        "ffn_up_exps.weight": (num_experts, num_ff, WIDTH),
        "ffn_down_exps.weight": (num_experts, WIDTH, num_ff),
    }
    keys: dict[str, object] = {
        "feed_forward_length": num_ff if architecture == "llama" else 2 * num_ff,
        "expert_count": num_experts,
        "expert_used_count": num_chosen,
        "rope.freq_base": 10000.0,
    }
    if architecture != "llama":
        keys["expert_feed_forward_length"] = num_ff
    if architecture in ("gpt-oss", "qwen3moe"):
        keys |= {"attention.key_length": HEAD, "attention.value_length": HEAD}
    if architecture in ("gpt-oss", "qwen2moe"):
        shapes |= {f"{name}.bias": (size,) for name, size in QKV.items()}
    if architecture == "qwen3moe":
        shapes |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
    if architecture == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = num_ff
        shapes |= {
            "ffn_gate_inp_shexp.weight": (WIDTH,),
            "ffn_gate_shexp.weight": (num_ff, WIDTH),
            "ffn_up_shexp.weight": (num_ff, WIDTH),
            "ffn_down_shexp.weight": (WIDTH, num_ff),
        }
    if architecture == "gpt-oss":
        keys["attention.sliding_window"] = 8
        shapes |= {
            "attn_output.bias": (WIDTH,),
            "attn_sinks.weight": (HEADS,),
            "ffn_gate_inp.bias": (num_experts,),
            "ffn_gate_exps.bias": (num_experts, num_ff),
            "ffn_up_exps.bias": (num_experts, num_ff),
            "ffn_down_exps.bias": (num_experts, WIDTH),
        }
    return keys, shapes


def write_mixture(path: Path, architecture: str, **sizes: int) -> Path:
    """Two layers of F32, 96 tokens and no tokenizer; `sizes` as in `layer_of`."""
    return write_two_layers(path, architecture, *layer_of(architecture, **sizes))


def write_experts(
    path: Path, architecture: str, tokenizer: GGUFFile, type: str = "F32", *, is_tied: bool = False
) -> Path:
    """The same with a real tokenizer.

    Args:
        path: the file to write.
        architecture: one of `ARCHITECTURES`.
        tokenizer: the file whose tokenizer it gets.
        type: of the layers' matrices, but routers.
        is_tied: the embedding is the head as well.
    """
    write_mixture(path, architecture)
    plain = GGUFFile.open(path)
    vocabulary = tokenizer.tensors["token_embd.weight"].shape[0]
    generator = torch.Generator().manual_seed(3)
    outside = {"token_embd.weight": 1.0, "output.weight": 1.5 * WIDTH**-0.5}
    if is_tied:
        del outside["output.weight"]

    def tensor(of: QuantTensor) -> QuantTensor:
        if len(of.shape) == 1 or "ffn_gate_inp" in of.name or of.name.endswith(".bias"):
            return of
        return quantize_tensor(of.name, of.blocks.view(torch.float32).reshape(of.shape), type)

    tensors = [
        quantize_tensor(name, std * torch.randn(vocabulary, WIDTH, generator=generator), "F32")
        for name, std in outside.items()
    ]
    tensors += [tensor(of) for name, of in plain.tensors.items() if name not in ("token_embd.weight", "output.weight")]
    words = {key: value for key, value in typed_metadata(tokenizer).items() if key.startswith("tokenizer.")}
    sizes = {f"{architecture}.vocab_size": vocabulary, f"{architecture}.context_length": 512}
    # The file is not needed any more, but its mapping is: it may not be written over.
    path.unlink()
    write_gguf(path, typed_metadata(plain) | words | sizes, tensors)
    return path
