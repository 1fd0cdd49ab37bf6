"""Which weights a pattern names.

A name can be written as the file has it ("blk.0.attn_q.weight"), without ".weight", without the layer ("attn_q": all
layers), with * and ?, or in Hugging Face's words ("q_proj", "model.layers.0.self_attn.q_proj"). What Hugging Face calls
by one name may stand under several in a file: "gate_proj" is the dense feed-forward's, every expert's and the shared
expert's. Experts of a layer are one tensor in the file and are trained together: llama.cpp reads a pair for each of
them, and beyond the end of an adapter that holds fewer.
"""

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from pyggtrain.errors import ConfigError, UnsupportedError
from pyggtrain.nn import Model

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"

HUGGING_FACE_NAMES = {
    "q_proj": ("attn_q",),
    "k_proj": ("attn_k",),
    "v_proj": ("attn_v",),
    "o_proj": ("attn_output",),
    "qkv_proj": ("attn_qkv",),
    "gate_proj": ("ffn_gate", "ffn_gate_exps", "ffn_gate_shexp"),
    "up_proj": ("ffn_up", "ffn_up_exps", "ffn_up_shexp"),
    "down_proj": ("ffn_down", "ffn_down_exps", "ffn_down_shexp"),
    "gate_up_proj": ("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", "ffn_up"),
    # Mixtral's own.
    "w1": ("ffn_gate_exps",),
    "w2": ("ffn_down_exps",),
    "w3": ("ffn_up_exps",),
    "lm_head": ("output",),
    "embed_tokens": ("token_embd",),
}

# They decide which expert gets a token, or how much of the shared one is added. "all-linear" leaves them as they are:
# a router that moves while its experts learn unbalances them.
ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")

_Value = TypeVar("_Value", int, float)


def select(
    model: Model, patterns: Sequence[str], *, exclude: Sequence[str] = (), layers: Sequence[int] | None = None
) -> list[str]:
    """Tensor names that the patterns choose, in the model's order.

    Args:
        model: a loaded model.
        patterns: what to train; "all-linear" stands for every trainable linear but the output head and routers.
        exclude: patterns taken out again.
        layers: only weights of these layers, and weights outside the layers; None: all.

    Raises:
        ConfigError: a pattern matches nothing, a layer does not exist, or nothing is left.
        UnsupportedError: a pattern names only tensors that cannot be trained, or one expert of several.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        chosen.update(all_linear(model) if pattern == ALL_LINEAR else matches(model, pattern, "target_modules"))
    for pattern in exclude:
        chosen.difference_update(matches(model, pattern, "exclude_modules"))
    missing = [layer for layer in layers or () if layer >= len(model.layers)]
    if missing:
        raise ConfigError(f"layers_to_transform names {missing}: the model has layers 0 to {len(model.layers) - 1}.")
    selected = [name for name in model.linears if name in chosen and _is_in_layers(name, layers)]
    if not selected:
        raise ConfigError(
            f"target_modules {list(patterns)} without exclude_modules {list(exclude)} leaves nothing to train. "
            "Exclude less, or name more layers."
        )
    return selected


def all_linear(model: Model) -> list[str]:
    """Every trainable linear, experts among them, but the output head, as PEFT's "all-linear" means it, and routers."""
    return [name for name in model.linears if name != "output.weight" and _kind(name) not in ROUTERS]


def last_match(patterns: Mapping[str, _Value], name: str, default: _Value) -> _Value:
    """The value of the last pattern that fits the tensor `name`, or `default`."""
    fitting = [value for pattern, value in patterns.items() if _does_fit(_translated(pattern), name)]
    return fitting[-1] if fitting else default


def matches(model: Model, pattern: str, option: str) -> list[str]:
    """Trainable tensors that `pattern` names.

    A target with wildcards may cover other tensors too: they are left out, and that is said. A target that names only
        such tensors is refused.

    Args:
        model: a loaded model.
        pattern: one pattern.
        option: the setting it stands in, for messages.

    Raises:
        ConfigError: it matches nothing.
        UnsupportedError: it names one expert of several, or it is a target and names only tensors that cannot be
            trained.
    """
    if one := re.search(r"\bexperts\.\d+\.", pattern):
        whole = pattern.replace(one[0], "experts.")
        raise UnsupportedError(
            f"{option} names a single expert: '{pattern}'. The experts of a layer are one tensor of the file, and an "
            f"adapter for llama.cpp holds a pair for each of them. Write '{whole}'."
        )
    translated = _translated(pattern)
    if translated != (_without_weight(pattern),):
        present = [name for name in translated if any(_does_fit((name,), tensor) for tensor in model.linears)]
        logger.info("%s: '%s' is '%s' in a GGUF file", option, pattern, "', '".join(present or translated))
    trainable = [name for name in model.linears if _does_fit(translated, name)]
    refused = [f"{name} {reason}" for name, reason in model.untrainable.items() if _does_fit(translated, name)]
    if translated == ("output",) and model.head_is_tied:
        refused.append(
            "the model has no output.weight: its head is the token embedding (tied), which no adapter can change"
        )
    if refused and option == "target_modules":
        if not trainable:
            raise UnsupportedError(
                f"{option} asks for '{pattern}', but {refused[0]}. Trainable are: {', '.join(_kinds(model))}."
            )
        logger.warning(
            "%s: '%s' also covers %d tensors that cannot be trained and stay as they are: %s",
            option,
            pattern,
            len(refused),
            refused[0],
        )
    if not trainable and not refused:
        near = difflib.get_close_matches(translated[0], [*_kinds(model), *map(_without_weight, model.linears)], n=3)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"{option} holds '{pattern}', which matches no weight of this {model.architecture} model. {hint}"
            f"Trainable are: {', '.join(_kinds(model))}."
        )
    return trainable


def _translated(pattern: str) -> tuple[str, ...]:
    """What `pattern` is in the file's words, without ".weight"."""
    pattern = re.sub(r"^model\.layers\.", "blk.", _without_weight(pattern))
    pattern = re.sub(r"(^|\.)((self_attn|mlp|block_sparse_moe|experts(\.\*)?)\.)+", r"\1", pattern)
    layer, dot, kind = pattern.rpartition(".")
    return tuple(layer + dot + name for name in HUGGING_FACE_NAMES.get(kind, (kind,)))


def _does_fit(patterns: tuple[str, ...], tensor_name: str) -> bool:
    """A pattern fits the whole name, or the part of it after the layer's number."""
    name, kind = _without_weight(tensor_name), _kind(tensor_name)
    return any(fnmatchcase(name, pattern) or fnmatchcase(kind, pattern) for pattern in patterns)


def _is_in_layers(name: str, layers: Sequence[int] | None) -> bool:
    match = re.match(r"blk\.(\d+)\.", name)
    return layers is None or match is None or int(match[1]) in layers


def _kinds(model: Model) -> list[str]:
    """What can be trained, each kind of weight once."""
    return list(dict.fromkeys(_kind(name) for name in model.linears))


def _kind(tensor_name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", _without_weight(tensor_name))


def _without_weight(name: str) -> str:
    return name.removesuffix(".weight")
