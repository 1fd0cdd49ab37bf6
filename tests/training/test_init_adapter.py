"""training.init_adapter: training on from somebody's adapter takes over exactly what it is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyggtrain import models
from pyggtrain.adapters import attach, gguf_adapter, restore
from pyggtrain.adapters.gguf_adapter import AdapterFile
from pyggtrain.adapters.peft import to_peft
from pyggtrain.errors import AdapterError, ConfigError, UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.training.config import TrainConfig, build_config
from pyggtrain.training.init_adapter import read_init_adapter, taken_over
from pyggtrain.training.prepare import lora_config


@pytest.fixture
def base(tiny_llama_path):
    return GGUFFile.open(tiny_llama_path)


def adapter_for(base, path, *, alpha=6.0, ranks=None, kinds=("attn_q", "attn_v", "ffn_down")):
    generator = torch.Generator().manual_seed(1)
    pairs = {}
    for name, info in base.tensor_infos.items():
        if name.split(".")[-2] in kinds:
            num_out, num_in = info.shape
            rank = (ranks or {}).get(name, 3)
            pairs[name] = (
                torch.randn(rank, num_in, generator=generator),
                torch.randn(num_out, rank, generator=generator),
            )
    gguf_adapter.write(path, AdapterFile(path, base.architecture, alpha, pairs, {}))
    return gguf_adapter.load(path)


def started(base, path, **settings):
    """What a run would start from: settings in force, and the adapter attached."""
    model = models.load(base)
    config = TrainConfig(model="m", data=("d",), output="o", init_adapter=str(path), **settings)
    file = read_init_adapter(str(path), base, model)
    config = taken_over(config, file, model)
    adapter = attach(model, lora_config(config), seed=0)
    restore(adapter, file)
    return config, adapter


@pytest.mark.parametrize("alpha", [6.0, 0.0, -2.5])
@pytest.mark.parametrize("ranks", [{}, {"blk.1.attn_v.weight": 5, "blk.0.ffn_down.weight": 1}])
def test_written_at_once_it_is_the_same_adapter(base, tmp_path, alpha, ranks):
    file = adapter_for(base, tmp_path / "a.gguf", alpha=alpha, ranks=ranks)
    _, adapter = started(base, file.path)
    gguf_adapter.save(tmp_path / "b.gguf", adapter, base)
    again = gguf_adapter.load(tmp_path / "b.gguf")
    assert again.pairs.keys() == file.pairs.keys()
    for name, (lora_a, lora_b) in file.pairs.items():
        assert torch.equal(again.pairs[name][0], lora_a)
        update = again.scale(name) * again.pairs[name][1].double()
        assert torch.allclose(update, file.scale(name) * lora_b.double(), rtol=2**-23, atol=0)
        if alpha > 0:
            assert torch.equal(again.pairs[name][1], lora_b)
    if alpha > 0:
        assert again.alpha == alpha


def test_settings_in_force_are_the_adapter_s(base, tmp_path):
    file = adapter_for(base, tmp_path / "a.gguf", ranks={"blk.1.attn_v.weight": 5})
    config, _ = started(base, file.path)
    assert (config.r, config.lora_alpha, config.rank_pattern) == (3, 6.0, {"blk.1.attn_v": 5})
    assert sorted(config.target_modules) == sorted(name.removesuffix(".weight") for name in file.pairs)
    # Said again, they are no contradiction: a run can be repeated by its own record.
    assert started(base, file.path, **{k: getattr(config, k) for k in ("r", "lora_alpha", "rank_pattern")})[0] == config
    everything = adapter_for(
        base,
        tmp_path / "all.gguf",
        kinds=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    )
    assert started(base, everything.path)[0].target_modules == ("all-linear",)


def test_settings_that_say_otherwise_are_refused_together(base, tmp_path):
    file = adapter_for(base, tmp_path / "a.gguf")
    with pytest.raises(ConfigError) as refusal:
        started(base, file.path, r=8, lora_alpha=32.0, use_rslora=True, target_modules=("attn_k",))
    for part in ("r: found 8; the adapter has 3", "lora_alpha: found 32.0", "use_rslora", "target_modules"):
        assert part in str(refusal.value)


def test_a_peft_folder_is_an_adapter_too(base, tmp_path):
    file = adapter_for(base, tmp_path / "a.gguf")
    to_peft(file, base, tmp_path / "peft")
    _, adapter = started(base, tmp_path / "peft")
    for name, pair in adapter.pairs.items():
        assert torch.equal(pair.lora_a, file.pairs[name][0]) and torch.equal(pair.lora_b, file.pairs[name][1])


def test_adapters_of_other_models_and_useless_pairs_are_refused(base, tmp_path):
    file = adapter_for(base, tmp_path / "a.gguf")
    gguf_adapter.write(tmp_path / "other.gguf", replace(file, architecture="qwen2"))
    with pytest.raises(AdapterError, match="'qwen2'"):
        started(base, tmp_path / "other.gguf")
    wide = {"blk.0.attn_q.weight": (torch.ones(3, 128), torch.ones(64, 3))}
    gguf_adapter.write(tmp_path / "wide.gguf", replace(file, pairs=wide))
    with pytest.raises(AdapterError, match="does not fit"):
        started(base, tmp_path / "wide.gguf")


def test_pairs_that_llama_cpp_ignores_are_refused(base, tmp_path, monkeypatch):
    file = adapter_for(base, tmp_path / "a.gguf")
    model = models.load(base)
    model.untrainable["blk.0.attn_q.weight"] = "is not multiplied through llama.cpp's LoRA path"
    del model.linears["blk.0.attn_q.weight"]
    with pytest.raises(UnsupportedError, match="1 pairs.*blk.0.attn_q.weight is not multiplied"):
        read_init_adapter(str(file.path), base, model)


def test_another_quantisation_is_accepted_and_said(base, tmp_path, caplog):
    file = adapter_for(base, tmp_path / "a.gguf")
    gguf_adapter.write(tmp_path / "b.gguf", replace(file, provenance={"base.header_sha256": "0" * 64}))
    with caplog.at_level("WARNING", "pyggtrain"):
        started(base, tmp_path / "b.gguf")
    assert "trained on another file" in caplog.text


@pytest.mark.parametrize("name", ["init_adapter", "lora_model_dir", "adapter_name_or_path"])
def test_peers_names_are_understood(name):
    config = build_config({"model": "m", "data": "d", "output": "o", name: "a.gguf"})
    assert config.init_adapter == "a.gguf" and Path(config.output).name == "o"
