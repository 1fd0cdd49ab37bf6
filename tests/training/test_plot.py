"""Ticks, gaps, thinning and text of the SVG plot."""

import math
from xml.etree import ElementTree

import pytest

from pyggtrain.training.plot import Series, histogram, line_plot, running_mean, ticks


def draw(*series: Series) -> ElementTree.Element:
    return ElementTree.fromstring(line_plot(series, name="p", description="d", x_label="x", y_label="y"))


def paths(svg: ElementTree.Element) -> list[str]:
    return [element.get("d", "") for element in svg.iter("path")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (1.31, 2.84, [1.0, 1.5, 2.0, 2.5, 3.0]),
        (0, 2e-4, [0, 5e-5, 1e-4, 1.5e-4, 2e-4]),
        (3.0, 3.0, [2.6, 2.8, 3.0, 3.2, 3.4]),
        (0, 0, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_and_enclose_the_range(low, high, expected):
    found = ticks(low, high, 6)
    assert found == pytest.approx(expected)


def test_points_lie_where_the_axes_say():
    svg = draw(Series("a", "train", [(0, 0), (10, 10)]))
    assert paths(svg) == ["M64.0 256.0 L744.0 36.0"]


def test_a_loss_that_is_not_finite_leaves_a_gap():
    svg = draw(Series("a", "train", [(0, 1), (1, 1), (2, math.nan), (3, 1), (4, 1)]))
    assert paths(svg)[0].count("M") == 2
    assert "nan" not in paths(svg)[0]


def test_one_point_and_no_point_do_not_fail():
    assert paths(draw(Series("a", "train", [(1, 2.5)])))
    assert line_plot([Series("a", "train", [(1, math.nan)])], name="p", description="", x_label="", y_label="") == ""


def test_long_runs_are_thinned():
    svg = draw(Series("a", "train", [(step, math.sin(step)) for step in range(100_000)]))
    assert 250 < len(paths(svg)[0].split()) / 2 <= 500


def test_running_mean_is_unbiased_at_its_start_and_calms_what_jumps():
    assert [mean for _, mean in running_mean([(step, 5.0) for step in range(100)])] == pytest.approx([5.0] * 100)
    jumping = [(step, step % 2) for step in range(400)]
    assert all(0.4 < mean < 0.6 for _, mean in running_mean(jumping)[100:])
    assert running_mean([(0, math.nan), (1, 2.0)]) == [(1, 2.0)]


def test_bars_count_the_values_between_round_edges():
    page = histogram([1, 2, 3, 39, 40], name="h", description="d", x_label="x", y_label="y")
    svg = ElementTree.fromstring(page)
    titles = [bar.find("title").text for bar in svg.iter("rect")]
    assert titles == ["0 to 2.5: 2", "2.5 to 5: 1", "37.5 to 40: 2"]
    heights = [float(bar.get("height")) for bar in svg.iter("rect")]
    assert heights[0] == heights[2] == pytest.approx(2 * heights[1])


def test_equal_values_make_one_bar_and_none_make_no_picture():
    svg = ElementTree.fromstring(histogram([7, 7], name="h", description="d", x_label="x", y_label="y"))
    assert len(list(svg.iter("rect"))) == 1
    assert histogram([], name="h", description="d", x_label="x", y_label="y") == ""


def test_the_y_axis_begins_at_zero_where_size_matters():
    series = [Series("a", "speed", [(0, 99), (1, 100)])]
    page = line_plot(series, name="p", description="d", x_label="x", y_label="y", from_zero=True)
    assert ">0</text>" in page and ">0</text>" in page.split(">100</text>")[0]
