"""A file that cannot be mapped is read; one that changes while it is in use is noticed; a huge one costs its header."""

import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.errors import BridgeError, GGUFError
from pyggtrain.gguf import GGUFFile, quantize_tensor, write_gguf
from pyggtrain.gguf.finite import find_nonfinite
from pyggtrain.ops import dequantize, quant_linear

VALUES = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """1 MiB of numbers behind a header."""
    path = tmp_path / "m.gguf"
    metadata = {"general.architecture": "llama", "k": ["x", "y"]}
    write_gguf(path, metadata, [quantize_tensor("a.weight", VALUES, "F32"), quantize_tensor("b", VALUES[0], "F32")])
    return path


def run(code: str, *arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )


# ---- a file system without mmap


def test_reading_gives_what_mapping_gives(path: Path) -> None:
    mapped, read = _bridge.MappedGGUF(str(path)), _bridge.MappedGGUF(str(path), use_mmap=False)
    assert mapped.why_read == "" and read.why_read == "mapping is switched off"
    assert read.keys() == mapped.keys() and read.value("k") == ["x", "y"]
    for index in (1, 0):
        assert torch.equal(torch.from_dlpack(read.tensor_bytes(index)), torch.from_dlpack(mapped.tensor_bytes(index)))


def test_bytes_beyond_the_end_cannot_be_asked_for(path: Path) -> None:
    file = _bridge.MappedGGUF(str(path))
    assert file.read_bytes(0, 4) == b"GGUF" and file.read_bytes(file.file_bytes, 0) == b""
    for offset, num_bytes in ((file.file_bytes, 1), (1, file.file_bytes), ((1 << 64) - 1, 2)):
        with pytest.raises(BridgeError, match="within the file's"):
            file.read_bytes(offset, num_bytes)


def test_what_was_read_lives_as_long_as_a_view(path: Path) -> None:
    gc.collect()
    before = _bridge.num_live_mappings()
    view = torch.from_dlpack(_bridge.MappedGGUF(str(path), use_mmap=False).tensor_bytes(0))
    gc.collect()
    assert _bridge.num_live_mappings() == before + 1
    assert torch.equal(view.view(torch.float32), VALUES)
    del view
    gc.collect()
    assert _bridge.num_live_mappings() == before


NO_MMAP = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <stdio.h>

/* mmap as on a file system that cannot map, for files named *.gguf. */
void * mmap(void * address, size_t length, int protection, int flags, int fd, off_t offset) {
    char link[64], name[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = fd < 0 ? -1 : readlink(link, name, sizeof(name) - 1);
    if (n > 5 && memcmp(name + n - 5, ".gguf", 5) == 0) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    void * (*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
    return real(address, length, protection, flags, fd, offset);
}
void * mmap64(void * a, size_t l, int p, int f, int fd, off_t o) { return mmap(a, l, p, f, fd, o); }
"""


@pytest.fixture
def no_mmap(tmp_path: Path) -> Path:
    """A library to preload."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "no_mmap.c").write_text(NO_MMAP)
    library = tmp_path / "no_mmap.so"
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "no_mmap.c", "-o", library, "-ldl"], check=True)
    return library


def test_a_file_system_that_cannot_map_is_read_and_that_is_said(path: Path, no_mmap: Path) -> None:
    code = """
import logging, sys
logging.basicConfig(format="%(message)s")
from pyggtrain.gguf import GGUFFile
import torch
print(float(GGUFFile(sys.argv[1]).tensors["a.weight"].blocks.view(torch.float32).double().sum()))
"""
    done = run(code, path, LD_PRELOAD=str(no_mmap))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == float(VALUES.double().sum())
    assert f"{path}: its file system cannot map files (No such device)" in done.stderr


def test_llama_cpp_reads_there_too(tiny_llama_path: Path, no_mmap: Path) -> None:
    code = """
import sys
from pathlib import Path
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings
runtime = BridgeRuntime(Path(sys.argv[1]), RuntimeSettings(num_ctx=8, num_ubatch=8, num_threads=1))
print(float(runtime.logits([1, 2, 3]).double().sum()))
"""
    mapped, read = run(code, tiny_llama_path), run(code, tiny_llama_path, LD_PRELOAD=str(no_mmap))
    assert read.returncode == 0, read.stderr
    assert float(read.stdout) == float(mapped.stdout)


