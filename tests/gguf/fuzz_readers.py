"""Fuzz what gives files a meaning, with atheris: split models, adapters (GGUF and PEFT), importance matrices, metadata,
NaN search, chat templates.

    python tests/gguf/fuzz_readers.py [--minutes 15] [--input-seconds 10]

Needs `pip install atheris`, which is no part of any extra: it has no wheels for every Python. The parser below all of
it has a fuzzer of its own (tests/csrc/fuzz_gguf_file.py). Any error but a PyggtrainError is a finding; it is left in
tests/gguf as found-*, to be replayed by tests/gguf/test_fuzzed.py once it has been moved to tests/gguf/fuzz_seeds.
"""

import argparse
import contextlib
import inspect
import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from pyggtrain.adapters import gguf_adapter, peft, peft_files
from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.samples import BadRowError
from pyggtrain.errors import PyggtrainError
from pyggtrain.gguf import GGUFFile, TypedValue, quantize_tensor, write_gguf
from pyggtrain.gguf.finite import find_nonfinite
from pyggtrain.gguf.imatrix import read_imatrix
from pyggtrain.gguf.requantize import plan
from pyggtrain.ops import dequantize

INSTRUMENTED = ("pyggtrain.gguf", "pyggtrain.adapters", "pyggtrain.data.chat_template", "pyggtrain.data.sandbox")
SEPARATOR = b"||PART||"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>Hm.</think>Hi."},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


TEMPLATE = (
    "{%- set ns = namespace(n=0) -%}{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m['content'] "
    "| trim }}{% elif m.content is string %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{{ eos_token * 1 }}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}"
    "{% endif %}{% macro f(x, y=2) %}{{ '%s' % x }}{% endmacro %}{{ f(ns.n) }}{{ messages[::-1] | length }}"
    "{% if add_generation_prompt %}{% generation %}a{% endgeneration %}{% endif %}{{ raise_exception('no') if false }}"
)


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


def read_peft(folder: Path, content: bytes, base: GGUFFile) -> None:
    config, _, weights = content.partition(SEPARATOR)
    (folder / peft_files.CONFIG).write_bytes(config)
    (folder / peft_files.WEIGHTS).write_bytes(weights)
    adapter = peft.from_peft(folder, base)
    gguf_adapter.write(folder / "from-peft.gguf", adapter, overwrite=True)
    gguf_adapter.check_against_base(gguf_adapter.load(folder / "from-peft.gguf"), base, ignore_hash=True)


def read_template(folder: Path, content: bytes, base: GGUFFile) -> None:
    template = ChatTemplate(content.decode("utf-8", "replace"), bos_token="<s>", eos_token="</s>")
    with contextlib.suppress(BadRowError):
        template.render(CHAT, tools=TOOLS, add_generation_prompt=True)


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


READERS: tuple[Callable[[Path, bytes, GGUFFile], None], ...] = (
    *(read_adapter, read_split, read_model),
    *(read_peft, read_template),
)


def read(data: bytes, folder: Path, base: GGUFFile) -> None:
    """One input: the first byte says how the rest is read. Anything but a PyggtrainError leaves this function."""
    if data:
        with contextlib.suppress(PyggtrainError):
            READERS[data[0] % len(READERS)](folder, data[1:], base)


def write_base(path: Path) -> GGUFFile:
    tensors = [quantize_tensor(f"blk.0.{name}.weight", torch.ones(4, 32), "Q4_0") for name in ("attn_q", "ffn_up")]
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 2}
    write_gguf(path, metadata, [*tensors, quantize_tensor("n", torch.ones(3), "F32")])
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
    entry = struct.pack("<i1sii32f", 1, b"w", 2, 32, *range(32))
    (folder / "imatrix.dat").write_bytes(b"\2" + struct.pack("<i", 1) + entry)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {"model.layers.0.*q_proj": 8}}
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{prefix}.lora_A.weight": torch.ones(2, 32), f"{prefix}.lora_B.weight": torch.ones(4, 2)}
    header = {"alpha": 4.0, "tensors": ["a"], "provenance": {"v": "1"}, "metadata": {"k": ["arr[u32]", [1]]}}
    weights = safetensors.torch.save(pair, {peft_files.HEADER_KEY: json.dumps(header)})
    (folder / "peft").write_bytes(b"\3" + json.dumps(config).encode() + SEPARATOR + weights)
    (folder / "template").write_bytes(b"\4" + TEMPLATE.encode())


def instrument(atheris: Any) -> None:
    """Let the fuzzer see which lines of the readers run; torch and numpy stay as they are."""
    for module in [module for name, module in sys.modules.items() if name.startswith(INSTRUMENTED)]:
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                setattr(module, name, atheris.instrument_func(function))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument(
        "--input-seconds",
        type=int,
        default=10,
        help="an input that takes longer hangs; by the clock, so more if stopped",
    )
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
            f"-timeout={arguments.input_seconds}",
            "-max_len=8192",
        ]
        options = [*limits, f"-artifact_prefix={here}/found-", "-print_final_stats=1", str(corpus)]
        atheris.Setup([sys.argv[0], *options], lambda data: read(data, work, base))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
