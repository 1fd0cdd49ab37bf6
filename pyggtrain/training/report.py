"""One page about a run, in one file that needs no network: losses, machine, data, answers, parity, settings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from pyggtrain.training.plot import Series, histogram, line_plot, running_mean


@dataclass(frozen=True)
class Sample:
    """A question answered by llama.cpp without and with the adapter."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class Report:
    """Contents of the page; each text is escaped when it is written.

    Attributes:
        title: of the page.
        command: shell line that repeats the run.
        serve: shell lines that serve the adapter.
        summary: fact -> value, first table of the page.
        data: sentences about the rows.
        lengths: tokens of each row, held-out ones included.
        metrics: lines of the metrics file.
        preview: pieces of one training row with True for those that are learnt.
        samples: answers before and after.
        unit: what a loss is measured in.
        parity: header row and further rows; empty if the comparison was turned off.
        has_passed: verdict of the comparison, None without one.
        settings: all settings of the run.
        versions: software -> version.
    """

    title: str
    command: str
    serve: str
    summary: Mapping[str, str]
    data: Sequence[str]
    metrics: Sequence[Mapping[str, Any]]
    preview: Sequence[tuple[str, bool]]
    parity: Sequence[Sequence[str]]
    has_passed: bool | None
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    samples: Sequence[Sample] = field(default=())
    lengths: Sequence[int] = field(default=())
    unit: str = "nats per learnt token"


