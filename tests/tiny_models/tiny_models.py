"""Tiny random models of llama.cpp's architectures, made by the fixture of llama.cpp's own tests.

The generator is compiled once, against the static libraries that the bridge was built from, and kept in the same cache.
"""

import hashlib
import os
import re
import subprocess
from functools import cache
from pathlib import Path

from pyggtrain.cache_folder import cache_folder

HERE = Path(__file__).parent


class NoModelError(Exception):
    """llama.cpp's fixture makes no file of this architecture; the message says why."""


@cache
def generator() -> Path:
    """The generator's executable; built where it is missing."""
    sources = [*sorted(HERE.rglob("*.h")), HERE / "generate.cpp", HERE / "CMakeLists.txt"]
    sources += sorted((HERE.parents[1] / "vendor").glob("*.cmake"))
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    folder = _cache_folder() / f"tiny-models-{key}"
    executable = folder / "generate"
    if not executable.exists():
        environment = {**os.environ, "PYGGTRAIN_CACHE_DIR": str(_cache_folder())}
        configure = ["cmake", "-S", HERE, "-B", folder, "-DCMAKE_BUILD_TYPE=Release"]
        for command in (configure, ["cmake", "--build", folder]):
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return executable


def _cache_folder() -> Path:
    """Where llama.cpp was built; under pytest, which has a cache of its own for all else, that of who started it."""
    return Path(os.environ.get("PYGGTRAIN_BUILD_CACHE_DIR") or cache_folder())


def table() -> list[tuple[str, str]]:
    """(architecture, "dense" or "moe") of everything that the generator may be asked for."""
    lines = subprocess.run([generator()], check=True, capture_output=True, text=True).stdout.splitlines()
    return [(name, kind) for name, kind in (line.split() for line in lines)]


def generate(architecture: str, kind: str, folder: Path) -> Path:
    """Write the tiny model of an architecture.

    Raises:
        NoModelError: the fixture has none.
    """
    path = folder / f"{architecture}-{kind}.gguf"
    try:
        done = subprocess.run(
            [generator(), architecture, kind, path],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise NoModelError("llama.cpp's fixture hangs") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error loading model" in line or "GGML_ASSERT" in line]
        why = lines[-1].split("error loading model: ")[-1] if lines else f"the generator ended with {done.returncode}"
        raise NoModelError(re.sub(r"\S*/llama\.cpp/", "", why))
    return path
