"""What has to hold before `bench_training.py` times anything: loss and adapter gradients of a small model, fused and in
half precision, against float32 and single operations.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from model_shapes import qwen3moe_30b
from synthetic import HeaderFile, LlamaShape, SyntheticFile, random_tensors

from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.graph.model import ImportedModel
from pyggtrain.models.llama import Llama
from pyggtrain.nn import Batch, Model
from pyggtrain.ops.fused import Kept

SMALL = LlamaShape("small", 4, 256, 512, 4, 2, 64, 600, "Q4_K_M")
# Relative error of the loss and of the adapter gradients: above these nothing is timed.
BOUNDS = {
    ("dense", "auto"): (2e-3, 3e-2),
    ("dense", "fp16"): (2e-3, 1e-2),
    ("dense", "fp8"): (1e-2, 2e-1),
    # Where two of a router's logits are nearly equal, bfloat16 may choose the other expert: 8 choices of 200 tokens.
    ("mixture", "auto"): (2e-3, 1e-1),
}


def products_of(compute: str) -> str:
    """How products are computed: float16 is a matter of activations alone."""
    return "auto" if compute == "fp16" else compute


def check(family: str, compute: str, device: torch.device, folder: Path) -> dict[str, object]:
    """A line of results; its "passed" says whether settings of this family may be timed.

    Args:
        folder: for a header.
    """
    half = torch.float16 if compute == "fp16" else torch.bfloat16
    vocabulary: int
    make: Callable[[torch.dtype, str], Model]
    if family == "dense":
        file = SyntheticFile(SMALL, device)
        vocabulary = SMALL.vocabulary

        def make(dtype: torch.dtype, products: str) -> Model:
            model = Llama(file, device=device, dtype=dtype, compute=products)  # type: ignore[arg-type]
            if dtype == half:
                model.kept = [
                    Kept(halves=False),
                    Kept(gate_up=True, weights=True),
                    Kept(on_host=True),
                    Kept(on_host=True, halves=False),
                ]
            return model
    else:
        shape = qwen3moe_30b(1)
        header = HeaderFile(folder / "check.gguf", shape.metadata, random_tensors(shape, device))
        vocabulary = shape.vocabulary

        def make(dtype: torch.dtype, products: str) -> Model:
            return ImportedModel(header, device=str(device), dtype=dtype, compute=products)

    loss, gradient = _loss_and_gradient(make(half, products_of(compute)), vocabulary, device)
    exact_loss, exact_gradient = _loss_and_gradient(make(torch.float32, "exact"), vocabulary, device)
    loss_error = abs(loss / exact_loss - 1)
    gradient_error = float((gradient - exact_gradient).norm() / exact_gradient.norm())
    max_loss_error, max_gradient_error = BOUNDS[family, compute]
    return {
        "benchmark": "training_check",
        "family": family,
        "compute": compute,
        "loss_error": loss_error,
        "gradient_error": gradient_error,
        "gradient_cosine": float(torch.cosine_similarity(gradient, exact_gradient, dim=0)),
        "passed": loss_error < max_loss_error and gradient_error < max_gradient_error,
    }


def _loss_and_gradient(model: Model, vocabulary: int, device: torch.device) -> tuple[float, torch.Tensor]:
    """Of two documents and pairs whose lora_b is not zero."""
    adapter = attach(model, LoraConfig(r=4, lora_alpha=2), seed=0)
    generator = torch.Generator(device).manual_seed(1)
    for pair in adapter.pairs.values():
        with torch.no_grad():
            pair.lora_b.copy_(torch.randn(pair.lora_b.shape, device=device, generator=generator) * 0.05)
    tokens = torch.randint(0, vocabulary, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    batch = Batch.from_documents([(tokens[:120], tokens[:120]), (tokens[120:], tokens[120:])]).to(device)
    loss_sum, _ = model.loss(batch)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in adapter.parameters() if parameter.grad is not None]
    return loss_sum.item(), torch.cat([gradient.flatten() for gradient in gradients]).double()
