"""What a person is told before the first step."""

import pytest

from pyggtrain import models
from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.gguf import GGUFFile
from pyggtrain.training.prepare import _layers_without_adapter, _ranges


@pytest.mark.parametrize(
    ("settings", "untouched"),
    [
        ({}, []),
        ({"layers_to_transform": (1,)}, [0]),
        ({"target_modules": ("blk.0.attn_q",)}, [1]),
    ],
)
def test_layers_without_a_pair_are_named(tiny_llama_path, settings, untouched):
    model = models.load(GGUFFile.open(tiny_llama_path))
    adapter = attach(model, LoraConfig(r=2, **settings), seed=1)
    assert _layers_without_adapter(model, adapter) == untouched


def test_numbers_are_told_in_ranges():
    assert _ranges([0, 1, 2, 3, 7]) == "0-3, 7"
    assert _ranges([5]) == "5" and _ranges([]) == ""
