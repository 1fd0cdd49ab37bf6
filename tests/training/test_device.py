"""Which device a run takes, and that what a GPU has trained is what llama.cpp computes."""

from pathlib import Path

import pytest
import torch

from pyggtrain import api
from pyggtrain.errors import ConfigError
from pyggtrain.training import prepare
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.prepare import compute_dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
def test_auto_takes_a_gpu() -> None:
    assert prepare.choose_device("auto").type == "cuda"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["auto", "exact", "fp16", "fp8"])
def test_a_run_on_a_gpu_ends_in_parity(compute: str, smollm2_path: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Count to {number}.", "completion": f" {number}, done."} for number in range(40)]
    result = api.train(
        smollm2_path, rows, tmp_path / "a.gguf", device="cuda", compute=compute, max_steps=4, eval_split=0.2, seed=1
    )
    assert result.parity is not None and result.parity.passed
    assert any("half precision" in note for note in result.parity.notes) == (compute == "fp8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_mistake() -> None:
    assert prepare.choose_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="sees no CUDA device; set device to cpu"):
        prepare.choose_device("cuda")


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp8", "fused", "mmq"])
def test_arithmetic_of_a_gpu_is_refused_on_a_cpu(compute):
    config = TrainConfig(model="m.gguf", data=("d",), output="o", compute=compute)
    with pytest.raises(ConfigError, match=f"compute: found '{compute}' on cpu; needed: auto, exact or ggml, or a GPU"):
        compute_dtype(config, torch.device("cpu"))


def test_activations_have_the_type_that_compute_names(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    dtypes = {
        compute: compute_dtype(
            TrainConfig(model="m.gguf", data=("d",), output="o", compute=compute), torch.device("cuda")
        )
        for compute in ("auto", "exact", "bf16", "fp16", "fp8", "mmq")
    }
    others = dict.fromkeys(("auto", "bf16", "fp8", "mmq"), torch.bfloat16)
    assert dtypes == others | {"exact": torch.float32, "fp16": torch.float16}


def test_8_bit_floats_need_a_card_that_multiplies_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    config = TrainConfig(model="m.gguf", data=("d",), output="o", compute="fp8")
    with pytest.raises(ConfigError, match="RTX 3090 multiplies no 8-bit floats"):
        compute_dtype(config, torch.device("cuda"))
