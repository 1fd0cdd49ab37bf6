from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain.validation.evidence import LlamaCpp
from pyggtrain.validation.layers import compare_layers, compare_rows, measure_layer_effects
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


def llama_cpp(trained: Any) -> LlamaCpp:
    return LlamaCpp(trained.base, trained.adapter, BridgeRuntime, RuntimeSettings(num_ctx=16, num_ubatch=16))


def test_a_huge_row_does_not_hide_the_error_of_another() -> None:
    reference = torch.ones(5, 8)
    reference[0] *= 10_000
    other = reference.clone()
    other[3, 2] += 0.5
    errors = compare_rows(reference, other)
    assert errors.worst == pytest.approx(0.5)
    assert errors.typical == 0
    assert compare_rows(reference, reference * 1.25).typical == pytest.approx(0.25)


def test_noise_of_llama_cpp_comes_with_every_layer(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    layers, missing = compare_layers(llama_cpp(trained), trained.model, TOKENS, strict=False)
    assert [(layer.name, layer.scale) for layer in layers] == [
        ("l_out-0", None),
        ("l_out-1", None),
        ("l_out-0", 1.0),
        ("l_out-1", 1.0),
    ]
    assert missing == []
    # F16 keys and values round by 2^-11; our float32 does not.
    assert all(1e-5 < layer.noise.typical < 1e-2 for layer in layers)
    assert all(layer.ours.worst < 1e-4 for layer in layers)


def test_a_tensor_that_llama_cpp_does_not_name_is_reported(
    tiny_llama_path: Path, make_trained: Callable[..., Any]
) -> None:
    trained = make_trained(tiny_llama_path)

    class Renamed:
        layer_names = ("l_out-0", "l_last-1")

        def layer_outputs(self, tokens: list[int], *, scale: float | None, inputs: Any = None) -> dict[str, Any]:
            outputs = trained.model.layer_outputs(tokens, scale=scale, inputs=inputs)
            return {name.replace("l_out-1", "l_last-1"): output for name, output in outputs.items()}

    ours: Any = Renamed()
    layers, missing = compare_layers(llama_cpp(trained), ours, TOKENS, strict=True)
    assert missing == ["l_last-1"]
    assert {layer.name for layer in layers} == {"l_out-0"}


def test_an_effect_is_heard_in_its_layer_alone(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path, target_modules="blk.0.*")
    # Twice what llama.cpp's file says, in layer 0; layer 1 has no pairs, but hears the error of layer 0 end to end.
    for pair in trained.pairs.values():
        pair.lora_b.data *= 2
    effects, faint = measure_layer_effects(llama_cpp(trained), trained.model, TOKENS, (1.0, 4.0), 20.0)
    assert [effect.name for effect in effects] == ["l_out-0"]
    assert effects[0].size < 0.8
    assert faint == []


def test_a_later_layer_is_right_whatever_an_earlier_one_does(
    tiny_llama_path: Path, make_trained: Callable[..., Any]
) -> None:
    trained = make_trained(tiny_llama_path)
    for name, pair in trained.pairs.items():
        if name.startswith("blk.0."):
            pair.lora_b.data.neg_()
    first, second = measure_layer_effects(llama_cpp(trained), trained.model, TOKENS, (1.0, 4.0), 20.0)[0]
    assert first.cosine < 0.5
    assert second.cosine == pytest.approx(1.0, abs=1e-4)
    assert second.size == pytest.approx(1.0, abs=1e-4)


def test_an_effect_too_faint_for_every_scale_is_named(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path, b_std=1e-9)
    effects, faint = measure_layer_effects(llama_cpp(trained), trained.model, TOKENS, (1.0, 4.0), 20.0)
    assert effects == []
    assert faint == ["l_out-0", "l_out-1"]
