"""Patterns, ranks and files of adapters on models of experts."""

from pathlib import Path

import pytest
from tiny_models import generate

from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.adapters.targets import select
from pyggtrain.errors import ConfigError
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.model import ImportedModel

ATTENTION = ["attn_q", "attn_k", "attn_v", "attn_output"]
EXPERTS = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
SHARED = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImportedModel:
    """qwen2moe: routed experts, a shared one, and a gate of one row for it."""
    path: Path = generate("qwen2moe", "moe", tmp_path_factory.mktemp("experts"))
    return ImportedModel(GGUFFile.open(path))


def kinds(names: list[str]) -> set[str]:
    return {name.split(".")[2] for name in names}


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (["all-linear"], [*ATTENTION, *EXPERTS, *SHARED]),
        (["gate_proj"], ["ffn_gate_exps", "ffn_gate_shexp"]),
        (["model.layers.*.mlp.experts.down_proj"], ["ffn_down_exps", "ffn_down_shexp"]),
        (["w1", "w2", "w3"], EXPERTS),
        (["ffn_*_exps"], EXPERTS),
        (["ffn_gate_inp"], ["ffn_gate_inp"]),
        (["blk.1.ffn_up_exps"], ["ffn_up_exps"]),
    ],
)
def test_pattern_names_these(model: ImportedModel, patterns: list[str], chosen: list[str]) -> None:
    assert kinds(select(model, patterns)) == set(chosen)


def test_routers_are_trained_only_when_they_are_named(model: ImportedModel) -> None:
    routers = {"ffn_gate_inp", "ffn_gate_inp_shexp"}
    assert routers <= kinds([name for name in model.linears if name.startswith("blk")])
    assert not routers & kinds(select(model, ["all-linear"]))
    assert kinds(select(model, ["all-linear", "ffn_gate_inp"])) & routers == {"ffn_gate_inp"}


def test_the_rank_is_bounded_by_one_expert(model: ImportedModel) -> None:
    stack = model.linears["blk.0.ffn_up_exps.weight"]
    assert len(stack.shape) == 3
    with pytest.raises(ConfigError, match=rf"r = 300 is too large .* needed at most {min(stack.shape[1:])}"):
        attach(model, LoraConfig(r=300, target_modules="ffn_up_exps"), seed=0)


def test_each_expert_starts_from_numbers_of_its_own(model: ImportedModel) -> None:
    adapter = attach(model, LoraConfig(r=3, target_modules="ffn_up_exps"), seed=0)
    pair = adapter.pairs["blk.0.ffn_up_exps.weight"]
    num_experts, num_out, num_in = model.linears["blk.0.ffn_up_exps.weight"].shape
    assert pair.lora_a.shape == (num_experts, 3, num_in) and pair.lora_b.shape == (num_experts, num_out, 3)
    assert pair.rank == 3 and not pair.lora_b.any()
    assert (pair.lora_a[0] != pair.lora_a[1]).all()
    assert pair.lora_a.abs().max() <= num_in**-0.5
