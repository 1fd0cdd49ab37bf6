"""Tiny models on a GPU against the same on the CPU: logits, and the gradients of pairs on all weights.

    python tests/tiny_models/on_gpu.py              every architecture of the pinned llama.cpp
    python tests/tiny_models/on_gpu.py 'qwen|gpt'   those whose names match
    python tests/tiny_models/on_gpu.py a.gguf ...   files that are there

In float32 with exact products both have to agree up to rounding. In bfloat16 the numbers are rounded to 8 bits on the
way, so what is asked is that logits and gradients point the same way.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from check import LENGTHS, LENGTHS_OF_BLOCKS, make_batch, relative
from tiny_models import NoModelError, generate, table

from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.errors import PyggtrainError
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.model import ImportedModel

# Relative to the rms of what the CPU computes in float32.
MAX_LOGITS_ERROR, MAX_GRADIENT_ERROR = 2e-4, 2e-3
# Of bfloat16. A router's choice that lies on the edge may fall to the other side.
MAX_HALF_LOGITS_ERROR, MAX_HALF_GRADIENT_ERROR = 0.1, 0.25


@dataclass
class Difference:
    """What a GPU computes from what a CPU computes, relative.

    Attributes:
        logits, gradients: in float32.
        half_logits, half_gradients: in bfloat16.
        is_fused: all layers ran as fused halves in bfloat16.
        num_halves: halves of layers that did.
    """

    logits: float
    gradients: float
    half_logits: float
    half_gradients: float
    is_fused: bool
    num_halves: int

    @property
    def is_small(self) -> bool:
        return (
            self.logits <= MAX_LOGITS_ERROR
            and self.gradients <= MAX_GRADIENT_ERROR
            and self.half_logits <= MAX_HALF_LOGITS_ERROR
            and self.half_gradients <= MAX_HALF_GRADIENT_ERROR
        )


def trained(path: Path, device: str, compute: str) -> tuple[ImportedModel, torch.Tensor, torch.Tensor]:
    """A file's model, its logits with pairs, and all their gradients in one row."""
    model = ImportedModel(GGUFFile.open(path), device=device, compute=compute)
    rank = min(2, *(size for linear in model.linears.values() for size in linear.shape[-2:]))
    adapter = attach(model, LoraConfig(r=rank, lora_alpha=2.0 * rank, target_modules=tuple(model.linears)), seed=0)
    generator = torch.Generator().manual_seed(1)
    for pair in adapter.pairs.values():
        pair.lora_b.data.copy_(torch.randn(pair.lora_b.shape, generator=generator) * 0.05)
    batch = make_batch(model.num_logits, LENGTHS if model.unit is None else LENGTHS_OF_BLOCKS).to(device)
    model.checkpoint_policy = "layers"
    with torch.no_grad():
        logits = model.logits(batch).float().cpu()
    loss, _ = model.loss(batch)
    gradients = torch.autograd.grad(loss, adapter.parameters(), allow_unused=True)
    flat = [torch.zeros(1) if gradient is None else gradient.flatten().float().cpu() for gradient in gradients]
    return model, logits, torch.cat(flat)


def compare(path: Path) -> Difference:
    """A file's model on the first GPU and on the CPU."""
    _, wanted, wanted_gradients = trained(path, "cpu", "exact")
    _, logits, gradients = trained(path, "cuda", "exact")
    model, half_logits, half_gradients = trained(path, "cuda", "auto")
    return Difference(
        relative(logits, wanted),
        relative(gradients, wanted_gradients),
        relative(half_logits, wanted),
        relative(half_gradients, wanted_gradients),
        model.is_fused,
        sum(half is not None for region in model.layers for half in region.halves),
    )


def files(arguments: list[str], folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, file) of what is asked for."""
    if arguments and arguments[0].endswith(".gguf"):
        yield from ((Path(argument).stem, Path(argument)) for argument in arguments)
        return
    for architecture, kind in table():
        name = f"{architecture}-{kind}"
        if arguments and not re.search(arguments[0], name):
            continue
        try:
            yield name, generate(architecture, kind, folder)
        except NoModelError as error:
            print(f"{name:24} no tiny model: {str(error)[:100]}", flush=True)


def main() -> int:
    torch.set_num_threads(1)
    num_bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files(sys.argv[1:], Path(folder)):
            try:
                found = compare(path)
            except PyggtrainError as error:
                print(f"{name:24} not served: {str(error)[:150]}", flush=True)
                continue
            except Exception as error:
                num_bad += 1
                print(f"{name:24} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            num_bad += not found.is_small
            numbers = json.dumps({key: float(f"{value:.2g}") for key, value in asdict(found).items()})
            print(f"{name:24} {'' if found.is_small else 'DIFFERS '}{numbers}", flush=True)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
