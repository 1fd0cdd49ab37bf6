"""A file from a stranger may not take memory out of proportion: at most twice its size and 64 MiB."""

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyggtrain.adapters import gguf_adapter
from pyggtrain.errors import GGUFError
from pyggtrain.gguf import GGUFFile

ROOM = 64 << 20

MEASURE = """
import resource, sys
from pyggtrain.errors import GGUFError
from pyggtrain.gguf import GGUFFile
from pyggtrain.model_info import info
if len(sys.argv) > 2:
    from pyggtrain.adapters import gguf_adapter
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
if sys.platform == "linux":
    # The imports' own peak shall hide nothing.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
before = peak()
try:
    if len(sys.argv) > 2:
        adapter = gguf_adapter.load(sys.argv[1])
    file = GGUFFile(sys.argv[1])
    kept = [file.tensor_infos[name].shape for name in file.tensor_infos]
    for key in file.metadata:
        try:
            value = file.metadata[key]
        except GGUFError:
            pass
    file.tokenizer_sha256, file.header_sha256
    del file
    info(sys.argv[1]).facts()
except GGUFError:
    pass
print(peak() - before)
"""


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(num_tensors: int, num_keys: int, body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + body


def array(key: bytes, type: int, count: int, data: bytes) -> bytes:
    return header(0, 1, string(key) + struct.pack("<IIQ", 9, type, count) + data)


def many_keys(count: int) -> bytes:
    return header(0, count, b"".join(string(b"%x" % i) + struct.pack("<IB", 0, 1) for i in range(count)))


def many_tensors(count: int) -> bytes:
    entries = (string(b"%x" % i) + struct.pack("<IQIQ", 1, 8, 0, 32 * i) for i in range(count))
    body = b"".join(entries)
    return header(count, 0, body) + bytes(32 * count + 64)


def text(content: bytes) -> bytes:
    return header(0, 1, string(b"tokenizer.chat_template.x") + struct.pack("<I", 8) + string(content))


GREEDY: dict[str, Callable[[], bytes]] = {
    "as many keys as are taken": lambda: many_keys(1 << 16),
    "half a million keys": lambda: many_keys(1 << 19),
    "as many tensors as are taken": lambda: many_tensors(1 << 16),
    "half a million tensors": lambda: many_tensors(1 << 19),
    "8 million small numbers": lambda: array(b"tokenizer.a", 0, 1 << 23, b"\x07" * (1 << 23)),
    "4 million numbers": lambda: array(b"tokenizer.a", 4, 1 << 22, struct.pack("<I", 99999) * (1 << 22)),
    "2 million empty strings": lambda: array(b"tokenizer.a", 8, 1 << 21, bytes(8 << 21)),
    "a million strings": lambda: array(b"tokenizer.a", 8, 1 << 20, string(b"ab") * (1 << 20)),
    "half a million strings": lambda: array(b"tokenizer.a", 8, 400_000, string(b"ab") * 400_000),
    "a text of wide characters": lambda: text(b"a" * (40 << 20) + "😀".encode()),
    "a text of wide characters that may be decoded": lambda: text(b"a" * (5 << 20) + "é日😀".encode()),
    "texts that could be decoded one at a time": lambda: header(
        0,
        4,
        b"".join(
            string(b"%d" % i) + struct.pack("<I", 8) + string(b"a" * (8 << 20) + "é日😀".encode()) for i in range(4)
        ),
    ),
    "a text that is hashed": lambda: header(
        0, 1, string(b"tokenizer.a") + struct.pack("<I", 8) + string(b"a" * (5 << 20) + "😀".encode())
    ),
    "a long key": lambda: header(0, 1, string(b"k" * (100 << 20)) + struct.pack("<IB", 0, 1)),
    "keys of 4 MiB with wide characters": lambda: header(
        0,
        64,
        b"".join(string(b"%02d" % i + b"k" * 65000 + "😀".encode()) + struct.pack("<IB", 0, 1) for i in range(64)),
    ),
}


@pytest.mark.parametrize("case", GREEDY)
def test_memory_stays_in_proportion_to_the_file(case: str, tmp_path: Path) -> None:
    path = tmp_path / "greedy.gguf"
    path.write_bytes(GREEDY[case]())
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2 * path.stat().st_size + ROOM


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("half a million keys", "524288 metadata keys"),
        ("half a million tensors", "524288 tensors"),
        ("8 million small numbers", "many times the size of the file"),
    ],
)
def test_what_takes_too_much_is_refused_by_name(case: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "greedy.gguf"
    path.write_bytes(GREEDY[case]())
    with pytest.raises(GGUFError, match=said):
        _ = GGUFFile(path).metadata["tokenizer.a"]


def many_arrays(count: int, length: int) -> bytes:
    """An adapter without pairs: arrays that could be decoded one at a time, and together take far too much."""
    keys = {b"general.type": b"adapter", b"general.architecture": b"llama", b"adapter.type": b"lora"}
    texts = b"".join(string(key) + struct.pack("<I", 8) + string(value) for key, value in keys.items())
    one = struct.pack("<IIQ", 9, 4, length) + struct.pack("<I", 99999) * length
    return header(0, 3 + count, texts + b"".join(string(b"a%d" % i) + one for i in range(count)))


def test_all_metadata_of_an_adapter_together_stays_in_proportion_too(tmp_path: Path) -> None:
    path = tmp_path / "greedy.gguf"
    path.write_bytes(many_arrays(16, 1 << 20))
    with pytest.raises(GGUFError, match="its metadata would take .* many times the size of the file"):
        gguf_adapter.load(path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path, "adapter"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2 * path.stat().st_size + ROOM
