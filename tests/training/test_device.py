"""Which device a run takes."""

import logging
from types import SimpleNamespace

import pytest
import torch

from pyggtrain.errors import ConfigError
from pyggtrain.training import prepare
from pyggtrain.training.config import TrainConfig

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("architecture", "device", "model_impl", "taken"),
    [
        ("llama", "auto", "auto", "cuda"),
        ("llama", "auto", "graph", "cpu"),
        ("qwen2", "auto", "auto", "cpu"),
        ("qwen2", "cuda:0", "auto", "cuda"),
    ],
)
def test_auto_takes_a_gpu_for_what_was_tried_there(
    architecture: str,
    device: str,
    model_impl: str,
    taken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(prepare, "choose_device", lambda name: CUDA)
    config = TrainConfig(model="m.gguf", data=("d.jsonl",), output="a.gguf", device=device, model_impl=model_impl)
    with caplog.at_level(logging.WARNING, "pyggtrain"):
        chosen = prepare._device_for(config, SimpleNamespace(architecture=architecture))
    assert chosen.type == taken
    assert ("not been tried on a GPU" in caplog.text) == (taken == "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_mistake() -> None:
    assert prepare.choose_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="sees no CUDA device; set device to cpu"):
        prepare.choose_device("cuda")
