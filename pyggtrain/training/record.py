"""The record beside an adapter: what it was made from and how; the commands that repeat the run and serve it."""

import dataclasses
import hashlib
import json
import math
import platform
import shlex
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyggtrain._version import __version__
from pyggtrain.adapters.gguf_adapter import base_fingerprint
from pyggtrain.data.sources import weighted_files
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.output import write_text
from pyggtrain.training.prepare import Preparation
from pyggtrain.training.serving import serve_command
from pyggtrain.training.trainer import TrainSummary

_NOT_REPEATED = frozenset({"model", "data", "output", "overwrite", "resume"})


def make_record(run: Preparation, summary: TrainSummary, parity: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return everything about a finished run as JSON values."""
    config = run.config
    return {
        "started": run.started,
        "finished": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": train_command(config, run.processes.local_count),
        "serve": serve_command(config, run.files, is_diffusion=run.model.diffusion is not None),
        "settings": config.to_dict(),
        "versions": versions(),
        "base": {
            "path": str(run.base.path),
            "bytes": run.base.file_bytes,
            "architecture": run.base.architecture,
            **{key.removeprefix("base."): value for key, value in base_fingerprint(run.base).items()},
        },
        "data": {
            "files": {
                str(file.path): sha256_of(file.path) for file in weighted_files((*config.data, *config.eval_data))
            },
            "encoded_sha256": run.data.report.sha256,
            "rows": len(run.data.rows),
            "held_out_rows": len(run.data.held_out),
            "report": run.data.lines(),
        },
        "adapter": {
            "path": str(run.files.adapter),
            "sha256": sha256_of(run.files.adapter),
            "pairs": len(run.adapter.pairs),
            "parameters": run.adapter.num_parameters,
        },
        "result": dataclasses.asdict(summary),
        "parity": parity,
    }


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record as JSON at once; numbers that are not finite become null."""
    write_text(path, json.dumps(_finite(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def train_command(config: TrainConfig, num_processes: int = 1) -> str:
    """Return the shell line that repeats a run: paths and every setting that is not the default.

    Args:
        num_processes: on this machine.
    """
    program = ["pyggtrain"]
    if num_processes > 1:
        # Without the two dashes torchrun takes --r for an abbreviation of its own flags.
        program = ["torchrun", "--nproc-per-node", str(num_processes), "-m", "--", "pyggtrain"]
    words = [*program, "train", config.model, *config.data, "-o", config.output]
    for field in dataclasses.fields(TrainConfig):
        value = getattr(config, field.name)
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if field.name in _NOT_REPEATED or value == default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", *(f"{name}={item}" for name, item in value.items())]
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return shlex.join(words)


def versions() -> dict[str, str]:
    """Return software -> version of what computed the run."""
    packages = {name: version(name) for name in ("torch", "numpy", "jinja2")}
    return {"pyggtrain": __version__, "python": platform.python_version(), "system": platform.platform(), **packages}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
