"""Mixtures of experts, trained, exported and served: what was trained is what llama.cpp computes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from pyggtrain import adapters, models
from pyggtrain.adapters import LoraConfig, attach, gguf_adapter
from pyggtrain.errors import AdapterError
from pyggtrain.gguf import GGUFFile, QuantTensor, Tokenizer, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.nn import Batch
from pyggtrain.ops import dequantize
from pyggtrain.validation.llama_server import ServerRuntime
from pyggtrain.validation.parity import ParitySettings, verify_adapter
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings
from pyggtrain.validation.trained_model import TrainedModel

WIDTH, HEADS, KV_HEADS, HEAD, FF, EXPERTS, LAYERS = 64, 4, 2, 16, 64, 4, 2
TEXT = "A strip of land along which one may pass from where it is too tiresome to be."


def write_experts(path: Path, architecture: str, tokenizer: GGUFFile, type: str) -> Path:
    """A random model of experts with a real tokenizer. Matrices of the layers are of `type`."""
    generator = torch.Generator().manual_seed(3)

    def matrix(name: str, *shape: int, type: str = type) -> QuantTensor:
        return quantize_tensor(name, torch.randn(shape, generator=generator) * shape[-1] ** -0.5 * 1.5, type)

    def vector(name: str, *shape: int, mean: float = 0.0) -> QuantTensor:
        return quantize_tensor(name, mean + 0.1 * torch.randn(shape, generator=generator), "F32")

    vocabulary = tokenizer.tensors["token_embd.weight"].shape[0]
    tensors = [
        quantize_tensor("token_embd.weight", torch.randn(vocabulary, WIDTH, generator=generator), "F32"),
        matrix("output.weight", vocabulary, WIDTH, type="F32"),
        vector("output_norm.weight", WIDTH, mean=1),
    ]
    is_gpt_oss = architecture == "gpt-oss"
    for layer in range(LAYERS):
        rows = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
        block = f"blk.{layer}."
        tensors += [matrix(f"{block}{name}.weight", size, WIDTH) for name, size in rows.items()]
        tensors += [
            vector(f"{block}attn_norm.weight", WIDTH, mean=1),
            vector(f"{block}{'post_attention_norm' if is_gpt_oss else 'ffn_norm'}.weight", WIDTH, mean=1),
            matrix(f"{block}attn_output.weight", WIDTH, HEADS * HEAD),
            matrix(f"{block}ffn_gate_inp.weight", EXPERTS, WIDTH, type="F32"),
            matrix(f"{block}ffn_gate_exps.weight", EXPERTS, FF, WIDTH),
            matrix(f"{block}ffn_up_exps.weight", EXPERTS, FF, WIDTH),
            matrix(f"{block}ffn_down_exps.weight", EXPERTS, WIDTH, FF),
        ]
        if architecture == "qwen3moe":
            tensors += [vector(f"{block}attn_{name}_norm.weight", HEAD, mean=1) for name in "qk"]
        if is_gpt_oss:
            tensors += [
                *(vector(f"{block}{name}.bias", size) for name, size in rows.items()),
                vector(f"{block}attn_output.bias", WIDTH),
                vector(f"{block}attn_sinks.weight", HEADS),
                vector(f"{block}ffn_gate_inp.bias", EXPERTS),
                vector(f"{block}ffn_gate_exps.bias", EXPERTS, FF),
                vector(f"{block}ffn_up_exps.bias", EXPERTS, FF),
                vector(f"{block}ffn_down_exps.bias", EXPERTS, WIDTH),
            ]
    keys = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "expert_feed_forward_length": FF,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 8,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
        "vocab_size": vocabulary,
    }
    words = {key: value for key, value in typed_metadata(tokenizer).items() if key.startswith("tokenizer.")}
    write_gguf(
        path,
        {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in keys.items()}}
        | words,
        tensors,
    )
    return path


@dataclass(frozen=True)
class TrainedExperts:
    base: Path
    adapter: Path
    model: TrainedModel
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
        return TrainedExperts(base.path, path, TrainedModel(model, adapter.pairs), [(ids, ids)], losses)

    return train


ARCHITECTURES = ["qwen3moe", "llama", "gpt-oss"]


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
    settings = ParitySettings(max_served_positions=3)
    with start_server(trained.base, trained.adapter) as server:
        report = verify_adapter(
            trained.base, trained.adapter, trained.documents, ours=trained.model, settings=settings, served=server
        )
    assert report.passed, report.table()


def test_the_file_holds_a_pair_for_each_expert(train_experts: Callable[..., TrainedExperts]) -> None:
    trained = train_experts("qwen3moe")
    pairs = gguf_adapter.load(trained.adapter).pairs
    lora_a, lora_b = pairs["blk.1.ffn_down_exps.weight"]
    assert lora_a.shape == (EXPERTS, 4, FF) and lora_b.shape == (EXPERTS, WIDTH, 4)
    assert len({tuple(row) for row in lora_a[:, 0].tolist()}) == EXPERTS, "experts share a start"
    assert lora_b.abs().sum((1, 2)).min() > 0


@pytest.mark.parametrize("experts", [slice(0, 2), 0], ids=["too few", "one for all"])
def test_a_pair_that_llama_cpp_would_read_beyond_is_refused(
    train_experts: Callable[..., TrainedExperts], tmp_path: Path, experts: slice | int
) -> None:
    trained = train_experts("qwen3moe")
    file = GGUFFile.open(trained.adapter)
    name = "blk.0.ffn_up_exps.weight"

    def cut(tensor: QuantTensor) -> QuantTensor:
        if not tensor.name.startswith(name):
            return tensor
        values = tensor.blocks.view(torch.float32).reshape(tensor.shape)[experts].contiguous()
        return quantize_tensor(tensor.name, values, "F32")

    path = tmp_path / "short.gguf"
    write_gguf(path, typed_metadata(file), [cut(tensor) for tensor in file.tensors.values()])
    with pytest.raises(AdapterError, match=rf"{name} .* needed lora_a \[4, 4, 64\] and lora_b \[4, 64, 4\]"):
        gguf_adapter.check_against_base(gguf_adapter.load(path), GGUFFile.open(trained.base))


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
