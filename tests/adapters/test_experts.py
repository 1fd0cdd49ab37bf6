"""Patterns, ranks and files of adapters on models of experts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import generate

from pyggtrain import _bridge
from pyggtrain.adapters import LoraConfig, attach, check_against_base, load, save
from pyggtrain.adapters.targets import select
from pyggtrain.errors import ConfigError, UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import Batch

ATTENTION = ["attn_q", "attn_k", "attn_v", "attn_output"]
EXPERTS = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
SHARED = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImportedModel:
    """qwen2moe: routed experts, a shared one, and a gate of one row for it."""
    path: Path = generate("qwen2moe", "moe", tmp_path_factory.mktemp("experts"))
    return ImportedModel(GGUFFile.open(path))


@pytest.fixture(autouse=True)
def _without_pairs(model: ImportedModel) -> Iterator[None]:
    yield
    for linear in model.linears.values():
        linear.lora = None


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


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (["blk.*.ffn_*_exps"], EXPERTS),
        (["model.layers.*.mlp.experts.*.up_proj"], ["ffn_up_exps", "ffn_up_shexp"]),
        (["experts.*.w2"], ["ffn_down_exps"]),
    ],
)
def test_all_experts_of_a_layer_may_be_named_by_a_wildcard(
    model: ImportedModel, patterns: list[str], chosen: list[str]
) -> None:
    assert kinds(select(model, patterns)) == set(chosen)


@pytest.mark.parametrize("option", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_single_expert_is_refused_with_the_name_of_its_stack(model: ImportedModel, option: str) -> None:
    pattern = "model.layers.1.mlp.experts.3.up_proj"
    value = {pattern: 2} if option.endswith("pattern") else (pattern,)
    with pytest.raises(UnsupportedError, match=rf"(?s){option} names a single expert.*mlp\.experts\.up_proj'"):
        attach(model, LoraConfig(**{option: value}), seed=0)  # type: ignore[arg-type]


def test_chosen_layers_get_whole_stacks_that_llama_cpp_applies_to_them_alone(tmp_path: Path) -> None:
    """What is not chosen has no pair in the file; what is chosen has one for every expert, also for those that no
    token has met.
    """
    path = generate("qwen3moe", "moe", tmp_path)
    file = GGUFFile.open(path)
    model = ImportedModel(file, compute="exact")
    config = LoraConfig(r=2, target_modules=("ffn_*_exps",), layers_to_transform=(1,))
    adapter = attach(model, config, seed=0)
    assert set(adapter.pairs) == {f"blk.1.{kind}.weight" for kind in EXPERTS}
    # One expert is taught, as if the router had sent all tokens there.
    for pair in adapter.pairs.values():
        pair.lora_b.data[2].normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    save(tmp_path / "adapter.gguf", adapter, file)
    stored = load(tmp_path / "adapter.gguf")
    check_against_base(stored, file)
    num_experts = model.linears["blk.1.ffn_up_exps.weight"].shape[0]
    assert all(lora_a.shape[0] == lora_b.shape[0] == num_experts for lora_a, lora_b in stored.pairs.values())

    session = _bridge.Session(str(path), num_ctx=64, num_ubatch=64, num_threads=1, kv_type="F32")
    tokens = list(range(1, 40))
    names = ["l_out-0", "l_out-1"]

    def streams() -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_dlpack(value).clone() for _, _, value in session.eval_tensors(tokens, names))

    base = streams()
    session.set_adapters([(session.load_adapter(str(tmp_path / "adapter.gguf")), 1.0)])
    adapted = streams()
    logits = torch.from_dlpack(session.logits(tokens))
    session.close()
    assert torch.equal(adapted[0], base[0])
    changed = (adapted[1] != base[1]).any(-1)
    # Tokens that did not go to the taught expert are what they were, to the bit.
    assert 0 < changed.sum() < len(tokens)
    with torch.no_grad():
        found = model.logits(Batch.from_documents([(tokens, tokens)]))
    assert float((found - logits).square().mean().sqrt()) < 1e-4 * float(logits.square().mean().sqrt())
