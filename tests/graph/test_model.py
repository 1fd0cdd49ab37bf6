"""The imported model against llama.cpp and the hand-written llama, on a real model and tiny ones of other families."""

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile, QuantTensor, Tokenizer, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.graph import capture as capture_module
from pyggtrain.graph.capture import capture
from pyggtrain.graph.model import ImportedModel
from pyggtrain.graph.program import Part
from pyggtrain.models.llama import Llama
from pyggtrain.nn import POLICIES, Batch

WIDTH, HEADS, HEAD, FF, VOCAB, EXPERTS = 64, 4, 16, 96, 96, 4
Shapes = dict[str, tuple[int, ...]]


def attention_shapes(*, kv: int = 32, bias: bool = False) -> Shapes:
    shapes: Shapes = {"attn_norm.weight": (WIDTH,), "attn_output.weight": (WIDTH, HEADS * HEAD)}
    for name, size in (("attn_q", HEADS * HEAD), ("attn_k", kv), ("attn_v", kv)):
        shapes[f"{name}.weight"] = (size, WIDTH)
        if bias:
            shapes[f"{name}.bias"] = (size,)
    return shapes


def dense_shapes() -> Shapes:
    return {
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (FF, WIDTH),
        "ffn_up.weight": (FF, WIDTH),
        "ffn_down.weight": (WIDTH, FF),
    }


def expert_shapes() -> Shapes:
    return {
        "ffn_gate_inp.weight": (EXPERTS, WIDTH),
        "ffn_gate_exps.weight": (EXPERTS, FF, WIDTH),
        "ffn_up_exps.weight": (EXPERTS, FF, WIDTH),
        "ffn_down_exps.weight": (EXPERTS, WIDTH, FF),
    }


RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
EXPERT_KEYS = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": FF}
INNER = 128
STATES = {"ssm.inner_size": INNER, "ssm.state_size": 16, "ssm.time_step_rank": 8, "ssm.group_count": 2}
MAMBA = {"ssm.conv_kernel": 4, **STATES}
# Architecture -> (metadata, tensors outside of the layers, tensors of each layer).
FAMILIES: dict[str, tuple[dict[str, object], Shapes, Shapes]] = {
    # Biases and an untied head.
    "qwen2": (RMS, {"output.weight": (VOCAB, WIDTH)}, attention_shapes(bias=True) | dense_shapes()),
    # Attention to the whole document, no cache.
    "dream": (RMS, {"output.weight": (VOCAB, WIDTH)}, attention_shapes(bias=True) | dense_shapes()),
    # A window in every other layer, soft-caps on scores and logits, norms after each part, GEGLU, a scaled embedding.
    "gemma2": (
        RMS | {"attention.sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {},
        attention_shapes()
        | dense_shapes()
        | {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)},
    ),
    # A router, experts, norms of queries and keys.
    "qwen3moe": (
        RMS | EXPERT_KEYS,
        {"output.weight": (VOCAB, WIDTH)},
        attention_shapes()
        | {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,), "ffn_norm.weight": (WIDTH,)}
        | expert_shapes(),
    ),
    # Sinks, windows, biases everywhere, experts with the clamped SwiGLU.
    "gpt-oss": (
        RMS | EXPERT_KEYS | {"attention.sliding_window": 8},
        {"output.weight": (VOCAB, WIDTH)},
        attention_shapes(bias=True)
        | {"attn_output.bias": (WIDTH,), "attn_sinks.weight": (HEADS,), "post_attention_norm.weight": (WIDTH,)}
        | expert_shapes()
        | {
            "ffn_gate_inp.bias": (EXPERTS,),
            "ffn_gate_exps.bias": (EXPERTS, FF),
            "ffn_up_exps.bias": (EXPERTS, FF),
            "ffn_down_exps.bias": (EXPERTS, WIDTH),
        },
    ),
    # Multi-head latent attention: one cached row for all heads, weights in stacks, products outside of the LoRA path.
    "deepseek2": (
        RMS
        | {"attention.q_lora_rank": 24, "attention.kv_lora_rank": 32, "attention.head_count_kv": 1}
        | {"attention.key_length": 40, "attention.value_length": 32, "rope.dimension_count": 8}
        | {"attention.key_length_mla": 24, "attention.value_length_mla": 16, "leading_dense_block_count": 2}
        | {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": FF}
        | {"expert_shared_count": 1, "expert_weights_scale": 1.0},
        {"output.weight": (VOCAB, WIDTH)},
        dense_shapes()
        | {
            "attn_norm.weight": (WIDTH,),
            "attn_q_a.weight": (24, WIDTH),
            "attn_q_a_norm.weight": (24,),
            "attn_q_b.weight": (HEADS * 24, 24),
            "attn_kv_a_mqa.weight": (40, WIDTH),
            "attn_kv_a_norm.weight": (32,),
            "attn_k_b.weight": (HEADS, 32, 16),
            "attn_v_b.weight": (HEADS, 16, 32),
            "attn_output.weight": (WIDTH, HEADS * 16),
        },
    ),
    # A short convolution and a state space instead of attention.
    "mamba2": (
        RMS | MAMBA,
        {"output.weight": (VOCAB, WIDTH)},
        {
            "attn_norm.weight": (WIDTH,),
            "ssm_in.weight": (2 * INNER + 2 * 2 * 16 + 8, WIDTH),
            "ssm_conv1d.weight": (INNER + 2 * 2 * 16, 4),
            "ssm_conv1d.bias": (INNER + 2 * 2 * 16,),
            "ssm_dt.bias": (8,),
            "ssm_a": (8, 1),
            "ssm_d": (8, 1),
            "ssm_norm.weight": (2, INNER // 2),
            "ssm_out.weight": (WIDTH, INNER),
        },
    ),
}  # fmt: skip


def write_tiny(path: Path, architecture: str) -> Path:
    """Two layers with random weights near real scale, all F32."""
    keys, outside, inside = FAMILIES[architecture]
    generator = torch.Generator().manual_seed(1)

    def tensor(name: str, shape: tuple[int, ...]) -> QuantTensor:
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif name.endswith("ssm_a"):
            values = -values.abs()
        elif name != "token_embd.weight":
            values = 0.15 * values
        return quantize_tensor(name, values, "F32")

    shapes: Shapes = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,), **outside}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in inside.items()}
    metadata: dict[str, object] = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 2,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD,
        "vocab_size": VOCAB,
        **keys,
    }
    write_gguf(
        path,
        {"general.architecture": architecture, "tokenizer.ggml.model": "no_vocab"}
        | {f"{architecture}.{key}": value for key, value in metadata.items()},
        [tensor(name, shape) for name, shape in shapes.items()],
    )
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImportedModel:
    path = write_tiny(tmp_path_factory.mktemp("family") / f"{request.param}.gguf", request.param)
    return ImportedModel(GGUFFile.open(path), compute="exact")


