"""adapters.arithmetic: what a scaled, summed or cut adapter means in llama.cpp."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.adapters import arithmetic, gguf_adapter
from pyggtrain.adapters.gguf_adapter import AdapterFile
from pyggtrain.errors import AdapterError
from pyggtrain.gguf import TypedValue

TOKENS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(0)).tolist()
SHAPES = {
    "blk.0.attn_q.weight": (64, 64),
    "blk.1.ffn_down.weight": (64, 96),
    "blk.1.attn_k.weight": (32, 64),
    "output.weight": (96, 64),
}


def adapter(seed, *, alpha=6.0, rank=4, names=tuple(SHAPES), ranks=None, std=0.2):
    """Random pairs for the tiny llama; `ranks` gives some of them another rank."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name in names:
        num_out, num_in = SHAPES[name]
        r = (ranks or {}).get(name, rank)
        pairs[name] = (
            torch.randn(r, num_in, generator=generator) / math.sqrt(num_in),
            torch.randn(num_out, r, generator=generator) * std,
        )
    return AdapterFile(Path(f"adapter-{seed}.gguf"), "llama", alpha, pairs, {"version": "1"})


def update(file, name):
    """s B A in float64."""
    lora_a, lora_b = arithmetic.factors(name, file.pairs[name])
    return file.scale(name) * (lora_b.double() @ lora_a.double())


def session(base):
    return _bridge.Session(str(base.path), num_ctx=64, num_ubatch=64, num_threads=1, kv_type="F32")


def served(opened, path, files, scales):
    """Logits with adapters, each written to `path` first."""
    active = []
    for index, (file, scale) in enumerate(zip(files, scales, strict=True)):
        one = path / f"{len(list(path.iterdir()))}-{index}.gguf"
        gguf_adapter.write(one, file)
        active.append((opened.load_adapter(str(one)), scale))
    opened.set_adapters(active)
    return torch.from_dlpack(opened.logits(TOKENS)).clone()


@pytest.mark.parametrize("factor", [0.5, 3.0, -0.7, 1 / 3])
@pytest.mark.parametrize("alpha", [6.0, 0.0])
def test_scaled_adapter_is_bit_for_bit_what_llama_cpp_makes_of_lora_scaled(untied, tmp_path, factor, alpha):
    file = adapter(1, alpha=alpha)
    opened = session(untied)
    wanted = served(opened, tmp_path, [file], [factor])
    assert torch.equal(served(opened, tmp_path, [arithmetic.scale(file, factor)], [1.0]), wanted)


def test_scaling_leaves_the_numbers_of_the_pairs_alone():
    file = adapter(1)
    scaled = arithmetic.scale(file, 1 / 3)
    for name, (lora_a, lora_b) in file.pairs.items():
        assert torch.equal(scaled.pairs[name][0], lora_a) and torch.equal(scaled.pairs[name][1], lora_b)


@pytest.mark.parametrize("factor", [0.0, math.inf, math.nan, 1e39, 1e-39])
def test_a_factor_that_cannot_be_meant_is_refused(factor):
    with pytest.raises(AdapterError):
        arithmetic.scale(adapter(1), factor)


def test_sum_in_llama_cpp_is_both_adapters_loaded_together(untied, tmp_path):
    first = adapter(1)
    second = adapter(2, alpha=5.0, rank=3, names=("blk.0.attn_q.weight", "blk.1.attn_k.weight"))
    opened = session(untied)
    wanted = served(opened, tmp_path, [first, second], [1.0, -0.7])
    alone = served(opened, tmp_path, [first], [1.0])
    total = arithmetic.add([first, second], [1.0, -0.7])
    got = served(opened, tmp_path, [total], [1.0])
    rms = float(wanted.square().mean().sqrt())
    assert float((alone - wanted).abs().max()) > 1e-2 * rms, "the second adapter changes nothing"
    assert float((got - wanted).abs().max()) < 1e-5 * rms


def test_sum_of_equal_factors_joins_the_ranks_without_touching_a_number():
    first, second = adapter(1, alpha=4.0, rank=4), adapter(2, alpha=3.0, rank=3)
    total = arithmetic.add([first, second])
    assert total.alpha == 7.0
    for name, (lora_a, lora_b) in total.pairs.items():
        assert torch.equal(lora_a, torch.cat([first.pairs[name][0], second.pairs[name][0]]))
        assert torch.equal(lora_b, torch.cat([first.pairs[name][1], second.pairs[name][1]], dim=1))


