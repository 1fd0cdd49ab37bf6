"""Training on from an adapter that somebody made before: its weights, its ranks and its alpha are taken over exactly.

Settings that say the same, or nothing, are filled in from the adapter; settings that say otherwise are mistakes.
"""

import dataclasses
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from pyggtrain.adapters import peft
from pyggtrain.adapters.gguf_adapter import AdapterFile, base_fingerprint, check_against_base, load
from pyggtrain.adapters.targets import select
from pyggtrain.errors import ConfigError, UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Model
from pyggtrain.training.config import TrainConfig

logger = logging.getLogger(__name__)

_WHICH = ("target_modules", "exclude_modules", "layers_to_transform")


def read_init_adapter(path: str, base: GGUFFile, model: Model) -> AdapterFile:
    """Read the adapter to start from, a GGUF file or a PEFT folder, and make sure that it can be trained on.

    Raises:
        AdapterError: not an adapter, or not one for this model.
        UnsupportedError: it holds pairs that llama.cpp would ignore.
    """
    file = peft.from_peft(path, base) if Path(path).is_dir() else load(path)
    check_against_base(file, base, ignore_hash=True)
    ignored = [name for name in file.pairs if name not in model.linears]
    if ignored:
        reason = model.untrainable.get(ignored[0], "is no linear of the model")
        raise UnsupportedError(
            f"init_adapter {path} holds {len(ignored)} pairs that cannot be trained on: {ignored[0]} {reason}."
        )
    fingerprint = base_fingerprint(base)
    if any(file.provenance.get(key, value) != value for key, value in fingerprint.items()):
        logger.warning("init_adapter: %s was trained on another file than %s; its pairs fit both", path, base.path)
    return file


def taken_over(config: TrainConfig, file: AdapterFile, model: Model) -> TrainConfig:
    """The settings with ranks, alpha and targets of the adapter to start from.

    Raises:
        ConfigError: settings that differ from the adapter's; all of them together.
    """
    ranks = {name: lora_b.shape[-1] for name, (_, lora_b) in file.pairs.items()}
    r = Counter(ranks.values()).most_common(1)[0][0]
    others = {name.removesuffix(".weight"): rank for name, rank in ranks.items() if rank != r}
    found: dict[str, Any] = {
        "r": r,
        # Without an alpha llama.cpp's factor is 1 for every rank. `restore` puts a negative sign into lora_b.
        "lora_alpha": abs(file.alpha) or float(r),
        "rank_pattern": others,
        "alpha_pattern": {} if file.alpha else {name: float(rank) for name, rank in others.items()},
        "use_rslora": False,
    }
    defaults = {setting.name: setting for setting in dataclasses.fields(TrainConfig)}
    mistakes = []
    for name, value in found.items():
        given = getattr(config, name)
        if given not in (value, _default(defaults[name])):
            mistakes.append(f"{name}: found {given!r}; the adapter has {value!r}")
    chosen = select(
        model, config.target_modules, exclude=config.exclude_modules, layers=config.layers_to_transform or None
    )
    if set(chosen) != set(file.pairs):
        if any(getattr(config, name) != _default(defaults[name]) for name in _WHICH):
            mistakes.append(
                f"{', '.join(_WHICH)}: choose {len(chosen)} weights; the adapter has {len(file.pairs)}, other ones"
            )
        found["target_modules"] = tuple(name.removesuffix(".weight") for name in file.pairs)
    if mistakes:
        raise ConfigError(
            "\n  - ".join([f"init_adapter {config.init_adapter} cannot be trained on with these settings:", *mistakes])
            + "\nLeave them out: they are taken from the adapter."
        )
    return dataclasses.replace(config, **found)


def _default(setting: "dataclasses.Field[Any]") -> Any:
    return setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory()
