"""Settings of one training run.

Each field's docstring is its only description: `--help`, docs/training.md and the record beside the adapter are made
from it. Names are those of PEFT, TRL and Unsloth wherever the same thing exists there.
"""

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pyggtrain.errors import ConfigError

GPU_COMPUTE = ("bf16", "fp16", "fp8", "fused", "mmq")
"""Values of `compute` that need a GPU."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of one training run. Constructing it checks them; every mistake is reported in one `ConfigError`."""

    model: str
    """GGUF file to train on (any part of a split one), or hf://owner/repo/file.gguf. It is only read, never changed."""
    data: tuple[str, ...]
    """Training data: one or more files (JSONL, JSON, CSV, Parquet, .txt). PATH:0.5 shows half of a file's rows in each
    epoch, PATH:2 shows them twice; in YAML also a mapping of path to weight."""
    output: str
    """Adapter to write (.gguf). Record, metrics, checkpoint and report lie beside it under the same name."""
    eval_data: tuple[str, ...] = ()
    """Held-out data, never trained on. Without it, `eval_split` sets rows aside."""
    eval_split: float = 0.05
    """Share of the training rows set aside as held-out rows when no `eval_data` is given; at most 200 rows, and none
    from fewer than 20 rows. Without held-out rows nobody can tell learning from memorising. 0 turns it off."""
    overwrite: bool = False
    """Replace an adapter that already exists at `output`."""
    resume: bool = False
    """Continue from the checkpoint beside `output`. Refused if base file, data or settings have changed."""

    r: int = 16
    """Rank of the adapter. 16 on all linears is the usual starting point of PEFT and Unsloth users; higher for much
    data."""
    lora_alpha: float = 16.0
    """Strength of the adapter: its product is multiplied by lora_alpha / r. Equal to r by default, so the factor is 1
    and the default learning rate fits."""
    lora_dropout: float = 0.0
    """Share of the adapter's inputs zeroed while training. 0 is fastest; 0.05 to 0.1 for very small data."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linears that get an adapter: "all-linear", or names as in the file (attn_q, ffn_up) or as in Hugging Face models
    (q_proj, up_proj)."""
    exclude_modules: tuple[str, ...] = ()
    """Linears that get none, although `target_modules` names them."""
    layers_to_transform: tuple[int, ...] = ()
    """Only these layers get an adapter (0 is the first); without it all do."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Other ranks for some linears, by pattern: attn_v=32. The last match counts."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Other lora_alpha for some linears, by pattern: attn_v=64. The last match counts."""
    use_rslora: bool = False
    """Multiply by lora_alpha / sqrt(r) instead of lora_alpha / r. Worth it for ranks above 64."""
    init_adapter: str | None = None
    """Adapter to train on: a GGUF adapter or a PEFT folder, whoever made it. Its weights, ranks, alpha and targets are
    taken over exactly. Axolotl calls this lora_model_dir, LLaMA-Factory adapter_name_or_path: both names work too."""

    method: Literal["sft", "dpo", "orpo"] = "sft"
    """What is learnt: the answers themselves ("sft"), or to prefer a chosen answer over a rejected one ("dpo", "orpo").
    DPO's reference is the model with its adapter switched off: no second model is loaded."""
    beta: float = 0.1
    """DPO: how strongly the adapter is held near the base model; smaller lets it go further. ORPO: weight of the
    preference beside the answer's own loss."""
    precompute_ref_log_probs: bool = False
    """DPO: compute what the base model thinks of all answers once, before the first step, and keep it in the cache,
    instead of a further forward pass in each step. Worth it from the second epoch or run on; a model that is split
    over processes needs it."""
    neftune_noise_alpha: float = 0.0
    """Strength of the noise on token embeddings while training (NEFTune); 5 is usual with small data. 0: none."""

    optim: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "muon", "schedule_free_adamw"] = "adamw"
    """Optimiser. adamw_8bit keeps its moments in 8 bits (bitsandbytes), schedule_free_adamw needs no falling rate
    (schedulefree): `pip install pyggtrain[optimizers]`. paged_ ones keep gradients and moments in the host's memory
    where a GPU computes, for adapters of all experts. muon makes each factor's step orthogonal (torch 2.9 or
    later)."""
    learning_rate: float = 2e-4
    """Highest learning rate. 2e-4 is the usual value for LoRA of rank 16 (TRL, Unsloth); full fine-tuning takes 10
    times less."""
    loraplus_lr_ratio: float = 1.0
    """Learning rate of lora_b divided by that of lora_a (LoRA+). 1: the same; the paper takes 16."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up: towards zero along a cosine or a line, constant, or constant with a
    fall at the end (warm-up, stable, decay)."""
    num_decay_steps: int | None = None
    """Schedule wsd: optimiser steps of the fall at the end; by default a fifth of all."""
    warmup_ratio: float = 0.03
    """Share of all steps in which the learning rate rises to its highest value. `warmup_steps` wins over it."""
    warmup_steps: int | None = None
    """Number of optimiser steps in which the learning rate rises."""
    num_train_epochs: float = 3.0
    """Passes over the training rows; may be a fraction. `max_steps` wins over it."""
    max_steps: int | None = None
    """Number of optimiser steps."""
    per_device_train_batch_size: int | None = None
    """Rows (conversations) in one micro-batch. They lie one after another without padding and never see one another.
    Unset: 2, or with `max_memory` as many as are fastest within it, the rows of a step staying the same."""
    gradient_accumulation_steps: int = 4
    """Micro-batches in one optimiser step. The loss is the mean over all learnt tokens of the step, however they are
    cut up."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW on the adapter's factors."""
    adam_beta1: float = 0.9
    """AdamW: decay of the mean of gradients."""
    adam_beta2: float = 0.999
    """AdamW: decay of the mean of squared gradients."""
    adam_epsilon: float = 1e-8
    """AdamW: added to the square root of the mean of squared gradients."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm when they exceed it. 0 turns clipping off; the norm is logged in any
    case."""

    max_seq_length: int = 2048
    """Longest row in tokens, also called max_length."""
    packing: bool = False
    """Put rows together into packs of at most `max_seq_length` tokens (best fit), and count packs instead of rows in
    `per_device_train_batch_size`: faster with many short rows. Rows never see one another, packed or not."""
    too_long: Literal["error", "drop", "truncate", "split"] = "drop"
    """What to do with rows above `max_seq_length`: stop and name them, leave them out, cut off their end, or (plain
    text only) cut them into pieces. Each case is counted and told."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """What to do with rows that cannot be used. All of them are listed in either case."""
    format: str | None = None
    """Format of the rows: messages, sharegpt, alpaca, prompt_completion, preference or text. By default the keys of
    each file's first row tell."""
    learnt_turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns in a conversation are learnt."""
    merge_system: bool = False
    """Put a system message before the first user message if the chat template has no system role."""
    chat_template: str | None = None
    """File with a jinja chat template to use instead of the one inside the GGUF file, or the name of another one that
    the GGUF file holds (tokenizer.chat_template.NAME). Serve with the same one."""
    chat_template_kwargs: str | None = None
    """Variables for the chat template as JSON, as llama-server takes them: {"enable_thinking": false}. Serve with the
    same ones."""

    device: str = "auto"
    """Where to compute: "auto" (a CUDA device if there is one), "cpu", "cuda", "cuda:1"."""
    model_impl: Literal["auto", "native", "graph"] = "auto"
    """Where the model's definition comes from: "native" (hand-written here), "graph" (llama.cpp's own compute graph
    of the file, imported), or "auto": native where there is one that knows all the file asks for, else graph."""
    compute: Literal["auto", "exact", "ggml", "bf16", "fp16", "fp8", "fused", "mmq"] = "auto"
    """Arithmetic of the base weights' products: "exact" (dequantised, float32), "ggml" (CPU only: llama.cpp's own 8-bit
    activations), or "auto" (CPU: the faster of these for each weight; GPU: bfloat16, for few rows the fastest way that
    was measured). For a GPU also one way for all: "bf16" and "fp16" (dequantised; activations of that type), "fused"
    (dequantised inside the product), "mmq" (llama.cpp's kernels, activations in 8 bits, in builds with CUDA), "fp8"
    (8-bit floats, hand-written models on cards that multiply them; docs/performance.md says what it costs)."""
    gradient_checkpointing: Literal["auto", "none", "matmuls", "layers", "offload"] = "auto"
    """Memory against time, by what backward computes again: nothing that takes a product ("none"), a part of each layer
    ("matmuls") or whole layers ("layers"); or, on a GPU, activations wait in the host's memory ("offload").
    docs/numerics.md has what each keeps."""
    cuda_graphs: bool = True
    """On a GPU, launch the forward and backward of short micro-batches as one CUDA graph for each shape."""
    max_memory: str | None = None
    """Most memory that training may take, like 16GiB or 800MiB: of the GPU, or on a CPU all that the process holds,
    base file included. The fastest setting that stays below is taken; a run that oversteps it stops with an error."""
    num_threads: int = 0
    """CPU threads; 0 takes all cores this process may use. Another number may change the last bits of a result."""
    split_mode: Literal["none", "layer"] = "none"
    """With several processes (torchrun): "none" gives each of them the whole model and a share of the rows, "layer" a
    part of the layers, for a model that fits no single device. llama-server calls it so too."""
    tensor_split: tuple[float, ...] = ()
    """With split_mode layer: how many layers each process gets, as shares (3 1: three quarters and one). By default
    the weights are spread by the free memory of the devices."""
    ddp_timeout: int = 600
    """With several processes (torchrun): seconds after which one that does not answer is given up and the run ends."""
    seed: int = 3407
    """Seed of the adapter's start, the order of rows and dropout. Same seed, same device: same adapter bytes."""

    logging_steps: int = 1
    """Write a line of metrics every so many steps."""
    eval_steps: int | None = None
    """Compute the held-out loss every so many steps; by default at the start, after each epoch and at the end."""
    save_steps: int = 100
    """Write a checkpoint every so many steps; one is always written at the end and on Ctrl-C. 0: only then."""
    early_stopping_patience: int | None = None
    """Stop once the held-out loss has not become better this many times in a row."""
    early_stopping_threshold: float = 0.0
    """By how much (in nats) the held-out loss must fall below the best one before to count as better."""
    load_best_model_at_end: bool = False
    """Write the adapter as it was when the held-out loss was lowest, not as it was last."""
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Also send metrics there: tensorboard (files in <output>.tensorboard), trackio, wandb. Each is a package to
    install."""
    run_name: str | None = None
    """Name of the run for `report_to`; by default the name of `output`."""

    verify: bool = True
    """Afterwards load base + adapter in llama.cpp and compare; exit code 3 if they differ by more than llama.cpp's own
    noise."""
    verify_tokens: int = 256
    """Tokens compared at most, in whole rows; held-out rows come first."""
    runtime: str = "bridge"
    """llama.cpp to compare with: "bridge" (built in), or the http address of a llama-server that has base and adapter
    loaded."""
    hash_base: bool = False
    """Store the SHA-256 of the whole base file in the adapter, not only that of its header; `pyggtrain verify
    --hash-base` compares it. Reads every byte of the file: minutes for 100 GiB."""
    sample_prompts: tuple[str, ...] = ()
    """Questions answered by llama.cpp without and with the adapter at the end; shown in the report."""

    def __post_init__(self) -> None:
        for name, annotation in field_types().items():
            object.__setattr__(self, name, _coerced(getattr(self, name), annotation))
        if mistakes := _mistakes(self):
            raise _config_error(mistakes)

    @property
    def step_rows(self) -> int:
        """Rows of one full optimiser step."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def micro_batch_size(self) -> int:
        """Rows of one micro-batch."""
        return self.per_device_train_batch_size or _DEFAULT_MICRO_BATCH_SIZE

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON / YAML values; `build_config(config.to_dict())` gives them back."""
        return {
            name: list(value) if isinstance(value, tuple) else copy.copy(value) for name, value in vars(self).items()
        }


_DEFAULT_MICRO_BATCH_SIZE = 2

ALIASES = {
    "max_length": "max_seq_length",
    "lora_model_dir": "init_adapter",
    "adapter_name_or_path": "init_adapter",
}
"""Names of the same thing in peers, accepted everywhere."""

ELSEWHERE = {
    "lora_r": "it is called r",
    "rank": "it is called r",
    "lora_rank": "it is called r",
    "lr": "it is called learning_rate",
    "epochs": "it is called num_train_epochs",
    "num_epochs": "it is called num_train_epochs",
    "batch_size": "it is called per_device_train_batch_size",
    "output_dir": "it is called output and names the adapter file",
    "resume_from_checkpoint": "it is called resume and is true or false",
    "save_total_limit": "one checkpoint is kept, the newest",
    "use_dora": "a llama.cpp adapter cannot hold DoRA's magnitudes",
    "modules_to_save": "a llama.cpp adapter can hold nothing but pairs of low-rank factors",
    "bias": "a llama.cpp adapter cannot hold biases",
    "padding_free": "always on",
    "assistant_only_loss": "always on for chats: only the assistant's turns are learnt",
    "completion_only_loss": "always on for prompt + completion",
    "load_in_4bit": "weights stay as they are in the GGUF file",
    "load_in_8bit": "weights stay as they are in the GGUF file",
    "bf16": "adapter weights are float32; the device decides the rest",
    "fp16": "adapter weights are float32; the device decides the rest",
    "loss_type": "it is called method: sft, dpo or orpo",
    "ref_model": "the reference of DPO is the base model itself, with the adapter switched off",
    "metric_for_best_model": "it is always the held-out loss",
    "greater_is_better": "the held-out loss is always better when lower",
    "eval_strategy": "the held-out loss is computed every eval_steps, or after each epoch",
    "random_state": "it is called seed",
    "train_on_responses_only": "always on for chats",
}
"""Settings of peers that are named otherwise or not offered here, and why."""


@functools.cache
def field_types() -> dict[str, Any]:
    """Return name -> type annotation of each setting, in order."""
    hints = typing.get_type_hints(TrainConfig)
    return {setting.name: hints[setting.name] for setting in dataclasses.fields(TrainConfig)}


@functools.cache
def field_docs() -> dict[str, str]:
    """Return name -> docstring of each setting, read from the source of `TrainConfig`."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(TrainConfig)).body[0]).body
    docs = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            name = typing.cast(ast.Name, statement.target).id
            docs[name] = " ".join(typing.cast(str, ast.literal_eval(following.value)).split())
    return docs


def is_needed(setting: "dataclasses.Field[Any]") -> bool:
    """Return whether a setting has no default."""
    return setting.default is dataclasses.MISSING and setting.default_factory is dataclasses.MISSING


def build_config(settings: Mapping[str, Any], base: "str | Path | TrainConfig | None" = None) -> TrainConfig:
    """Make a config from named settings, on top of those of a configuration file or another config.

    Args:
        settings: name -> value; these win over the base. A value may be text ("2e-4"), as YAML and shells give it.
        base: YAML (.yaml, .yml) or TOML (.toml) file with one value for each setting, or a config.

    Raises:
        ConfigError: unknown names, wrong types or values, missing settings: all of them together.
    """
    mistakes: list[str] = []
    merged: dict[str, Any] = {}
    below = base.to_dict() if isinstance(base, TrainConfig) else read_config_file(base) if base is not None else {}
    for source, values in ((f" (in {base})", below), ("", settings)):
        for given, value in values.items():
            name = ALIASES.get(given, given)
            if name not in field_types():
                mistakes.append(f"{given}{source}: {_unknown(given)}")
            elif name != given and name in values:
                mistakes.append(f"{given}{source}: the same setting as {name}; give one of them")
            else:
                merged[name] = value
    for setting in dataclasses.fields(TrainConfig):
        if is_needed(setting) and setting.name not in merged:
            mistakes.append(f"{setting.name}: missing. {field_docs()[setting.name]}")
            merged[setting.name] = "missing"
    try:
        config = TrainConfig(**merged)
    except ConfigError as error:
        raise _config_error(mistakes + str(error).split("\n  - ")[1:]) from None
    if mistakes:
        raise _config_error(mistakes)
    return config


def size_in_bytes(text: str) -> int | None:
    """Return what a size like "16GiB", "1.5 GB" or "800MiB" is in bytes, None if it is none."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(i?)B\s*", text)
    if found is None or float(found[1]) == 0:
        return None
    return int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2]) + 1))


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Read a YAML or TOML file of settings as a flat mapping.

    Raises:
        ConfigError: not readable, not valid YAML / TOML, or not a flat mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration file: {error}") from error
    if path.suffix.lower() == ".toml":
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            values: Any = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
    elif path.suffix.lower() in (".yaml", ".yml"):
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from error
    else:
        raise ConfigError(f"{path}: a configuration file must end in .yaml, .yml or .toml")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {type(values).__name__}; needed: one `name: value` line for each setting")
    return {str(name): value for name, value in values.items()}


def _config_error(mistakes: list[str]) -> ConfigError:
    count = "1 setting is wrong" if len(mistakes) == 1 else f"{len(mistakes)} settings are wrong"
    return ConfigError("\n  - ".join([f"{count}:", *mistakes]))


def _unknown(name: str) -> str:
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    near = difflib.get_close_matches(name, [*field_types(), *ALIASES], n=1)
    return (
        f"no such setting; did you mean {near[0]}?" if near else "no such setting; `pyggtrain train --help` lists all"
    )


def _coerced(value: Any, annotation: Any) -> Any:
    """Return `value` as the annotated type where the meaning is certain, else unchanged: then it is a mistake."""
    if isinstance(annotation, types.UnionType):
        return value if value is None else _coerced(value, typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is tuple:
        if isinstance(value, Mapping):
            # Files with weights, as YAML writes them: {chat.jsonl: 1, extra.csv: 0.5}.
            value = [f"{item}:{weight}" for item, weight in value.items()]
        items = value if isinstance(value, list | tuple) else () if value is None else (value,)
        return tuple(_coerced(item, typing.get_args(annotation)[0]) for item in items)
    if typing.get_origin(annotation) is dict:
        pairs = (
            value.items() if isinstance(value, Mapping) else [str(item).rpartition("=")[::2] for item in value or ()]
        )
        return {name: _coerced(item, typing.get_args(annotation)[1]) for name, item in pairs}
    try:
        # YAML 1.1 reads 2e-4 as text, and shells give nothing but text.
        if annotation is float and not isinstance(value, bool) and isinstance(value, int | str):
            return float(value)
        if annotation is int and (isinstance(value, str) or (isinstance(value, float) and value.is_integer())):
            return int(value)
    except ValueError:
        pass
    return str(value) if annotation is str and isinstance(value, Path) else value


def _has_type(value: Any, annotation: Any) -> bool:
    if isinstance(annotation, types.UnionType):
        return any(_has_type(value, kind) for kind in typing.get_args(annotation))
    if typing.get_origin(annotation) is Literal:
        return value in typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return isinstance(value, tuple) and all(_has_type(item, typing.get_args(annotation)[0]) for item in value)
    if typing.get_origin(annotation) is dict:
        kinds = typing.get_args(annotation)
        return isinstance(value, dict) and all(
            _has_type(name, kinds[0]) and _has_type(item, kinds[1]) for name, item in value.items()
        )
    if annotation is float:
        return isinstance(value, float) and math.isfinite(value)
    return type(value) is annotation and value != ""


def describe_type(annotation: Any) -> str:
    """Return what a setting accepts, in words: "number", "one of cosine, linear, constant"."""
    if isinstance(annotation, types.UnionType):
        return " or ".join(describe_type(kind) for kind in typing.get_args(annotation))
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return "one or more of: " + describe_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is dict:
        return "one or more of: name=" + describe_type(typing.get_args(annotation)[1])
    words = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "none"}
    return words[annotation]


def _mistakes(config: TrainConfig) -> list[str]:
    mistakes = []
    for name, annotation in field_types().items():
        value = getattr(config, name)
        if not _has_type(value, annotation):
            mistakes.append(f"{name}: found {value!r}; needed: {describe_type(annotation)}")
        elif value is not None and name in _RANGES:
            holds, needed = _RANGES[name]
            if not holds(value):
                mistakes.append(f"{name}: found {value!r}; needed: {needed}")
    if mistakes:
        return mistakes
    if not config.data:
        mistakes.append("data: no file given")
    if not config.target_modules:
        mistakes.append("target_modules: empty, so nothing would be trained")
    if config.chat_template_kwargs is not None:
        try:
            is_object = isinstance(json.loads(config.chat_template_kwargs), dict)
        except json.JSONDecodeError:
            is_object = False
        if not is_object:
            mistakes.append(
                f"chat_template_kwargs: found {config.chat_template_kwargs!r}; "
                'needed: JSON, like {"enable_thinking": false}'
            )
    if config.optim == "schedule_free_adamw" and config.lr_scheduler_type != "constant":
        mistakes.append(
            f"lr_scheduler_type: found {config.lr_scheduler_type!r} with optim schedule_free_adamw, which replaces the "
            "schedule; needed: constant (warm-up stays)"
        )
    if config.precompute_ref_log_probs and config.method != "dpo":
        mistakes.append(f"precompute_ref_log_probs: only dpo has a reference, and method is {config.method}")
    if config.split_mode == "layer" and config.method == "dpo" and not config.precompute_ref_log_probs:
        mistakes.append("method: dpo with split_mode layer needs precompute_ref_log_probs")
    if config.tensor_split and config.split_mode == "none":
        mistakes.append("tensor_split: has no effect without split_mode layer")
    if any(not share > 0 for share in config.tensor_split):
        mistakes.append(f"tensor_split: found {list(config.tensor_split)}; needed: numbers above 0")
    if config.resume and config.overwrite:
        mistakes.append(
            "resume, overwrite: one continues the run beside `output`, the other discards it; give one of them"
        )
    return mistakes


_AT_LEAST_0 = (lambda value: value >= 0, "0 or more")
_AT_LEAST_1 = (lambda value: value >= 1, "1 or more")
_ABOVE_0 = (lambda value: value > 0, "more than 0")
_SHARE = (lambda value: 0 <= value < 1, "0 or more and below 1")
_RANGES: dict[str, tuple[Any, str]] = {
    "eval_split": _SHARE,
    "r": _AT_LEAST_1,
    # llama.cpp reads a zero alpha as "factor 1", other tools as "factor 0".
    "lora_alpha": _ABOVE_0,
    "lora_dropout": _SHARE,
    "beta": _ABOVE_0,
    "neftune_noise_alpha": _AT_LEAST_0,
    "learning_rate": _ABOVE_0,
    "loraplus_lr_ratio": _ABOVE_0,
    "num_decay_steps": _AT_LEAST_0,
    "warmup_ratio": (lambda value: 0 <= value <= 1, "0 to 1"),
    "warmup_steps": _AT_LEAST_0,
    "num_train_epochs": _ABOVE_0,
    "max_steps": _AT_LEAST_1,
    "per_device_train_batch_size": _AT_LEAST_1,
    "gradient_accumulation_steps": _AT_LEAST_1,
    "weight_decay": _AT_LEAST_0,
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": _ABOVE_0,
    "max_grad_norm": _AT_LEAST_0,
    "max_seq_length": (lambda value: value >= 2, "2 or more, since a token is learnt from the one before it"),
    "max_memory": (lambda value: size_in_bytes(value) is not None, "a size, like 16GiB or 800MiB"),
    "num_threads": _AT_LEAST_0,
    "ddp_timeout": _AT_LEAST_1,
    "seed": (lambda value: 0 <= value < 2**63, "0 to 2^63 - 1"),
    "logging_steps": _AT_LEAST_1,
    "eval_steps": _AT_LEAST_1,
    "save_steps": _AT_LEAST_0,
    "early_stopping_patience": _AT_LEAST_1,
    "early_stopping_threshold": _AT_LEAST_0,
    "verify_tokens": (lambda value: value >= 2, "2 or more"),
    "runtime": (
        lambda value: value == "bridge" or value.startswith(("http://", "https://")),
        '"bridge" or an http address',
    ),
}
