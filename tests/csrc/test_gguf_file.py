"""The mapped file: views at their own address, lifetime kept by tensors, writes that reach nobody, and files that
lie.
"""

import gc
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.errors import GGUFError
from pyggtrain.gguf import GGUFFile, quantize_tensor, write_gguf

KEY = struct.pack("<Q", 1) + b"k"


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(num_tensors: int, num_keys: int, body: bytes = b"", *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def table_entry(
    name: bytes, sizes: list[int], *, type_id: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    count = len(sizes) if num_dims is None else num_dims
    return string(name) + struct.pack(f"<I{len(sizes)}Q", count, *sizes) + struct.pack("<IQ", type_id, offset)


@pytest.fixture
def small_path(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    tensors = [
        quantize_tensor("a.weight", torch.randn(4, 64), "Q4_0"),
        quantize_tensor("b.weight", torch.randn(3), "F32"),
    ]
    write_gguf(path, {"general.architecture": "llama", "k": 7}, tensors)
    return path


def test_views_lie_at_the_tensors_own_address_in_one_mapping(small_path: Path) -> None:
    file = GGUFFile(small_path)
    bases = {file.tensors[name].blocks.data_ptr() - info.offset for name, info in file.tensor_infos.items()}
    assert len(bases) == 1
    raw = small_path.read_bytes()
    for name, info in file.tensor_infos.items():
        stored = raw[info.offset : info.offset + info.num_bytes]
        assert file.tensors[name].blocks.numpy().tobytes() == stored


def test_the_mapping_lives_as_long_as_any_view_and_no_longer(small_path: Path) -> None:
    gc.collect()
    before = _bridge.num_live_mappings()
    file = GGUFFile(small_path)
    view = file.tensors["a.weight"].blocks[1:3]
    expected = view.clone()
    del file
    gc.collect()
    assert _bridge.num_live_mappings() == before + 1
    assert torch.equal(view, expected)
    del view
    gc.collect()
    assert _bridge.num_live_mappings() == before


def test_an_unread_capsule_keeps_the_mapping_and_frees_it(small_path: Path) -> None:
    gc.collect()
    before = _bridge.num_live_mappings()
    capsule = _bridge.MappedGGUF(str(small_path)).tensor_bytes(0).__dlpack__()
    gc.collect()
    assert _bridge.num_live_mappings() == before + 1
    del capsule
    gc.collect()
    assert _bridge.num_live_mappings() == before


def test_a_write_through_a_view_does_not_reach_the_file_or_another_mapping(small_path: Path) -> None:
    digest = hashlib.sha256(small_path.read_bytes()).hexdigest()
    first, second = GGUFFile(small_path), GGUFFile(small_path)
    first.tensors["a.weight"].blocks.fill_(0)
    assert second.tensors["a.weight"].blocks.any()
    assert hashlib.sha256(small_path.read_bytes()).hexdigest() == digest


def test_the_bridge_never_copies_on_request(small_path: Path) -> None:
    view = _bridge.MappedGGUF(str(small_path)).tensor_bytes(0)
    with pytest.raises(Exception, match="never copied"):
        view.__dlpack__(copy=True)


BIG = 1 << 62
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "less than a GGUF header"),
    "too short": (b"GGUF\x03\0\0\0", "less than a GGUF header"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
    "web page": (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
    "zip": (b"PK\x03\x04" + b"\0" * 40, "zip archive"),
    "other bytes": (b"\x89PNG" + b"\0" * 40, "not a GGUF file"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (header(0, 0, version=1), "version 1"),
    "version 99": (header(0, 0, version=99), "version 99"),
    "2^63 keys": (header(0, 1 << 63), "more than its size has room for"),
    "2^63 tensors": (header(1 << 63, 0), "more than its size has room for"),
    "key longer than the file": (header(0, 1, struct.pack("<Q", BIG) + b"x" * 32), "the file ends after"),
    "empty key": (header(0, 1, string(b"") + struct.pack("<II", 4, 1)), "empty, holds a NUL"),
    "key longer than the specification allows": (
        header(0, 1, string(b"k" * 65536) + struct.pack("<II", 4, 1)),
        "65536 bytes long, longer than 65535",
    ),
    "keys of 5 MiB": (
        header(0, 80, b"".join(string(b"%d" % i * 32000) + struct.pack("<IB", 0, 1) for i in range(10, 90))),
        "take more than 4194304 bytes together",
    ),
    "key that is no text": (header(0, 1, string(b"a\xff") + struct.pack("<II", 4, 1)), "is not UTF-8"),
    "NUL in key": (header(0, 1, string(b"a\0b") + struct.pack("<II", 4, 1)), "empty, holds a NUL"),
    "key twice": (header(0, 2, (KEY + struct.pack("<II", 4, 1)) * 2), "stands twice"),
    "unknown value type": (header(0, 1, KEY + struct.pack("<II", 77, 1)), "value type 77"),
    "array in an array": (header(0, 1, KEY + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 32), "not allowed"),
    "array of 2^62": (header(0, 1, KEY + struct.pack("<IIQ", 9, 4, BIG)), "more than the file has room for"),
    "2^62 strings": (header(0, 1, KEY + struct.pack("<IIQ", 9, 8, BIG)), "more than the file has room for"),
    "string beyond the end": (header(0, 1, KEY + struct.pack("<IQ", 8, BIG)), "the file ends after"),
    "boolean 2": (header(0, 1, KEY + struct.pack("<IB", 7, 2)), "neither 0 nor 1"),
    "alignment 0": (header(0, 1, string(b"general.alignment") + struct.pack("<II", 4, 0)), "power of two"),
    "alignment 24": (header(0, 1, string(b"general.alignment") + struct.pack("<II", 4, 24)), "power of two"),
    "alignment 16": (header(0, 1, string(b"general.alignment") + struct.pack("<II", 4, 16)), "32 or more"),
    "alignment of another type": (
        header(0, 1, string(b"general.alignment") + struct.pack("<IQ", 10, 32)),
        "needed: u32",
    ),
    "0 dimensions": (header(1, 0, table_entry(b"t", [], num_dims=0) + b"\0" * 64), "0 dimensions"),
    "5 dimensions": (header(1, 0, table_entry(b"t", [1] * 5) + b"\0" * 64), "5 dimensions"),
    "2^32 dimensions": (
        header(1, 0, table_entry(b"t", [1], num_dims=0xFFFFFFFF) + b"\0" * 64),
        "4294967295 dimensions",
    ),
    "a dimension of 2^63": (header(1, 0, table_entry(b"t", [1 << 63]) + b"\0" * 64), "2\\^63|cut off"),
    "sizes of 2^64 - 1": (header(1, 0, table_entry(b"t", [(1 << 64) - 1] * 4) + b"\0" * 64), "2\\^63"),
    "alignment 2^31": (
        header(
            1,
            1,
            string(b"general.alignment") + struct.pack("<II", 4, 1 << 31) + table_entry(b"t", [8]) + b"\0" * 64,
        ),
        "cut off",
    ),
    "integers that are no weights": (header(1, 0, table_entry(b"t", [8], type_id=15) + b"\0" * 64), "multiple of 256"),
    "size 0": (header(1, 0, table_entry(b"t", [32, 0]) + b"\0" * 64), "size 0"),
    "product wraps to 0": (header(1, 0, table_entry(b"t", [1 << 32, 1 << 32]) + b"\0" * 64), "more than 2\\^63"),
    "product wraps to little": (
        header(1, 0, table_entry(b"t", [(1 << 42) + 1, 1152 << 20]) + b"\0" * 64),
        "more than 2\\^63",
    ),
    "bytes wrap": (header(1, 0, table_entry(b"t", [1 << 31, 1 << 31]) + b"\0" * 64), "2\\^63|cut off"),
    # Each size is below 2^63; summed up they end at byte 64 again.
    "sums of sizes wrap": (
        header(
            3,
            0,
            table_entry(b"t", [(1 << 61) - 41])
            + table_entry(b"u", [(1 << 61) - 1], offset=(1 << 63) - 160)
            + table_entry(b"v", [16], offset=(1 << 64) - 160)
            + b"\0" * 64,
        ),
        "does not fit into any file",
    ),
    "rows not a multiple": (header(1, 0, table_entry(b"t", [33], type_id=2) + b"\0" * 64), "multiple of 32"),
    "unknown types": (
        header(
            3,
            0,
            table_entry(b"t", [32], type_id=999)
            + table_entry(b"u", [32], type_id=0)
            + table_entry(b"v", [32], type_id=77)
            + b"\0" * 64,
        ),
        r"2 tensors have ggml type numbers .* does not know: 't' \(999\), 'v' \(77\)\. Take",
    ),
    "many unknown types": (
        header(12, 0, b"".join(table_entry(b"%d" % i, [32], type_id=999) for i in range(12)) + b"\0" * 64),
        r"12 tensors .*'9' \(999\), \.\.\.",
    ),
    "removed type": (header(1, 0, table_entry(b"t", [32], type_id=4) + b"\0" * 64), r"'t' \(4\)"),
    "name too long": (header(1, 0, table_entry(b"t" * 64, [8]) + b"\0" * 64), "longer than 63"),
    "NUL in name": (header(1, 0, table_entry(b"t\0t", [8]) + b"\0" * 64), "NUL"),
    "name that is no text": (header(1, 0, table_entry(b"t\xed\xa0\x80", [8]) + b"\0" * 64), "is not UTF-8"),
    "name twice": (header(2, 0, table_entry(b"t", [8]) * 2 + b"\0" * 128), "stands twice"),
    "offset beyond the end": (header(1, 0, table_entry(b"t", [8], offset=1 << 40) + b"\0" * 64), "has offset"),
    "offset near 2^64": (header(1, 0, table_entry(b"t", [8], offset=(1 << 64) - 32) + b"\0" * 64), "has offset"),
    "overlapping": (header(2, 0, table_entry(b"t", [8]) + table_entry(b"u", [8]) + b"\0" * 128), "right after"),
    "data cut off": (header(1, 0, table_entry(b"t", [1 << 20])), "cut off"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_malformed_file_is_one_clear_error(case: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "keep", [lambda size: size - 1, lambda size: size // 2, lambda size: 40], ids=["less one byte", "half", "40 bytes"]
)
def test_a_truncated_file_is_refused_before_anything_is_read(small_path: Path, keep: Callable[[int], int]) -> None:
    content = small_path.read_bytes()
    last = GGUFFile(small_path).tensor_infos["b.weight"]
    content = content[: last.offset + last.num_bytes]
    small_path.write_bytes(content[: keep(len(content))])
    with pytest.raises(GGUFError, match="cut off|not complete"):
        GGUFFile(small_path)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="No such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(GGUFError, match="not a regular file"):
        GGUFFile(tmp_path)


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match="not a regular file"):
        GGUFFile(tmp_path / "pipe.gguf")


def test_text_that_is_not_utf8_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "latin1.gguf"
    path.write_bytes(header(0, 1, KEY + struct.pack("<IQ", 8, 1) + b"\xe9"))
    with pytest.raises(GGUFError, match="UTF-8"):
        GGUFFile(path).metadata["k"]


def test_paths_with_spaces_and_any_script_work(small_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "тест 日本 é"
    folder.mkdir()
    moved = folder / "модель é.gguf"
    moved.write_bytes(small_path.read_bytes())
    assert GGUFFile(moved).metadata["k"] == 7
