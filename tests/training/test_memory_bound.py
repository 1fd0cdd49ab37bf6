"""The bound is above what a rehearsal finds, whatever the settings; it decides only where there is plenty."""

import pytest
import torch

from pyggtrain.gguf import GGUFFile, typed_metadata, write_gguf
from pyggtrain.training import memory_bound
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.memory import RehearsedNeed
from pyggtrain.training.memory_bound import plan_with_plenty
from pyggtrain.training.prepare import lora_config
from pyggtrain.training.rehearse import Rehearsal

CPU = torch.device("cpu")


def config_for(path, **settings) -> TrainConfig:
    return TrainConfig(model=str(path), data=("d",), output="a.gguf", **settings)


def bound(path, num_tokens: int, config: TrainConfig):
    return plan_with_plenty(GGUFFile.open(path), config, CPU, lambda size: num_tokens)


@pytest.fixture(autouse=True)
def _plenty(monkeypatch):
    monkeypatch.setattr(memory_bound, "free_memory_bytes", lambda device: 2**50)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"r": 32},
        {"r": 4, "rank_pattern": {"attn_v": 32}},
        {"lora_dropout": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"method": "dpo"},
        {"method": "orpo"},
        {"optim": "muon"},
        {"target_modules": ("attn_q",)},
        {"gradient_accumulation_steps": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [8, 300])
def test_bound_is_above_the_rehearsed_need(tiny_llama_path, num_tokens, settings):
    config = config_for(tiny_llama_path, **settings)
    row = ([1] * (num_tokens // 2), [1] * (num_tokens // 2))
    need = RehearsedNeed(Rehearsal(GGUFFile.open(tiny_llama_path), config, lora_config(config))).parts(
        "none", [row] * 2
    )
    plan = bound(tiny_llama_path, num_tokens, config)
    assert plan.degree == "at most" and plan.policy == "none" and plan.num_tokens == num_tokens
    assert plan.parts["adapter"] >= need["adapter"]
    # What comes and goes. Loading decodes a little that the rehearsal counts with the file; the program grew meanwhile.
    passing = ("gradients", "activations", "loss chunk", "workspace", "allocator")
    assert sum(plan.parts[name] for name in passing) >= sum(need.get(name, 0) for name in passing)
    assert plan.total_bytes >= sum(need.values())


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [256, 2048])
def test_bound_holds_for_a_real_model_and_is_no_more_than_three_times_the_need(smollm2_path, num_tokens):
    config = config_for(smollm2_path)
    row = ([1] * (num_tokens // 2), [1] * (num_tokens // 2))
    need = RehearsedNeed(Rehearsal(GGUFFile.open(smollm2_path), config, lora_config(config))).parts("none", [row] * 2)
    plan = bound(smollm2_path, num_tokens, config)
    assert plan.parts["activations"] >= need["activations"]
    assert sum(need.values()) <= plan.total_bytes <= 3 * sum(need.values())


def test_a_bound_that_is_not_far_below_the_free_memory_decides_nothing(tiny_llama_path, monkeypatch):
    config = config_for(tiny_llama_path)
    new_bytes = bound(tiny_llama_path, 100, config).new_bytes
    for share, decides in ((2.1, True), (1.9, False)):
        monkeypatch.setattr(memory_bound, "free_memory_bytes", lambda device, share=share: int(share * new_bytes))
        assert (bound(tiny_llama_path, 100, config) is not None) == decides
    monkeypatch.setattr(memory_bound, "free_memory_bytes", lambda device: None)
    assert bound(tiny_llama_path, 100, config) is None


@pytest.mark.parametrize(
    "settings", [{"max_memory": "1TiB"}, {"gradient_checkpointing": "layers"}, {"model_impl": "graph"}], ids=str
)
def test_what_needs_numbers_or_is_not_known_is_rehearsed(tiny_llama_path, settings):
    assert bound(tiny_llama_path, 100, config_for(tiny_llama_path, **settings)) is None


def test_other_architectures_and_gpus_are_not_bounded(tiny_llama_path, tmp_path):
    file = GGUFFile.open(tiny_llama_path)
    metadata = {**typed_metadata(file), "general.architecture": "other"}
    write_gguf(tmp_path / "other.gguf", metadata, file.tensors.values())
    assert bound(tmp_path / "other.gguf", 100, config_for(tiny_llama_path)) is None
    assert plan_with_plenty(file, config_for(tiny_llama_path), torch.device("meta"), lambda size: 100) is None
