"""Nothing is overwritten, nothing is half written, and what must fail fails before training."""

import contextlib
import os
import resource
import subprocess
import sys
from collections import namedtuple

import pytest

from pyggtrain.training import output
from pyggtrain.training.output import (
    OutputError,
    OutputFiles,
    atomic_path,
    check_free_space,
    check_output,
    remove_leftovers,
    write_text,
)


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.gguf"
    path.write_bytes(b"base")
    return path


def check(path, base, **flags):
    check_output(OutputFiles(path), base, **{"overwrite": False, "resume": False, **flags})


def test_free_name_is_accepted(tmp_path, base):
    check(tmp_path / "adapter.gguf", base)


def test_existing_adapter_is_refused_without_overwrite(tmp_path, base):
    path = tmp_path / "adapter.gguf"
    path.write_bytes(b"good")
    with pytest.raises(OutputError, match="--overwrite"):
        check(path, base)
    check(path, base, overwrite=True)
    assert path.read_bytes() == b"good"


@pytest.mark.parametrize("make_link", [os.symlink, os.link])
def test_output_that_is_the_base_or_a_link_to_it_is_refused_even_with_overwrite(tmp_path, base, make_link):
    link = tmp_path / "link.gguf"
    make_link(base, link)
    for path in (base, link, tmp_path / "." / "base.gguf"):
        for flags in ({}, {"overwrite": True}):
            with pytest.raises(OutputError, match="base file itself"):
                check(path, base, **flags)


def test_dangling_link_is_not_written_through(tmp_path, base):
    link = tmp_path / "adapter.gguf"
    link.symlink_to(tmp_path / "elsewhere.gguf")
    with pytest.raises(OutputError, match="exists already"):
        check(link, base)


def test_unfinished_run_is_not_thrown_away_by_chance(tmp_path, base):
    files = OutputFiles(tmp_path / "adapter.gguf")
    files.checkpoint.write_bytes(b"state")
    with pytest.raises(OutputError, match="--resume"):
        check(files.adapter, base)
    check(files.adapter, base, resume=True)
    check(files.adapter, base, overwrite=True)


def test_resume_without_checkpoint_is_refused(tmp_path, base):
    with pytest.raises(OutputError, match="no checkpoint"):
        check(tmp_path / "adapter.gguf", base, resume=True)


def test_missing_folder_folder_as_output_and_other_endings_are_refused(tmp_path, base):
    with pytest.raises(OutputError, match="does not exist"):
        check(tmp_path / "nowhere" / "adapter.gguf", base)
    with pytest.raises(OutputError, match="is a folder"):
        check(tmp_path, base)
    with pytest.raises(OutputError, match=r"adapter\.bin\.gguf"):
        check(tmp_path / "adapter.bin", base)


def test_folder_that_is_not_writable_is_refused(tmp_path, base, monkeypatch):
    # Root may write everywhere, so the system's answer is replaced.
    monkeypatch.setattr(output.os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="not writable"):
        check(tmp_path / "adapter.gguf", base)


def test_too_little_free_space_is_told_in_bytes(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage(10**9, 0, 20 * 2**20))
    files = OutputFiles(tmp_path / "adapter.gguf")
    assert check_free_space(files, 1000) == 28 * 1000 + 16 * 2**20
    with pytest.raises(OutputError, match="20,971,520 bytes are free.* 10,000,000 trainable .*need 296,777,216"):
        check_free_space(files, 10_000_000)


def write_half(path, error):
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"half")
        raise error


def test_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "record.json"
    write_text(path, "old")
    with pytest.raises(OutputError, match=r"record\.json: writing failed after 4 bytes"):
        write_half(path, OSError(28, "No space left on device"))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["record.json"]


def test_interrupt_while_writing_leaves_no_temporary_file(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "a", KeyboardInterrupt())
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_run_are_removed_and_nobody_elses(tmp_path):
    files = OutputFiles(tmp_path / ("тест 日本 " * 7 + "a.gguf"))
    other = OutputFiles(tmp_path / "a.gguf")
    with contextlib.suppress(SystemExit), atomic_path(files.checkpoint) as temporary:
        killed = temporary.with_name(temporary.name.replace(".tmp", "0.tmp"))
        killed.write_bytes(b"half")
    with atomic_path(other.checkpoint) as temporary:
        remove_leftovers(files)
        assert temporary.exists() and not killed.exists()


def test_written_file_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_real_file_size_limit_keeps_the_older_checkpoint(tmp_path):
    """The kernel refuses bytes beyond 1 MiB, as a full disk does."""
    code = f"""
import resource, sys
from pathlib import Path
import torch
from pyggtrain.errors import PyggtrainError
from pyggtrain.training.checkpoint import Checkpoint, Origin, save_checkpoint
path = Path({str(tmp_path / "a.checkpoint")!r})
origin = Origin({{}}, "", "", 1)
save_checkpoint(path, Checkpoint(1, "", origin, {{"w": torch.zeros(10)}}, {{}}, {{}}, 0.0))
resource.setrlimit(resource.RLIMIT_FSIZE, ({2**20}, {2**20}))
try:
    save_checkpoint(path, Checkpoint(2, "", origin, {{"w": torch.zeros(2**20)}}, {{}}, {{}}, 0.0))
except PyggtrainError as error:
    sys.exit(str(error))
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "a.checkpoint: writing failed after" in done.stderr and "bytes are free" in done.stderr
    assert os.listdir(tmp_path) == ["a.checkpoint"]
    import torch

    assert torch.load(tmp_path / "a.checkpoint", weights_only=True)["step"] == 1