# ---- a file that changes while it is in use


def cut_off(path: Path) -> None:
    os.truncate(path, 4096)


def cut_off_in_the_last_page(path: Path) -> None:
    # The system pads the last page with zeros: only the size can tell.
    os.truncate(path, path.stat().st_size - 8)


def write_one_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    # Some clocks are coarse.
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut_off, "bytes when it was opened and has 4096 now"),
        (cut_off_in_the_last_page, "bytes when it was opened and has"),
        (write_one_byte, "was written to while it was in use"),
    ],
)
def test_a_change_is_noticed(change: Callable[[Path], None], said: str, path: Path) -> None:
    file = GGUFFile(path)
    file.check_unchanged()
    change(path)
    with pytest.raises(GGUFError, match=said):
        file.check_unchanged()


def test_a_file_that_is_replaced_or_deleted_lives_on(path: Path, tmp_path: Path) -> None:
    file = GGUFFile(path)
    header, whole = GGUFFile(path).header_sha256, hashlib.sha256(path.read_bytes()).hexdigest()
    other = tmp_path / "other.gguf"
    write_gguf(other, {}, [])
    other.replace(path)
    file.check_unchanged()
    path.unlink()
    file.check_unchanged()
    assert (file.header_sha256, file.sha256()) == (header, whole)
    assert torch.equal(file.tensors["a.weight"].blocks.view(torch.float32), VALUES)


def test_a_read_of_lost_bytes_ends_the_process_with_the_reason_and_never_gives_zeros(path: Path) -> None:
    code = """
import os, sys
from pyggtrain.gguf import GGUFFile
blocks = GGUFFile(sys.argv[1]).tensors["a.weight"].blocks
os.truncate(sys.argv[1], 4096)
print(int(blocks[40].sum()))
"""
    done = run(code, path)
    assert done.returncode == -signal.SIGBUS and done.stdout == ""
    assert f"pyggtrain: {path}: was cut off while it was in use" in done.stderr


# ---- huge files


def test_tensors_beyond_4_gib_are_found(sparse_gguf: Callable[..., Path]) -> None:
    path = sparse_gguf({"a.weight": ("F16", (65536, 40000)), "b.weight": ("F32", (4,))})
    info = GGUFFile(path).tensor_infos["b.weight"]
    assert info.offset > 5 * 10**9
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\x00\x00\x80\x3f" * 4)
    assert dequantize(GGUFFile(path).tensors["b.weight"]).tolist() == [1, 1, 1, 1]


def test_a_tensor_of_more_than_2_to_the_31_weights_is_computed_with(sparse_gguf: Callable[..., Path]) -> None:
    num_rows, num_columns = 66000, 32768
    path = sparse_gguf({"a.weight": ("Q1_0", (num_rows, num_columns))})
    assert num_rows * num_columns > 1 << 31
    info = GGUFFile(path).tensor_infos["a.weight"]
    with path.open("r+b") as file:
        # The last block: scale 1, all bits set.
        file.seek(info.offset + info.num_bytes - 18)
        file.write(b"\x00\x3c" + b"\xff" * 16)
    weight = GGUFFile(path).tensors["a.weight"]
    (last,) = dequantize(weight, rows=slice(num_rows - 1, num_rows))
    assert last[-128:].tolist() == [1.0] * 128 and not last[:-128].any()
    y = quant_linear(torch.ones(1, num_columns), weight)
    assert y.shape == (1, num_rows) and float(y[0, -1]) == pytest.approx(128, rel=1e-2) and not y[0, :-1].any()
    with path.open("r+b") as file:
        file.seek(info.offset + info.num_bytes - 18)
        file.write(b"\x00\x7e")
    (bad,) = find_nonfinite(GGUFFile(path), num_threads=1)
    assert (bad.num_bad, bad.first_row) == (1, num_rows - 1)
