"""Fuzz the GGUF parser with libFuzzer, AddressSanitizer and UBSan.

    python tests/csrc/fuzz_gguf_file.py [--minutes 30] [--jobs 1] [--keep] [--input-seconds 5]

Needs clang with its runtime (Debian: clang libclang-rt-14-dev) and one build of the project, whose llama.cpp
libraries it links. Starts from the files in tests/csrc/fuzz_seeds/corpus.zip and from small ones written here. A
finding is left in tests/csrc/fuzz_seeds and ends the run with libFuzzer's exit code; the normal tests replay it there
(tests/csrc/test_fuzzed.py) until the parser is mended and for ever after. `--keep` puts what the run found worth
keeping, made small, into corpus.zip.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from pyggtrain.cache_folder import cache_folder
from pyggtrain.gguf import TypedValue, quantize_tensor, write_gguf

ROOT = Path(__file__).parents[2]
SEEDS = Path(__file__).parent / "fuzz_seeds"
CORPUS = SEEDS / "corpus.zip"
# 64 MiB over twice the largest input (1 MiB) covers the sanitizers' own need many times over.
RSS_LIMIT_MIB = 512


def llama_cpp() -> tuple[Path, Path]:
    """(source folder, build folder) of llama.cpp in the cache."""
    cache = cache_folder()
    builds = sorted(cache.glob("llama.cpp-*/build-*/built"))
    if not builds:
        sys.exit(f"No build of llama.cpp in {cache}; install the project first.")
    return builds[-1].parents[1] / "source" / "vendor" / "llama.cpp", builds[-1].parent


def write_seeds(folder: Path) -> None:
    """Small valid files, so that the fuzzer starts behind the first checks."""
    write_gguf(folder / "empty.gguf", {}, [])
    values = {"general.architecture": "llama", "a": [1, 2], "b": ["x", "yz"], "c": True, "d": TypedValue("f64", 1.5)}
    tensors = [quantize_tensor("t", torch.ones(2, 32), "Q4_0"), quantize_tensor("u", torch.ones(3), "F32")]
    write_gguf(folder / "small.gguf", values, tensors)
    write_gguf(folder / "split.gguf", {"split.no": 0, "split.count": 2, "split.tensors.count": 1}, tensors[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the corpus for the next run and the tests")
    parser.add_argument(
        "--input-seconds",
        type=int,
        default=5,
        help="an input that takes longer hangs; by the clock, so more if stopped",
    )
    arguments = parser.parse_args()
    source, build = llama_cpp()
    with tempfile.TemporaryDirectory() as folder:
        binary, corpus = Path(folder) / "fuzz", Path(folder) / "corpus"
        corpus.mkdir()
        write_seeds(corpus)
        if CORPUS.exists():
            with zipfile.ZipFile(CORPUS) as archive:
                archive.extractall(corpus)
        includes = [f"-I{ROOT / 'csrc'}", f"-I{source / 'ggml' / 'include'}", f"-I{source / 'ggml' / 'src'}"]
        (library,) = build.rglob("libggml-base.a")
        files = [Path(__file__).with_suffix(".cpp"), ROOT / "csrc" / "gguf_file.cpp", ROOT / "csrc" / "bus_error.cpp"]
        flags = ["-std=c++17", "-g", "-O1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined"]
        command = ["clang++", *flags, *includes, *files, library, "-fopenmp=libgomp", "-o", binary]
        subprocess.run([str(part) for part in command], check=True)
        limits = [
            f"-max_total_time={int(arguments.minutes * 60)}",
            f"-rss_limit_mb={RSS_LIMIT_MIB}",
            f"-timeout={arguments.input_seconds}",
        ]
        options = [
            *limits,
            "-max_len=65536",
            "-malloc_limit_mb=64",
            f"-artifact_prefix={SEEDS}/found-",
            "-print_final_stats=1",
        ]
        jobs = [f"-fork={arguments.jobs}"] if arguments.jobs > 1 else []
        code = subprocess.call([str(binary), *options, *jobs, str(corpus)])
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        sys.stdout.write(f"{(used.ru_utime + used.ru_stime) / 60:.1f} CPU-minutes, the compiler's included\n")
        if arguments.keep and code == 0:
            keep(binary, corpus, Path(folder) / "small")
        sys.exit(code)


def keep(binary: Path, corpus: Path, small: Path) -> None:
    """Put the fewest files that reach all that the corpus reaches into the archive."""
    small.mkdir()
    subprocess.run([str(binary), "-merge=1", str(small), str(corpus)], check=True)
    with zipfile.ZipFile(CORPUS, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(small.iterdir()):
            # A fixed time, so that equal files make an equal archive.
            archive.writestr(zipfile.ZipInfo(path.name, (2026, 1, 1, 0, 0, 0)), path.read_bytes())


if __name__ == "__main__":
    main()
