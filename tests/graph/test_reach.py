"""What "all-linear" covers of unusual architectures is all that llama.cpp adapts: every layer, and no tensor left out
that a pair would have changed.
"""

import re
from pathlib import Path

import pytest
import torch
from tiny_models import generate

from pyggtrain import _bridge
from pyggtrain.adapters.targets import select
from pyggtrain.errors import BridgeError
from pyggtrain.gguf import GGUFFile, TypedValue, quantize_tensor, write_gguf
from pyggtrain.graph.model import ImportedModel

# Short convolutions, gated delta nets, state spaces, both at once; latent attention; a shared expert; sinks.
MODELS = [
    ("lfm2", "dense"),
    ("qwen35moe", "moe"),
    ("jamba", "moe"),
    ("falcon-h1", "dense"),
    ("deepseek2", "moe"),
    ("glm4moe", "moe"),
    ("qwen2moe", "moe"),
    ("gpt-oss", "moe"),
]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(generate(*request.param, tmp_path_factory.mktemp("reach")))


@pytest.fixture(scope="module")
def model(file: GGUFFile) -> ImportedModel:
    return ImportedModel(file)


def test_every_layer_has_a_pair_by_default(model: ImportedModel) -> None:
    chosen = select(model, ["all-linear"])
    layers = {int(found[1]) for name in chosen if (found := re.match(r"blk\.(\d+)\.", name))}
    assert layers == set(range(len(model.layers)))


def test_a_pair_on_anything_else_is_refused_by_llama_cpp_or_ignored(
    file: GGUFFile, model: ImportedModel, tmp_path: Path
) -> None:
    session = _bridge.Session(str(file.path), num_ctx=64, num_ubatch=64, num_threads=1, kv_type="F32")
    tokens = list(range(1, 30))
    base = torch.from_dlpack(session.logits(tokens)).clone()
    kinds: dict[str, str] = {}
    for name, reason in model.untrainable.items():
        # Embeddings llama.cpp does adapt; they are not implemented here, and the reason says so.
        if name.endswith(".weight") and "not implemented" not in reason:
            kinds.setdefault(re.sub(r"blk\.\d+\.", "", name), name)
    num_ignored = 0
    for name in kinds.values():
        *experts, num_out, num_in = (1, *file.tensors[name].shape)[-max(2, len(file.tensors[name].shape)) :]
        halves = {"lora_a": torch.ones(*experts, 1, num_in), "lora_b": torch.ones(*experts, num_out, 1)}
        path = tmp_path / "one.gguf"
        keys = {"general.type": "adapter", "general.architecture": file.architecture, "adapter.type": "lora"}
        write_gguf(
            path,
            {**keys, "adapter.lora.alpha": TypedValue("f32", 1.0)},
            [quantize_tensor(f"{name}.{half}", values, "F32") for half, values in halves.items()],
        )
        try:
            session.set_adapters([(session.load_adapter(str(path)), 1.0)])
        except BridgeError:
            continue
        num_ignored += 1
        assert torch.equal(torch.from_dlpack(session.logits(tokens)), base), f"{name}: {model.untrainable[name]}"
    session.close()
    assert num_ignored > 1, kinds
