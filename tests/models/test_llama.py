"""models.llama: the graph, its gradients, and what it refuses."""

import logging
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge, adapters, models
from pyggtrain.errors import ConfigError, GGUFError, UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import POLICIES, Batch
from pyggtrain.ops import dequantize

VARIANTS = {
    "plain": {},
    "untied": {"is_tied": False},
    "biases": {"has_bias": True},
    "fused": {"has_fused_qkv": True},
    "fused with biases": {"has_fused_qkv": True, "has_bias": True},
    "8 heads over 2, wide heads": {"num_heads": 8, "num_kv_heads": 2, "head_width": 24},
    "one kv head": {"num_kv_heads": 1},
    "rope_freqs": {"tensors": {"rope_freqs.weight": torch.tensor([1.0, 1, 2, 2.5, 4, 8, 8, 8])}},
    "linear": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "old key of linear": {"metadata": {"llama.rope.scale_linear": 4.0}},
    "yarn": {
        "metadata": {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
            "llama.rope.freq_base": 500.0,
        }
    },
    "longrope": {
        "metadata": {
            "llama.rope.scaling.type": "longrope",
            "llama.rope.scaling.original_context_length": 128,
            "llama.rope.scaling.attn_factor": 1.19,
        },
        "tensors": {
            "rope_factors_long.weight": torch.tensor([1.0, 1.5, 2, 3, 4, 6, 9, 12]),
            "rope_factors_short.weight": torch.tensor([1.0, 1, 1, 1, 1.5, 1.5, 2, 2]),
        },
    },
    "mixed types": {
        "width": 256,
        "num_ff": 512,
        "is_tied": False,
        "types": {"attn_q": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q8_0", "ffn_up": "Q4_1", "token_embd": "Q5_0"},
    },
}
IDS = pytest.mark.parametrize("variant", VARIANTS)


def tokens_of(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 96, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(*lengths: int, is_masked: bool = False) -> Batch:
    documents = []
    for index, length in enumerate(lengths):
        ids = tokens_of(length, seed=index)
        documents.append((ids, [-100 if is_masked and i % 3 == 0 else id for i, id in enumerate(ids)]))
    return Batch.from_documents(documents)


def with_random_pairs(file: GGUFFile, *, targets="all-linear", **options):
    model = models.load(file, compute="exact", **options)
    adapter = adapters.attach(model, adapters.LoraConfig(r=4, lora_alpha=6.0, target_modules=targets), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for pair in adapter.pairs.values():
            pair.lora_b.normal_(0, 0.2, generator=generator)
    return model, adapter


class Float64Llama:
    """The same model written down once more, dense and in float64, for one document. Rotation angles by the formula."""

    def __init__(self, file: GGUFFile, adapter: adapters.LoraAdapter | None, *, is_long: bool = True) -> None:
        self.w = {name: dequantize(tensor, dtype=torch.float64) for name, tensor in file.tensors.items()}
        self.key = lambda name, default=None: file.metadata.get(f"llama.{name}", default)
        self.is_long = is_long
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        for name, pair in (adapter.pairs if adapter else {}).items():
            a, b = (half.detach().double().requires_grad_() for half in (pair.lora_a, pair.lora_b))
            self.pairs[name] = (a, b, pair.scale)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].t()
        if f"{name}.weight" in self.pairs:
            a, b, scale = self.pairs[f"{name}.weight"]
            y = y + scale * (x @ a.t()) @ b.t()
        return y + self.w.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self.key("attention.layer_norm_rms_epsilon")
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.w[f"{name}.weight"]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        num_tokens, _, n = x.shape
        base, kind = self.key("rope.freq_base", 10000.0), self.key("rope.scaling.type", "linear")
        factor = self.key("rope.scaling.factor", self.key("rope.scale_linear", 1.0))
        i = torch.arange(n // 2, dtype=torch.float64)
        theta = torch.arange(num_tokens, dtype=torch.float64)[:, None] * base ** (-2 * i / n)
        for name in ("rope_freqs", f"rope_factors_{'long' if self.is_long else 'short'}"):
            theta = theta / self.w.get(f"{name}.weight", 1.0)
        magnitude = self.key("rope.scaling.attn_factor", 1.0)
        scaled = theta / factor
        if kind == "yarn":
            original = self.key("rope.scaling.original_context_length")
            low, high = (n * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in (32.0, 1.0))
            low, high = max(0, math.floor(low)), min(n - 1, math.ceil(high))
            keep = 1 - ((i - low) / max(0.001, high - low)).clamp(0, 1)
            scaled = scaled * (1 - keep) + theta * keep
            magnitude *= 1 + 0.1 * math.log(factor)
        cos, sin = scaled.cos()[:, None] * magnitude, scaled.sin()[:, None] * magnitude
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv = self.key("attention.head_count"), self.key("attention.head_count_kv")
        width = self.key("attention.key_length")
        x = self.w["token_embd.weight"][tokens]
        hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        for layer in range(self.key("block_count")):
            block = f"blk.{layer}."
            y = self.norm(block + "attn_norm", x)
            if block + "attn_qkv.weight" in self.w:
                fused = self.linear(block + "attn_qkv", y)
                q, k, v = fused.split([num_heads * width, num_kv * width, num_kv * width], -1)
            else:
                q, k, v = (self.linear(block + name, y) for name in ("attn_q", "attn_k", "attn_v"))
            q, k, v = (t.unflatten(-1, (-1, width)) for t in (q, k, v))
            q, k = self.rotate(q), self.rotate(k)
            k, v = (t.repeat_interleave(num_heads // num_kv, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
            o = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
            x = x + self.linear(block + "attn_output", o.flatten(1))
            y = self.norm(block + "ffn_norm", x)
            gate, up = self.linear(block + "ffn_gate", y), self.linear(block + "ffn_up", y)
            x = x + self.linear(block + "ffn_down", torch.nn.functional.silu(gate) * up)
        head = "output" if "output.weight" in self.w else "token_embd"
        return self.linear(head, self.norm("output_norm", x))

    def loss(self, batch: Batch) -> torch.Tensor:
        bounds = batch.cu_seqlens.tolist()
        return sum(
            torch.nn.functional.cross_entropy(
                self.logits(batch.tokens_T[start:end]), batch.targets_T[start:end], reduction="sum"
            )
            for start, end in pairwise(bounds)
        )


@IDS
def test_logits_are_those_of_the_written_down_model(make_llama: Callable, variant):
    file = make_llama(**VARIANTS[variant])
    model, adapter = with_random_pairs(file)
    batch = batch_of(40)
    with torch.no_grad():
        logits, reference = model.logits(batch), Float64Llama(file, adapter).logits(batch.tokens_T)
    assert float((logits - reference).norm() / reference.norm()) < 1e-5


@IDS
def test_logits_are_those_of_llama_cpp(make_llama: Callable, variant):
    file = make_llama(**{**VARIANTS[variant], "types": {}})
    batch = batch_of(48)
    with torch.no_grad():
        logits = models.load(file, compute="exact").logits(batch)
    session = _bridge.Session(
        str(file.path), num_ctx=256, num_ubatch=64, num_threads=1, kv_type="F32", flash_attention=False
    )
    served = torch.from_dlpack(session.logits(batch.tokens_T.tolist()))
    rms = float(served.pow(2).mean().sqrt())
    assert float((logits - served).abs().max()) < 1e-3 * rms
    log_p, log_q = served.log_softmax(-1), logits.log_softmax(-1)
    assert float((log_p.exp() * (log_p - log_q)).sum(-1).mean()) < 1e-6


@pytest.mark.slow
def test_loss_at_the_end_of_a_row_of_12000_tokens_is_llama_cpps_with_rope_factors(make_llama: Callable):
    file = make_llama(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        metadata={"llama.rope.freq_base": 500000.0, "llama.context_length": 12_288},
        **VARIANTS["rope_freqs"],
    )
    batch = batch_of(12_000)
    end = slice(11_000, 11_999)
    session = _bridge.Session(str(file.path), num_ctx=12_288, num_ubatch=512, num_threads=1, kv_type="F32")
    served = torch.from_dlpack(session.logits(batch.tokens_T.tolist()))[end]
    session.close()
    with torch.no_grad():
        found = models.load(file, compute="exact").logits(batch)[end]
    losses = [torch.nn.functional.cross_entropy(logits, batch.targets_T[end]) for logits in (found, served)]
    assert abs(float(losses[0] - losses[1])) < 1e-6
    assert float((found - served).norm()) < 1e-5 * float(served.norm())


@pytest.mark.parametrize("variant", ["plain", "untied", "fused with biases", "mixed types"])
def test_every_adapter_gradient_is_that_of_the_written_down_model(make_llama: Callable, variant):
    file = make_llama(**VARIANTS[variant])
    targets = ("all-linear", "output") if not VARIANTS[variant].get("is_tied", True) else "all-linear"
    model, adapter = with_random_pairs(file, targets=targets)
    batch = batch_of(13, 1, 20, is_masked=True)
    loss, num_targets = model.loss(batch)
    (loss / num_targets).backward()
    reference = Float64Llama(file, adapter)
    (reference.loss(batch) / batch.num_targets).backward()
    assert num_targets == batch.num_targets
    assert adapter.pairs.keys() == model.linears.keys()
    for name, pair in adapter.pairs.items():
        for half, exact in zip((pair.lora_a, pair.lora_b), reference.pairs[name][:2], strict=True):
            error = float((half.grad - exact.grad).norm() / exact.grad.norm())
            assert error < 2e-5, f"{name}: relative error {error}"


def test_gradient_is_the_slope_of_the_loss(make_llama: Callable):
    # Along the gradient itself the loss is steepest, so float32 resolves the difference.
    model, adapter = with_random_pairs(make_llama())
    batch = batch_of(30)
    model.loss(batch)[0].backward()
    parameters = list(adapter.parameters())
    norm = torch.sqrt(sum(parameter.grad.pow(2).sum() for parameter in parameters))
    step = 1e-3

    def loss_at(distance: float) -> float:
        with torch.no_grad():
            for parameter in parameters:
                parameter += distance * parameter.grad / norm
            loss = float(model.loss(batch)[0])
            for parameter in parameters:
                parameter -= distance * parameter.grad / norm
        return loss

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    assert slope == pytest.approx(float(norm), rel=5e-3)


def test_packed_documents_are_the_documents_one_by_one(make_llama: Callable):
    model, adapter = with_random_pairs(make_llama(has_bias=True))
    documents = [(tokens_of(length, seed=length), tokens_of(length, seed=length)) for length in (9, 1, 17, 4)]

    def gradients_of(batches: list[Batch]) -> tuple[float, list[torch.Tensor]]:
        for parameter in adapter.parameters():
            parameter.grad = None
        total = 0.0
        for batch in batches:
            loss, _ = model.loss(batch)
            loss.backward()
            total += loss.item()
        return total, [parameter.grad.clone() for parameter in adapter.parameters()]

    packed_loss, packed = gradients_of([Batch.from_documents(documents)])
    single_loss, single = gradients_of([Batch.from_documents([document]) for document in documents])
    assert packed_loss == pytest.approx(single_loss, rel=1e-6)
    for together, apart in zip(packed, single, strict=True):
        torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpoint_policies_give_the_same_loss_and_gradients(make_llama: Callable, dropout):
    model = models.load(make_llama(is_tied=False), compute="exact")
    adapter = adapters.attach(model, adapters.LoraConfig(r=4, lora_dropout=dropout), seed=0)
    with torch.no_grad():
        for pair in adapter.pairs.values():
            pair.lora_b.normal_(0, 0.2, generator=torch.Generator().manual_seed(2))
    batch = batch_of(21, 8, is_masked=True)
    outcomes = {}
    for policy in POLICIES:
        model.checkpoint_policy = policy
        torch.manual_seed(0)
        loss, _ = model.loss(batch)
        outcomes[policy] = (loss.detach(), *torch.autograd.grad(loss, list(adapter.parameters())))
    for policy in POLICIES[1:]:
        for kept, recomputed in zip(outcomes["none"], outcomes[policy], strict=True):
            assert torch.equal(kept, recomputed), policy


def test_loss_chunk_changes_nothing_beyond_rounding(make_llama: Callable):
    model, _ = with_random_pairs(make_llama())
    batch = batch_of(25, is_masked=True)
    losses = []
    for chunk in (1, 7, None):
        model.loss_chunk = chunk
        losses.append(model.loss(batch)[0].item())
    assert losses == pytest.approx([losses[-1]] * 3, rel=1e-6)


def test_longrope_takes_its_factors_by_the_context_served_with(make_llama: Callable):
    file = make_llama(**VARIANTS["longrope"])
    batch = batch_of(30)
    for num_ctx, is_long in ((64, True), (256, True), (None, True)):
        # 64 becomes 256 in llama.cpp, which is above the original 128.
        with torch.no_grad():
            logits = models.load(file, compute="exact", num_ctx=num_ctx).logits(batch)
            reference = Float64Llama(file, None, is_long=is_long).logits(batch.tokens_T)
        assert float((logits - reference).norm() / reference.norm()) < 1e-5
    long_original = {**VARIANTS["longrope"]["metadata"], "llama.rope.scaling.original_context_length": 256}
    file = make_llama(**{**VARIANTS["longrope"], "metadata": long_original})
    with torch.no_grad():
        logits = models.load(file, compute="exact", num_ctx=256).logits(batch)
        reference = Float64Llama(file, None, is_long=False).logits(batch.tokens_T)
    assert float((logits - reference).norm() / reference.norm()) < 1e-5


def test_attention_scale_is_ignored_as_llama_cpp_ignores_it(make_llama: Callable, caplog):
    batch = batch_of(20)
    with torch.no_grad():
        plain = models.load(make_llama()).logits(batch)
        file = make_llama(metadata={"llama.attention.scale": 0.9})
        with caplog.at_level(logging.WARNING):
            scaled = models.load(file).logits(batch)
    assert torch.equal(plain, scaled)
    assert "llama.attention.scale" in caplog.text and "has no effect" in caplog.text
    session = _bridge.Session(str(file.path), num_ctx=256, num_ubatch=64, num_threads=1, kv_type="F32")
    served = torch.from_dlpack(session.logits(batch.tokens_T.tolist()))
    torch.testing.assert_close(scaled, served, rtol=1e-3, atol=1e-3)


def test_weights_are_views_of_the_file(make_llama: Callable):
    file = make_llama(types={"attn_q": "Q8_0"})
    model = models.load(file)
    for name, linear in model.linears.items():
        assert linear.weight.data_ptr() == file.tensors[name].blocks.data_ptr(), name
    assert model.token_embd.weight.data_ptr() == file.tensors["token_embd.weight"].blocks.data_ptr()


@pytest.mark.parametrize("variant", ["plain", "untied", "fused with biases", "biases"])
def test_state_names_are_tensor_names(make_llama: Callable, variant):
    file = make_llama(**VARIANTS[variant])
    model = models.load(file)
    assert set(model.state_dict()) == set(file.tensors)
    assert set(model.linears) | set(model.untrainable) == set(file.tensors)
    assert model.head_is_tied == ("output.weight" not in file.tensors)
    assert len(model.layers) == 2


def test_unknown_keys_are_listed_in_one_warning(make_llama: Callable, caplog):
    with caplog.at_level(logging.WARNING):
        models.load(make_llama(metadata={"llama.new_thing": 1, "llama.rope.other": 2.0}))
    (record,) = caplog.records
    assert "llama.new_thing, llama.rope.other" in record.getMessage()


def test_a_common_file_gives_no_warning(make_llama: Callable, caplog):
    with caplog.at_level(logging.WARNING):
        models.load(make_llama(metadata={"llama.attention.head_count_kv": [2, 2], "llama.rope.freq_base": 5e5}))
    assert not caplog.records


def test_extra_tensors_are_listed(make_llama: Callable, caplog):
    with caplog.at_level(logging.WARNING):
        models.load(make_llama(tensors={"blk.0.attn_q_norm.weight": torch.ones(16)}))
    assert "does not use: blk.0.attn_q_norm.weight" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "tensors", "named"),
    [
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, {}, "llama.expert_count"),
        ({"llama.attention.value_length": 8}, {}, "llama.attention.value_length"),
        ({"llama.rope.dimension_count": 8}, {}, "llama.rope.dimension_count"),
        ({"llama.attention.causal": False}, {}, "llama.attention.causal"),
        ({"llama.nextn_predict_layers": 1}, {}, "llama.nextn_predict_layers"),
        ({"llama.rope.scaling.type": "dynamic"}, {}, "llama.rope.scaling.type"),
        ({"llama.attention.head_count": [4, 2]}, {}, "llama.attention.head_count.*differs from layer to layer"),
        ({"llama.attention.head_count_kv": 3}, {}, "4 query heads and 3 kv heads"),
        ({}, {"blk.1.ffn_up.scale": torch.ones(1)}, "blk.1.ffn_up.scale"),
        ({}, {"blk.0.attn_q.input_scale": torch.ones(1)}, "blk.0.attn_q.input_scale"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(make_llama: Callable, metadata, tensors, named):
    with pytest.raises(UnsupportedError, match=named):
        models.load(make_llama(metadata=metadata, tensors=tensors), implementation="native")


def test_what_the_hand_written_model_lacks_is_taken_from_llama_cpp(make_llama: Callable, caplog):
    with caplog.at_level("INFO", logger="pyggtrain"):
        model = models.load(make_llama(tensors={"blk.1.ffn_up.scale": torch.full((1,), 0.5)}))
    assert type(model).__name__ == "ImportedModel"
    assert "blk.1.ffn_up.scale" in caplog.text and "llama.cpp's own graph" in caplog.text


def test_an_unknown_implementation_is_named(make_llama: Callable):
    with pytest.raises(ConfigError, match="needed: one of auto, native, graph"):
        models.load(make_llama(), implementation="torch")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"metadata": {"llama.block_count": None}}, "llama.block_count is missing"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": None}}, "layer_norm_rms_epsilon is missing"),
        ({"metadata": {"llama.embedding_length": "64"}}, "llama.embedding_length.*is '64'"),
        ({"metadata": {"llama.attention.head_count": 0}}, "llama.attention.head_count.*1 or more"),
        ({"metadata": {"llama.rope.freq_base": 0.0}}, "llama.rope.freq_base.*above 1"),
        ({"metadata": {"llama.rope.freq_base": math.nan}}, "llama.rope.freq_base.*a finite number"),
        ({"metadata": {"llama.block_count": 3}}, "blk.2.attn_norm.weight is missing"),
        ({"without": ("blk.1.ffn_up.weight",)}, "blk.1.ffn_up.weight is missing.*shape"),
        ({"metadata": {"llama.feed_forward_length": 128}}, r"blk.0.ffn_gate.weight.*\[96, 64\].*\[128, 64\]"),
        ({"tensors": {"output.weight": torch.zeros(95, 64)}}, r"output.weight.*\[95, 64\].*\[96, 64\]"),
        ({"tensors": {"rope_freqs.weight": torch.ones(7)}}, r"rope_freqs.weight.*\[7\].*\[8\]"),
    ],
)
def test_an_inconsistent_file_is_named(make_llama: Callable, fields, named):
    with pytest.raises(GGUFError, match=named):
        models.load(make_llama(**fields))


def test_an_unknown_architecture_lists_the_known_ones(make_llama: Callable):
    with pytest.raises(UnsupportedError, match=r"(?s)'nonsense'.*there are llama\..*unknown model architecture"):
        models.load(make_llama(metadata={"general.architecture": "nonsense"}))


PARTS = (range(1), range(1, 3), range(3, 4))


def parts_of(file: GGUFFile, **options) -> list[tuple[models.Model, adapters.LoraAdapter]]:
    return [with_random_pairs(file, layers=layers, **options) for layers in PARTS]


@pytest.mark.parametrize("variant", ["plain", "untied"])
def test_parts_of_a_model_compute_what_the_whole_does(make_llama, variant):
    """As processes do that each have some of the layers (training.pipeline), in one process."""
    file = make_llama(num_layers=4, **VARIANTS[variant])
    whole, adapter = with_random_pairs(file)
    batch = batch_of(9, 4, is_masked=True)
    loss, count = whole.loss(batch)
    loss.backward()
    parts = parts_of(file)
    x_TD = parts[0][0].embed(batch)
    for model, _ in parts:
        x_TD = model.run_own_layers(x_TD, batch)
    last = parts[-1][0]
    loss_of_parts, count_of_parts = last.loss_of(x_TD, batch)
    loss_of_parts.backward()
    assert torch.equal(loss_of_parts, loss) and count_of_parts == count
    assert torch.equal(last.log_probs_of(x_TD, batch), whole.log_probs(batch))
    for name, pair in adapter.pairs.items():
        for (_, part), layers in zip(parts, PARTS, strict=True):
            mine = part.pairs[name]
            if name.startswith("blk.") and int(name.split(".")[1]) in layers:
                assert torch.equal(mine.lora_a.grad, pair.lora_a.grad), name
                assert torch.equal(mine.lora_b.grad, pair.lora_b.grad), name
            else:
                assert mine.lora_a.grad is None, name


def test_a_model_from_the_graph_is_not_split(make_llama):
    with pytest.raises(UnsupportedError, match="only a hand-written model can be split by layers"):
        models.load(make_llama(), implementation="graph", layers=range(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_part_on_a_gpu_holds_its_own_weights_only_and_computes_what_the_whole_does(make_llama):
    file = make_llama(num_layers=4, **VARIANTS["mixed types"])
    options = {"target_modules": "all-linear"}
    config = adapters.LoraConfig(r=4, lora_alpha=6.0, **options)
    batch = batch_of(130, 70, is_masked=True).to("cuda")
    losses, gradients = [], []
    for cut in ((range(4),), PARTS):
        loaded = [models.load(file, device="cuda", layers=layers if len(cut) > 1 else None) for layers in cut]
        pairs = [adapters.attach(model, config, seed=0).pairs for model in loaded]
        for some in pairs:
            for index, pair in enumerate(some.values()):
                with torch.no_grad():
                    generator = torch.Generator().manual_seed(index)
                    pair.lora_b.copy_(torch.randn(pair.lora_b.shape, generator=generator) * 0.1)
        for model, layers in zip(loaded, cut, strict=True):
            assert model.is_fused
            for name, linear in model.linears.items():
                is_own = int(name.split(".")[1]) in layers if name.startswith("blk.") else layers.stop == 4
                assert linear.weight.is_cuda == is_own, name
        x_TD = loaded[0].embed(batch)
        for model in loaded:
            x_TD = model.run_own_layers(x_TD, batch)
        loss, _ = loaded[-1].loss_of(x_TD, batch)
        loss.backward()
        losses.append(loss.item())
        own = {
            name: pair.lora_b.grad.clone()
            for some, layers in zip(pairs, cut, strict=True)
            for name, pair in some.items()
            if name.startswith("blk.") and int(name.split(".")[1]) in layers
        }
        gradients.append(own)
    assert losses[0] == losses[1]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize("compute", ["auto", "exact"])
def test_who_asks_hears_of_each_layer(compute: str, tiny_llama_path: Path) -> None:
    model = models.load(GGUFFile.open(tiny_llama_path), implementation="native", compute=compute)
    heard: list[int] = []
    model.before_layer = heard.append
    model.loss(batch_of(5))
    assert heard == [0, 1, 2]
    names = ("token_embd.weight", "blk.0.ffn_up.weight", "blk.1.attn_q.weight", "output.weight")
    assert [model.layer_of(name) for name in names] == [0, 0, 1, 2]
