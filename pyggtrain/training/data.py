"""Rows for a run: read, encoded, and a share set aside that is never trained on."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from pyggtrain.cores import num_usable_cores
from pyggtrain.data.cache import cached_examples
from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.encode import rows_with_format
from pyggtrain.data.examples import NOT_LEARNT, Example
from pyggtrain.data.order import epoch_order
from pyggtrain.data.packing import MicroBatches
from pyggtrain.data.report import EncodeReport
from pyggtrain.data.settings import DataSettings
from pyggtrain.data.sources import WeightedFile, weighted_files
from pyggtrain.data.store import ExampleStore, StoredExamples, StoredPairs
from pyggtrain.errors import ConfigError, DataError
from pyggtrain.gguf import GGUFFile, Tokenizer
from pyggtrain.training.config import TrainConfig

_MOST_HELD_OUT = 200
_FEWEST_TO_SPLIT = 20
_MOST_COMPARED = 200
_NO_LIMIT = 1 << 31


@dataclass(frozen=True)
class RunData:
    """Encoded rows of a run.

    Attributes:
        rows: to train on, examples or preference pairs; a row of a file with a weight is there as often as an epoch
            shows it.
        held_out: never trained on; empty if there are none.
        report: what happened to the training files' rows, those set aside included.
        held_out_report: the same for `eval_data`; None if rows were set aside instead.
        template: how conversations were rendered; None if the model has no template and none was given.
        sha256: of all that decides what is trained on: rows, and weights of files.
        mix: one line for each file with a weight.
    """

    rows: StoredExamples | StoredPairs
    held_out: StoredExamples | StoredPairs
    report: EncodeReport
    held_out_report: EncodeReport | None
    template: ChatTemplate | None
    sha256: str
    mix: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What happened to the rows, for a person."""
        lines = [*self.report.lines(), *self.mix]
        if self.held_out_report is not None:
            lines += ["held-out data:", *(f"  {line}" for line in self.held_out_report.lines())]
        elif self.held_out:
            lines.append(f"{len(self.held_out)} of these rows are held out and never trained on")
        else:
            lines.append("no held-out rows: the report cannot tell learning from memorising")
        return lines

    def documents(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return (token ids, labels) of rows to compare with llama.cpp: the first few hundred, held-out ones first."""
        rows = [
            some.example(index)
            for some in (self.held_out, self.rows)
            for index in range(min(len(some), _MOST_COMPARED))
        ]
        return [(row.input_ids, row.labels) for row in rows]


def load_data(
    config: TrainConfig, tokenizer: Tokenizer, *, max_length: int, started: datetime, as_pairs: bool = False
) -> RunData:
    """Read and encode the rows of a run, or find them encoded in the cache.

    Args:
        max_length: longest row in tokens.
        started: when the run was started first; its day is the date that templates write.
        as_pairs: rows are preferences.

    Raises:
        DataError: files or rows cannot be used, or nothing is left; all rows concerned are named.
        ConfigError: the template file cannot be read, or settings do not fit the data.
    """
    template = run_template(config, tokenizer, started)
    settings = data_settings(config, max_length)

    kind = StoredPairs if as_pairs else StoredExamples

    def encoded(files: Sequence[WeightedFile]) -> ExampleStore:
        paths = [file.path for file in files]
        workers = config.num_threads or num_usable_cores()
        return cached_examples(
            paths, tokenizer, settings, chat_template=template, as_pairs=as_pairs, num_workers=workers
        )

    files = weighted_files(config.data)
    store = encoded(files)
    # A pair is two examples of the store.
    file_of = store.files[:: 2 if as_pairs else 1]
    if config.eval_data:
        held_out_store = encoded(weighted_files(config.eval_data))
        held_out = kind(held_out_store, np.arange(len(held_out_store) // (2 if as_pairs else 1)))
        held_out_report, kept = held_out_store.report, np.arange(len(file_of))
    else:
        aside = _rows_aside(config, len(file_of))
        held_out, held_out_report = kind(store, aside), None
        kept = np.setdiff1d(np.arange(len(file_of)), aside)
    indices, mix = _mixed(kept, file_of, files, seed=config.seed)
    digest = hashlib.sha256(json.dumps([store.report.sha256, [file.weight for file in files]]).encode()).hexdigest()
    return RunData(kind(store, indices), held_out, store.report, held_out_report, template, digest, mix)


def data_settings(config: TrainConfig, max_length: int) -> DataSettings:
    """Return the part of the settings that says how rows become examples."""
    return DataSettings(
        format=config.format,
        max_length=max_length,
        too_long=config.too_long,
        bad_rows=config.bad_rows,
        merge_system=config.merge_system,
        learnt_turns=config.learnt_turns,
    )


def holds_pairs(config: TrainConfig) -> bool:
    """Return whether the rows are preferences: `format` says so, or else the first row."""
    first = next(rows_with_format([file.path for file in weighted_files(config.data)], config.format), None)
    return first is not None and first[1] == "preference"


def whole_lengths(config: TrainConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    """Return the tokens of each usable row before the policy for long rows."""
    paths = [file.path for file in weighted_files(config.data)]
    settings = replace(data_settings(config, _NO_LIMIT), bad_rows="skip")
    as_pairs, workers = holds_pairs(config), config.num_threads or num_usable_cores()
    store = cached_examples(paths, tokenizer, settings, chat_template=template, as_pairs=as_pairs, num_workers=workers)
    return list(map(int, store.lengths))


def longest_row(config: TrainConfig, base: GGUFFile) -> int:
    """Return the longest row in tokens: the setting, or the model's own context length if that is smaller."""
    context_length = base.metadata.get(f"{base.architecture}.context_length")
    return min(config.max_seq_length, context_length) if isinstance(context_length, int) else config.max_seq_length


def micro_batches(config: TrainConfig, rows: Sequence[Any], num_processes: int = 1) -> MicroBatches:
    """Return which rows each step takes.

    Args:
        rows: examples or pairs, each with `num_tokens`.
        num_processes: that share a step; each takes `gradient_accumulation_steps` micro-batches.
    """
    lengths = getattr(rows, "lengths", None)
    return MicroBatches(
        [row.num_tokens for row in rows] if lengths is None else lengths.tolist(),
        seed=config.seed,
        micro_batch_size=config.micro_batch_size,
        accumulation_steps=config.gradient_accumulation_steps * num_processes,
        capacity=config.max_seq_length if config.packing else None,
    )


def run_template(config: TrainConfig, tokenizer: Tokenizer, started: datetime) -> ChatTemplate | None:
    """Return the chat template that the settings ask for; None if the model has none and no file was given.

    Raises:
        ConfigError: the file cannot be read.
        DataError: the template is not valid.
    """
    variables = json.loads(config.chat_template_kwargs or "{}")
    # Templates write the day; a rendering that changed within it could not be found in the cache again.
    now = datetime.combine(started.date(), time())
    source = None
    if config.chat_template in tokenizer.chat_templates:
        return ChatTemplate.of_model(tokenizer, variant=config.chat_template, now=now, variables=variables)
    if config.chat_template is not None:
        try:
            source = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(tokenizer.chat_templates) or "none"
            raise ConfigError(
                f"chat_template: {config.chat_template} cannot be read: {error}. Give a file, or the name of one of "
                f"the model file's further templates ({names})."
            ) from error
    if source is None and tokenizer.chat_template is None and not tokenizer.chat_templates:
        return None
    return ChatTemplate.of_model(tokenizer, source=source, now=now, variables=variables)


def learnt_pieces(row: Example, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the text of a row in pieces, each with whether it is learnt."""
    pairs = zip(row.input_ids, row.labels, strict=True)
    # Joined before decoding: a character may be spread over several tokens.
    return [
        (b"".join(tokenizer.piece(token) for token, _ in group).decode("utf-8", "replace"), is_learnt)
        for is_learnt, group in groupby(pairs, key=lambda pair: pair[1] != NOT_LEARNT)
    ]


def _rows_aside(config: TrainConfig, num_rows: int) -> "np.ndarray[Any, Any]":
    """Indices of the rows to set aside, in the order of the files."""
    count = 0 if num_rows < _FEWEST_TO_SPLIT else min(_MOST_HELD_OUT, int(config.eval_split * num_rows))
    # The order of an epoch that no run reaches.
    return np.sort(np.array(epoch_order(num_rows, config.seed, -1)[:count], dtype=np.int64))


def _mixed(
    kept: "np.ndarray[Any, Any]", file_of: "np.ndarray[Any, Any]", files: Sequence[WeightedFile], *, seed: int
) -> tuple["np.ndarray[Any, Any]", tuple[str, ...]]:
    """Rows to train on, each as often as the weight of its file says, and a line for each file with a weight."""
    if all(file.weight == 1 for file in files):
        return kept, ()
    parts, lines = [], []
    for number, file in enumerate(files):
        rows = kept[file_of[kept] == number]
        copies, share = divmod(file.weight, 1)
        # The order of an epoch that no run reaches, and another than that of the rows set aside.
        some = np.sort(rows[list(epoch_order(len(rows), seed, -2))][: round(share * len(rows))])
        parts += [rows] * int(copies) + [some]
        lines.append(
            f"{file.path.name} has weight {file.weight:g}: {int(copies) * len(rows) + len(some)} rows an epoch"
        )
    mixed = np.concatenate(parts)
    if not len(mixed):
        raise DataError(f"Nothing is left to train on: {'; '.join(lines)}. Give larger weights.")
    return mixed, tuple(lines)
