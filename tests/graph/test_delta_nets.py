"""Gated delta net hybrids (qwen35, qwen35moe, qwen3next) against llama.cpp and against float64, on tiny all-F32 files:
several patterns of layers, lengths around a chunk's, adapters on every kind of tensor, packed documents, long ones.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_models import CONTEXT, TINY, Tiny, batch_of, write_delta
from delta_net_reference import Reference

from pyggtrain import _bridge
from pyggtrain.adapters import LoraConfig, attach, save
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import Batch
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.rehearse import Rehearsal

LENGTHS = (1, 63, 64, 65, 500)
# Relative to the logits' rms.
BOUND = 1e-4


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the rms of what is right."""
    return float((found - wanted).abs().max() / wanted.square().mean().sqrt())


@dataclass(eq=False)
class Served:
    """A tiny file, its model, and llama.cpp's session with it."""

    path: Path
    file: GGUFFile
    model: ImportedModel
    session: _bridge.Session

    def logits(self, batch: Batch) -> torch.Tensor:
        """llama.cpp's, each document by itself."""
        bounds = batch.cu_seqlens.tolist()
        tokens = [batch.tokens_T[start:end].tolist() for start, end in pairwise(bounds)]
        return torch.cat([torch.from_dlpack(self.session.logits(ids)) for ids in tokens])


@pytest.fixture(scope="module", params=TINY, ids=lambda tiny: tiny.id)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_delta(request.param, tmp_path_factory.mktemp("delta") / "tiny.gguf")
    file = GGUFFile.open(path)
    session = _bridge.Session(str(path), num_ctx=CONTEXT, num_ubatch=512, num_threads=1, kv_type="F32")
    yield Served(path, file, ImportedModel(file, compute="exact"), session)
    session.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_are_llama_cpps_at_every_length(served: Served, length: int) -> None:
    batch = batch_of(length)
    with torch.no_grad():
        assert relative(served.model.logits(batch), served.logits(batch)) < BOUND


def test_packed_documents_are_as_good_as_separate_ones(served: Served) -> None:
    batch = batch_of(*LENGTHS)
    assert not served.model.takes_one_document
    with torch.no_grad():
        assert relative(served.model.logits(batch), served.logits(batch)) < BOUND


def test_no_state_is_left_in_the_graph(served: Served) -> None:
    names = {step.name for region in served.model.layers for step in region.steps}  # type: ignore[union-attr]
    assert any(name.startswith(("attn_output-", "conv_output")) for name in names)
    assert not any("state" in name or "cache" in name for name in names)


# llama.cpp's names of what a delta net computes on its way, and of what every layer does. (It gives others twice.)
DELTA_NET = (
    "conv_output_silu",
    "q_conv_predelta",
    "k_conv_predelta",
    "v_conv_predelta",
    "a_softplus",
    "final_output",
)
LAYER = ("attn_norm", "attn_residual", "attn_post_norm", "l_out")


def test_every_named_tensor_of_every_layer_is_llama_cpps(served: Served, request: pytest.FixtureRequest) -> None:
    batch = batch_of(65)
    with torch.no_grad():
        found = {step.name: value for step, value in served.model.run_steps(batch)}
    tiny: Tiny = request.node.callspec.params["served"]
    named = [
        f"{kind}-{layer}"
        for layer, is_recurrent in enumerate(tiny.is_recurrent)
        for kind in (LAYER + DELTA_NET if is_recurrent else LAYER)
    ]
    compared = set()
    for name, _, view in served.session.eval_tensors(batch.tokens_T.tolist(), named):
        wanted = torch.from_dlpack(view).float()
        assert relative(found[name].reshape(wanted.shape), wanted) < BOUND, name
        compared.add(name)
    assert compared == set(named)


def test_an_adapter_on_each_kind_of_tensor_is_llama_cpps(served: Served, tmp_path: Path) -> None:
    batch = batch_of(70, 9)
    base = served.logits(batch)
    by_kind: dict[str, list[str]] = {}
    for name in served.model.linears:
        by_kind.setdefault(re.sub(r"blk\.\d+\.", "", name), []).append(name)
    wanted_kinds = {"attn_qkv.weight", "attn_gate.weight", "ssm_out.weight", "attn_q.weight", "attn_output.weight"}
    assert wanted_kinds <= by_kind.keys()
    for kind, names in by_kind.items():
        rank = min(2, *(size for name in names for size in served.model.linears[name].shape[-2:]))
        adapter = attach(served.model, LoraConfig(r=rank, lora_alpha=2.0 * rank, target_modules=tuple(names)), seed=0)
        generator = torch.Generator().manual_seed(1)
        for pair in adapter.pairs.values():
            pair.lora_b.data = torch.randn(pair.lora_b.shape, generator=generator) * 0.3
        path = tmp_path / f"{kind}.gguf"
        save(path, adapter, served.file)
        served.session.set_adapters([(served.session.load_adapter(str(path)), 1.0)])
        wanted = served.logits(batch)
        served.session.set_adapters([])
        with torch.no_grad():
            found = served.model.logits(batch)
        for name in names:
            served.model.linears[name].lora = None
        assert relative(wanted, base) > 1e-2, kind
        assert relative(found, wanted) < BOUND, kind


