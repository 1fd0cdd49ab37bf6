"""The predicted peak of a fused step against what was measured on a GPU, and the choice of what to keep."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_shapes import more_bits

from pyggtrain import models
from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Model, kept_by
from pyggtrain.ops import workspace
from pyggtrain.ops.fused import Kept
from pyggtrain.training import gpu_memory
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.gpu_memory import (
    FusedSetting,
    FusedSizes,
    RehearsedOnGpu,
    StepSizes,
    fitting,
    fused_peak,
    fused_settings,
    kept_on_host,
    plan_fused,
)
from pyggtrain.training.memory import MemoryPlan, join_free_device_memory
from pyggtrain.training.rehearse import ADAPTER, BASE, Rehearsal

GIB, MIB = 2**30, 2**20
LLAMA_8B = FusedSizes(4096, 14336, 6144, 4096, 32, (64, 64, 64, 64), 128256, 32)
WEIGHTS, PARAMETERS = int(4.58 * GIB), 41_943_040

WHOLE = Kept(attention=False, on_host=True, halves=False)


def step_of(num_tokens: int) -> StepSizes:
    return StepSizes(num_tokens, num_tokens, resident=WEIGHTS + 12 * PARAMETERS, gradients=4 * PARAMETERS)


def on_host(gate_up: int, weights: int = 0, on_card: int = 0) -> list[Kept]:
    """All but what so many last layers have on the card."""
    return [Kept(True, layer >= 32 - gate_up, layer >= 32 - weights, layer < 32 - on_card) for layer in range(32)]


def on_card(gate_up: int) -> list[Kept]:
    return [Kept(gate_up=layer >= 32 - gate_up) for layer in range(32)]


@pytest.fixture(autouse=True)
def _head_in_three_parts() -> Iterator[None]:
    workspace.set_limit_bytes(2 * 4096 * 42752, "cuda")
    yield
    workspace.set_limit_bytes(workspace.DEFAULT_GPU_LIMIT_BYTES, "cuda")


# One H200, torch 2.11, expandable segments, Llama-3.1-8B Q4_K_M shape, r = 16 (benchmarks/bench_training.py): GiB that
# torch's allocator had reserved at most.
MEASURED = [
    (8192, on_host(0), 6.97),
    (8192, on_host(1), 7.22),
    (8192, on_host(2), 7.65),
    (8192, on_host(32, 6), 23.24),
    (8192, on_card(18), 23.47),
    (8192, on_host(32, 32), 35.19),
    (2048, on_host(0), 6.05),
    (2048, on_host(32, 9), 13.26),
    (81_920, on_host(2), 19.90),
    # Attention's backward is the peak.
    (350_000, [Kept(False, on_host=layer < 24, halves=layer >= 17) for layer in range(32)], 79.46),
]


@pytest.mark.parametrize(("num_tokens", "kept", "measured"), MEASURED)
def test_prediction_is_within_5_percent_of_what_was_measured(
    num_tokens: int, kept: list[Kept], measured: float
) -> None:
    predicted = fused_peak(LLAMA_8B, kept, step_of(num_tokens))
    assert predicted / GIB == pytest.approx(measured, rel=0.05)


# The same card, 4 x 2048 tokens, head decoded as a whole: GiB given out at most.
@pytest.mark.parametrize(("weights", "on_card", "measured"), [(20, 14, 33.41), (14, 22, 33.17)])
def test_activations_on_the_card_in_place_of_weights_change_the_peak_as_measured(
    weights: int, on_card: int, measured: float
) -> None:
    workspace.set_limit_bytes(2 * 4096 * 128256, "cuda")
    without, predicted = (
        fused_peak(LLAMA_8B, kept, step_of(8192)) / GIB for kept in (on_host(32, 31), on_host(32, weights, on_card))
    )
    assert predicted - without == pytest.approx(measured - 34.03, abs=0.05)


@pytest.fixture
def llama_8b(sparse_gguf: Callable[..., Path]) -> Rehearsal:
    width, ff, kv, layers, vocabulary = 4096, 14336, 1024, 32, 128256
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": 131072,
        "llama.embedding_length": width,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.model": "no_vocab",
    }
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("Q4_K", (vocabulary, width)),
        "output.weight": ("Q6_K", (vocabulary, width)),
        "output_norm.weight": ("F32", (width,)),
    }
    sizes = {"attn_q": (width, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, width)}
    sizes |= {"ffn_gate": (ff, width), "ffn_up": (ff, width), "ffn_down": (width, ff)}
    for layer in range(layers):
        for kind, shape in sizes.items():
            has_more = kind in ("attn_v", "ffn_down") and more_bits(layer, layers)
            shapes[f"blk.{layer}.{kind}.weight"] = ("Q6_K" if has_more else "Q4_K", shape)
        shapes |= {f"blk.{layer}.{kind}_norm.weight": ("F32", (width,)) for kind in ("attn", "ffn")}
    path = sparse_gguf(shapes, metadata)
    config = TrainConfig(
        model=str(path), data=("d",), output="a", per_device_train_batch_size=1, gradient_accumulation_steps=1
    )
    lora = LoraConfig(r=16, exclude_modules=("output",))
    return Rehearsal(GGUFFile.open(path), config, lora, torch.device("cuda"), torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_rehearsal_agrees_with_the_formula_and_with_what_was_measured(llama_8b: Rehearsal) -> None:
    assert FusedSizes.of(llama_8b.model.fused_layers, 128256) == LLAMA_8B
    row = [0] * 2048
    for num_tokens, kept, measured in MEASURED:
        parts = RehearsedOnGpu(llama_8b, kept).parts("matmuls", [(row, row)] * (num_tokens // 2048))
        rehearsed = sum(parts.values())
        assert rehearsed == pytest.approx(fused_peak(LLAMA_8B, kept, step_of(num_tokens)), rel=0.03)
        assert rehearsed / GIB == pytest.approx(measured, rel=0.03)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("on_card", [1, 8, 31, 32])
def test_a_layer_on_the_card_costs_what_the_rehearsal_says(on_card: int, llama_8b: Rehearsal) -> None:
    row, step = [0] * 2048, step_of(8192)

    def rehearsed(kept: list[Kept]) -> int:
        return sum(RehearsedOnGpu(llama_8b, kept).parts("matmuls", [(row, row)] * 4).values())

    none, some = on_host(32), on_host(32, 0, on_card)
    costs = fused_peak(LLAMA_8B, some, step) - fused_peak(LLAMA_8B, none, step)
    assert costs == pytest.approx(rehearsed(some) - rehearsed(none), abs=2 * MIB)
    # The last layer of those on the host never leaves the card.
    assert costs == pytest.approx(min(on_card, 31) * 1.01 * 288 * MIB, abs=2 * MIB)
    sent = RehearsedOnGpu(llama_8b, some).host_bytes("matmuls", [(row, row)] * 4)
    assert sent == kept_on_host(LLAMA_8B, some, 8192) == (32 - on_card) * 288 * MIB


def numbers(kept: list[Kept]) -> tuple[int, int, int]:
    """Of how many layers gate and up, decoded weights, and activations on the card are kept."""
    return sum(one.gate_up for one in kept), sum(one.weights for one in kept), sum(not one.on_host for one in kept)


@pytest.mark.parametrize("limit_gib", [6.9, 7.8, 12, 24, 30])
def test_choice_fits_and_more_memory_keeps_more(limit_gib: float) -> None:
    step = step_of(8192)
    kept = fitting(LLAMA_8B, int(limit_gib * GIB), step)
    assert kept is not None
    assert fused_peak(LLAMA_8B, kept, step) <= limit_gib * GIB
    more = fitting(LLAMA_8B, int((limit_gib + 4) * GIB), step)
    assert more is not None
    assert sum(numbers(more)) > sum(numbers(kept))


@pytest.mark.parametrize("num_tokens", [2048, 8192, 80 * 1024])
@pytest.mark.parametrize("limit_gib", [6.3, 7.8, 10, 13.3, 24, 30, 36, 48])
def test_gate_up_come_first_then_activations_on_the_card_then_weights(num_tokens: int, limit_gib: float) -> None:
    step = step_of(num_tokens)
    kept = fitting(LLAMA_8B, int(limit_gib * GIB), step)
    if kept is None or not kept[0].attention:
        assert fused_peak(LLAMA_8B, on_host(0), step) > limit_gib * GIB
        return
    gate_up, weights, on_card = numbers(kept)
    assert kept == on_host(gate_up, weights, on_card)
    # One more of a kind does not fit, even without what comes after it.
    more = [(gate_up + 1, 0, 0), (gate_up, 0, on_card + 1), (gate_up, weights + 1, on_card)]
    for number, one in zip((gate_up, on_card, weights), more, strict=True):
        assert number == 32 or fused_peak(LLAMA_8B, on_host(*one), step) > limit_gib * GIB


# Of pairs of runs on one H200, 4 and 1 x 2048 tokens: the faster first.
@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        ((32, 14, 22), (32, 31, 0)),
        ((32, 0, 8), (32, 6, 0)),
        ((32, 6, 0), (28, 0, 14)),
        ((32, 3, 32), (32, 5, 20)),
        ((32, 5, 20), (32, 8, 0)),
        ((0, 0, 3), (0, 0, 0)),
    ],
)
def test_time_puts_settings_in_the_order_that_was_measured(
    faster: tuple[int, int, int], slower: tuple[int, int, int]
) -> None:
    assert gpu_memory._time(on_host(*faster)) < gpu_memory._time(on_host(*slower))


def test_a_plan_tells_how_many_layers_use_the_host() -> None:
    config = TrainConfig(
        model="m.gguf",
        data=("d.jsonl",),
        output="a.gguf",
        max_memory="24GiB",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
    )
    row = [0] * 2048
    settings = fused_settings(
        LLAMA_8B, config, lambda size: [(row, row)] * size, base=WEIGHTS, num_parameters=PARAMETERS, free=None
    )
    (setting,) = settings
    assert setting.plan.fits and setting.kept is not None
    on_card = numbers(setting.kept)[2]
    assert 0 < on_card < 32
    assert setting.plan.policy == (
        f"activations of the first {32 - on_card} layers on the host, of the rest on the card, "
        "gate and up of 32 of 32 layers kept, weights of 0"
    )
    assert setting.plan.host_bytes == (32 - on_card) * 288 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("num_tokens", [32768, 350_000])
@pytest.mark.parametrize("kept", [Kept(on_host=True), Kept(attention=False, on_host=True), WHOLE], ids=str)
def test_long_contexts_take_of_card_and_host_what_the_rehearsal_says(
    num_tokens: int, kept: Kept, llama_8b: Rehearsal
) -> None:
    need, documents = RehearsedOnGpu(llama_8b, [kept] * 32), [([0] * num_tokens,) * 2]
    rehearsed = sum(need.parts("matmuls", documents).values())
    # Attention's backward is the largest part of these, and more than the feed-forward half's by 8 GiB in the last.
    assert fused_peak(LLAMA_8B, [kept] * 32, step_of(num_tokens)) == pytest.approx(rehearsed, rel=0.03)
    # Low-rank products and attention's sums are large enough to go, too.
    assert need.host_bytes("matmuls", documents) == kept_on_host(LLAMA_8B, [kept] * 32, num_tokens)


def of_host(limit_gib: float, host_gib: float | None, num_tokens: int = 8192) -> list[Kept] | None:
    host = None if host_gib is None else int(host_gib * GIB)
    return fitting(LLAMA_8B, int(limit_gib * GIB), step_of(num_tokens), host)


@pytest.mark.parametrize("limit_gib", [12, 24, 34])
def test_what_the_host_has_no_room_for_stays_on_the_card(limit_gib: float) -> None:
    assert of_host(limit_gib, None) == of_host(limit_gib, 10) == of_host(limit_gib, 32 * 288 / 1024)
    # Room for 22 layers' 288 MiB, and not for one more.
    kept = of_host(limit_gib, 23 * 288 / 1024 - 0.001)
    assert kept is not None
    gate_up, weights, on_card = numbers(kept)
    assert kept == on_host(gate_up, weights, on_card) and on_card >= 10
    if limit_gib == 12:
        assert on_card == 10
        assert fused_peak(LLAMA_8B, on_host(gate_up + 1, 0, 10), step_of(8192)) > limit_gib * GIB
    assert of_host(limit_gib, 0) == of_host(limit_gib, 0.12)
    assert all(not one.on_host for one in of_host(limit_gib, 0) or ())


def test_where_card_and_host_are_small_fewer_layers_keep_what_attention_does() -> None:
    # All inputs of halves are 4 GiB, with what attention keeps they are 9.
    for limit_gib, host_gib in ((7.8, 4.01), (7.3, 6)):
        kept = of_host(limit_gib, host_gib)
        assert kept is not None
        attention = sum(one.attention for one in kept)
        assert 0 < attention < 32 and all(one.attention == (layer >= 32 - attention) for layer, one in enumerate(kept))
        assert all(one.halves for one in kept)
        assert kept_on_host(LLAMA_8B, kept, 8192) <= host_gib * GIB
        assert fused_peak(LLAMA_8B, kept, step_of(8192)) <= limit_gib * GIB
        # One more does not fit both, however many layers use the host.
        for number in range(33):
            more = [Kept(layer >= 31 - attention, on_host=layer < number) for layer in range(32)]
            on_card, waiting = fused_peak(LLAMA_8B, more, step_of(8192)), kept_on_host(LLAMA_8B, more, 8192)
            assert on_card > limit_gib * GIB or waiting > host_gib * GIB
    assert gpu_memory._described([Kept(layer >= 20, on_host=layer < 28) for layer in range(32)]) == (
        "inputs and of 12 of 32 layers activations, of the first 28 layers on the host, of the rest on the card, "
        "gate and up of 0 of 32 layers kept, weights of 0"
    )
    assert of_host(7.8, 1) is None


def test_at_last_the_inputs_of_as_few_first_layers_as_can_be_are_alone() -> None:
    # Each half's input is 64 MiB, on the card or on the host.
    for host_gib in (2, 3):
        kept = of_host(7.3, host_gib)
        assert kept is not None
        whole = sum(not one.halves for one in kept)
        assert 0 < whole <= 32 and kept[0] == WHOLE
        assert all(one.halves == (layer >= whole) for layer, one in enumerate(kept))
        assert kept_on_host(LLAMA_8B, kept, 8192) <= host_gib * GIB
        assert fused_peak(LLAMA_8B, kept, step_of(8192)) <= 7.3 * GIB
        # One less does not fit both, however many layers use the host.
        for number in range(33):
            fewer = [Kept(False, on_host=layer < number, halves=layer >= whole - 1) for layer in range(32)]
            on_card, waiting = fused_peak(LLAMA_8B, fewer, step_of(8192)), kept_on_host(LLAMA_8B, fewer, 8192)
            assert on_card > 7.3 * GIB or waiting > host_gib * GIB
    assert gpu_memory._time([WHOLE] * 32) > gpu_memory._time([replace(WHOLE, halves=True)] * 32)
    assert gpu_memory._described([WHOLE] * 32) == "inputs of layers on the host, all else computed again"
    assert gpu_memory._described([WHOLE] + [replace(WHOLE, halves=True)] * 31) == (
        "inputs on the host, 1 of 32 layers computed again as a whole, gate and up of 0 of 32 layers kept, weights of 0"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_whole_layers_of_every_place_cost_what_the_rehearsal_says(llama_8b: Rehearsal) -> None:
    on_the_card, least = replace(WHOLE, on_host=False), Kept(attention=False)
    for kept in (
        [on_the_card] * 32,
        [WHOLE] * 10 + [on_the_card] * 10 + [least] * 12,
        [WHOLE] * 20 + [Kept()] * 12,
        [replace(least, on_host=True)] * 20 + [Kept(on_host=True)] * 8 + [Kept()] * 4,
        [least] * 16 + [Kept(gate_up=True)] * 16,
    ):
        need, documents = RehearsedOnGpu(llama_8b, kept), [([0] * 8192,) * 2]
        rehearsed = sum(need.parts("matmuls", documents).values())
        assert fused_peak(LLAMA_8B, kept, step_of(8192)) == pytest.approx(rehearsed, rel=0.03)
        assert need.host_bytes("matmuls", documents) == kept_on_host(LLAMA_8B, kept, 8192)


def long_settings(host_free: int | None, **changes: Any) -> list[FusedSetting]:
    """Of a micro-batch of 350,000 tokens."""
    row = [0] * 350_000
    settings: dict[str, Any] = {"max_memory": "80GiB", "per_device_train_batch_size": 1, **changes}
    config = TrainConfig(model="m.gguf", data=("d.jsonl",), output="a.gguf", **settings)
    return fused_settings(
        LLAMA_8B,
        config,
        lambda size: [(row, row)] * size,
        base=WEIGHTS,
        num_parameters=PARAMETERS,
        free=None,
        host_free=host_free,
    )


def test_a_host_too_small_for_all_is_used_least() -> None:
    (without,) = long_settings(None)
    (setting,) = long_settings(20 * GIB)
    plan = setting.plan
    assert setting.kept is not None and without.plan.fits
    assert not plan.fits and plan.missing_bytes == 0
    assert plan.missing_on_host_bytes == plan.host_bytes - 18 * GIB > 0
    assert plan.host_bytes < without.plan.host_bytes
    assert plan.shortage() == f"{plan.missing_on_host_bytes / MIB:,.0f} MiB on the host"
    assert "free on the host are 20,480 MiB" in plan.bounds() and "on the host" in plan.need()
    # One layer more on the card does not fit it.
    first = sum(one.on_host for one in setting.kept)
    more = [replace(one, on_host=index < first - 1) for index, one in enumerate(setting.kept)]
    assert fused_peak(LLAMA_8B, more, replace(step_of(350_000), num_targets=349_999)) > 80 * GIB


def test_moments_of_a_paged_optimiser_lie_on_the_host_too() -> None:
    pytest.importorskip("bitsandbytes")
    free = 1000 * GIB
    (plain,), (paged,) = long_settings(free), long_settings(free, optim="paged_adamw_8bit")
    assert plain.kept is not None and paged.kept is not None
    num_host = [sum(one.on_host for one in setting.kept or ()) for setting in (plain, paged)]
    assert num_host[0] == num_host[1]
    assert paged.plan.host_bytes - plain.plan.host_bytes == 6 * PARAMETERS
    enough = -(-10 * plain.plan.host_bytes // 9)
    assert long_settings(enough)[0].kept == plain.kept
    assert long_settings(enough, optim="paged_adamw_8bit")[0].kept != paged.kept


def test_choice_by_size() -> None:
    step = step_of(8192)

    def choose(limit_gib: float) -> list[Kept] | None:
        return fitting(LLAMA_8B, int(limit_gib * GIB), step)

    assert choose(5) is None
    leanest, small, middle, large = choose(6.9), choose(24), choose(34), choose(80)
    assert leanest is not None and small is not None and middle is not None and large is not None
    assert leanest[0] == Kept(attention=False, on_host=True)
    assert small == on_host(32, 0, 10)
    assert middle == on_host(32, 10, 32)
    assert all(one == Kept(gate_up=True, weights=True) for one in large)


@pytest.fixture
def loaded(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model as it lies on a card; what the card has is set by hand, since there may be none."""
    model = models.load(GGUFFile.open(tiny_llama_path))
    attach(model, LoraConfig(r=4), seed=0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * MIB)
    monkeypatch.setattr(gpu_memory, "free_memory_bytes", lambda device: 40 * GIB)
    return model


