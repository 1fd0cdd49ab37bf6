"""What `bench_training.py` measures: models that llama.cpp takes, with random weights and of the size meant."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="random blocks are laid out by Triton's decoders")

from bench_training import lora_config
from model_shapes import ModelShape, qwen35moe_35b, qwen35moe_122b
from synthetic import HeaderFile, blocks_of_weights
from training_settings import SETTINGS, Setting, qwen35moe_35b_small

from pyggtrain.adapters import attach
from pyggtrain.gguf import QuantTensor
from pyggtrain.graph.model import ImportedModel
from pyggtrain.ops import rehearsal
from pyggtrain.ops.dequantize import block_sizes, dequantize

GIB = 2**30
OTHERS = {name: setting for name, setting in SETTINGS.items() if isinstance(setting.make_shape(), ModelShape)}
LAYERS = {"gpt-oss": 2, "qwen35moe": 4, "deepseek2": 27, "nemotron_h": 9}
"""Architecture -> layers that hold one of each kind; others: 1. llama.cpp knows the small deepseek2 by their number."""


def row_bytes(type: str, columns: int) -> int:
    block_size, block_bytes = block_sizes()[type] if type != "F32" else (1, 4)
    assert columns % block_size == 0
    return columns // block_size * block_bytes


def num_bytes(shape: ModelShape) -> int:
    return sum(prod(sizes[:-1]) * row_bytes(type, sizes[-1]) for type, sizes in shape.tensors.values())


def without_memory(shape: ModelShape) -> Mapping[str, QuantTensor]:
    def tensor(name: str, type: str, sizes: tuple[int, ...]) -> QuantTensor:
        blocks = torch.empty(*sizes[:-1], row_bytes(type, sizes[-1]), dtype=torch.uint8, device="meta")
        return QuantTensor(name, type, sizes, blocks)

    return {name: tensor(name, *layout) for name, layout in shape.tensors.items()}


@pytest.mark.parametrize("name", OTHERS)
def test_llama_cpp_builds_the_graph_and_the_adapter_fits(name: str, tmp_path: Path) -> None:
    setting: Setting = OTHERS[name]
    assert callable(setting.shape)
    shape = setting.shape(LAYERS.get(setting.make_shape().architecture, 1))  # type: ignore[union-attr]
    file = HeaderFile(tmp_path / "header.gguf", shape.metadata, without_memory(shape))
    with rehearsal.rehearsal(lambda storage, operation: None):
        model = ImportedModel(file, device="cpu", dtype=torch.float32)
        adapter = attach(model, lora_config(setting), seed=0)
    assert adapter.num_parameters > 0
    assert len(model.layers) == shape.keys["block_count"]
    assert len(setting.kept(len(model.layers))) == len(model.layers)


@pytest.mark.parametrize(("shape", "gib"), [(qwen35moe_35b_small(), 13.3), (qwen35moe_122b(), 46.1)])
def test_mix_has_the_size_meant(shape: ModelShape, gib: float) -> None:
    assert num_bytes(shape) / GIB == pytest.approx(gib, abs=0.1)


def test_shapes_have_as_many_weights_as_published_files() -> None:
    shape = qwen35moe_35b()
    assert len(shape.tensors) == 733
    assert sum(prod(sizes) for _, sizes in shape.tensors.values()) == 34_660_610_688


def test_every_type_has_random_blocks_of_trained_size() -> None:
    generator = torch.Generator().manual_seed(0)
    for type in sorted({type for setting in OTHERS.values() for type, _ in setting.make_shape().tensors.values()}):  # type: ignore[union-attr]
        if type != "F32":
            blocks = blocks_of_weights(type, 16, 1024, generator)
            weights = dequantize(QuantTensor("weight", type, (16, 1024), blocks))
            assert 0.01 < weights.std() < 0.04, type
