"""PEFT adapter folders (adapter_config.json, adapter_model.safetensors) <-> GGUF adapters.

Going out, every edit that llama.cpp's converter made to the base is undone on the pair: q and k rows go back to Hugging
Face's order, stacks of experts become one pair per expert, lora_a of the embedding is turned round. Coming in, the same
edits are made. Both ways keep every bit of every number, so a round trip gives the same file. What a GGUF file knows
and PEFT has no place for (metadata, a missing alpha) travels in the safetensors header, where PEFT does not look.

Factors: PEFT multiplies by lora_alpha / r (or / sqrt(r)) with patterns of r and lora_alpha, llama.cpp by one alpha over
each pair's r. Where one alpha cannot say what PEFT says, the quotient goes into lora_b.
"""

import json
import logging
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pyggtrain.adapters.arithmetic import with_scales
from pyggtrain.adapters.gguf_adapter import AdapterFile, check_against_base
from pyggtrain.adapters.lora import scale_of
from pyggtrain.adapters.peft_files import CONFIG, HEADER_KEY, WEIGHTS, Header, read_config, read_weights
from pyggtrain.adapters.peft_names import (
    halved,
    interleaved,
    layout_of,
    module_name,
    num_interleaved_heads,
    tensor_name,
)
from pyggtrain.errors import AdapterError, UnsupportedError
from pyggtrain.gguf import GGUFFile

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
# Settings that change what an adapter means, with the only values of them that a GGUF adapter can follow.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    # Others start from a base whose weights were changed, and mean nothing without that base.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


def weights_of(path: Path) -> Path:
    """The file with an adapter's numbers: itself, or the one in a PEFT folder."""
    return path / WEIGHTS if path.is_dir() else path


