"""Flags are made from the settings: every one is there, in any spelling, and mistakes are reported together."""

import dataclasses
import subprocess
import sys

import pytest

from pyggtrain.cli.arguments import parse_settings, train_parser
from pyggtrain.errors import ConfigError
from pyggtrain.training.config import TrainConfig, build_config, field_docs


def parse(*arguments: str) -> TrainConfig:
    settings, file, _ = parse_settings(arguments, "pyggtrain train")
    return build_config(settings, file)


def test_help_has_a_flag_and_the_docstring_of_every_setting():
    text = " ".join(train_parser("pyggtrain train").format_help().split())
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in text
        # argparse may break a line at a hyphen.
        assert field_docs()[field.name].replace("- ", "-").replace(" ", "") in text.replace("- ", "-").replace(" ", "")


def test_help_needs_no_torch():
    code = """
import sys
from pyggtrain.cli import main
try:
    main(["train", "--help"])
except SystemExit:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--learning-rate" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("m.gguf", "d.jsonl", "e.jsonl", "-o", "a.gguf"),
        ("-o", "a.gguf", "m.gguf", "d.jsonl", "e.jsonl"),
        ("m.gguf", "-o", "a.gguf", "d.jsonl", "e.jsonl"),
        ("m.gguf", "d.jsonl", "--output", "a.gguf", "e.jsonl"),
        ("--model", "m.gguf", "--output=a.gguf", "--data", "d.jsonl", "e.jsonl"),
    ],
)
def test_model_and_data_may_stand_anywhere(arguments):
    config = parse(*arguments)
    assert (config.model, config.data, config.output) == ("m.gguf", ("d.jsonl", "e.jsonl"), "a.gguf")


def test_flags_have_the_spellings_of_peers():
    config = parse(
        "m",
        "d",
        "-o",
        "a",
        "--learning_rate",
        "1e-3",
        "--max-length=99",
        "--target_modules",
        "q_proj",
        "attn_v",
        "--r",
        "4",
    )
    assert (config.learning_rate, config.max_seq_length, config.target_modules, config.r) == (
        1e-3,
        99,
        ("q_proj", "attn_v"),
        4,
    )


def test_switches_can_be_turned_on_and_off():
    assert parse("m", "d", "-o", "a", "--use-rslora", "--no-verify").use_rslora
    assert not parse("m", "d", "-o", "a", "--no-verify").verify
    assert parse("m", "d", "-o", "a").verify


def test_values_with_dashes_and_underscores_are_left_alone():
    config = parse("my_model--x.gguf", "a_b.jsonl", "-o", "out_put.gguf", "--sample-prompts", "a_b --c_d?")
    assert (config.model, config.data, config.output) == ("my_model--x.gguf", ("a_b.jsonl",), "out_put.gguf")
    assert config.sample_prompts == ("a_b --c_d?",)


def test_patterns_are_read_as_pairs():
    assert parse("m", "d", "-o", "a", "--rank-pattern", "attn_v=32", "ffn_*=4").rank_pattern == {
        "attn_v": 32,
        "ffn_*": 4,
    }


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m.gguf\ndata: d.jsonl\noutput: a.gguf\nr: 4\nlearning_rate: 1e-3\n", encoding="utf-8")
    config = parse("-c", str(path), "--r", "2", "other.gguf")
    assert (config.model, config.r, config.learning_rate) == ("other.gguf", 2, 1e-3)


def test_unknown_flags_are_named_together_with_other_mistakes():
    with pytest.raises(ConfigError) as caught:
        parse("m", "d", "-o", "a", "--learning-rte", "3", "--lora-r=4", "--r", "x", "--bf16")
    text = str(caught.value)
    assert "learning_rte: no such setting; did you mean learning_rate?" in text
    assert "lora_r: it is called r" in text and "r: found 'x'" in text and "bf16: adapter weights are float32" in text


def test_dry_run_is_no_setting():
    settings, _, is_dry_run = parse_settings(("m", "d", "-o", "a", "--dry-run"), "pyggtrain train")
    assert is_dry_run and "dry_run" not in settings
