"""Whole models of experts against float64 in plain torch: logits, loss, and the gradient of every pair, routers too."""

from pathlib import Path

import pytest
import torch
from expert_models import ARCHITECTURES, write_mixture
from expert_reference import ExpertReference

from pyggtrain import _bridge
from pyggtrain.adapters import LoraAdapter, LoraConfig, attach, save
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import POLICIES, Batch
from pyggtrain.ops import dequantize

# gpt-oss has a window of 8 in every other layer: shorter, as long, and longer than two layers of it reach.
LENGTHS = (7, 8, 9, 40)
ROUTERS = ("all-linear", "ffn_gate_inp", "output")


def documents(*lengths: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(4)
    rows = []
    for length in lengths:
        ids = torch.randint(1, 96, (length,), generator=generator).tolist()
        rows.append((ids, [-100 if place % 3 == 1 else token for place, token in enumerate(ids)]))
    return rows


@pytest.fixture(scope="module", params=ARCHITECTURES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Made":
    folder = tmp_path_factory.mktemp("experts")
    return Made(write_mixture(folder / "m.gguf", request.param, num_ff=32, num_experts=5, num_chosen=3))


class Made:
    """A model with random pairs on everything, and the same by hand."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile.open(path)
        self.model = ImportedModel(self.file, compute="exact")
        self.adapter: LoraAdapter = attach(self.model, LoraConfig(r=2, lora_alpha=3.0, target_modules=ROUTERS), seed=0)
        generator = torch.Generator().manual_seed(1)
        for pair in self.adapter.pairs.values():
            pair.lora_b.data = torch.randn(pair.lora_b.shape, generator=generator) * 0.2
        self.leaves = {
            name: tuple(half.detach().double().requires_grad_() for half in (pair.lora_a, pair.lora_b))
            for name, pair in self.adapter.pairs.items()
        }
        architecture = self.file.architecture
        prefix = f"{architecture}."
        self.reference = ExpertReference(
            architecture,
            {key.removeprefix(prefix): value for key, value in self.file.metadata.items() if key.startswith(prefix)},
            {name: dequantize(tensor).double() for name, tensor in self.file.tensors.items()},
            {name: (*halves, 1.5) for name, halves in self.leaves.items()},
        )

    def gradients(self, batch: Batch) -> list[torch.Tensor]:
        """Loss and gradients of all halves."""
        loss, _ = self.model.loss(batch)
        return [loss.detach(), *torch.autograd.grad(loss, list(self.adapter.parameters()))]


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.double().norm())


def test_logits_loss_and_gradients_are_those_of_dense_float64(made: Made) -> None:
    batch = Batch.from_documents(documents(*LENGTHS))
    logits = made.reference.logits(batch.tokens_T, batch.cu_seqlens.tolist())
    with torch.no_grad():
        assert relative(made.model.logits(batch), logits.detach()) < 1e-5
    wanted = torch.nn.functional.cross_entropy(logits, batch.targets_T, reduction="sum")
    loss, *found = made.gradients(batch)
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-6, atol=0)
    leaves = [half for halves in made.leaves.values() for half in halves]
    names = [name for name in made.leaves for _ in range(2)]
    for name, one, other in zip(names, found, torch.autograd.grad(wanted, leaves), strict=True):
        assert cosine(one, other) > 0.99999 and relative(one, other) < 1e-4, name
        # Nobody chose it there, so nobody does here.
        assert not one.flatten(-2)[~other.flatten(-2).any(-1)].any(), name


@pytest.mark.parametrize("policy", POLICIES)
def test_packed_documents_give_the_loss_and_gradients_of_documents_one_by_one(made: Made, policy: str) -> None:
    rows = documents(*LENGTHS)
    made.model.checkpoint_policy = policy
    together = made.gradients(Batch.from_documents(rows))
    apart = [made.gradients(Batch.from_documents([row])) for row in rows]
    made.model.checkpoint_policy = "none"
    for one, others in zip(together, zip(*apart, strict=True), strict=True):
        assert relative(one, torch.stack(others).sum(0)) < 1e-5


def test_another_document_before_it_changes_nothing(made: Made) -> None:
    first, other, last = documents(30, 30, 20)
    with torch.no_grad():
        wanted = made.model.logits(Batch.from_documents([last]))
        for before in (first, other):
            found = made.model.logits(Batch.from_documents([before, last]))
            assert relative(found[30:], wanted) < 1e-6


def test_llama_cpp_computes_the_same_with_the_adapter_beyond_every_window(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    save(path, made.adapter, made.file)
    session = _bridge.Session(str(made.file.path), num_ctx=256, num_ubatch=256, num_threads=1, kv_type="F32")
    ids, labels = documents(100)[0]
    base = torch.from_dlpack(session.logits(ids)).clone()
    session.set_adapters([(session.load_adapter(str(path)), 1.0)])
    served = torch.from_dlpack(session.logits(ids))
    session.close()
    with torch.no_grad():
        found = made.model.logits(Batch.from_documents([(ids, labels)]))
    # Also at the very end, where the first tokens lie far beyond the window.
    for rows in (slice(None), slice(-10, None)):
        assert relative(found[rows], served[rows]) < 1e-5 < 0.1 < relative(served[rows], base[rows])
