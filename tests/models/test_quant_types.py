"""A model in each tensor type computes what llama.cpp computes with it, and an adapter on it learns."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge, adapters, models
from pyggtrain.adapters import LoraConfig
from pyggtrain.gguf import GGUFFile
from pyggtrain.gguf.requantize import requantize
from pyggtrain.nn import Batch

TOKENS = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(0)).tolist()
BATCH = Batch.from_documents([(TOKENS, TOKENS)])


@pytest.mark.slow
@pytest.mark.parametrize("type", sorted(_bridge.quant_types()))
def test_a_model_of_one_type_is_llama_cpps_and_learns(
    type: str, make_llama: Callable[..., GGUFFile], tmp_path: Path
) -> None:
    source = make_llama(num_layers=1, width=256, num_ff=256, num_heads=4, num_kv_heads=2, head_width=64)
    changes = requantize(source, tmp_path / "copy.gguf", type, is_uniform_allowed=True)
    assert {change.made for change in changes} == {type, "F32"}
    file = GGUFFile(tmp_path / "copy.gguf")

    model = models.load(file, implementation="native", compute="ggml")
    session = _bridge.Session(str(file.path), num_ctx=32, num_ubatch=32, num_threads=1, kv_type="F32")
    served, logits = torch.from_dlpack(session.logits(TOKENS)), model.logits(BATCH).detach()
    # The same kernels on both sides; roundings of activations to 8 bits flip here and there.
    assert (logits - served).norm() < 0.05 * served.norm()

    model = models.load(file)
    adapter = adapters.attach(model, LoraConfig(r=8, lora_alpha=8.0), seed=0)
    parameters = [half for pair in adapter.pairs.values() for half in (pair.lora_a, pair.lora_b)]
    optimizer = torch.optim.AdamW(parameters, lr=2e-2)
    losses = []
    for _ in range(6):
        loss, count = model.loss(BATCH)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) / count)
    assert losses[-1] < losses[0] - 0.3