def test_sum_of_other_factors_is_exact_to_one_rounding(caplog):
    first, second = adapter(1, alpha=7.0, ranks={"output.weight": 5}), adapter(2, alpha=0.3, rank=7)
    with caplog.at_level(logging.INFO, "pyggtrain"):
        total = arithmetic.add([first, second], [1.0, 2.5])
    assert "rounded once" in caplog.text
    for name in SHAPES:
        wanted = update(first, name) + 2.5 * update(second, name)
        bound = 2**-23 * (total.scale(name) * total.pairs[name][1].double().abs() @ total.pairs[name][0].double().abs())
        assert bool(((update(total, name) - wanted).abs() <= bound).all())


def test_sum_turns_an_embedding_pair_the_right_way():
    generator = torch.Generator().manual_seed(0)
    parts = []
    for rank in (2, 3):
        pair = torch.randn(96, rank, generator=generator), torch.randn(64, rank, generator=generator)
        parts.append(AdapterFile(Path("a"), "llama", float(rank), {"token_embd.weight": pair}, {}))
    total = arithmetic.add(parts)
    assert [half.shape for half in total.pairs["token_embd.weight"]] == [(96, 5), (64, 5)]
    wanted = sum(update(part, "token_embd.weight") for part in parts)
    assert torch.allclose(update(total, "token_embd.weight"), wanted)


def test_sum_keeps_only_what_all_parts_say():
    first, second = adapter(1), replace(adapter(2), provenance={"version": "1", "settings": "x"})
    name = {"general.name": TypedValue("str", "one")}
    total = arithmetic.add([replace(first, other_metadata=name), second])
    assert total.provenance == {"version": "1"} and total.other_metadata == {}


def test_adapters_that_do_not_belong_together_are_refused():
    with pytest.raises(AdapterError, match="'qwen2'"):
        arithmetic.add([adapter(1), replace(adapter(2), architecture="qwen2")])
    wide = {"output.weight": (torch.zeros(4, 128), torch.zeros(96, 4))}
    with pytest.raises(AdapterError, match=r"\[96, 64\].*\[96, 128\]"):
        arithmetic.add([adapter(1), replace(adapter(2), pairs=wide)])
    alora = {"adapter.alora.invocation_tokens": TypedValue("arr[u32]", [1, 2])}
    with pytest.raises(AdapterError, match="switched on by certain tokens"):
        arithmetic.add([adapter(1), replace(adapter(2), other_metadata=alora)])
    with pytest.raises(AdapterError, match="weight 0"):
        arithmetic.add([adapter(1)], [0.0])


@pytest.mark.parametrize("rank", [1, 3])
def test_cut_adapter_is_the_best_of_its_rank_and_tells_what_is_lost(rank):
    file = adapter(1, rank=6)
    reduction = arithmetic.reduce_rank(file, rank)
    lost = total = 0.0
    for name in SHAPES:
        wanted = update(file, name)
        singular = torch.linalg.svdvals(wanted)
        error = float((update(reduction.adapter, name) - wanted).norm())
        assert reduction.adapter.pairs[name][1].shape[-1] == rank
        assert error == pytest.approx(float(singular[rank:].norm()), rel=1e-5)
        lost, total = lost + error**2, total + float(wanted.norm()) ** 2
    assert reduction.relative_error == pytest.approx(math.sqrt(lost / total), rel=1e-5)
    assert reduction.worst_pair in SHAPES and reduction.worst_relative_error >= reduction.relative_error


def test_cutting_a_doubled_adapter_back_loses_nothing():
    file = adapter(1)
    reduction = arithmetic.reduce_rank(arithmetic.add([file, file], [0.25, 0.75]), 4)
    assert reduction.relative_error < 1e-6
    for name in SHAPES:
        assert torch.allclose(update(reduction.adapter, name), update(file, name), atol=1e-6)


def test_experts_are_cut_each_by_itself():
    generator = torch.Generator().manual_seed(0)
    pair = (torch.randn(3, 4, 16, generator=generator), torch.randn(3, 24, 4, generator=generator))
    file = AdapterFile(Path("a"), "qwen3moe", 4.0, {"blk.0.ffn_up_exps.weight": pair}, {})
    cut = arithmetic.reduce_rank(file, 2).adapter
    wanted, got = update(file, "blk.0.ffn_up_exps.weight"), update(cut, "blk.0.ffn_up_exps.weight")
    for expert in range(3):
        singular = torch.linalg.svdvals(wanted[expert])
        assert float((got[expert] - wanted[expert]).norm()) == pytest.approx(float(singular[2:].norm()), rel=1e-5)


def test_norm_is_that_of_the_product():
    file = adapter(1)
    for name in SHAPES:
        assert arithmetic.update_norm(file, name) == pytest.approx(float(update(file, name).norm()), rel=1e-9)
