"""Fuzz what gives files a meaning, with atheris: split models, adapters, importance matrices, metadata, NaN search.

    python tests/gguf/fuzz_readers.py [--minutes 15]

Needs `pip install atheris`, which is no part of any extra: it has no wheels for every Python. The parser below all of
it has a fuzzer of its own (tests/csrc/fuzz_gguf_file.py). Any error but a PyggtrainError is a finding; it is left in
tests/gguf as found-*, to be replayed by tests/gguf/test_fuzzed.py once it has been moved to tests/gguf/fuzz_seeds.
"""

import argparse
import contextlib
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pyggtrain.adapters import gguf_adapter
from pyggtrain.errors import PyggtrainError
from pyggtrain.gguf import GGUFFile, TypedValue, quantize_tensor, write_gguf
from pyggtrain.gguf.finite import find_nonfinite
from pyggtrain.gguf.imatrix import read_imatrix
from pyggtrain.gguf.requantize import plan
from pyggtrain.ops import dequantize

INSTRUMENTED = ("pyggtrain.gguf", "pyggtrain.adapters.gguf_adapter")
SEPARATOR = b"||PART||"


def read_adapter(folder: Path, content: bytes, base: GGUFFile) -> None:
    path = folder / "adapter.gguf"
    path.write_bytes(content)
    gguf_adapter.check_against_base(gguf_adapter.load(path), base, ignore_hash=True)


def read_split(folder: Path, content: bytes, base: GGUFFile) -> None:
    parts = content.split(SEPARATOR)[:4]
    paths = [folder / f"m-{number + 1:05d}-of-{len(parts):05d}.gguf" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part)
    for path in (paths[0], paths[-1]):
        with contextlib.suppress(PyggtrainError):
            read_whole(GGUFFile(path))


def read_model(folder: Path, content: bytes, base: GGUFFile) -> None:
    path = folder / "model.gguf"
    path.write_bytes(content)
    with contextlib.suppress(PyggtrainError):
        read_imatrix(path)
    read_whole(GGUFFile(path))


def read_whole(file: GGUFFile) -> None:
    """Everything that is done with a file before llama.cpp gets to see it."""
    _ = file.header_sha256, file.tokenizer_sha256, file.array_length("tokenizer.ggml.tokens")
    for key in file.metadata:
        _ = file.metadata[key], file.metadata.value_type(key)
    find_nonfinite(file, num_threads=1)
    plan(file, "Q4_0")
    for tensor in file.tensors.values():
        with contextlib.suppress(KeyError):
            dequantize(tensor)
    _ = file.chat_template, file.architecture


READERS: tuple[Callable[[Path, bytes, GGUFFile], None], ...] = (read_adapter, read_split, read_model)


def read(data: bytes, folder: Path, base: GGUFFile) -> None:
    """One input: the first byte says how the rest is read. Anything but a PyggtrainError leaves this function."""
    if data:
        with contextlib.suppress(PyggtrainError):
            READERS[data[0] % len(READERS)](folder, data[1:], base)


def write_base(path: Path) -> GGUFFile:
    tensors = [quantize_tensor(f"blk.0.{name}.weight", torch.ones(4, 32), "Q4_0") for name in ("attn_q", "ffn_up")]
    write_gguf(path, {"general.architecture": "llama"}, [*tensors, quantize_tensor("n", torch.ones(3), "F32")])
    return GGUFFile(path)


def write_seeds(folder: Path) -> None:
    """Whole files of each kind, so that the fuzzer starts behind the first checks."""
    path = folder / "seed.gguf"
    adapter = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    halves = [
        quantize_tensor("blk.0.attn_q.weight.lora_a", torch.ones(2, 32), "F32"),
        quantize_tensor("blk.0.attn_q.weight.lora_b", torch.ones(4, 2), "F32"),
    ]
    write_gguf(path, {**adapter, "adapter.lora.alpha": TypedValue("f32", 2.0), "pyggtrain.version": "1"}, halves)
    (folder / "adapter").write_bytes(b"\0" + path.read_bytes())
    parts = []
    for number in range(2):
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": 2, "general.architecture": "llama"}
        write_gguf(path, keys, [quantize_tensor(f"t{number}", torch.ones(2, 32), "Q8_0")])
        parts.append(path.read_bytes())
    (folder / "split").write_bytes(b"\1" + SEPARATOR.join(parts))
    (folder / "model").write_bytes(b"\2" + write_base(path).path.read_bytes())
    sums = [
        quantize_tensor("w.in_sum2", torch.ones(1, 32), "F32"),
        quantize_tensor("w.counts", torch.ones(1, 1), "F32"),
    ]
    write_gguf(path, {"general.type": "imatrix", "tokenizer.ggml.tokens": ["a", "b"]}, sums)
    (folder / "imatrix").write_bytes(b"\2" + path.read_bytes())
    path.unlink()


def instrument(atheris: Any) -> None:
    """Let the fuzzer see which lines of the readers run; torch and numpy stay as they are."""
    for module in [module for name, module in sys.modules.items() if name.startswith(INSTRUMENTED)]:
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                setattr(module, name, atheris.instrument_func(function))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    arguments = parser.parse_args()
    import atheris

    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        corpus, work = Path(folder) / "corpus", Path(folder) / "work"
        corpus.mkdir()
        work.mkdir()
        write_seeds(corpus)
        base = write_base(Path(folder) / "base.gguf")
        instrument(atheris)
        limits = [
            f"-max_total_time={int(arguments.minutes * 60)}",
            "-rss_limit_mb=3072",
            "-timeout=10",
            "-max_len=8192",
        ]
        options = [*limits, f"-artifact_prefix={here}/found-", "-print_final_stats=1", str(corpus)]
        atheris.Setup([sys.argv[0], *options], lambda data: read(data, work, base))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
