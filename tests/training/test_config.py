"""Settings: types, ranges, unknown names, files, and that every description exists once."""

import dataclasses

import pytest

from pyggtrain.errors import ConfigError
from pyggtrain.training.config import (
    ALIASES,
    ELSEWHERE,
    TrainConfig,
    build_config,
    field_docs,
    field_types,
    read_config_file,
    size_in_bytes,
)

NEEDED = {"model": "m.gguf", "data": "d.jsonl", "output": "a.gguf"}


def mistakes_of(**settings) -> str:
    with pytest.raises(ConfigError) as caught:
        build_config({**NEEDED, **settings})
    return str(caught.value)


def test_every_setting_has_a_docstring_of_its_own():
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    assert list(field_docs()) == names
    assert all(text.endswith((".", ".)", ").")) for text in field_docs().values())
    assert len(set(field_docs().values())) == len(names)


def test_names_of_peers_do_not_shadow_settings():
    assert not (ALIASES.keys() | ELSEWHERE.keys()) & field_types().keys()
    assert set(ALIASES.values()) <= field_types().keys()


def test_defaults_are_valid_and_survive_a_round_trip():
    config = build_config(NEEDED)
    assert config.data == ("d.jsonl",)
    assert build_config(config.to_dict()) == config


def test_all_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        build_config(
            {"data": "d", "output": "o", "learning_rte": 1, "lr": 1, "r": 0, "too_long": "cut", "verify": "maybe"}
        )
    text = str(caught.value)
    assert text.startswith("6 settings are wrong:")
    for expected in (
        "learning_rte: no such setting; did you mean learning_rate?",
        "lr: it is called learning_rate",
        "model: missing.",
        "r: found 0; needed: 1 or more",
        "too_long: found 'cut'; needed: one of error, drop, truncate, split",
        "verify: found 'maybe'; needed: true or false",
    ):
        assert expected in text


@pytest.mark.parametrize("alpha", [0, -16, float("nan"), float("inf"), "sixteen", True, None])
def test_alpha_that_no_runtime_agrees_on_is_refused(alpha):
    # llama.cpp reads a missing or zero alpha as "factor 1", other tools as "factor 0".
    assert "lora_alpha: found" in mistakes_of(lora_alpha=alpha)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", 2.5),
        ("r", True),
        ("lora_dropout", 1.0),
        ("learning_rate", 0),
        ("learning_rate", float("nan")),
        ("num_train_epochs", 0),
        ("max_steps", 0),
        ("gradient_accumulation_steps", 0),
        ("max_seq_length", 1),
        ("max_grad_norm", -1),
        ("adam_beta2", 1.0),
        ("seed", -1),
        ("data", []),
        ("data", [""]),
        ("target_modules", []),
        ("layers_to_transform", ["x"]),
        ("rank_pattern", {"attn_q": 1.5}),
        ("rank_pattern", ["attn_q"]),
        ("chat_template_kwargs", "enable_thinking"),
        ("model", ""),
        ("eval_split", 1.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    assert f"{name}: " in mistakes_of(**{name: value})


def test_resume_and_overwrite_exclude_each_other():
    assert "resume, overwrite" in mistakes_of(resume=True, overwrite=True)


def test_text_that_yaml_does_not_read_as_a_number_is_one():
    config = build_config({**NEEDED, "learning_rate": "2e-4", "r": "8", "num_train_epochs": 2, "warmup_steps": 5.0})
    assert (config.learning_rate, config.r, config.num_train_epochs, config.warmup_steps) == (2e-4, 8, 2.0, 5)
    assert type(config.num_train_epochs) is float and type(config.warmup_steps) is int


def test_max_length_is_another_name_of_max_seq_length():
    assert build_config({**NEEDED, "max_length": 99}).max_seq_length == 99
    assert "the same setting as max_seq_length" in mistakes_of(max_length=99, max_seq_length=98)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "model: m.gguf\ndata: [d.jsonl, e.jsonl]\noutput: a.gguf\nlearning_rate: 1e-3\nr: 4\n"),
        (
            "run.toml",
            'model = "m.gguf"\ndata = ["d.jsonl", "e.jsonl"]\noutput = "a.gguf"\nlearning_rate = 1e-3\nr = 4\n',
        ),
    ],
)
def test_flags_win_over_the_file(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8-sig")
    config = build_config({"r": 2}, path)
    assert (config.data, config.learning_rate, config.r) == (("d.jsonl", "e.jsonl"), 1e-3, 2)


def test_an_alias_in_flags_wins_over_the_name_in_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("max_seq_length: 10", encoding="utf-8")
    assert build_config({**NEEDED, "max_length": 20}, path).max_seq_length == 20


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("run.yaml", "a: [", "not valid YAML"),
        ("run.toml", "a = ", "not valid TOML"),
        ("run.yaml", "- a\n- b", "holds list"),
        ("run.yaml", "", "holds NoneType"),
        ("run.json", "{}", "must end in .yaml, .yml or .toml"),
        ("run.yaml", "!!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_broken_configuration_files_are_named(tmp_path, name, text, expected):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected) as caught:
        read_config_file(path)
    assert name in str(caught.value)


def test_missing_configuration_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        read_config_file(tmp_path / "nowhere.yaml")


def test_lists_and_patterns_are_read_from_text_and_from_files():
    from_flags = build_config({**NEEDED, "layers_to_transform": ["0", "3"], "rank_pattern": ["attn_v=32", "blk.0.*=4"]})
    from_file = build_config({**NEEDED, "layers_to_transform": [0, 3], "rank_pattern": {"attn_v": 32, "blk.0.*": 4}})
    assert from_flags == from_file
    assert from_flags.layers_to_transform == (0, 3) and from_flags.rank_pattern == {"attn_v": 32, "blk.0.*": 4}
    assert from_flags.alpha_pattern == {}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("16GiB", 16 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("800MiB", 800 * 2**20),
        ("16", None),
        ("0GiB", None),
        ("lots", None),
    ],
)
def test_sizes_are_read_with_their_unit(text, num_bytes):
    assert size_in_bytes(text) == num_bytes
    if num_bytes is None:
        assert f"max_memory: found '{text}'; needed: a size" in mistakes_of(max_memory=text)
    else:
        assert build_config({**NEEDED, "max_memory": text}).max_memory == text


def test_micro_batch_has_a_default_only_where_nobody_chose_it():
    assert build_config(NEEDED).micro_batch_size == 2 and build_config(NEEDED).step_rows == 8
    assert build_config({**NEEDED, "per_device_train_batch_size": 3}).step_rows == 12
