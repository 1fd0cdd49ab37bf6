"""A line plot as inline SVG: no script, no font, no file beside it; CSS gives the colours, in light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 44
_MAX_POINTS = 500


@dataclass(frozen=True)
class Series:
    """One line: its name, its CSS class, its points (x, y) in order of x, and whether each gets a dot."""

    name: str
    css_class: str
    points: Sequence[tuple[float, float]]
    has_dots: bool = False


def line_plot(series: Sequence[Series], *, name: str, description: str, x_label: str, y_label: str) -> str:
    """Return an `<svg>` element with axes, ticks and one line for each series; points that are not finite leave a gap.

    Args:
        series: lines; those without a finite point are left out.
        name: unique on the page; makes the ids that tie title and description to the picture for screen readers.
        description: what the plot shows, in a sentence with numbers.
        x_label, y_label: of the axes, with unit.
    """
    shown = [line for line in series if any(math.isfinite(y) for _, y in line.points)]
    if not shown:
        return ""
    xs = [x for line in shown for x, _ in line.points]
    ys = [y for line in shown for _, y in line.points if math.isfinite(y)]
    x_ticks, y_ticks = ticks(min(xs), max(xs), 8), ticks(min(ys), max(ys), 6)
    x_low, x_high = min(xs[0], *x_ticks, *xs), max(*x_ticks, *xs)
    y_low, y_high = min(*y_ticks, *ys), max(*y_ticks, *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{escape(name)}-title {escape(name)}-text">',
        f'<title id="{escape(name)}-title">{escape(y_label)} by {escape(x_label)}</title>',
        f'<desc id="{escape(name)}-text">{escape(description)}</desc>',
    ]
    for tick in y_ticks:
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = place(tick, y_low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text x="0" y="14">{escape(y_label)}</text>')
    for line in shown:
        placed = [(*place(x, y), math.isfinite(y)) for x, y in _thinned(line.points)]
        path = _path(placed)
        parts.append(f'<path class="{escape(line.css_class)}" d="{path}"><title>{escape(line.name)}</title></path>')
        if line.has_dots:
            parts += [
                f'<circle class="{escape(line.css_class)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
                for x, y, is_finite in placed
                if is_finite
            ]
    parts.append("</svg>")
    return "".join(parts)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round numbers (1, 2, 2.5 or 5 times a power of ten apart) that enclose low to high."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.floor(low / spacing + 1e-9)
    last = math.ceil(high / spacing - 1e-9)
    return [round(index * spacing, 12) for index in range(first, last + 1)]


def running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the exponentially weighted mean of y over about a twentieth of the points, unbiased from the start."""
    keep = 1 - 1 / max(1.0, len(points) / 20)
    smooth, mean, weight = [], 0.0, 0.0
    for x, y in points:
        if math.isfinite(y):
            mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
            smooth.append((x, mean / weight))
    return smooth


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """More points than pixels make a slow page: replace runs of neighbours by their means."""
    size = math.ceil(len(points) / _MAX_POINTS)
    if size <= 1:
        return points
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def _path(placed: Sequence[tuple[float, float, bool]]) -> str:
    commands, is_drawing = [], False
    for x, y, is_finite in placed:
        if is_finite:
            commands.append(f"{'L' if is_drawing else 'M'}{x:.1f} {y:.1f}")
        is_drawing = is_finite
    return " ".join(commands)
