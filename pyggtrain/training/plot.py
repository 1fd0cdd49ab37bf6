"""Plots as inline SVG: no script, no font, no file beside it; CSS gives the colours, in light and dark."""

import math
from collections import Counter
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


def line_plot(
    series: Sequence[Series], *, name: str, description: str, x_label: str, y_label: str, from_zero: bool = False
) -> str:
    """Return an `<svg>` element with axes, ticks and one line for each series; points that are not finite leave a gap.

    Args:
        series: lines; those without a finite point are left out.
        name: unique on the page; makes the ids that tie title and description to the picture for screen readers.
        description: what the plot shows, in a sentence with numbers.
        x_label, y_label: of the axes, with unit.
        from_zero: let the y axis begin at 0, for quantities whose size matters and not only their change.
    """
    shown = [line for line in series if any(math.isfinite(y) for _, y in line.points)]
    if not shown:
        return ""
    xs = [x for line in shown for x, _ in line.points]
    ys = [y for line in shown for _, y in line.points if math.isfinite(y)]
    axes = _Axes.around(xs, [0.0, *ys] if from_zero else ys)
    parts = []
    for line in shown:
        placed = [(*axes.place(x, y), math.isfinite(y)) for x, y in _thinned(line.points)]
        path = _path(placed)
        parts.append(f'<path class="{escape(line.css_class)}" d="{path}"><title>{escape(line.name)}</title></path>')
        if line.has_dots:
            parts += [
                f'<circle class="{escape(line.css_class)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
                for x, y, is_finite in placed
                if is_finite
            ]
    return _svg(axes, parts, name=name, description=description, x_label=x_label, y_label=y_label)


def histogram(values: Sequence[float], *, name: str, description: str, x_label: str, y_label: str) -> str:
    """Return an `<svg>` element with ten to twenty bars of round widths: how many values lie in each.

    Args:
        values: finite numbers; without any the result is "".
        name, description, x_label, y_label: as in `line_plot`.
    """
    if not values:
        return ""
    edges = ticks(min(values), max(values), 20)
    width = edges[1] - edges[0]
    counts = Counter(min(int((value - edges[0]) / width), len(edges) - 2) for value in values)
    axes = _Axes.around(edges, [0.0, max(counts.values())])
    parts = []
    for index, count in sorted(counts.items()):
        (left, top), (right, bottom) = axes.place(edges[index], count), axes.place(edges[index + 1], 0)
        title = f"{edges[index]:g} to {edges[index + 1]:g}: {count}"
        parts.append(
            f'<rect class="bar" x="{left + 0.5:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" '
            f'height="{bottom - top:.1f}"><title>{title}</title></rect>'
        )
    return _svg(axes, parts, name=name, description=description, x_label=x_label, y_label=y_label)


@dataclass(frozen=True)
class _Axes:
    """Ticks of both axes, and the range of numbers that the picture shows."""

    x_ticks: list[float]
    y_ticks: list[float]
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> "_Axes":
        x_ticks, y_ticks = ticks(min(xs), max(xs), 8), ticks(min(ys), max(ys), 6)
        x_range = min(*x_ticks, *xs), max(*x_ticks, *xs)
        return cls(x_ticks, y_ticks, x_range, (min(*y_ticks, *ys), max(*y_ticks, *ys)))

    def place(self, x: float, y: float) -> tuple[float, float]:
        (x_low, x_high), (y_low, y_high) = self.x_range, self.y_range
        return (
            _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM),
        )


def _svg(axes: _Axes, drawing: Sequence[str], *, name: str, description: str, x_label: str, y_label: str) -> str:
    """The picture around what is drawn: title, description, grid, ticks and labels."""
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{escape(name)}-title {escape(name)}-text">',
        f'<title id="{escape(name)}-title">{escape(y_label)} by {escape(x_label)}</title>',
        f'<desc id="{escape(name)}-text">{escape(description)}</desc>',
    ]
    for tick in axes.y_ticks:
        _, y = axes.place(axes.x_range[0], tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in axes.x_ticks:
        x, _ = axes.place(tick, axes.y_range[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text x="0" y="14">{escape(y_label)}</text>')
    return "".join([*parts, *drawing, "</svg>"])


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
