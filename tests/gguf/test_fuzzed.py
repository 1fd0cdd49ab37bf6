"""What the fuzzers found worth keeping, and a few thousand fresh mutations: a file is read or refused, never worse.

The fuzzers are tests/csrc/fuzz_gguf_file.py (the parser) and tests/gguf/fuzz_readers.py (what is built on it).
"""

import contextlib
import importlib.util
import random
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from pyggtrain.errors import PyggtrainError
from pyggtrain.gguf import GGUFFile

TESTS = Path(__file__).parents[1]
CORPUS = TESTS / "csrc" / "fuzz_seeds" / "corpus.zip"
FOUND = sorted(path for folder in ("csrc", "gguf") for path in (TESTS / folder / "fuzz_seeds").glob("found-*"))


@pytest.fixture(scope="module")
def fuzz_readers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_readers", Path(__file__).with_name("fuzz_readers.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_readers"] = module
    spec.loader.exec_module(module)
    return module


def test_kept_files_are_read_or_refused(tmp_path: Path) -> None:
    num_read, path = 0, tmp_path / "case.gguf"
    with zipfile.ZipFile(CORPUS) as archive:
        names = archive.namelist()
        for name in names:
            path.write_bytes(archive.read(name))
            with contextlib.suppress(PyggtrainError):
                file = GGUFFile(path)
                num_read += 1
                assert all(info.offset + info.num_bytes <= file.file_bytes for info in file.tensor_infos.values())
    # The corpus reaches both sides of the checks.
    assert len(names) > 50 and 0 < num_read < len(names)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_what_once_broke_a_reader_no_longer_does(path: Path, fuzz_readers: ModuleType, tmp_path: Path) -> None:
    base = fuzz_readers.write_base(tmp_path / "base.gguf")
    content = path.read_bytes()
    # The parser's own findings are whole files; those of the readers begin with a byte that chooses one.
    for data in [content, *(bytes([number]) + content for number in range(len(fuzz_readers.READERS)))]:
        fuzz_readers.read(data, tmp_path, base)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A copy with a few bytes changed, cut out, doubled, or replaced by a number at the edge of a range."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(1, len(out))
        match rng.randrange(4):
            case 0:
                out[at] = rng.randrange(256)
            case 1:
                out[at : at + 8] = rng.choice((0, 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)).to_bytes(8, "little")
            case 2:
                del out[at : at + rng.randint(1, 64)]
            case _:
                out[at:at] = out[at : at + rng.randint(1, 64)]
        if len(out) < 2:
            break
    return bytes(out)


def test_mutations_of_good_files_are_read_or_refused(fuzz_readers: ModuleType, tmp_path: Path) -> None:
    seeds, work = tmp_path / "seeds", tmp_path / "work"
    seeds.mkdir()
    work.mkdir()
    fuzz_readers.write_seeds(seeds)
    base = fuzz_readers.write_base(tmp_path / "base.gguf")
    rng = random.Random(0)
    for seed in sorted(seeds.iterdir()):
        content = seed.read_bytes()
        for _ in range(400):
            data = mutated(content, rng)
            try:
                fuzz_readers.read(data, work, base)
            except Exception:
                (tmp_path / "found").write_bytes(data)
                raise
