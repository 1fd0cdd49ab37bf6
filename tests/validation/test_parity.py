"""The comparison with llama.cpp: it passes for what was trained, and fails for everything else."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain.gguf import GGUFFile, Tokenizer, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.ops import dequantize
from pyggtrain.validation.parity import ParitySettings, verify_adapter
from pyggtrain.validation.parity_report import ParityReport
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings

Documents = list[tuple[list[int], list[int]]]

TEXTS = [
    '<|im_start|>user\nDefine "road".<|im_end|>\n<|im_start|>assistant\nA strip of land where one may pass.<|im_end|>',
    "The capital of France is Paris, a city on the Seine that has been a centre of art and science for centuries.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def documents(smollm2_path: Path) -> Documents:
    tokenizer = Tokenizer.from_gguf(smollm2_path)
    encoded = [tokenizer.encode(text, parse_special=True) for text in TEXTS]
    return [(ids, [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]) for ids in encoded]


def tiny_documents() -> Documents:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in (17, 5, 31)]
    return [(ids, [-100, -100, *ids[2:]]) for ids in rows]


def values(report: ParityReport) -> dict[str, float]:
    return {check.name: check.value for check in report.checks}


def failures(report: ParityReport) -> set[str]:
    return {check.name for check in report.checks if not check.passed}


class Changed:
    """Our side, with another scale than the one asked for: `scales(scale)`."""

    def __init__(self, model: Any, scales: Callable[[float | None], float | None]) -> None:
        self._model, self._scales = model, scales
        self.num_pairs, self.layer_names = model.num_pairs, model.layer_names

    def logits(self, tokens: Sequence[int], *, scale: float | None) -> torch.Tensor:
        return self._model.logits(tokens, scale=self._scales(scale))

    def layer_outputs(
        self, tokens: Sequence[int], *, scale: float | None, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        return self._model.layer_outputs(tokens, scale=self._scales(scale), inputs=inputs)


class DeafRuntime(BridgeRuntime):
    """A llama.cpp that loads an adapter without complaint and never applies it, as several engines have done."""

    def logits(
        self, tokens: Sequence[int], *, scale: float | None = None, positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        return super().logits(tokens, scale=None, positions=positions)

    def tensors(
        self, tokens: Sequence[int], names: Collection[str], *, scale: float | None = None
    ) -> dict[str, torch.Tensor]:
        return super().tensors(tokens, names, scale=None)


class StickyRuntime(BridgeRuntime):
    """A llama.cpp in which an adapter, once on, cannot be turned down to zero."""

    def logits(
        self, tokens: Sequence[int], *, scale: float | None = None, positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        return super().logits(tokens, scale=1.0 if scale == 0.0 else scale, positions=positions)


def permute_rows_of(trained: Any, name: str) -> None:
    """Shuffle the rows of one lora_b in training only: the file keeps them in order."""
    lora_b = trained.pairs[name].lora_b
    lora_b.data = lora_b.data[torch.randperm(lora_b.shape[0], generator=torch.Generator().manual_seed(1))]


# Strict: a tiny F32 model, where one number out of place shows.


def test_equal_arithmetic_passes_strictly(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    report = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model)
    assert report.passed, report.table()
    assert report.mode == "strict"
    assert (report.num_documents, report.num_tokens, report.num_positions) == (3, 53, 53)
    assert report.first_difference is None
    found = values(report)
    assert found["pairs that llama.cpp loaded"] == 14
    assert found["adapter: layers that differ, of 2"] == 0
    assert found["effect at scale 1: mean KL, llama.cpp"] > 0.01
    assert found["adapter: held-out loss, ours"] != pytest.approx(found["base: held-out loss, ours"], abs=1e-3)


def test_the_base_alone_can_be_compared(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    report = verify_adapter(tiny_llama_path, None, tiny_documents(), ours=trained.model)
    assert report.passed, report.table()
    assert not any(name.startswith(("adapter", "effect")) for name in values(report))


@pytest.mark.parametrize("kind", ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"])
def test_a_pair_on_any_kind_of_tensor_has_the_same_effect_in_llama_cpp(
    tiny_llama_path: Path, make_trained: Callable[..., Any], kind: str
) -> None:
    trained = make_trained(tiny_llama_path, target_modules=f"blk.1.{kind}", r=1)
    report = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model)
    assert report.passed, report.table()
    assert values(report)["pairs that llama.cpp loaded"] == 1


def test_twice_the_scale_fails(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    doubled = Changed(trained.model, lambda scale: None if scale is None else 2 * scale)
    report = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=doubled)
    assert not report.passed
    assert {
        "adapter: mean KL(llama.cpp || ours)",
        "adapter: largest difference of a logit",
        "adapter: layers that differ, of 2",
        "effect: llama.cpp's size over ours, off 1 by",
    } <= failures(report)
    assert not any(name.startswith("base") for name in failures(report))
    assert report.first_difference is not None
    assert report.first_difference.startswith("l_out-0 with the adapter")


def test_the_first_layer_that_differs_is_named(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    permute_rows_of(trained, "blk.1.ffn_down.weight")
    report = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model)
    assert "adapter: mean KL(llama.cpp || ours)" in failures(report)
    assert values(report)["adapter: layers that differ, of 2"] == 1
    assert report.first_difference is not None
    assert report.first_difference.startswith("l_out-1 with the adapter")


def test_an_adapter_that_llama_cpp_ignores_fails(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    report = verify_adapter(
        tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model, open_runtime=DeafRuntime
    )
    assert {"adapter: mean KL(llama.cpp || ours)", "effect at scale 1: mean KL, llama.cpp"} <= failures(report)


def test_an_adapter_that_both_sides_ignore_fails(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    report = verify_adapter(
        tiny_llama_path,
        trained.adapter,
        tiny_documents(),
        ours=Changed(trained.model, lambda scale: None),
        open_runtime=DeafRuntime,
    )
    assert "adapter: mean KL(llama.cpp || ours)" not in failures(report)
    assert sum(name.startswith("effect") for name in failures(report)) >= 3


def test_an_adapter_that_cannot_be_turned_off_fails(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    report = verify_adapter(
        tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model, open_runtime=StickyRuntime
    )
    assert failures(report) == {"logits that scale 0 changes"}


def test_a_pair_missing_from_the_file_fails(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    exported = make_trained(tiny_llama_path, target_modules="blk.0.*")
    report = verify_adapter(tiny_llama_path, exported.adapter, tiny_documents(), ours=trained.model)
    assert {"pairs that llama.cpp loaded", "adapter: mean KL(llama.cpp || ours)"} <= failures(report)
    assert values(report)["pairs that llama.cpp loaded"] == 7
    assert report.first_difference is not None
    assert report.first_difference.startswith("l_out-1 with the adapter")


def test_an_untrained_adapter_passes_and_says_that_it_does_nothing(
    tiny_llama_path: Path, make_trained: Callable[..., Any]
) -> None:
    trained = make_trained(tiny_llama_path, b_std=0.0)
    report = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model)
    assert report.passed, report.table()
    assert any("lora_b of the adapter is zero" in note for note in report.notes)


def test_a_faint_effect_is_proven_at_a_larger_scale(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path, b_std=1e-4)
    settings = ParitySettings(mode="statistical")
    report = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model, settings=settings)
    assert report.passed, report.table()
    assert any("compared at scale" in note for note in report.notes)
    for name in trained.pairs:
        permute_rows_of(trained, name)
    report = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model, settings=settings)
    # At scale 1 the wrong adapter is as faint as the right one.
    assert "adapter: mean KL(llama.cpp || ours)" not in failures(report)
    assert "effect: correlation of the two" in failures(report)


def test_nan_fails(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    trained.pairs["blk.0.attn_v.weight"].lora_b.data[3, 1] = math.nan
    report = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model)
    assert "adapter: mean KL(llama.cpp || ours)" in failures(report)
    assert report.first_difference is not None
    assert report.first_difference.startswith("l_out-0 with the adapter")


def test_the_table_fits_a_screen(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    table = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model).table()
    lines = table.splitlines()
    assert len(lines) <= 50
    # The line of the two paths is as long as they are.
    assert max(len(line) for line in lines if "tiny-llama.gguf" not in line) <= 110


# Nearly F32: one tensor of Q8_0, whose rounding of activations no other variation of llama.cpp shows.


@pytest.fixture
def nearly_f32(tiny_llama_path: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        file = GGUFFile.open(tiny_llama_path)
        changed = quantize_tensor(name, dequantize(file.tensors[name]), "Q8_0")
        path = tmp_path / "nearly-f32.gguf"
        write_gguf(path, typed_metadata(file), (file.tensors | {name: changed}).values())
        return path

    return make


@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight", "blk.0.attn_v.weight"])
def test_one_quantised_tensor_is_judged_by_its_own_rounding(
    name: str, nearly_f32: Callable[[str], Path], make_trained: Callable[..., Any]
) -> None:
    base = nearly_f32(name)
    trained = make_trained(base, compute="exact")
    report = verify_adapter(base, trained.adapter, tiny_documents(), ours=trained.model)
    assert report.passed, report.table()
    found = values(report)
    others = [
        found[f"base: llama.cpp from itself, {way}: mean KL"] for way in ("ubatch 1", "F16 KV", "flash attention")
    ]
    ours, rounding = (
        found[f"base: {what}"]
        for what in ("mean KL(llama.cpp || ours)", "llama.cpp from itself, float32 products: mean KL")
    )
    # We compute what llama.cpp would without rounding, and the other ways do not see that rounding.
    assert ours == pytest.approx(rounding, rel=1e-2) and max(others) < ours / 2


@pytest.mark.parametrize(
    ("wrong", "failing"),
    [
        ("blk.0.ffn_down.weight", "adapter: mean KL(llama.cpp || ours)"),
        ("blk.1.attn_q.weight", "layers whose effect differs, of 2"),
    ],
)
def test_a_wrong_pair_fails_there_too(
    wrong: str, failing: str, nearly_f32: Callable[[str], Path], make_trained: Callable[..., Any]
) -> None:
    base = nearly_f32("blk.0.ffn_down.weight")
    trained = make_trained(base)
    permute_rows_of(trained, wrong)
    report = verify_adapter(base, trained.adapter, tiny_documents(), ours=trained.model)
    assert failing in failures(report), report.table()
    assert not any(name.startswith("base") for name in failures(report))


# The real model.


@pytest.mark.slow
def test_smollm2_in_f32_agrees_strictly_in_every_layer(
    smollm2_f32_path: Path, documents: Documents, make_trained: Callable[..., Any]
) -> None:
    trained = make_trained(smollm2_f32_path, b_std=0.05)
    report = verify_adapter(smollm2_f32_path, trained.adapter, documents[:2], ours=trained.model)
    assert report.passed, report.table()
    assert report.mode == "strict"
    found = values(report)
    for side in ("base", "adapter"):
        assert found[f"{side}: mean KL(llama.cpp || ours)"] <= 1e-6
        assert found[f"{side}: largest difference of a logit"] <= 1e-3 * found[f"{side}: RMS of the logits"]
        assert found[f"{side}: layers that differ, of 30"] == 0
    assert found["pairs that llama.cpp loaded"] == 210


@pytest.mark.slow
def test_smollm2_in_q4_1_agrees_within_llama_cpp_s_own_noise(taught: Any, documents: Documents) -> None:
    lesson = taught.lessons[1]
    held_out = [(lesson.ids, lesson.labels), documents[1]]
    report = verify_adapter(taught.base, taught.adapter, held_out, ours=taught.model)
    assert report.passed, report.table()
    assert report.mode == "statistical"
    assert report.first_difference is None
    # The taught answer is near certain on both sides, which the base is far from.
    found = values(report)
    assert found["effect at scale 1: mean KL, llama.cpp"] > 10 * found["adapter: mean KL(llama.cpp || ours)"]


@pytest.mark.slow
def test_a_wrong_adapter_fails_on_the_quantised_model_too(
    smollm2_path: Path, documents: Documents, make_trained: Callable[..., Any]
) -> None:
    trained = make_trained(smollm2_path, b_std=0.05, compute="auto")
    held_out = documents[1:2]
    doubled = Changed(trained.model, lambda scale: None if scale is None else 2 * scale)
    report = verify_adapter(smollm2_path, trained.adapter, held_out, ours=doubled)
    assert {
        "adapter: mean KL(llama.cpp || ours)",
        "effect: llama.cpp's size over ours, off 1 by",
        "layers whose effect differs, of 30",
    } <= failures(report)
    # One pair of 210 is wrong, in a place that the softmax hides well.
    permute_rows_of(trained, "blk.7.attn_q.weight")
    report = verify_adapter(smollm2_path, trained.adapter, held_out, ours=trained.model)
    assert failures(report) == {"layers whose effect differs, of 30"}
    assert values(report)["layers whose effect differs, of 30"] == 1
    assert report.first_difference is not None
    assert report.first_difference.startswith("l_out-7 with the adapter")


def test_strictness_can_be_asked_for_or_turned_off(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    settings = ParitySettings(mode="statistical", max_tokens=31)
    report = verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=trained.model, settings=settings)
    assert report.passed, report.table()
    assert report.mode == "statistical"
    assert report.num_tokens == 22
    assert "adapter: llama.cpp from itself, flash attention: mean KL" in values(report)


def test_runtimes_are_closed_even_if_our_side_fails(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    opened: list[BridgeRuntime] = []

    def open_runtime(path: Path, settings: RuntimeSettings) -> BridgeRuntime:
        opened.append(BridgeRuntime(path, settings))
        return opened[-1]

    class Broken(Changed):
        def layer_outputs(
            self, tokens: Sequence[int], *, scale: float | None, inputs: Mapping[str, torch.Tensor] | None = None
        ) -> dict[str, torch.Tensor]:
            raise RuntimeError("out of memory")

    broken = Broken(trained.model, lambda scale: scale)
    with pytest.raises(RuntimeError, match="out of memory"):
        verify_adapter(tiny_llama_path, trained.adapter, tiny_documents(), ours=broken, open_runtime=open_runtime)
    assert len(opened) >= 2
    for runtime in opened:
        with pytest.raises(Exception, match="closed"):
            runtime.logits([1])