def test_a_run_whose_host_may_have_too_little_is_warned_of_and_taken(
    loaded: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_memory, "host_free_bytes", lambda device: 2 * MIB)
    monkeypatch.setattr("pyggtrain.nn.host_stash._MIN_BYTES", 1024)
    plan, kept = planned(loaded)
    assert plan.fits and not any(one.on_host for one in kept) and not caplog.records
    plan, kept = planned(loaded, gradient_checkpointing="offload", per_device_train_batch_size=64)
    assert all(one.on_host for one in kept) and plan.missing_on_host_bytes > 0 == plan.missing_bytes
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{plan.host_bytes / MIB:,.0f} MiB, and 2 MiB are free" in record.getMessage()


def planned(model: Model, **settings: Any) -> tuple[MemoryPlan, list[Kept]]:
    config = TrainConfig(model="m.gguf", data=("d.jsonl",), output="a.gguf", **settings)
    tokens = list(range(96))
    return plan_fused(model, config, torch.device("cuda", 0), 96, lambda size: [(tokens, tokens)] * size)


def test_with_room_everything_is_kept(loaded: Model) -> None:
    plan, kept = planned(loaded)
    assert kept == [Kept(gate_up=True, weights=True)] * len(loaded.layers)
    assert plan.fits and plan.num_tokens == 2 * 96 and plan.device_type == "cuda"
    assert plan.parts[BASE] + plan.parts[ADAPTER] == 100 * MIB
    assert "MiB" in plan.need()


@pytest.mark.parametrize("policy", ["none", "matmuls", "layers", "offload"])
def test_a_named_policy_is_taken(loaded: Model, policy: str) -> None:
    plan, kept = planned(loaded, gradient_checkpointing=policy, optim="adamw_8bit")
    assert kept == kept_by(policy, len(loaded.layers)) and plan.policy == policy


def test_a_limit_chooses_what_is_kept_and_how_a_step_is_cut(loaded: Model) -> None:
    free, _ = planned(loaded, max_memory="1GiB")
    assert free.micro_batch_size > 2 and free.limit_bytes == GIB
    with pytest.raises(UnsupportedError, match=r"max_memory is 200 MiB.* Lower"):
        planned(loaded, max_memory="200MiB")


def test_the_allocator_is_set_up_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    join_free_device_memory()
    assert settings == []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    join_free_device_memory()
    assert settings == ["expandable_segments:True"]