def to_peft(
    adapter: AdapterFile,
    base: GGUFFile,
    folder: str | os.PathLike[str],
    *,
    prefix: str = "model",
    base_model: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write an adapter as PEFT loads it beside the Hugging Face model that `base` was converted from.

    Args:
        adapter: as loaded.
        base: GGUF file of the base model: head counts, and what else could be adapted. Its weights are not read.
        folder: to make; its parent exists.
        prefix: the module that holds the layers: "model", or "model.language_model" inside a model that also sees.
        base_model: the Hugging Face model, written into the configuration so that AutoPeftModel finds it.
        overwrite: replace these two files in a folder that holds others.

    Raises:
        AdapterError: the adapter does not fit the base, or the folder is in use.
        UnsupportedError: an architecture or a tensor whose Hugging Face name is not known here.
    """
    from safetensors.torch import save

    folder = Path(folder)
    if folder.exists() and not overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise AdapterError(f"{folder} exists already. Choose another name, or overwrite it explicitly.")
    check_against_base(adapter, base, ignore_hash=True)
    modules = _modules(adapter, prefix)
    tensors: dict[str, torch.Tensor] = {}
    for name, (lora_a, lora_b) in adapter.pairs.items():
        if (num_heads := num_interleaved_heads(base, name)) is not None:
            lora_b = halved(lora_b, num_heads)
        module = _PREFIX + modules[name]
        if name == "token_embd.weight":
            tensors[f"{module}.lora_embedding_A"], tensors[f"{module}.lora_embedding_B"] = lora_a.mT, lora_b
        elif lora_a.dim() == 3:
            for expert, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
                of_expert = module.format(expert)
                tensors[f"{of_expert}.lora_A.weight"], tensors[f"{of_expert}.lora_B.weight"] = a, b
        else:
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = lora_a, lora_b
    header = {"format": "pt", HEADER_KEY: json.dumps(_leftovers(adapter), ensure_ascii=False)}
    weights = save({name: values.contiguous() for name, values in tensors.items()}, header)
    config = _config(adapter, base, modules, prefix, base_model)
    folder.mkdir(exist_ok=True)
    # The configuration comes last: it never describes weights that are not there.
    _replace(folder / WEIGHTS, weights)
    _replace(folder / CONFIG, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())


def _modules(adapter: AdapterFile, prefix: str) -> dict[str, str]:
    found = {name: module_name(adapter.architecture, name, prefix=prefix) for name in adapter.pairs}
    if unknown := [name for name, module in found.items() if module is None]:
        raise UnsupportedError(
            f"{adapter.path} changes {len(unknown)} tensors whose place in Hugging Face's {adapter.architecture} is "
            f"not known here: {', '.join(unknown)}. Known kinds are: "
            f"{', '.join(layout_of(adapter.architecture).modules)}, token_embd, output."
        )
    return {name: module for name, module in found.items() if module is not None}


def _leftovers(adapter: AdapterFile) -> dict[str, Any]:
    """What has no place in PEFT's files."""
    return {
        "alpha": adapter.alpha,
        "tensors": list(adapter.pairs),
        "provenance": adapter.provenance,
        "metadata": {key: [value.type, value.value] for key, value in adapter.other_metadata.items()},
    }


def _config(
    adapter: AdapterFile, base: GGUFFile, modules: Mapping[str, str], prefix: str, base_model: str | None
) -> dict[str, Any]:
    ranks = {name: lora_b.shape[-1] for name, (_, lora_b) in adapter.pairs.items()}
    # transformers 5 fuses experts when it loads them, and PEFT then takes their rank to be r.
    of_experts = [rank for name, rank in ranks.items() if "{}" in modules[name]]
    r = Counter(of_experts or ranks.values()).most_common(1)[0][0]
    others = {modules[name]: rank for name, rank in ranks.items() if rank != r}
    if len(set(of_experts)) > 1:
        logger.warning("Stacks of experts have several ranks: PEFT loads this with transformers 4 only")
        num_experts = max(lora_b.shape[0] for _, lora_b in adapter.pairs.values() if lora_b.dim() == 3)
        others = {m.format(e): rank for m, rank in others.items() for e in range(num_experts if "{}" in m else 1)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": r,
        "lora_alpha": _number(adapter.alpha or r),
        "lora_dropout": 0.0,
        "target_modules": _target_modules(adapter, base, modules, prefix),
        "rank_pattern": others,
        # Without an alpha llama.cpp's factor is 1 for every rank.
        "alpha_pattern": {} if adapter.alpha else dict(others),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _target_modules(adapter: AdapterFile, base: GGUFFile, modules: Mapping[str, str], prefix: str) -> list[str]:
    """Last parts of names ("q_proj") where each names only modules that are adapted, whole names elsewhere."""
    # A model that also sees has modules of the same names that the GGUF file does not show.
    in_base = (
        {}
        if prefix != "model"
        else {name: module_name(base.architecture, name, prefix=prefix) for name in base.tensor_infos}
    )
    left_out = {_last(module) for name, module in in_base.items() if module is not None and name not in modules}
    targets: dict[str, None] = {}
    for name, module in modules.items():
        is_short = bool(in_base) and _last(module) not in left_out
        num_experts = adapter.pairs[name][0].shape[0] if "{}" in module else 1
        targets.update(dict.fromkeys([_last(module)] if is_short else [module.format(e) for e in range(num_experts)]))
    return list(targets)


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _replace(path: Path, data: bytes) -> None:
    """Write `path` at once: a reader never meets half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files for the owner alone.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def from_peft(folder: str | os.PathLike[str], base: GGUFFile) -> AdapterFile:
    """Read a PEFT LoRA adapter as one for `base`, whoever trained it; `gguf_adapter.write` stores it.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        base: GGUF file of the model that the adapter was trained on, in any quantisation. Its weights are not read.

    Raises:
        AdapterError: unreadable or incomplete files, or pairs that do not fit the base.
        UnsupportedError: the adapter holds something that a GGUF adapter cannot (all such things are listed), or a
            module whose place in the base is not known here.
    """
    folder = Path(folder)
    config = read_config(folder / CONFIG)
    tensors, header = read_weights(folder / WEIGHTS)
    found, strangers = _pairs_by_module(tensors)
    mistakes = _mistakes(config, [name for name in strangers if not _is_base_weight(name, tensors[name], base)])
    by_tensor: dict[str, dict[int | None, _Found]] = {}
    for module, part in found.items():
        fused = _unfused(module, part, base)
        place = tensor_name(base.architecture, module)
        if fused is None and place is None:
            mistakes.append(f"module {module}: its place in a GGUF file of '{base.architecture}' is not known here")
        elif fused is None and place is not None:
            by_tensor.setdefault(place[0], {})[place[1]] = part
        else:
            by_tensor |= {name: {None: piece} for name, piece in (fused or {}).items()}
    if mistakes:
        raise UnsupportedError(
            "\n  - ".join([f"{folder} holds what a GGUF adapter for {base.path} cannot:", *mistakes])
        )
    pairs, scales = {}, {}
    order = _order(base, header)
    for name, parts in sorted(by_tensor.items(), key=lambda item: order.get(item[0], len(order))):
        whole = parts[None] if None in parts else _stacked(name, parts, base)
        lora_a, lora_b = whole.lora_a, whole.lora_b
        # What does not fit the heads does not fit the base, which is found out below.
        if (num_heads := num_interleaved_heads(base, name)) is not None and lora_b.shape[0] % (2 * num_heads) == 0:
            lora_b = interleaved(lora_b, num_heads)
        pairs[name] = (lora_a.contiguous(), lora_b.contiguous())
        scales[name] = _scale(config, whole)
    adapter = AdapterFile(folder, base.architecture, 0.0, pairs, header.provenance, header.metadata)
    check_against_base(adapter, base, ignore_hash=True)
    return with_scales(adapter, scales, _alpha(config, header, pairs, scales))


@dataclass(frozen=True, eq=False)
class _Found:
    """A pair of one module, the embedding's lora_a turned as GGUF wants it, and the rank that PEFT divides by."""

    module: str
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    rank: int


def _pairs_by_module(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, _Found], list[str]]:
    """Pairs by module, and the names of tensors that are no half of one."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    strangers = []
    for name, values in tensors.items():
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.weight)?", name)
        if match is None:
            strangers.append(name)
            continue
        if values.dim() < 2:
            raise AdapterError(f"{name} is a vector {list(values.shape)}; needed: a matrix.")
        halves.setdefault(match[1], {})[match[3]] = values.mT if match[2] and match[3] == "A" else values
    for module, pair in halves.items():
        if len(pair) < 2:
            raise AdapterError(f"{module} has lora_{next(iter(pair))} alone: needed both lora_A and lora_B.")
    return {m: _Found(m, pair["A"], pair["B"], pair["B"].shape[-1]) for m, pair in halves.items()}, strangers


def _is_base_weight(name: str, values: torch.Tensor, base: GGUFFile) -> bool:
    """Whether this is the base's own embedding or head, which PEFT saves beside a pair on it."""
    module = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight", name)
    place = tensor_name(base.architecture, module[1]) if module else None
    if place is None or place[0] not in base.tensor_infos:
        return False
    is_same = tuple(values.shape) == tuple(base.tensor_infos[place[0]].shape)
    if is_same:
        logger.info("%s: left out, it is a copy of the base model's weight", name)
    return is_same


def _unfused(module: str, part: _Found, base: GGUFFile) -> dict[str, _Found] | None:
    """Pairs by tensor of a module that transformers 5 made of all experts of a layer; None for any other module.

    PEFT stores A as [E * R, K] and B as [N, R * E] with the expert's number running fastest. `down_proj` wraps
    `gate_up_proj`, or the other way round: the shapes tell which one it is.
    """
    match = re.fullmatch(r"(.*\blayers\.(\d+)\..*\bexperts)((?:\.base_layer)*)", module)
    stacks = {
        kind: f"blk.{match[2]}.ffn_{kind}_exps.weight" if match else "" for kind in ("gate", "up", "down", "gate_up")
    }
    if match is None or stacks["down"] not in base.tensor_infos:
        return None
    *experts, width, num_ff = base.tensor_infos[stacks["down"]].shape
    num_experts = math.prod(experts)
    num_out, num_in = part.lora_b.shape[0], part.lora_a.shape[1]
    halves = (part.rank, num_in), (num_out, part.rank)
    if (
        (num_out, num_in) not in ((width, num_ff), (2 * num_ff, width))
        or (tuple(part.lora_a.shape), tuple(part.lora_b.shape)) != halves
        or part.rank % num_experts
    ):
        raise AdapterError(
            f"{module} has lora_A {list(part.lora_a.shape)} and lora_B {list(part.lora_b.shape)}: they fit neither "
            f"{stacks['down']} {[num_experts, width, num_ff]} in {base.path} nor gate and up beside it."
        )
    rank = part.rank // num_experts
    lora_a = part.lora_a.reshape(num_experts, rank, num_in)
    lora_b = part.lora_b.reshape(num_out, rank, num_experts).permute(2, 0, 1)
    if num_out == width:
        return {stacks["down"]: _Found(f"{match[1]}.down_proj", lora_a, lora_b, rank)}
    whole = _Found(f"{match[1]}.gate_up_proj", lora_a, lora_b, rank)
    if stacks["gate_up"] in base.tensor_infos:
        return {stacks["gate_up"]: whole}
    return dict(zip((stacks["gate"], stacks["up"]), _halves(whole, num_ff), strict=True))


def _halves(whole: _Found, num_ff: int) -> tuple[_Found, _Found]:
    """Gate and up of a pair on both: B's rows are theirs, A is shared. Where two pairs were joined block by block, each
    gets its own rows of A back.
    """
    gate_b, up_b = whole.lora_b[:, :num_ff], whole.lora_b[:, num_ff:]
    half = whole.rank // 2
    is_joined = whole.rank % 2 == 0 and not bool(gate_b[..., half:].any()) and not bool(up_b[..., :half].any())
    if is_joined and bool(whole.lora_b.any()):
        first, second = slice(None, half), slice(half, None)
    else:
        first = second = slice(None)
    return (
        _Found(whole.module, whole.lora_a[:, first], gate_b[..., first], whole.rank),
        _Found(whole.module, whole.lora_a[:, second], up_b[..., second], whole.rank),
    )


def _mistakes(config: Mapping[str, Any], strangers: Iterable[str]) -> list[str]:
    mistakes = [
        f"{key} = {config[key]!r}; needed: {neutral[0]!r}"
        for key, neutral in _NEUTRAL.items()
        if key in config and config[key] not in neutral
    ]
    return mistakes + [f"tensor {name}: no half of a LoRA pair" for name in strangers]


def _stacked(name: str, parts: Mapping[int | None, _Found], base: GGUFFile) -> _Found:
    """One pair for a stack of experts; experts without one get zeros, which change nothing."""
    info = base.tensor_infos.get(name)
    num_experts = info.shape[0] if info is not None else 0
    present = {expert: part for expert, part in parts.items() if expert is not None}
    if not present.keys() <= set(range(num_experts)):
        raise AdapterError(f"{name}: the adapter names expert {max(present)}, {base.path} has {num_experts} experts.")
    some = next(iter(present.values()))
    for part in present.values():
        if (part.lora_a.shape, part.lora_b.shape) != (some.lora_a.shape, some.lora_b.shape):
            raise AdapterError(
                f"{name}: {part.module} has lora_A {list(part.lora_a.shape)}, {some.module} {list(some.lora_a.shape)}: "
                "a stack of experts needs one rank and one shape."
            )
    if len(present) < num_experts:
        logger.info("%s: %d of %d experts have no pair and get zeros", name, num_experts - len(present), num_experts)
    zeros = replace(some, lora_a=torch.zeros_like(some.lora_a), lora_b=torch.zeros_like(some.lora_b))
    ordered = [present.get(expert, zeros) for expert in range(num_experts)]
    return replace(
        some, lora_a=torch.stack([p.lora_a for p in ordered]), lora_b=torch.stack([p.lora_b for p in ordered])
    )


def _scale(config: Mapping[str, Any], found: _Found) -> float:
    """PEFT's factor of a pair, as float32."""
    alpha = config["lora_alpha"]
    for pattern, value in config["alpha_pattern"].items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", found.module):
            alpha = value
            break
    factor = float(alpha) / (math.sqrt(found.rank) if config.get("use_rslora") else found.rank)
    return float(torch.tensor(factor, dtype=torch.float32))


def _alpha(
    config: Mapping[str, Any],
    header: Header,
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    scales: Mapping[str, float],
) -> float:
    """The alpha that leaves most lora_b as they are; 0 (none) if that is how the file was."""
    ranks = {name: lora_b.shape[-1] for name, (_, lora_b) in pairs.items()}

    def num_exact(alpha: float) -> int:
        return sum(scales[name] == (scale_of(alpha, rank) if alpha else 1.0) for name, rank in ranks.items())

    of_config = config["lora_alpha"]
    even = Counter(scales[name] * rank for name, rank in ranks.items()).most_common(1)[0][0]
    return float(max((of_config if header.alpha is None else header.alpha, of_config, even), key=num_exact))


def _order(base: GGUFFile, header: Header) -> dict[str, int]:
    """Where each pair stood in the GGUF file that was converted; else where its weight stands in the base."""
    return {name: place for place, name in enumerate(dict.fromkeys([*header.tensors, *base.tensor_infos]))}
