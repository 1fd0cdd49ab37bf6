"""The house stays in order: rooms of the design and no others, names without meaning nowhere, importing costs
nothing.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"csrc", "pyggtrain", "kernels", "tests", "vendor", "benchmarks", "docs", "examples", ".ci"}
FILES = {
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "NOTICE"),
    *("pyproject.toml", "CMakeLists.txt", "run.py", ".gitignore", ".clang-format"),
}
ROOMS = {"gguf", "ops", "nn", "models", "graph", "adapters", "data", "training", "validation", "cli"}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "stuff"}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [Path(line) for line in listed.stdout.splitlines()]


def test_top_level_holds_what_the_design_names() -> None:
    files = tracked()
    assert {path.parts[0] for path in files if len(path.parts) > 1} <= FOLDERS
    assert {path.name for path in files if len(path.parts) == 1} <= FILES


def test_package_holds_only_rooms_of_the_design() -> None:
    rooms = {path.parts[1] for path in tracked() if path.parts[0] == "pyggtrain" and len(path.parts) > 2}
    assert rooms <= ROOMS


def test_the_compiled_bridge_is_imported_only_where_it_may() -> None:
    """import-linter sees no compiled module, so this rule is checked here."""
    importing = set()
    for path in tracked():
        if path.suffix != ".py" or path.parts[0] not in ("pyggtrain", "kernels") or not (ROOT / path).exists():
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if any(name.split(".")[-1] == "_bridge" for name in (*names, module)):
                importing.add(path.parts[1] if path.parts[0] == "pyggtrain" else path.parts[0])
    assert importing == {"gguf", "ops", "graph", "validation"}


def test_no_file_has_a_name_that_says_nothing() -> None:
    bad = [
        path for path in tracked() if path.stem in EMPTY_NAMES or re.search(r"(^|_)(v2|new|old|fast)(_|$)", path.stem)
    ]
    assert not bad


def test_each_test_stands_in_the_folder_of_its_layer() -> None:
    layers = ROOMS | {"csrc", "kernels", "project", "examples", "benchmarks"}
    tests = [path for path in tracked() if path.parts[0] == "tests" and path.name.startswith("test_")]
    assert tests
    assert {path.parts[1] for path in tests} <= layers


def test_no_tracked_file_is_large() -> None:
    assert not [path for path in tracked() if (ROOT / path).exists() and (ROOT / path).stat().st_size > 1 << 20]


def test_llama_cpp_source_is_not_committed() -> None:
    vendor = {path.name for path in tracked() if path.parts[0] == "vendor"}
    scripts = {"llama_cpp.cmake", "llama_cpp_cuda.cmake", "llama_cpp_python.cmake", "ggml_base.cmake"}
    assert vendor == scripts | {"constraints.txt", "CMakeLists.txt", "cublas_stub.h"}


@pytest.mark.parametrize("module", ["torch", "triton", "pyggtrain._bridge"])
def test_importing_pyggtrain_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, pyggtrain; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/").returncode == 0
