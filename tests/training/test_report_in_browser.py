"""The report page in a real browser, if there is one: light and dark, wide and narrow, without network."""

import json
import math
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from pyggtrain.training.report import Report, Sample, render

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium or Chrome")

# Runs in a copy of the page, which itself has no script, and leaves what it measured where --dump-dom shows it.
MEASURE = """
const boxes = [...document.querySelectorAll("svg")].map(svg => {
  const outer = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect());
  const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return {
    width: outer.width, height: outer.height,
    outside: texts.filter(box => box.left < outer.left - 1 || box.right > outer.right + 1).length,
    overlaps: texts.filter((a, i) => texts.some((b, j) => i < j && overlap(a, b))).length,
    unpainted: [...svg.querySelectorAll("path, rect, circle")].filter(shape => {
      const style = getComputedStyle(shape);
      return style.stroke === "none" && style.fill === "none";
    }).length,
  };
});
document.body.dataset.measured = JSON.stringify({
  page: document.documentElement.scrollWidth, window: window.innerWidth, boxes,
  background: getComputedStyle(document.body).backgroundColor, text: getComputedStyle(document.body).color,
  mark: getComputedStyle(document.querySelector("mark")).backgroundColor,
});
"""


def page() -> str:
    metrics = [
        {
            "step": step,
            "loss": 0.8 + 2.5 * math.exp(-step / 80) + 0.1 * math.sin(step),
            "learning_rate": 2e-4 * (1 - step / 301),
            "tokens_per_second": 12_345.6 + 100 * math.cos(step),
            "memory_mib": 640.0 + step,
            "rewards/accuracies": 0.5 + step / 700,
        }
        for step in range(1, 301)
    ]
    metrics += [{"step": step, "eval_loss": 2.0 - step / 300, "eval_rewards/accuracies": 0.6} for step in (0, 150, 300)]
    long_line = "a-long-word-without-any-place-to-break-" * 8
    return render(
        Report(
            title=f"{long_line}.gguf",
            command=f"pyggtrain train {long_line}.gguf",
            serve=f"llama-server -m {long_line}.gguf",
            summary={"base": long_line},
            data=["10 rows"],
            metrics=metrics,
            preview=[("<|im_start|>user\n", False), (long_line, True)],
            parity=[["check", "found", "needed", ""], ["mean KL", "1e-3", "<= 2e-3", "ok"]],
            has_passed=True,
            settings={"r": 16},
            versions={"pyggtrain": "0"},
            samples=[Sample("q", long_line, "b")],
            lengths=[20 + (index * index) % 700 for index in range(400)],
        )
    )


def browse(
    folder: Path, html: str, *flags: str, width: int = 900, is_dark: bool = False
) -> subprocess.CompletedProcess:
    """Open a page without network; returns what the browser printed."""
    (folder / "page.html").write_text(html, encoding="utf-8")
    command = [
        *(
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/user",
        ),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},4000"),
        f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        *(*flags, (folder / "page.html").as_uri()),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [900, 500])
def test_nothing_overflows_overlaps_or_is_unpainted(tmp_path, width, is_dark):
    script = f'<script type="text/javascript">//<![CDATA[\n{MEASURE}\n//]]></script></body>'
    shown = browse(tmp_path, page().replace("</body>", script), "--dump-dom", width=width, is_dark=is_dark).stdout
    measured = json.loads(unescape(re.search(r'data-measured="([^"]*)"', shown)[1]))
    assert measured["page"] <= measured["window"], "the page is wider than the window"
    assert len(measured["boxes"]) == 6
    for box in measured["boxes"]:
        assert box["width"] > 300 and box["height"] > 100
        assert (box["outside"], box["overlaps"], box["unpainted"]) == (0, 0, 0)

    def brightness(color: str) -> float:
        return sum(map(int, re.findall(r"\d+", color)[:3])) / 3

    assert (brightness(measured["background"]) < 100) == is_dark
    assert abs(brightness(measured["background"]) - brightness(measured["text"])) > 150
    assert measured["mark"] != "rgba(0, 0, 0, 0)"


def test_a_screenshot_shows_the_page(tmp_path):
    sizes = []
    for html in ("<html><body></body></html>", page()):
        picture = tmp_path / "page.png"
        browse(tmp_path, html, f"--screenshot={picture}")
        sizes.append(picture.stat().st_size)
    # A blank picture is packed to a fraction of a drawn one.
    assert sizes[1] > 5 * sizes[0]
