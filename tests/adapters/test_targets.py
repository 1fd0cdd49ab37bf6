"""adapters.targets: which weights a pattern names, and which are refused with the reason."""

import logging

import pytest

from pyggtrain import models
from pyggtrain.adapters.targets import select
from pyggtrain.errors import ConfigError, UnsupportedError

ALL_KINDS = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]


def names(*kinds, layers=(0, 1)):
    return [f"blk.{layer}.{kind}.weight" for layer in layers for kind in kinds]


@pytest.fixture(scope="module")
def tied_model(tied):
    return models.load(tied)


@pytest.fixture(scope="module")
def untied_model(untied):
    return models.load(untied)


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (("all-linear",), names(*ALL_KINDS)),
        (("attn_q",), names("attn_q")),
        (("attn_q.weight",), names("attn_q")),
        (("blk.0.attn_q",), names("attn_q", layers=(0,))),
        (("blk.1.attn_q.weight",), names("attn_q", layers=(1,))),
        (("blk.*.ffn_*",), names("ffn_gate", "ffn_up", "ffn_down")),
        (("ffn_?p",), names("ffn_up")),
        (("q_proj", "v_proj"), names("attn_q", "attn_v")),
        (("k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), names(*ALL_KINDS[1:2], *ALL_KINDS[3:])),
        (("self_attn.q_proj",), names("attn_q")),
        (("model.layers.1.mlp.up_proj",), names("ffn_up", layers=(1,))),
        (("all-linear", "lm_head"), ["output.weight"]),
    ],
)
def test_pattern_names_these(tied_model, untied_model, patterns, chosen):
    if "lm_head" in patterns:
        assert set(select(untied_model, patterns)) == {*names(*ALL_KINDS), *chosen}
        return
    selected = select(tied_model, patterns)
    assert set(selected) == set(chosen)
    assert selected == [name for name in tied_model.linears if name in selected], "not in the model's order"


def test_all_linear_leaves_the_head_out(untied_model):
    assert "output.weight" in untied_model.linears
    assert "output.weight" not in select(untied_model, ["all-linear"])
    assert select(untied_model, ["output"]) == ["output.weight"]


def test_exclusions_and_layers(tied_model, untied_model):
    assert select(tied_model, ["all-linear"], exclude=["ffn_*", "attn_k", "v_proj"]) == names("attn_q", "attn_output")
    assert select(tied_model, ["attn_q"], layers=[1]) == names("attn_q", layers=(1,))
    # Weights outside the layers are not touched by the choice of layers.
    assert set(select(untied_model, ["attn_q", "output"], layers=[0])) == {"blk.0.attn_q.weight", "output.weight"}
    # Excluding what is never trained is no mistake.
    assert select(tied_model, ["attn_q"], exclude=["token_embd"]) == names("attn_q")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("output", "its head is the token embedding (tied)"),
        ("lm_head", "its head is the token embedding (tied)"),
        ("token_embd", "the output head in one (tied), and llama.cpp aborts"),
        ("embed_tokens", "the output head in one (tied), and llama.cpp aborts"),
        ("attn_norm", "blk.0.attn_norm.weight is a norm weight, and llama.cpp silently drops"),
        ("output_norm", "output_norm.weight is a norm weight"),
        ("*norm", "is a norm weight"),
    ],
)
def test_what_llama_cpp_would_drop_or_abort_on_is_refused(tied_model, pattern, reason):
    with pytest.raises(UnsupportedError) as error:
        select(tied_model, ["attn_q", pattern])
    assert reason in str(error.value)
    assert "Trainable are: attn_q, attn_k" in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("token_embd", "training is not implemented"), ("rope_freqs", "refuses an adapter that names it")],
)
def test_untied_refusals_have_their_own_reasons(untied_model, pattern, reason):
    with pytest.raises(UnsupportedError, match=reason):
        select(untied_model, [pattern])


def test_a_wildcard_over_norms_says_what_it_leaves_out(tied_model, caplog):
    with caplog.at_level(logging.WARNING):
        assert select(tied_model, ["attn_*"]) == names("attn_q", "attn_k", "attn_v", "attn_output")
    assert "'attn_*' also covers 2 tensors" in caplog.text and "norm weight" in caplog.text


def test_a_translated_name_is_said(tied_model, caplog):
    with caplog.at_level(logging.INFO):
        select(tied_model, ["q_proj"])
    assert "'q_proj' is 'attn_q' in a GGUF file" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("ffn_gat", "Did you mean ffn_gate"),
        ("blk.0.attn_qq", "Did you mean blk.0.attn_q"),
        ("wo", "Trainable are:"),
        ("blk.7.attn_q", "Did you mean"),
    ],
)
@pytest.mark.parametrize("option", ["target_modules", "exclude_modules"])
def test_a_pattern_that_matches_nothing_is_an_error_with_near_misses(tied_model, pattern, hint, option):
    patterns, exclude = (["attn_q", pattern], []) if option == "target_modules" else (["attn_q"], [pattern])
    with pytest.raises(ConfigError) as error:
        select(tied_model, patterns, exclude=exclude)
    assert f"{option} holds '{pattern}', which matches no weight of this llama model" in str(error.value)
    assert hint in str(error.value)


def test_nothing_left_and_no_such_layer_are_errors(tied_model):
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        select(tied_model, ["attn_q"], exclude=["attn_*"])
    with pytest.raises(ConfigError, match=r"layers_to_transform names \[2\]: the model has layers 0 to 1"):
        select(tied_model, ["attn_q"], layers=[0, 2])
