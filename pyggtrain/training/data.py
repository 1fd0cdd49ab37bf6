"""Rows for a run: read, encoded, and a share set aside that is never trained on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path

from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.encode import NOT_LEARNT, DataSettings, EncodeReport, Example, load_examples
from pyggtrain.data.order import epoch_order
from pyggtrain.errors import ConfigError
from pyggtrain.gguf import Tokenizer
from pyggtrain.training.config import TrainConfig

_MOST_HELD_OUT = 200
_FEWEST_TO_SPLIT = 20


@dataclass(frozen=True)
class RunData:
    """Encoded rows of a run.

    Attributes:
        rows: to train on.
        held_out: never trained on; empty if there are none.
        report: what happened to the training file's rows, those set aside included.
        held_out_report: the same for `eval_data`; None if rows were set aside instead.
        template: how conversations were rendered; None if the model has no template and none was given.
    """

    rows: list[Example]
    held_out: list[Example]
    report: EncodeReport
    held_out_report: EncodeReport | None
    template: ChatTemplate | None

    def lines(self) -> list[str]:
        """What happened to the rows, for a person."""
        lines = self.report.lines()
        if self.held_out_report is not None:
            lines += ["held-out data:", *(f"  {line}" for line in self.held_out_report.lines())]
        elif self.held_out:
            lines.append(f"{len(self.held_out)} of these rows are held out and never trained on")
        else:
            lines.append("no held-out rows: the report cannot tell learning from memorising")
        return lines

    def documents(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return (token ids, labels) of all rows, held-out ones first."""
        return [(row.input_ids, row.labels) for row in [*self.held_out, *self.rows]]


def load_data(config: TrainConfig, tokenizer: Tokenizer, *, max_length: int, started: datetime) -> RunData:
    """Read and encode the rows of a run.

    Args:
        max_length: longest row in tokens.
        started: when the run was started first; the date that templates write.

    Raises:
        DataError: files or rows cannot be used, or nothing is left; all rows concerned are named.
        ConfigError: the template file cannot be read, or settings do not fit the data.
    """
    template = run_template(config, tokenizer, started)
    settings = DataSettings(
        format=config.format,
        max_length=max_length,
        too_long=config.too_long,
        bad_rows=config.bad_rows,
        merge_system=config.merge_system,
        learnt_turns=config.learnt_turns,
    )
    rows, report = load_examples(config.data, tokenizer, settings, chat_template=template)
    if config.eval_data:
        held_out, held_out_report = load_examples(config.eval_data, tokenizer, settings, chat_template=template)
        return RunData(rows, held_out, report, held_out_report, template)
    aside = _rows_aside(config, len(rows))
    held_out = [row for index, row in enumerate(rows) if index in aside]
    rows = [row for index, row in enumerate(rows) if index not in aside]
    return RunData(rows, held_out, report, None, template)


def run_template(config: TrainConfig, tokenizer: Tokenizer, started: datetime) -> ChatTemplate | None:
    """Return the chat template that the settings ask for; None if the model has none and no file was given.

    Raises:
        ConfigError: the file cannot be read.
        DataError: the template is not valid.
    """
    source = None
    if config.chat_template is not None:
        try:
            source = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {config.chat_template} cannot be read: {error}") from error
    if source is None and tokenizer.chat_template is None:
        return None
    variables = json.loads(config.chat_template_kwargs or "{}")
    return ChatTemplate.of_model(tokenizer, source=source, now=started, variables=variables)


def learnt_pieces(row: Example, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the text of a row in pieces, each with whether it is learnt."""
    pairs = zip(row.input_ids, row.labels, strict=True)
    # Joined before decoding: a character may be spread over several tokens.
    return [
        (b"".join(tokenizer.piece(token) for token, _ in group).decode("utf-8", "replace"), is_learnt)
        for is_learnt, group in groupby(pairs, key=lambda pair: pair[1] != NOT_LEARNT)
    ]


def _rows_aside(config: TrainConfig, num_rows: int) -> frozenset[int]:
    if num_rows < _FEWEST_TO_SPLIT:
        return frozenset()
    count = min(_MOST_HELD_OUT, int(config.eval_split * num_rows))
    # The order of an epoch that no run reaches.
    return frozenset(epoch_order(num_rows, config.seed, -1)[:count])
