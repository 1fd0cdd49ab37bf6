"""Gated delta net hybrids (qwen35, qwen35moe, qwen3next) against llama.cpp and against float64, on tiny all-F32 files:
several patterns of layers, lengths around a chunk's, adapters on every kind of tensor, packed documents, long ones.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_net_reference import Reference

from pyggtrain import _bridge
from pyggtrain.adapters import LoraConfig, attach, save
from pyggtrain.gguf import GGUFFile, QuantTensor, quantize_tensor, write_gguf
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import Batch
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.rehearse import Rehearsal

WIDTH, HEADS, KV_HEADS, HEAD, FF, VOCAB, EXPERTS, USED = 64, 4, 2, 32, 48, 96, 6, 2
LENGTHS = (1, 63, 64, 65, 500)
CONTEXT = 4096
# Relative to the logits' rms.
BOUND = 1e-4


@dataclass(frozen=True)
class Tiny:
    """A tiny model.

    Attributes:
        is_recurrent: of each layer, whether it is a gated delta net; the others are full attention.
        key_heads, value_heads, state: of the delta nets. taps: of their convolution.
        has_list: the pattern is written layer by layer; else as an interval, which then must be one.
        is_tied: the head is the embedding.
        has_fused_experts: gate and up of all experts are one tensor.
        decay: size of the log decays' factor.
    """

    architecture: str
    is_recurrent: tuple[bool, ...]
    key_heads: int
    value_heads: int
    state: int
    taps: int = 4
    has_list: bool = False
    is_tied: bool = False
    has_fused_experts: bool = False
    decay: float = 1.0

    @property
    def id(self) -> str:
        pattern = "".join("G" if is_recurrent else "A" for is_recurrent in self.is_recurrent)
        return f"{self.architecture}_{pattern}_{self.value_heads}of{self.key_heads}x{self.state}"


TINY = (
    Tiny("qwen35", (True, True, True, False), 2, 4, 32, is_tied=True),
    Tiny("qwen35", (False, True, False), 1, 3, 64, taps=3, has_list=True),
    Tiny("qwen35moe", (True, False, True, False), 2, 4, 32),
    Tiny("qwen35moe", (False, True, True, False, True), 2, 2, 64, has_list=True, has_fused_experts=True),
    Tiny("qwen3next", (True, True, True, False), 2, 4, 32),
)


def shapes_of(tiny: Tiny, layer: int) -> dict[str, tuple[int, ...]]:
    keys, values = tiny.key_heads * tiny.state, tiny.value_heads * tiny.state
    shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (WIDTH,), "post_attention_norm.weight": (WIDTH,)}
    if not tiny.is_recurrent[layer]:
        shapes |= {
            "attn_q.weight": (2 * HEADS * HEAD, WIDTH),
            "attn_k.weight": (KV_HEADS * HEAD, WIDTH),
            "attn_v.weight": (KV_HEADS * HEAD, WIDTH),
            "attn_output.weight": (WIDTH, HEADS * HEAD),
            "attn_q_norm.weight": (HEAD,),
            "attn_k_norm.weight": (HEAD,),
        }
    else:
        shapes |= {
            "attn_qkv.weight": (2 * keys + values, WIDTH),
            "attn_gate.weight": (values, WIDTH),
            "ssm_conv1d.weight": (2 * keys + values, tiny.taps),
            "ssm_dt.bias": (tiny.value_heads,),
            "ssm_a": (tiny.value_heads,),
            "ssm_norm.weight": (tiny.state,),
            "ssm_out.weight": (WIDTH, values),
        }
        if tiny.architecture == "qwen3next":
            shapes["ssm_ba.weight"] = (2 * tiny.value_heads, WIDTH)
        else:
            shapes |= {f"ssm_{gate}.weight": (tiny.value_heads, WIDTH) for gate in ("alpha", "beta")}
    if tiny.architecture == "qwen35":
        return shapes | {
            "ffn_gate.weight": (FF, WIDTH),
            "ffn_up.weight": (FF, WIDTH),
            "ffn_down.weight": (WIDTH, FF),
        }
    experts: dict[str, tuple[int, ...]] = (
        {"ffn_gate_up_exps.weight": (EXPERTS, 2 * FF, WIDTH)}
        if tiny.has_fused_experts
        else {f"ffn_{name}_exps.weight": (EXPERTS, FF, WIDTH) for name in ("gate", "up")}
    )
    return shapes | experts | {
        "ffn_gate_inp.weight": (EXPERTS, WIDTH),
        "ffn_down_exps.weight": (EXPERTS, WIDTH, FF),
        "ffn_gate_inp_shexp.weight": (WIDTH,),
        "ffn_gate_shexp.weight": (FF, WIDTH),
        "ffn_up_shexp.weight": (FF, WIDTH),
        "ffn_down_shexp.weight": (WIDTH, FF),
    }  # fmt: skip


def write(tiny: Tiny, path: Path) -> Path:
    generator = torch.Generator().manual_seed(1)

    def tensor(name: str, shape: tuple[int, ...]) -> QuantTensor:
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif name.endswith("ssm_a"):
            values = -tiny.decay * values.abs()
        elif "conv1d" in name:
            values = values * 0.5
        elif name != "token_embd.weight":
            values = values / shape[-1] ** 0.5
        return quantize_tensor(name, values, "F32")

    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    if not tiny.is_tied:
        shapes["output.weight"] = (VOCAB, WIDTH)
    num_layers = len(tiny.is_recurrent)
    for layer in range(num_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in shapes_of(tiny, layer).items()}
    keys: dict[str, Any] = {
        "block_count": num_layers,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e4,
        "rope.dimension_count": HEAD // 2,
        "rope.dimension_sections": [3, 3, 2, 0],
        "ssm.conv_kernel": tiny.taps,
        "ssm.state_size": tiny.state,
        "ssm.group_count": tiny.key_heads,
        "ssm.time_step_rank": tiny.value_heads,
        "ssm.inner_size": tiny.value_heads * tiny.state,
        "vocab_size": VOCAB,
    }
    if tiny.has_list:
        keys["attention.recurrent_layers"] = list(tiny.is_recurrent)
    else:
        keys["full_attention_interval"] = tiny.is_recurrent.index(False) + 1
    if tiny.architecture != "qwen35":
        keys |= {
            "expert_count": EXPERTS,
            "expert_used_count": USED,
            "expert_feed_forward_length": FF,
            "expert_shared_feed_forward_length": FF,
        }
    write_gguf(
        path,
        {"general.architecture": tiny.architecture, "tokenizer.ggml.model": "no_vocab"}
        | {f"{tiny.architecture}.{key}": value for key, value in keys.items()},
        [tensor(name, shape) for name, shape in shapes.items()],
    )
    return path


def batch_of(*lengths: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return Batch.from_documents([(tokens, tokens) for tokens in ids])


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
    path = write(request.param, tmp_path_factory.mktemp("delta") / "tiny.gguf")
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


def test_gradients_of_all_adapters_are_those_of_float64(served: Served) -> None:
    architecture = served.file.architecture
    if architecture == "qwen3next":
        pytest.skip("the reference has no ssm_ba; the operations are those of qwen35moe")
    model, batch = served.model, batch_of(1, 65, 40)
    names = tuple(model.linears)
    adapter = attach(model, LoraConfig(r=1, lora_alpha=2.0, target_modules=names), seed=0)
    generator = torch.Generator().manual_seed(1)
    for pair in adapter.pairs.values():
        pair.lora_b.data = torch.randn(pair.lora_b.shape, generator=generator) * 0.3
    halves = {name: (pair.lora_a, pair.lora_b) for name, pair in adapter.pairs.items()}
    loss, _ = model.loss(batch)
    found = torch.autograd.grad(loss, [half for pair in halves.values() for half in pair])

    keys = {key.removeprefix(f"{architecture}."): value for key, value in served.file.metadata.items()}
    weights = {
        name: tensor.blocks.view(torch.float32).reshape(tensor.shape).double()
        for name, tensor in served.file.tensors.items()
    }
    exact = {name: tuple(half.detach().double().requires_grad_() for half in pair) for name, pair in halves.items()}
    reference = Reference(keys, weights, {name: (a, b, adapter.pairs[name].scale) for name, (a, b) in exact.items()})
    logits = reference.logits(batch.tokens_T, batch.cu_seqlens.tolist())
    exact_loss = torch.nn.functional.cross_entropy(logits, batch.targets_T, reduction="sum")
    right = torch.autograd.grad(exact_loss, [half for pair in exact.values() for half in pair])
    for name in names:
        model.linears[name].lora = None

    assert abs(float(loss.detach()) - float(exact_loss.detach())) < 1e-5 * float(exact_loss.detach())
    whole = [torch.cat([part.double().flatten() for part in parts]) for parts in (found, right)]
    assert torch.nn.functional.cosine_similarity(*whole, dim=0) >= 0.99999
    for name, one, other in zip([name for name in halves for _ in range(2)], found, right, strict=True):
        cosine = torch.nn.functional.cosine_similarity(one.double().flatten(), other.flatten(), dim=0)
        assert cosine >= 0.99999, (name, float(cosine))


def test_a_step_can_be_planned_without_memory(served: Served) -> None:
    config = TrainConfig(model=str(served.path), data=("d",), output="a.gguf", r=2)
    ids = list(range(1, 80))
    shorter, longer = (
        Rehearsal(served.file, config, LoraConfig(r=2)).trace("none", [(ids, ids)] * count).peak() for count in (1, 3)
    )
    # Three documents need about three times the memory of one, and all of it is known.
    assert 2 < longer["activations"] / shorter["activations"] < 4
