"""adapters.lora: settings, start and factors of the pairs."""

import math

import pytest
import torch

from pyggtrain import models
from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.adapters.lora import scale_of
from pyggtrain.errors import ConfigError
from pyggtrain.nn import Batch

BATCH = Batch.from_documents([(list(range(30)), list(range(30)))])


@pytest.mark.parametrize("alpha", [0, 0.0, -16, math.nan, math.inf, "16", True, None, 1e-50, 1e39])
def test_alpha_that_two_engines_would_read_differently_is_refused(alpha):
    with pytest.raises(ConfigError, match="lora_alpha is"):
        LoraConfig(lora_alpha=alpha)
    with pytest.raises(ConfigError, match=r"alpha_pattern\['attn_q'\] is"):
        LoraConfig(alpha_pattern={"attn_q": alpha})


@pytest.mark.parametrize("rank", [0, -1, 2.0, "8", True])
def test_rank_that_is_no_count_is_refused(rank):
    with pytest.raises(ConfigError, match="r is"):
        LoraConfig(r=rank)
    with pytest.raises(ConfigError, match=r"rank_pattern\['attn_q'\] is"):
        LoraConfig(rank_pattern={"attn_q": rank})


@pytest.mark.parametrize("dropout", [-0.1, 1.0, "0.1", math.nan])
def test_dropout_outside_zero_to_one_is_refused(dropout):
    with pytest.raises(ConfigError, match="lora_dropout is"):
        LoraConfig(lora_dropout=dropout)


def test_one_pattern_may_stand_alone(tied):
    adapter = attach(models.load(tied), LoraConfig(target_modules="attn_*", exclude_modules="attn_q"), seed=0)
    assert {name.split(".")[2] for name in adapter.pairs} == {"attn_k", "attn_v", "attn_output"}


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        LoraConfig(
            r=0, lora_alpha=0, lora_dropout=2, target_modules=(), exclude_modules=(3,), layers_to_transform=(-1,)
        )
    for name in (
        "r is 0",
        "lora_alpha is 0",
        "lora_dropout is 2",
        "target_modules is ()",
        "exclude_modules holds 3",
        "layers_to_transform holds -1",
    ):
        assert name in str(error.value)


@pytest.mark.parametrize(("alpha", "rank"), [(16.0, 8), (10.0, 3), (0.1, 7), (1e-3, 64)])
def test_scale_is_alpha_over_rank_to_the_last_bit_of_float32(tied, alpha, rank):
    expected = (torch.tensor(alpha, dtype=torch.float32) / torch.tensor(rank, dtype=torch.float32)).item()
    assert scale_of(alpha, rank) == expected
    if rank <= 32:
        adapter = attach(models.load(tied), LoraConfig(r=rank, lora_alpha=alpha), seed=0)
        assert adapter.scale == expected
        assert {pair.scale for pair in adapter.pairs.values()} == {expected}


def test_rank_larger_than_a_weight_is_refused(tied):
    with pytest.raises(ConfigError, match=r"r = 33 is too large for blk.0.attn_k.weight \[32, 64\].*at most 32"):
        attach(models.load(tied), LoraConfig(r=33), seed=0)
    # Another rank for the small ones makes it right.
    attach(models.load(tied), LoraConfig(r=33, rank_pattern={"attn_k": 32, "attn_v": 32}), seed=0)


def test_a_new_adapter_changes_nothing(tied):
    model = models.load(tied)
    with torch.no_grad():
        before = model.logits(BATCH)
        attach(model, LoraConfig(), seed=0)
        assert torch.equal(model.logits(BATCH), before)


def test_start_is_uniform_in_one_over_root_k_as_in_peft(tied):
    adapter = attach(models.load(tied), LoraConfig(r=32), seed=0)
    pair = adapter.pairs["blk.1.ffn_down.weight"]
    bound = 1 / math.sqrt(96)
    assert pair.lora_a.dtype == torch.float32 and pair.lora_a.shape == (32, 96) and pair.lora_b.shape == (64, 32)
    assert 0.98 * bound < pair.lora_a.abs().max() < bound
    assert pair.lora_a.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert torch.equal(pair.lora_b, torch.zeros(64, 32))


