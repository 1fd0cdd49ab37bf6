"""Models of a true shape and quant mix, with random valid blocks made on the GPU: what a speed measurement needs of a
file, without the file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from model_shapes import Layout, ModelShape
from pyggtrain.kernels.reference.cases import random_blocks

from pyggtrain.gguf import DeferredTensor, GGUFFile, QuantTensor, writer


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a `llama` file, in the order of its metadata, and its mix: names of ggml types."""

    name: str
    block_count: int
    embedding_length: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_size: int
    vocabulary: int
    mix: str

    def with_layers(self, count: int) -> "LlamaShape":
        """The same with another number of layers."""
        return replace(self, block_count=count)

    def type_of(self, layer: int, kind: str) -> str:
        """ggml type of a linear.

        Q4_K_M gives attn_v and ffn_down of half the layers Q6_K, as llama.cpp's quantiser does; IQ2_M is near that of
        70B files: IQ2_S, with attn_v in Q4_K, attn_output and the first eighth's ffn_down in IQ3_S.
        """
        first, last = self.block_count // 8, 7 * self.block_count // 8
        has_more_bits = layer < first or layer >= last or (layer - first) % 3 == 2
        if self.mix == "Q4_K_M":
            return "Q6_K" if kind in ("attn_v", "ffn_down") and has_more_bits else "Q4_K"
        if self.mix == "IQ2_M":
            if kind == "attn_v":
                return "Q4_K"
            return "IQ3_S" if kind == "attn_output" or (kind == "ffn_down" and layer < first) else "IQ2_S"
        raise ValueError(f"mix {self.mix!r}: needed Q4_K_M or IQ2_M")

    @property
    def metadata(self) -> dict[str, Any]:
        return {
            "general.architecture": "llama",
            "llama.block_count": self.block_count,
            "llama.context_length": 131072,
            "llama.embedding_length": self.embedding_length,
            "llama.feed_forward_length": self.feed_forward_length,
            "llama.attention.head_count": self.head_count,
            "llama.attention.head_count_kv": self.head_count_kv,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 500000.0,
            "llama.rope.dimension_count": self.head_size,
            "llama.vocab_size": self.vocabulary,
        }

    @property
    def tensors(self) -> dict[str, Layout]:
        """Type and shape of each."""
        width, ff, kv = self.embedding_length, self.feed_forward_length, self.head_count_kv * self.head_size
        num_q = self.head_count * self.head_size
        layouts: dict[str, Layout] = {
            "token_embd.weight": ("IQ2_S" if self.mix == "IQ2_M" else "Q4_K", (self.vocabulary, width)),
            "output.weight": ("Q6_K" if self.mix == "Q4_K_M" else "Q5_K", (self.vocabulary, width)),
            "output_norm.weight": ("F32", (width,)),
        }
        sizes = {
            "attn_q": (num_q, width),
            "attn_k": (kv, width),
            "attn_v": (kv, width),
            "attn_output": (width, num_q),
            "ffn_gate": (ff, width),
            "ffn_up": (ff, width),
            "ffn_down": (width, ff),
        }
        for layer in range(self.block_count):
            for kind, shape in sizes.items():
                layouts[f"blk.{layer}.{kind}.weight"] = (self.type_of(layer, kind), shape)
            for kind in ("attn_norm", "ffn_norm"):
                layouts[f"blk.{layer}.{kind}.weight"] = ("F32", (width,))
        return layouts


LLAMA_3_1_8B = LlamaShape("Llama-3.1-8B Q4_K_M", 32, 4096, 14336, 32, 8, 128, 128256, "Q4_K_M")
LLAMA_3_3_70B = LlamaShape("Llama-3.3-70B IQ2_M", 80, 8192, 28672, 64, 8, 128, 128256, "IQ2_M")

# Random scales of blocks that give weights of about the size of trained ones: 0.02 (root of the mean square).
_MAGNITUDE = {
    "Q5_0": 2e-3,
    "Q8_0": 3e-4,
    "Q3_K": 5e-4,
    "Q4_K": 6e-5,
    "Q5_K": 3e-5,
    "Q6_K": 1.5e-5,
    "IQ2_S": 4e-4,
    "IQ3_S": 1.5e-4,
}


