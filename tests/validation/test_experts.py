"""Mixtures of experts, trained, exported and served: what was trained is what llama.cpp computes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from dense_models import WIDTH
from expert_models import ARCHITECTURES, EXPERTS, FF, LAYERS, write_experts

from pyggtrain import adapters, models
from pyggtrain.adapters import LoraConfig, attach, gguf_adapter
from pyggtrain.gguf import GGUFFile, Tokenizer, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.nn import Batch, LoraPair
from pyggtrain.ops import dequantize
from pyggtrain.validation.llama_server import ServerRuntime
from pyggtrain.validation.parity import ParitySettings, verify_adapter
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings
from pyggtrain.validation.trained_model import TrainedModel

TEXT = "A strip of land along which one may pass from where it is too tiresome to be."


@dataclass(frozen=True)
class TrainedExperts:
    base: Path
    adapter: Path
    model: TrainedModel
    pairs: Mapping[str, LoraPair]
    documents: list[tuple[list[int], list[int]]]
    losses: list[float]


@pytest.fixture
def train_experts(smollm2: GGUFFile, tmp_path: Path) -> Callable[..., TrainedExperts]:
    """train_experts(architecture, type): eight steps on one sentence with pairs on all linears and the router."""

    def train(architecture: str, type: str = "F32") -> TrainedExperts:
        base = GGUFFile.open(write_experts(tmp_path / f"{architecture}.gguf", architecture, smollm2, type))
        model = models.load(base, compute="exact")
        config = LoraConfig(r=4, lora_alpha=8.0, target_modules=("all-linear", "ffn_gate_inp"))
        adapter = attach(model, config, seed=0)
        ids = Tokenizer.from_gguf(base.path).encode(TEXT)
        batch = Batch.from_documents([(ids, ids)])
        optimizer = torch.optim.Adam(adapter.parameters(), lr=1e-2)
        losses = []
        for _ in range(8):
            loss, num_targets = model.loss(batch)
            losses.append(loss.item() / num_targets)
            loss.div(num_targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        path = tmp_path / "adapter.gguf"
        adapters.save(path, adapter, base)
        return TrainedExperts(base.path, path, TrainedModel(model, adapter.pairs), adapter.pairs, [(ids, ids)], losses)

    return train


def mean_kl(log_probs: torch.Tensor, logits: torch.Tensor) -> float:
    other = logits.log_softmax(-1)
    return float((log_probs.exp() * (log_probs - other)).sum(-1).mean())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trained_experts_pass_the_strict_comparison(
    train_experts: Callable[..., TrainedExperts], architecture: str
) -> None:
    trained = train_experts(architecture)
    assert trained.losses[-1] < trained.losses[0] - 2
    report = verify_adapter(trained.base, trained.adapter, trained.documents, ours=trained.model)
    assert report.passed, report.table()
    assert report.mode == "strict"
    effects = next(check for check in report.checks if check.name == f"layers whose effect differs, of {LAYERS}")
    assert effects.passed and effects.value == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trained_experts_are_what_a_llama_server_serves(
    train_experts: Callable[..., TrainedExperts],
    start_server: Callable[[Path, Path], AbstractContextManager[ServerRuntime]],
    architecture: str,
) -> None:
    trained = train_experts(architecture, "Q8_0")
    (tokens, _), *_ = trained.documents
    settings, positions = ParitySettings(max_served_positions=3), [5, 11]
    with start_server(trained.base, trained.adapter) as server:
        report = verify_adapter(
            trained.base, trained.adapter, trained.documents, ours=trained.model, settings=settings, served=server
        )
        base, off, on = (server.logits(tokens, scale=scale, positions=positions) for scale in (None, 0.0, 1.0))
    assert report.passed, report.table()
    check = next(check for check in report.checks if check.name == "adapter: mean KL(llama.cpp || ours)")
    assert torch.equal(off, base)
    assert mean_kl(on, off) > 100 * check.value, "the adapter does little more than rounding"
    # Each expert's pair on its neighbour: the update is as large as it was, and wrong.
    for pair in trained.pairs.values():
        if pair.lora_b.dim() == 3:
            pair.lora_a.data, pair.lora_b.data = pair.lora_a.data.roll(1, 0), pair.lora_b.data.roll(1, 0)
    assert mean_kl(on, trained.model.logits(tokens, scale=1.0)[positions]) > 2 * check.bound


def test_the_file_holds_a_pair_for_each_expert(train_experts: Callable[..., TrainedExperts]) -> None:
    trained = train_experts("qwen2moe")
    pairs = gguf_adapter.load(trained.adapter).pairs
    lora_a, lora_b = pairs["blk.1.ffn_down_exps.weight"]
    assert lora_a.shape == (EXPERTS, 4, FF) and lora_b.shape == (EXPERTS, WIDTH, 4)
    assert len({tuple(row) for row in lora_a[:, 0].tolist()}) == EXPERTS, "experts share a start"
    kinds = {name.split(".")[2] for name in pairs}
    assert {f"ffn_{kind}_{of}" for kind in ("gate", "up", "down") for of in ("exps", "shexp")} | {"attn_q"} <= kinds
    for name, (_, trained_b) in pairs.items():
        # [E, N, r] of a stack, [N, r] of all else.
        still = ~trained_b.flatten(-2).any(-1)
        assert not still.any(), f"{name}: experts {still.nonzero().flatten().tolist()} learnt nothing"


def test_products_of_experts_are_exact_where_that_is_asked_for(smollm2: GGUFFile, tmp_path: Path) -> None:
    path, twin = write_experts(tmp_path / "m.gguf", "qwen3moe", smollm2, "Q8_0"), tmp_path / "twin.gguf"
    file = GGUFFile.open(path)
    tensors = [quantize_tensor(tensor.name, dequantize(tensor), "F32") for tensor in file.tensors.values()]
    write_gguf(twin, typed_metadata(file), tensors)
    ids = Tokenizer.from_gguf(path).encode(TEXT)
    plain = RuntimeSettings(num_ctx=64, num_ubatch=64)
    wanted = BridgeRuntime(twin, plain).logits(ids)
    rounded = BridgeRuntime(path, plain).logits(ids)
    exact = BridgeRuntime(path, replace(plain, exact_products=True)).logits(ids)
    assert float((exact - wanted).abs().max()) < 1e-4 < 1e-3 < float((rounded - wanted).abs().max())