def documents(*lengths: int, vocab: int = VOCAB) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(1, vocab, (length,), generator=generator).tolist() for length in lengths]
    return Batch.from_documents([(tokens, tokens) for tokens in ids])


def served_logits(path: Path, batch: Batch) -> torch.Tensor:
    """llama.cpp's, each document by itself."""
    session = _bridge.Session(str(path), num_ctx=256, num_ubatch=256, num_threads=1, kv_type="F32")
    bounds = batch.cu_seqlens.tolist()
    rows = [torch.from_dlpack(session.logits(batch.tokens_T[start:end].tolist())) for start, end in pairwise(bounds)]
    session.close()
    return torch.cat(rows)


def with_random_pairs(model: ImportedModel | Llama) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Attach pairs that depend on nothing but the weight's name."""
    for linear in model.linears.values():
        linear.lora = None
    adapter = attach(model, LoraConfig(r=2), seed=0)  # type: ignore[arg-type]
    for name, pair in adapter.pairs.items():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        for half in (pair.lora_a, pair.lora_b):
            half.data.normal_(0, 0.05, generator=generator)
    return {name: (pair.lora_a, pair.lora_b) for name, pair in adapter.pairs.items()}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


# Several families, tiny


def test_logits_equal_llama_cpps_with_several_documents_in_one_batch(tiny: ImportedModel, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", tiny.architecture)
    batch = documents(23, 9, 30)
    with torch.no_grad():
        found = tiny.logits(batch)
    # gemma's GELU comes from a table of half-precision numbers in llama.cpp.
    assert relative(found, served_logits(path, batch)) < (5e-4 if tiny.architecture == "gemma2" else 1e-5)


def test_loss_is_the_cross_entropy_of_the_logits_and_only_of_targets(tiny: ImportedModel) -> None:
    batch = documents(23, 9)
    batch.targets_T[3:11] = -100
    with torch.no_grad():
        loss, num_targets = tiny.loss(batch)
        wanted = torch.nn.functional.cross_entropy(tiny.logits(batch), batch.targets_T, reduction="sum")
    assert num_targets == batch.num_targets
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)