def render(report: Report) -> str:
    """Return the page as well-formed XHTML5 text."""
    parts = [
        "<h1>" + _text(report.title) + "</h1>",
        _facts(report.summary),
        _losses(report.metrics, report.unit),
        _preferences(report.metrics),
        _machine(report.metrics),
        _section("Data", _lines(report.data) + _lengths(report.lengths) + _preview(report.preview)),
        _section("Answers before and after", _samples(report.samples)) if report.samples else "",
        _section("Comparison with llama.cpp", _verdict(report.has_passed) + _table(report.parity)),
        _section("Serve it", _code(report.serve)),
        _section(
            "Repeat it",
            _code(report.command)
            + _details("All settings", _facts({name: _shown(value) for name, value in report.settings.items()}))
            + _details("Versions", _facts(report.versions)),
        ),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>{_text(report.title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _losses(metrics: Sequence[Mapping[str, Any]], unit: str) -> str:
    train = _series(metrics, "loss")
    held_out = _series(metrics, "eval_loss")
    rate = _series(metrics, "learning_rate")
    finite = [loss for _, loss in train if math.isfinite(loss)]
    description = (
        f"Training loss from {finite[0]:.3f} to {finite[-1]:.3f}." if finite else "There was no finite training loss."
    )
    if held_out:
        description += f" Held-out loss from {held_out[0][1]:.3f} to {held_out[-1][1]:.3f}."
    loss_plot = line_plot(
        [
            Series("training loss, each logged step", "train faint", train),
            Series("training loss, running mean", "train", running_mean(train)),
            Series("held-out loss", "held-out", held_out, has_dots=True),
        ],
        name="loss",
        description=description,
        x_label="optimiser step",
        y_label=f"loss ({unit})",
    )
    rate_plot = line_plot(
        [Series("learning rate", "rate", rate)],
        name="rate",
        description="Learning rate of each logged step.",
        x_label="optimiser step",
        y_label="learning rate",
    )
    legend = (
        '<p class="legend"><span class="key train"></span>training loss (thin: each step) '
        '<span class="key held-out"></span>held-out loss</p>'
    )
    rows = [["step", "held-out loss"], *([f"{step:g}", f"{loss:.4f}"] for step, loss in held_out)]
    table = _details("Held-out losses as numbers", _table(rows)) if held_out else ""
    return _section("Loss", f"<p>{_text(description)}</p>{legend}{loss_plot}{table}<h3>Learning rate</h3>{rate_plot}")


def _preferences(metrics: Sequence[Mapping[str, Any]]) -> str:
    """How often the chosen answer is preferred; "" for a run that learns no preferences."""
    train = _series(metrics, "rewards/accuracies")
    if not train:
        return ""
    held_out = _series(metrics, "eval_rewards/accuracies")
    description = f"Share of training pairs whose chosen answer is preferred: {train[-1][1]:.2f} at the end."
    if held_out:
        description += f" Of held-out pairs from {held_out[0][1]:.2f} to {held_out[-1][1]:.2f}."
    plot = line_plot(
        [
            Series("training pairs, each logged step", "train faint", train),
            Series("training pairs, running mean", "train", running_mean(train)),
            Series("held-out pairs", "held-out", held_out, has_dots=True),
        ],
        name="accuracy",
        description=description,
        x_label="optimiser step",
        y_label="share of pairs",
        from_zero=True,
    )
    return _section("Preferences", f"<p>{_text(description)}</p>{plot}")


def _machine(metrics: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for name, title, unit, style in (
        ("tokens_per_second", "Speed", "tokens per second", "speed"),
        ("memory_mib", "Memory", "MiB", "memory"),
    ):
        series = [(step, value) for step, value in _series(metrics, name) if math.isfinite(value)]
        if not series:
            continue
        values = [value for _, value in series]
        description = f"{title}: {min(values):,.0f} to {max(values):,.0f} {unit}."
        plot = line_plot(
            [Series(title, style, series)],
            name=name.replace("_", "-"),
            description=description,
            x_label="optimiser step",
            y_label=unit,
            from_zero=True,
        )
        parts.append(f"<h3>{title}</h3><p>{_text(description)}</p>{plot}")
    return _section("Machine", "".join(parts)) if parts else ""


def _lengths(lengths: Sequence[int]) -> str:
    if not lengths:
        return ""
    ordered = sorted(lengths)
    percentiles = ", ".join(
        f"{share} % up to {ordered[math.ceil(share / 100 * len(ordered)) - 1]:,}" for share in (50, 90, 99)
    )
    description = f"Tokens of {len(ordered):,} rows: {ordered[0]:,} to {ordered[-1]:,}; {percentiles}."
    plot = histogram(
        ordered, name="lengths", description=description, x_label="tokens of a row", y_label="number of rows"
    )
    return f"<h3>Lengths</h3><p>{_text(description)}</p>{plot}"


def _series(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    # A number that was not finite is null in the file.
    return [(line["step"], math.nan if line[name] is None else float(line[name])) for line in metrics if name in line]


def _preview(pieces: Sequence[tuple[str, bool]]) -> str:
    if not pieces:
        return ""
    marked = "".join(f"<mark>{_text(piece)}</mark>" if is_learnt else _text(piece) for piece, is_learnt in pieces)
    return f"<h3>First row</h3><p>Marked tokens are learnt, the others are only read.</p><pre>{marked}</pre>"


def _samples(samples: Iterable[Sample]) -> str:
    rows = [
        ["question", "without adapter", "with adapter"],
        *([sample.prompt, sample.before, sample.after] for sample in samples),
    ]
    return _table(rows)


def _verdict(has_passed: bool | None) -> str:
    if has_passed is None:
        return "<p>Turned off for this run.</p>"
    if has_passed:
        return '<p class="passed">Passed: what was trained is what llama.cpp computes.</p>'
    return '<p class="failed">Failed: llama.cpp computes something else than what was trained.</p>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>"


def _details(title: str, body: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{body}</details>"


def _code(text: str) -> str:
    return f"<pre><code>{_text(text)}</code></pre>"


def _lines(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in facts.items()
    )
    return f'<div class="wide"><table>{rows}</table></div>' if rows else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _shown(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def _text(text: object) -> str:
    """Escape, and show control characters, which XML forbids, as their pictures (U+2400 and following)."""
    shown = "".join(
        chr(0x2400 + ord(char))
        if ord(char) < 0x20 and char not in "\n\t"
        else "\N{REPLACEMENT CHARACTER}"
        if _is_forbidden(char)
        else char
        for char in str(text)
    )
    return escape(shown)


def _is_forbidden(char: str) -> bool:
    return 0xD800 <= ord(char) <= 0xDFFF or ord(char) in (0xFFFE, 0xFFFF)


_STYLE = """
:root { color-scheme: light dark; --text: #1d2126; --dim: #5b6470; --page: #fbfbfa; --line: #d9dcdf; --box: #f0f1f2;
  --train: #1f5fa8; --held-out: #b3440a; --rate: #2f7d4f; --speed: #6b4fa0;
  --memory: #86651a; --mark: #d4ecd9; --mark-text: #0f3d20; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8ea; --dim: #a2abb5; --page: #16191c; --line: #363c43; --box: #20252a;
    --train: #7db4f0; --held-out: #f2a062; --rate: #7fcf9d; --speed: #b9a0ee;
    --memory: #d9b95f; --mark: #1f4a2f; --mark-text: #d9f5e2; } }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 50rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--line); }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
th[scope=row] { font-weight: normal; color: var(--dim); white-space: nowrap; }
pre { background: var(--box); padding: .75rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: var(--mark); color: var(--mark-text); text-decoration: underline; }
summary { cursor: pointer; margin: .75rem 0; } .legend { color: var(--dim); margin: 0; }
.key { display: inline-block; width: 1.5rem; margin: 0 .4rem 0 1rem; vertical-align: middle; border-top: 3px solid; }
.key.train { border-color: var(--train); } .key.held-out { border-color: var(--held-out); border-top-style: dashed; }
.passed::before { content: "\\2713  "; } .failed { font-weight: bold; } .failed::before { content: "\\2717  "; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 13px; } svg .grid { stroke: var(--line); }
svg path { fill: none; stroke-width: 2; stroke-linejoin: round; } svg .faint { opacity: .4; stroke-width: 1; }
svg .train { stroke: var(--train); } svg .rate { stroke: var(--rate); } svg .bar { fill: var(--train); }
svg .speed { stroke: var(--speed); } svg .memory { stroke: var(--memory); }
svg path.held-out { stroke: var(--held-out); stroke-dasharray: 6 4; } svg circle.held-out { fill: var(--held-out); }
"""