def blocks_of_weights(type: str, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Random valid blocks (uint8 [rows, row_bytes]) on the generator's device, for a type of `_MAGNITUDE` or MXFP4."""
    if type != "MXFP4":
        return random_blocks(type, rows, columns, generator=generator, magnitude=_MAGNITUDE[type])
    blocks = random_blocks(type, rows, columns, generator=generator)
    # The scale is a power of two, 2^(byte - 127).
    scales = blocks.view(-1, 17)[:, 0]
    scales.copy_(scales % 4 + 118)
    return blocks


class SyntheticFile:
    """Looks to a model like an opened GGUF file whose tensors lie on the GPU already.

    Args:
        shape: of the model.
        device: where blocks are made.
        seed: of the random blocks.
    """

    architecture = "llama"
    path = Path("synthetic.gguf")

    def __init__(self, shape: LlamaShape, device: torch.device, *, seed: int = 0) -> None:
        self.shape = shape
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self.metadata: dict[str, Any] = shape.metadata
        self.tensors: dict[str, QuantTensor] = {}
        for name, (type, sizes) in shape.tensors.items():
            if type == "F32":
                self._add_norm(name, *sizes)
            else:
                self._add(name, type, *sizes)

    @property
    def file_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def place(self, name: str, device: torch.device | str) -> QuantTensor:
        return self.tensors[name]

    def _add(self, name: str, type: str, rows: int, columns: int) -> None:
        blocks = blocks_of_weights(type, rows, columns, self._generator)
        self.tensors[name] = QuantTensor(name, type, (rows, columns), blocks)

    def _add_norm(self, name: str, width: int) -> None:
        values = torch.rand(width, device=self._device, generator=self._generator) + 0.5
        self.tensors[name] = QuantTensor(name, "F32", (width,), values.view(torch.uint8))


def write_header(path: Path, metadata: Mapping[str, Any], layouts: Mapping[str, Layout]) -> None:
    """Write a file whose weights are holes, which take no room."""

    def produce() -> torch.Tensor:
        raise AssertionError("never written")

    tensors = [DeferredTensor(name, type, shape, produce) for name, (type, shape) in layouts.items()]
    path.write_bytes(writer._header(metadata, tensors, 32))
    num_bytes = sum(writer._padded(writer._num_bytes(tensor), 32) for tensor in tensors)
    os.truncate(path, path.stat().st_size + num_bytes)


class HeaderFile(GGUFFile):
    """An opened GGUF file whose header is on disk, for llama.cpp to build its graph from, and whose weights are holes:
    those that a model gets are on the GPU.

    Args:
        path: where it is written.
        metadata: of the header.
        placed: the tensors on the GPU.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any], placed: Mapping[str, QuantTensor]) -> None:
        write_header(path, metadata, {tensor.name: (tensor.type, tensor.shape) for tensor in placed.values()})
        super().__init__(path)
        self.placed = placed

    def place(self, name: str, device: torch.device | str) -> QuantTensor:
        return self.placed[name]


def random_tensors(shape: ModelShape, device: torch.device, *, seed: int = 0) -> dict[str, QuantTensor]:
    """All tensors of a model on the GPU, of about the size of trained ones."""
    generator = torch.Generator(device).manual_seed(seed)
    return {name: _random_tensor(name, *layout, generator) for name, layout in shape.tensors.items()}


def _random_tensor(name: str, type: str, shape: tuple[int, ...], generator: torch.Generator) -> QuantTensor:
    if type != "F32":
        blocks = blocks_of_weights(type, prod(shape[:-1]), shape[-1], generator)
        return QuantTensor(name, type, shape, blocks.view(*shape[:-1], -1))
    values = torch.rand(shape, generator=generator, device=generator.device) + 0.5
    if name.endswith("ssm_a"):
        values = -values
    elif "norm" not in name and not name.endswith("ssm_d"):
        values = (values - 1) * (3 / shape[-1]) ** 0.5
    return QuantTensor(name, type, shape, values.view(torch.uint8))