def test_start_depends_on_seed_and_name_only(tied):
    def start(config, seed):
        return {name: pair.lora_a for name, pair in attach(models.load(tied), config, seed=seed).pairs.items()}

    everything, some, other = (
        start(LoraConfig(), 0),
        start(LoraConfig(target_modules="ffn_up"), 0),
        start(LoraConfig(), 1),
    )
    torch.manual_seed(99)
    again = start(LoraConfig(), 0)
    for name, lora_a in everything.items():
        assert torch.equal(lora_a, again[name])
        assert not torch.equal(lora_a, other[name])
    assert torch.equal(some["blk.1.ffn_up.weight"], everything["blk.1.ffn_up.weight"])
    assert not torch.equal(everything["blk.0.ffn_up.weight"], everything["blk.1.ffn_up.weight"])


def test_patterns_give_other_ranks_and_factors(tied):
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        rank_pattern={"ffn_*": 6, "blk.1.ffn_up": 2},
        alpha_pattern={"q_proj": 16},
        target_modules="all-linear",
    )
    adapter = attach(models.load(tied), config, seed=0)
    assert {name: (pair.rank, pair.scale) for name, pair in adapter.pairs.items() if name.startswith("blk.1.")} == {
        "blk.1.attn_q.weight": (4, 4.0),
        "blk.1.attn_k.weight": (4, 2.0),
        "blk.1.attn_v.weight": (4, 2.0),
        "blk.1.attn_output.weight": (4, 2.0),
        "blk.1.ffn_gate.weight": (6, scale_of(8, 6)),
        "blk.1.ffn_up.weight": (2, 4.0),
        "blk.1.ffn_down.weight": (6, scale_of(8, 6)),
    }
    with pytest.raises(ConfigError, match="rank_pattern holds 'nothing'"):
        attach(models.load(tied), LoraConfig(rank_pattern={"nothing": 2}), seed=0)


def test_rslora_divides_by_the_root_of_the_rank(tied):
    adapter = attach(models.load(tied), LoraConfig(r=16, lora_alpha=8, use_rslora=True), seed=0)
    assert {pair.scale for pair in adapter.pairs.values()} == {2.0}


def test_adapter_counts_its_parameters(tied):
    adapter = attach(models.load(tied), LoraConfig(r=3, target_modules="attn_k"), seed=0)
    assert adapter.num_parameters == 2 * 3 * (64 + 32) == sum(p.numel() for p in adapter.parameters())
    assert all(parameter.requires_grad for parameter in adapter.parameters())


def test_a_second_adapter_is_refused(tied):
    model = models.load(tied)
    attach(model, LoraConfig(target_modules="attn_q"), seed=0)
    with pytest.raises(ConfigError, match="has an adapter already"):
        attach(model, LoraConfig(target_modules="attn_k"), seed=0)


@pytest.mark.parametrize("rank", [1, 3, 8, 23, 24, 32])
def test_error_does_not_grow_with_the_rank(tied, rank):
    model = models.load(tied, compute="exact")
    adapter = attach(model, LoraConfig(r=rank, lora_alpha=rank, target_modules="attn_k"), seed=0)
    pair = adapter.pairs["blk.0.attn_k.weight"]
    linear = model.linears["blk.0.attn_k.weight"]
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        base = linear(x)
        pair.lora_b.copy_(torch.randn(32, rank, generator=torch.Generator().manual_seed(1)))
        update = linear(x).double() - base
        exact = (x.double() @ pair.lora_a.double().t()) @ pair.lora_b.double().t()
    assert float((update - exact).norm() / exact.norm()) < 1e-6 * 5
