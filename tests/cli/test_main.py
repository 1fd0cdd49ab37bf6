"""Commands, exit codes, and what a person sees when something goes wrong."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import pyggtrain
from pyggtrain import cli
from pyggtrain.cli import COMMANDS, main
from pyggtrain.errors import DataError, ParityError


def test_without_arguments_the_commands_are_listed(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


def test_unknown_command_is_a_mistake(capsys):
    assert main(["trian"]) == 2
    assert (
        "no command 'trian'; there are train, plan, verify, info, selftest, architectures, quickstart"
        in capsys.readouterr().err
    )


def test_version_is_that_of_the_project(capsys):
    assert main(["--version"]) == 0
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "(.+)"$', text, flags=re.MULTILINE)[1]
    assert capsys.readouterr().out == f"pyggtrain {declared}\n" and pyggtrain.__version__ == declared


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (DataError("rows.jsonl:3 is bad"), 2, "pyggtrain info: rows.jsonl:3 is bad"),
        (ParityError("they differ"), 3, "pyggtrain info: they differ"),
        (KeyboardInterrupt("stopped after step 3"), 130, "stopped after step 3"),
        (KeyboardInterrupt(), 130, "Stopped."),
    ],
)
def test_errors_are_one_message_and_an_exit_code(monkeypatch, capsys, error, code, shown):
    def run(arguments):
        raise error

    monkeypatch.setattr(cli, "import_module", lambda name: types.SimpleNamespace(run=run))
    assert main(["info", "x"]) == code
    captured = capsys.readouterr()
    assert captured.err.strip() == shown and captured.out == ""


def test_debug_shows_the_trace(monkeypatch):
    def run(arguments):
        assert arguments == ["x"]
        raise DataError("bad")

    monkeypatch.setattr(cli, "import_module", lambda name: types.SimpleNamespace(run=run))
    with pytest.raises(DataError):
        main(["info", "x", "--debug"])


def test_a_bug_is_not_hidden(monkeypatch):
    def run(arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "import_module", lambda name: types.SimpleNamespace(run=run))
    with pytest.raises(ZeroDivisionError):
        main(["info"])


def test_importing_the_package_imports_no_torch_and_no_triton():
    code = """
import sys
import pyggtrain
pyggtrain.TrainConfig
assert not {"torch", "triton", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves():
    assert all(getattr(pyggtrain, name) is not None for name in pyggtrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = pyggtrain.trian


def test_module_runs_as_a_program(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pyggtrain", "info", str(tmp_path / "missing.gguf")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "missing.gguf" in done.stderr and "Traceback" not in done.stderr
