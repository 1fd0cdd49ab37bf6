"""How Hugging Face's models name and lay out the weights that a GGUF file holds under its own names.

A layout is known per `general.architecture`, as llama.cpp's converter made the file (conversion/*.py at 0c1e57098):
the module that each kind of weight comes from, and whether the rows of attn_q and attn_k were reordered. Architectures
whose rope turns neighbouring rows (ggml's "NORM") have each head's two halves interleaved: row i of the first half and
row i of the second come to stand side by side. An adapter's lora_b must follow.

What is not listed here is refused: a wrong guess would load in PEFT and mean nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
# {} is the expert's number.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd.weight": "embed_tokens", "output.weight": "lm_head"}


@dataclass(frozen=True)
class Layout:
    """One architecture's modules by kind of weight, and whether its q and k rows are interleaved in the file."""

    modules: Mapping[str, str]
    is_interleaved: bool = False


LAYOUTS = {
    # Mistral and Mixtral are `llama` in a GGUF file.
    "llama": Layout(_ATTENTION | _DENSE | _MIXTRAL_EXPERTS, is_interleaved=True),
    "smollm3": Layout(_ATTENTION | _DENSE, is_interleaved=True),
    "granite": Layout(_ATTENTION | _DENSE, is_interleaved=True),
    "qwen2": Layout(_ATTENTION | _DENSE),
    "qwen2moe": Layout(_ATTENTION | _EXPERTS | _SHARED_EXPERT),
    "qwen3": Layout(_ATTENTION | _DENSE),
    "qwen3moe": Layout(_ATTENTION | _EXPERTS),
    "gemma": Layout(_ATTENTION | _DENSE),
    "gemma2": Layout(_ATTENTION | _DENSE),
    "gemma3": Layout(_ATTENTION | _DENSE),
    "olmo2": Layout(_ATTENTION | _DENSE),
    "seed_oss": Layout(_ATTENTION | _DENSE),
    "phi3": Layout(_FUSED),
}
"""What can be converted, by `general.architecture`."""


def layout_of(architecture: str) -> Layout:
    """The layout of an architecture.

    Raises:
        UnsupportedError: it is not known here.
    """
    if architecture not in LAYOUTS:
        raise UnsupportedError(
            f"How Hugging Face lays out the weights of architecture '{architecture}' is not known here; "
            f"known are: {', '.join(LAYOUTS)}. Use the adapter as GGUF."
        )
    return LAYOUTS[architecture]


def module_name(architecture: str, tensor: str, *, prefix: str) -> str | None:
    """Hugging Face's module of a tensor ("blk.0.attn_q.weight" -> "model.layers.0.self_attn.q_proj"), or None.

    For a stack of experts "{}" stands in the place of the expert's number.

    Args:
        architecture: `general.architecture`.
        tensor: name in the file.
        prefix: the module that holds the layers: "model", or "model.language_model" inside a model that also sees.
    """
    if tensor in _OUTSIDE:
        return _OUTSIDE[tensor] if tensor == "output.weight" else f"{prefix}.{_OUTSIDE[tensor]}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor)
    module = layout_of(architecture).modules.get(match[2]) if match else None
    return f"{prefix}.layers.{match[1]}.{module}" if match and module else None


def tensor_name(architecture: str, module: str) -> tuple[str, int | None] | None:
    """The tensor that a module's weight went into, and the expert's number in it; None for an unknown module.

    The opposite of `module_name`; whatever stands before "layers." or "embed_tokens" is the prefix.
    """
    for tensor, name in _OUTSIDE.items():
        if module == name or module.endswith(f".{name}"):
            return tensor, None
    match = re.fullmatch(r"(?:.+\.)?layers\.(\d+)\.(.+)", module)
    if match is None:
        return None
    expert = re.search(r"(?<=\.experts\.)\d+(?=\.)", match[2])
    inside = match[2] if expert is None else match[2].replace(f".experts.{expert[0]}.", ".experts.{}.")
    for kind, name in layout_of(architecture).modules.items():
        # transformers 5 has another word for Mixtral's block.
        if inside in (name, name.replace("block_sparse_moe.", "mlp.")):
            return f"blk.{match[1]}.{kind}.weight", int(expert[0]) if expert else None
    return None


def num_interleaved_heads(base: GGUFFile, tensor: str) -> int | None:
    """Heads whose rows stand interleaved in a tensor of this file; None if its rows are Hugging Face's.

    Raises:
        UnsupportedError: the architecture is not known, or the file's head counts cannot be read.
    """
    match = re.fullmatch(r"blk\.(\d+)\.attn_([qk])\.weight", tensor)
    if match is None or not layout_of(base.architecture).is_interleaved:
        return None
    key = f"{base.architecture}.attention.head_count"
    found = base.metadata.get(f"{key}_kv") if match[2] == "k" else None
    found = base.metadata.get(key) if found is None else found
    count = found[int(match[1])] if isinstance(found, list) else found
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UnsupportedError(f"{key} in {base.path} is {found!r}: needed the number of heads, to order {tensor}.")
    return count


def interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Hugging Face's order of rows -> the file's: [N, ...], N = heads * 2 * half."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def halved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The file's order of rows -> Hugging Face's; undoes `interleaved`."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
