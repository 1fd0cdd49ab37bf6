"""validation.merge_parity: a right merge passes at every type, a wrong one fails, and the yardstick is measured."""

from dataclasses import replace

import pytest
import torch

from pyggtrain import models
from pyggtrain.adapters import gguf_adapter
from pyggtrain.adapters.gguf_adapter import AdapterFile
from pyggtrain.adapters.merge import merge
from pyggtrain.gguf import GGUFFile
from pyggtrain.validation.merge_parity import verify_merge

GENERATOR = torch.Generator().manual_seed(0)
DOCUMENTS = [(tokens, tokens) for tokens in torch.randint(0, 96, (4, 32), generator=GENERATOR).tolist()]
EXACT = "mean KL(base + adapter || merged)"
SIZE = "effect: merged file's size over the adapter's, off 1 by"
DIRECTION = "effect: correlation of the two"


@pytest.fixture(scope="module")
def base(tiny_llama_path):
    return GGUFFile.open(tiny_llama_path)


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """Pairs on every weight, strong enough to be heard above the rounding to eight bits."""
    generator = torch.Generator().manual_seed(1)
    pairs = {}
    for name in models.load(base).linears:
        num_out, num_in = base.tensor_infos[name].shape
        if name != "output.weight":
            lora_a = torch.randn(4, num_in, generator=generator) / num_in**0.5
            pairs[name] = lora_a, torch.randn(num_out, 4, generator=generator) * 0.15
    path = tmp_path_factory.mktemp("adapter") / "adapter.gguf"
    gguf_adapter.write(path, AdapterFile(path, base.architecture, 6.0, pairs, {}))
    return gguf_adapter.load(path)


def compared(base, adapter, merged_with, folder, *, scale=1.0, understate=1.0, **types):
    """Merge `merged_with`, and compare with base + `adapter`."""
    done = merge(base, [(merged_with, scale)], folder / "m.gguf", overwrite=True, **types)
    rounding = {name: replace(r, rms=r.rms * understate) for name, r in done.rounding.items()}
    report = verify_merge(
        base,
        [(adapter.path, 1.0)],
        GGUFFile.open(done.path),
        rounding,
        DOCUMENTS,
        adaptable=models.load(base).linears,
    )
    return report, {check.name: check for check in report.checks}


@pytest.mark.parametrize("type", [None, "BF16", "Q8_0", "Q5_1", "Q4_0", "IQ4_NL"])
def test_right_merge_passes(base, adapter, tmp_path, type):
    report, checks = compared(base, adapter, adapter, tmp_path, type=type)
    assert report.passed, report.table()
    assert report.mode == ("strict" if type is None else "statistical")
    if type is None:
        assert checks[EXACT].value < 1e-6 and checks[EXACT].bound == pytest.approx(1e-6, rel=0.1)
    # A tied head has no adapter, and still its rounding is part of the yardstick.
    assert not any("leaves out" in note for note in report.notes)


@pytest.mark.parametrize("type", [None, "Q8_0"])
@pytest.mark.parametrize("mistake", ["scale", "sign", "lost pair", "swapped pairs"])
def test_wrong_merge_fails(base, adapter, tmp_path, type, mistake):
    pairs, scale = dict(adapter.pairs), 1.0
    if mistake == "scale":
        scale = 1.3
    elif mistake == "sign":
        scale = -1.0
    elif mistake == "lost pair":
        del pairs["blk.0.ffn_down.weight"]
    else:
        first, second = "blk.0.attn_q.weight", "blk.1.attn_q.weight"
        pairs[first], pairs[second] = pairs[second], pairs[first]
    report, _ = compared(base, adapter, replace(adapter, pairs=pairs), tmp_path, scale=scale, type=type)
    assert not report.passed


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_random_error_of_the_same_size_does_as_much_as_the_rounding(base, adapter, tmp_path, type):
    _, checks = compared(base, adapter, adapter, tmp_path, type=type)
    ratio = checks[EXACT].value / checks["yardstick: KL of as much random error"].value
    assert 1 / 3 < ratio < 3


def test_rounding_that_is_worse_than_noted_fails(base, adapter, tmp_path):
    report, _ = compared(base, adapter, adapter, tmp_path, type="Q4_0", understate=0.1)
    assert not report.passed


def test_size_and_direction_are_checked_where_the_effect_is_clear(base, adapter, tmp_path):
    _, checks = compared(base, adapter, adapter, tmp_path, type="Q8_0")
    assert checks[SIZE].passed and checks[DIRECTION].passed
    weak = replace(adapter, alpha=1e-3)
    path = tmp_path / "weak.gguf"
    gguf_adapter.write(path, weak)
    report, checks = compared(base, gguf_adapter.load(path), gguf_adapter.load(path), tmp_path, type="Q4_0")
    assert report.passed and SIZE not in checks
    assert any("not clear of the rounding" in note for note in report.notes)