@pytest.mark.slow
@pytest.mark.parametrize("served", [TINY[0], TINY[3]], ids=lambda tiny: tiny.id, indirect=True)
def test_a_long_document_does_not_drift_away(served: Served) -> None:
    batch = batch_of(4000)
    with torch.no_grad():
        difference = (served.model.logits(batch) - served.logits(batch)).abs().amax(1)
    size = float(served.logits(batch_of(64)).square().mean().sqrt())
    # Nothing grows with the number of tokens: the last quarter is as good as the first.
    assert difference.max() < BOUND * size
    assert difference[3000:].mean() < 4 * difference[:1000].mean()


def gradients(
    file: GGUFFile, model: ImportedModel, batch: Batch, *, size: float = 0.3
) -> tuple[tuple[float, float], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The loss, the model's and float64's, and so of each factor of a pair on every linear the gradient; `size` is that
    of the pairs' second factors.
    """
    names = tuple(model.linears)
    adapter = attach(model, LoraConfig(r=1, lora_alpha=2.0, target_modules=names), seed=0)
    generator = torch.Generator().manual_seed(1)
    for pair in adapter.pairs.values():
        pair.lora_b.data = (torch.randn(pair.lora_b.shape, generator=generator) * size).to(pair.lora_b.device)
    halves = {name: (pair.lora_a, pair.lora_b) for name, pair in adapter.pairs.items()}
    loss, _ = model.loss(batch.to(adapter.pairs[names[0]].lora_a.device))
    found = torch.autograd.grad(loss, [half for pair in halves.values() for half in pair])

    keys = {key.removeprefix(f"{file.architecture}."): value for key, value in file.metadata.items()}
    weights = {
        name: tensor.blocks.view(torch.float32).reshape(tensor.shape).double() for name, tensor in file.tensors.items()
    }
    exact = {
        name: tuple(half.detach().double().cpu().requires_grad_() for half in pair) for name, pair in halves.items()
    }
    reference = Reference(keys, weights, {name: (a, b, adapter.pairs[name].scale) for name, (a, b) in exact.items()})
    logits = reference.logits(batch.tokens_T, batch.cu_seqlens.tolist())
    exact_loss = torch.nn.functional.cross_entropy(logits, batch.targets_T, reduction="sum")
    right = torch.autograd.grad(exact_loss, [half for pair in exact.values() for half in pair])
    for name in names:
        model.linears[name].lora = None
    factors = [f"{name}.{half}" for name in halves for half in ("lora_a", "lora_b")]
    both = [(one.double().flatten().cpu(), other.flatten()) for one, other in zip(found, right, strict=True)]
    return (float(loss.detach()), float(exact_loss.detach())), dict(zip(factors, both, strict=True))


def cosine(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Of all first ones together with all second ones."""
    whole = [torch.cat(parts) for parts in zip(*pairs, strict=True)]
    return float(torch.nn.functional.cosine_similarity(*whole, dim=0))


def test_gradients_of_all_adapters_are_those_of_float64(served: Served) -> None:
    (loss, exact_loss), found = gradients(served.file, served.model, batch_of(1, 65, 40))
    assert abs(loss - exact_loss) < 1e-5 * exact_loss
    assert cosine(found.values()) >= 0.99999
    for name, both in found.items():
        assert cosine([both]) >= 0.99999, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
def test_gradients_in_bfloat16_point_the_same_way(tiny: Tiny, tmp_path: Path) -> None:
    # As in a trained model, a layer adds little to what passes it, and a pair little to its weight: else rounding of
    # what passes decides all.
    file = GGUFFile.open(write_delta(tiny, tmp_path / "tiny.gguf", gain=0.3))
    model = ImportedModel(file, device="cuda")
    (loss, exact_loss), found = gradients(file, model, batch_of(1, 65, 40), size=0.09)
    assert abs(loss - exact_loss) < 1e-3 * exact_loss
    assert cosine(found.values()) >= 0.9999


def test_a_step_can_be_planned_without_memory(served: Served) -> None:
    config = TrainConfig(model=str(served.path), data=("d",), output="a.gguf", r=2)
    ids = list(range(1, 80))
    shorter, longer = (
        Rehearsal(served.file, config, LoraConfig(r=2)).trace("none", [(ids, ids)] * count).peak() for count in (1, 3)
    )
    # Three documents need about three times the memory of one, and all of it is known.
    assert 2 < longer["activations"] / shorter["activations"] < 4