def test_a_batch_without_targets_has_loss_0(tiny: ImportedModel) -> None:
    batch = documents(5)
    batch.targets_T[:] = -100
    loss, num_targets = tiny.loss(batch)
    assert num_targets == 0 and loss.item() == 0.0


def test_gradient_of_a_pair_equals_finite_differences(tiny: ImportedModel) -> None:
    parameters = with_random_pairs(tiny)
    batch = documents(12, 7)
    loss, _ = tiny.loss(batch)
    loss.backward()
    generator = torch.Generator().manual_seed(2)
    for name, halves in parameters.items():
        for half in halves:
            assert half.grad is not None and half.grad.isfinite().all(), name
            direction = torch.randn(half.shape, generator=generator)
            direction /= direction.norm()
            with torch.no_grad():
                # Small: a router that chooses otherwise is a jump.
                step = 2e-3
                half += step * direction
                above, _ = tiny.loss(batch)
                half -= 2 * step * direction
                below, _ = tiny.loss(batch)
                half += step * direction
            slope = float(above - below) / (2 * step)
            found = float((half.grad * direction).sum())
            assert found == pytest.approx(slope, rel=0.05, abs=0.05), name
            half.grad = None


def test_every_policy_gives_equal_loss_and_gradients(tiny: ImportedModel) -> None:
    parameters = with_random_pairs(tiny)
    batch = documents(12, 7)
    results = []
    for policy in POLICIES:
        tiny.checkpoint_policy = policy
        loss, _ = tiny.loss(batch)
        leaves = [half for halves in parameters.values() for half in halves]
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    tiny.checkpoint_policy = "none"
    for result in results[1:]:
        for found, wanted in zip(result, results[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_chunks_of_the_loss_give_the_same_loss(tiny: ImportedModel) -> None:
    batch = documents(23)
    whole, _ = tiny.loss(batch)
    tiny.loss_chunk = 4
    parts, _ = tiny.loss(batch)
    tiny.loss_chunk = None
    torch.testing.assert_close(parts, whole)


def test_log_probs_are_those_of_the_logits_with_their_gradient(tiny: ImportedModel) -> None:
    """Also where something follows the head, and where documents run one by one."""
    batch = documents(5, 9, 1)
    weights = torch.linspace(-1, 1, batch.num_tokens)
    parameters = [half for halves in with_random_pairs(tiny).values() for half in halves]
    found = tiny.log_probs(batch)
    wanted = torch.log_softmax(tiny.logits(batch), dim=1)
    wanted = wanted.gather(1, batch.targets_T.clamp(min=0).unsqueeze(1)).squeeze(1).where(batch.targets_T >= 0, 0.0)
    assert relative(found.detach(), wanted.detach()) < 1e-5
    gradients = [torch.autograd.grad((value * weights).sum(), parameters) for value in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        assert relative(ours, theirs) < 1e-3


def test_layers_are_the_blocks(tiny: ImportedModel) -> None:
    assert len(tiny.layers) == 2
    for index, layer in enumerate(tiny.layers):
        steps = layer.steps  # type: ignore[union-attr]
        names = {name for step in steps for name in step.weights if name.startswith("blk.")}  # type: ignore[union-attr]
        assert names and all(name.startswith(f"blk.{index}.") for name in names)


def test_who_asks_hears_of_each_layer_before_its_weights_are_read(
    tiny: ImportedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    read: set[str] = set()

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def watching(part: Part, *values: Any, **options: Any) -> Any:
            for name in {name for step in part.steps for name in step.weights} & set(tiny.linears):
                assert tiny.layer_of(name) <= heard[-1]
                read.add(name)
            return run(part, *values, **options)

        return watching

    monkeypatch.setattr(Part, "__call__", watched(Part.__call__))
    monkeypatch.setattr(Part, "fused", watched(Part.fused))
    monkeypatch.setattr(tiny, "before_layer", heard.append)
    documents = [(list(range(length)),) * 2 for length in (5, 3)]
    tiny.loss(Batch.from_documents(documents))
    assert heard == [0, 1, 2]
    # The head's product with its loss is no step.
    assert read == {name for name in tiny.linears if name != "output.weight"}
    for index in range(2):
        assert {tiny.layer_of(name) for name in read if name.startswith(f"blk.{index}.")} == {index}
    assert tiny.layer_of("unknown.weight") == 0
    if "output.weight" in tiny.linears:
        assert tiny.layer_of("output.weight") == 2


def test_every_tensor_is_trainable_or_has_a_reason(tiny: ImportedModel) -> None:
    file_names = set(tiny.linears) | set(tiny.untrainable)
    assert {name for name in file_names if name.startswith("blk.1.")} == {
        f"blk.1.{name}" for name in FAMILIES[tiny.architecture][2]
    }
    assert set(tiny.linears).isdisjoint(tiny.untrainable)
    assert "norm" in next(name for name, reason in tiny.untrainable.items() if "no matrix" in reason)


# One architecture, closely


@pytest.fixture(scope="module")
def tiny_llama(tiny_llama_path: Path) -> ImportedModel:
    return ImportedModel(GGUFFile.open(tiny_llama_path), compute="exact")


def test_reach_is_that_of_llama_cpps_own_adapter_path(tiny_llama: ImportedModel, tiny_llama_path: Path) -> None:
    native = Llama(GGUFFile.open(tiny_llama_path), compute="exact")
    assert set(tiny_llama.linears) == set(native.linears)
    assert tiny_llama.head_is_tied and native.head_is_tied
    assert "tied" in tiny_llama.untrainable["token_embd.weight"]


def test_it_has_the_face_of_a_model(tiny_llama: ImportedModel, tiny_llama_path: Path) -> None:
    native = Llama(GGUFFile.open(tiny_llama_path))
    for name in ("architecture", "linears", "untrainable", "head_is_tied", "checkpoint_policy", "loss_chunk", "layers"):
        assert type(getattr(tiny_llama, name)) is type(getattr(native, name)), name


def test_weights_stay_in_the_files_memory_under_the_files_names(tiny_llama_path: Path) -> None:
    file = GGUFFile.open(tiny_llama_path)
    state = ImportedModel(file).state_dict()
    assert set(state) == set(file.tensors)
    for name, tensor in file.tensors.items():
        assert state[name].data_ptr() == tensor.blocks.data_ptr(), name


def test_a_layer_takes_and_gives_the_residual_stream_of_llama_cpps_name(
    tiny_llama: ImportedModel, tiny_llama_path: Path
) -> None:
    batch = documents(20)
    streams: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda module, x, y: streams.extend((*x, y))) for layer in tiny_llama.layers]
    with torch.no_grad():
        tiny_llama.logits(batch)
    for hook in hooks:
        hook.remove()
    session = _bridge.Session(str(tiny_llama_path), num_ctx=256, num_ubatch=256, num_threads=1, kv_type="F32")
    served = [view for _, _, view in session.eval_tensors(batch.tokens_T.tolist(), ["l_out-0", "l_out-1"])]
    session.close()
    assert streams[1] is streams[2]
    for found, wanted in zip((streams[1], streams[3]), map(torch.from_dlpack, served), strict=True):
        assert found.shape == wanted.shape and relative(found, wanted) < 1e-5


def test_no_mask_of_tokens_by_tokens_is_made(tiny_llama: ImportedModel) -> None:
    batch = documents(200)
    shapes: list[tuple[int, ...]] = []
    for region in tiny_llama._programs[None].regions:
        region.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    with torch.no_grad():
        tiny_llama.logits(batch)
    assert shapes and not any(shape[-2:] == (200, 200) for shape in shapes)
    assert not any(
        name.startswith("kq_mask") for region in tiny_llama._programs[None].regions for name in _input_names(region)
    )


def _input_names(region: torch.nn.Module) -> list[str]:
    return [step.name for step in region.steps]  # type: ignore[union-attr]


def test_a_state_that_is_not_known_to_be_empty_makes_documents_run_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GGUFFile.open(write_tiny(tmp_path / "mamba2.gguf", "mamba2"))
    batch = documents(5, 70, 6)
    at_once = ImportedModel(file, compute="exact")
    assert not at_once.takes_one_document
    monkeypatch.setattr("pyggtrain.graph.rewrite.drop_empty_states", lambda graph: graph)
    with caplog.at_level(logging.INFO, logger="pyggtrain.graph.model"):
        one_by_one = ImportedModel(file, compute="exact")
        one_by_one.loss(batch)
    assert one_by_one.takes_one_document
    assert [record.message for record in caplog.records] == [
        "mamba2 carries a state from token to token: documents run one after another."
    ]
    with torch.no_grad():
        assert relative(at_once.logits(batch), one_by_one.logits(batch)) < 1e-6


def test_an_encoder_is_refused(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = capture(tiny_llama_path)
    encoder = type(captures)(**{**vars(captures), "is_causal": False})
    monkeypatch.setattr("pyggtrain.graph.model.cached_capture", lambda file, num_ctx, num_tokens=None: encoder)
    with pytest.raises(UnsupportedError, match="is an encoder"):
        ImportedModel(GGUFFile.open(tiny_llama_path))


def test_a_graph_with_a_cache_computes_what_the_one_without_does(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few models llama.cpp builds only that: keys and values go through memory, and the softmax is written out."""
    file, batch = GGUFFile.open(tiny_llama_path), documents(5, 9)
    wanted = ImportedModel(file, compute="exact").logits(batch)
    text = capture_module._asked(
        file.path, num_ctx=None, num_tokens=None, lengths=capture_module.LENGTHS, with_cache=True
    )
    cached = capture_module.parsed(file.path, text)
    monkeypatch.setattr("pyggtrain.graph.model.cached_capture", lambda file, num_ctx, num_tokens=None: cached)
    model = ImportedModel(file, compute="exact")
    found = model.logits(batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert set(model.linears) == set(ImportedModel(file).linears)


ROPE_KEYS = {
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    "yarn with a factor of attention": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.attn_factor": 1.25,
    },
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "long factors": {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 512},
    "short factors": {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 2048},
}


@pytest.mark.parametrize("case", ROPE_KEYS)
def test_rotations_equal_those_of_the_hand_written_model_and_of_llama_cpp(
    case: str, tiny_llama_path: Path, tmp_path: Path
) -> None:
    base = GGUFFile.open(tiny_llama_path)
    path = tmp_path / "rope.gguf"
    keys = {f"llama.{key}": value for key, value in ROPE_KEYS[case].items()}
    factors = [
        quantize_tensor(f"rope_factors_{length}.weight", torch.linspace(1.0, last, 8), "F32")
        for length, last in (("short", 1.5), ("long", 4.0))
    ]
    tensors = [*base.tensors.values(), *(factors if "factors" in case else [])]
    write_gguf(path, typed_metadata(base) | {"llama.context_length": 1024} | keys, tensors)
    file = GGUFFile.open(path)
    # longrope goes by the context that is served with: here more than 512 and less than 2048 tokens.
    batch = documents(60)
    with torch.no_grad():
        found = ImportedModel(file, compute="exact", num_ctx=1024).logits(batch)
        assert relative(found, Llama(file, compute="exact", num_ctx=1024).logits(batch)) < 1e-5
    session = _bridge.Session(str(path), num_ctx=1024, num_ubatch=256, num_threads=1, kv_type="F32")
    assert relative(found, torch.from_dlpack(session.logits(batch.tokens_T.tolist()))) < 1e-5
    session.close()


# A real model


def test_smollm2_equals_llama_cpp_and_the_hand_written_model_in_logits_and_gradients(
    smollm2_path: Path, smollm2_f32_path: Path
) -> None:
    file = GGUFFile.open(smollm2_f32_path)
    tokenizer = Tokenizer(smollm2_path)
    texts = ("The capital of France is Paris, and its", "def add(a, b):\n    return a + b", "Once upon a time")
    batch = Batch.from_documents([(ids, ids) for ids in map(tokenizer.encode, texts)])
    native, imported = Llama(file, compute="exact"), ImportedModel(file, compute="exact")
    gradients: list[dict[str, torch.Tensor]] = []
    with torch.no_grad():
        logits = imported.logits(batch)
    served = served_logits(smollm2_f32_path, batch)
    # 5.5e-5 of an rms of 6.9 is llama.cpp's own spread between kernels.
    assert relative(logits, served) < 1e-5
    kl = torch.nn.functional.kl_div(logits.log_softmax(-1), served.log_softmax(-1), log_target=True, reduction="none")
    assert kl.sum(-1).max() < 1e-6
    for model in (native, imported):
        parameters = with_random_pairs(model)
        loss, _ = model.loss(batch)
        halves = {f"{name} {index}": pair[index] for name, pair in parameters.items() for index in range(2)}
        gradients.append(dict(zip(halves, torch.autograd.grad(loss, list(halves.values())), strict=True)))
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 2 * 210
    # The hand-written model sums in another order: its layers are two operations each on a CPU, those of the graph
    # many. Over 30 layers that came to 2.7e-5.
    assert max(relative(gradients[1][name], wanted) for name, wanted in gradients[0].items()) < 1e-4
