"""Random `llama` files of every shape that the architecture allows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain.gguf import GGUFFile, QuantTensor, quantize_tensor, write_gguf


@dataclass
class LlamaFile:
    """What to write; the default is 2 layers, width 64, 4 query and 2 kv heads of 16, 96 tokens, tied head, all F32."""

    num_layers: int = 2
    width: int = 64
    num_ff: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_width: int = 16
    num_vocab: int = 96
    is_tied: bool = True
    has_bias: bool = False
    has_fused_qkv: bool = False
    types: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    seed: int = 1

    def values(self) -> dict[str, torch.Tensor]:
        """Every tensor's values before quantisation; `tensors` replaces or adds."""
        generator = torch.Generator().manual_seed(self.seed)
        values: dict[str, torch.Tensor] = {}

        def matrix(name: str, num_out: int, num_in: int, std: float = 0.15) -> None:
            values[f"{name}.weight"] = torch.randn(num_out, num_in, generator=generator) * std
            if self.has_bias and name.startswith("blk."):
                values[f"{name}.bias"] = torch.randn(num_out, generator=generator) * 0.1

        def norm(name: str) -> None:
            values[f"{name}.weight"] = 1 + 0.1 * torch.randn(self.width, generator=generator)

        num_q, num_kv = self.num_heads * self.head_width, self.num_kv_heads * self.head_width
        matrix("token_embd", self.num_vocab, self.width, std=1.0)
        norm("output_norm")
        if not self.is_tied:
            matrix("output", self.num_vocab, self.width)
        for layer in range(self.num_layers):
            norm(f"blk.{layer}.attn_norm")
            if self.has_fused_qkv:
                matrix(f"blk.{layer}.attn_qkv", num_q + 2 * num_kv, self.width)
            else:
                matrix(f"blk.{layer}.attn_q", num_q, self.width)
                matrix(f"blk.{layer}.attn_k", num_kv, self.width)
                matrix(f"blk.{layer}.attn_v", num_kv, self.width)
            matrix(f"blk.{layer}.attn_output", self.width, num_q)
            norm(f"blk.{layer}.ffn_norm")
            matrix(f"blk.{layer}.ffn_gate", self.num_ff, self.width)
            matrix(f"blk.{layer}.ffn_up", self.num_ff, self.width)
            matrix(f"blk.{layer}.ffn_down", self.width, self.num_ff)
        values.update(self.tensors)
        return {name: tensor for name, tensor in values.items() if name not in self.without}

    def write(self, path: Path) -> GGUFFile:
        metadata = {
            "general.architecture": "llama",
            "llama.block_count": self.num_layers,
            "llama.context_length": 256,
            "llama.embedding_length": self.width,
            "llama.feed_forward_length": self.num_ff,
            "llama.attention.head_count": self.num_heads,
            "llama.attention.head_count_kv": self.num_kv_heads,
            "llama.attention.key_length": self.head_width,
            "llama.attention.value_length": self.head_width,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": self.head_width,
            "llama.vocab_size": self.num_vocab,
            "tokenizer.ggml.model": "no_vocab",
            **self.metadata,
        }
        write_gguf(
            path,
            {key: value for key, value in metadata.items() if value is not None},
            [self._tensor(name, tensor) for name, tensor in self.values().items()],
        )
        return GGUFFile.open(path)

    def _tensor(self, name: str, values: torch.Tensor) -> QuantTensor:
        kind = name.split(".")[-2]
        return quantize_tensor(name, values, self.types.get(kind, "F32") if name.endswith(".weight") else "F32")


@pytest.fixture
def make_llama(tmp_path: Path) -> Callable[..., GGUFFile]:
    """make_llama(**fields of LlamaFile) -> the opened file."""
    return lambda **fields: LlamaFile(**fields).write(tmp_path / "model.gguf")
