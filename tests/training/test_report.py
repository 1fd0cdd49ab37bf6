"""The page is well-formed, needs no network, and shows hostile text as text."""

import re
from xml.etree import ElementTree

import pytest

from pyggtrain.training.report import Report, Sample, render

HOSTILE = "</pre><script>alert('x')</script> & \x1b[31m \x00 \x85 \U0001f600 \"quoted\" \ud83d"
NAMESPACE = "{http://www.w3.org/1999/xhtml}"


def report(**changes) -> Report:
    metrics = [
        {
            "step": step,
            "loss": 3.0 / (step + 1),
            "learning_rate": 1e-4,
            "grad_norm": 1.0,
            "tokens_per_second": 100.0 + step,
            "memory_mib": 500.0,
        }
        for step in range(1, 30)
    ]
    metrics[5]["loss"] = None
    metrics += [{"step": step, "eval_loss": 2.0 - step / 100, "eval_tokens": 5} for step in (0, 10, 29)]
    values = {
        "title": "adapter.gguf",
        "command": "pyggtrain train m.gguf",
        "serve": "llama-server -m m.gguf --lora adapter.gguf",
        "summary": {"loss": "1.0"},
        "data": ["10 rows"],
        "metrics": metrics,
        "preview": [("<|im_start|>user\n", False), ("Hello", True)],
        "parity": [["check", "found", "needed", ""], ["mean KL", "1e-3", "<= 2e-3", "ok"]],
        "has_passed": True,
        "settings": {"r": 16, "data": ("a", "b")},
        "versions": {"pyggtrain": "0"},
        "samples": [Sample("q", "a", "b")],
        "lengths": [5, 9, 40, 41, 200],
    }
    return Report(**{**values, **changes})


def parsed(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def test_page_is_well_formed_and_holds_its_parts():
    root = parsed(render(report()))
    headings = ["".join(element.itertext()) for element in root.iter(f"{NAMESPACE}h2")]
    assert headings == [
        "Loss",
        "Machine",
        "Data",
        "Answers before and after",
        "Comparison with llama.cpp",
        "Serve it",
        "Repeat it",
    ]
    assert len(list(root.iter(f"{NAMESPACE}svg"))) == 5
    text = "".join(root.itertext())
    assert "Tokens of 5 rows: 5 to 200; 50 % up to 40, 90 % up to 200, 99 % up to 200." in text
    assert "Speed: 101 to 129 tokens per second." in text and "Memory: 500 to 500 MiB." in text


def test_page_needs_nothing_from_elsewhere():
    page = render(report())
    addresses = re.findall(r"https?://[^\"' <]+", page)
    assert set(addresses) == {"http://www.w3.org/1999/xhtml"}
    assert not re.search(r"<(script|link|img|iframe|object)|@import|url\(", page)


def test_hostile_text_is_shown_as_text():
    page = render(
        report(
            title=HOSTILE,
            command=HOSTILE,
            serve=HOSTILE,
            summary={HOSTILE: HOSTILE},
            data=[HOSTILE, HOSTILE],
            preview=[(HOSTILE, True)],
            parity=[[HOSTILE], [HOSTILE]],
            settings={HOSTILE: HOSTILE},
            versions={HOSTILE: HOSTILE},
            samples=[Sample(HOSTILE, HOSTILE, HOSTILE)],
        )
    )
    root = parsed(page)
    assert list(root.iter(f"{NAMESPACE}script")) == []
    # Every place that was given the text shows it; the title stands twice.
    assert "".join(root.itertext()).count("alert('x')") == 18
    page.encode("utf-8")


def test_plots_can_be_read_without_seeing_them():
    root = parsed(render(report()))
    ids = {element.get("id") for element in root.iter()}
    for svg in root.iter(f"{NAMESPACE}svg"):
        assert svg.get("role") == "img"
        assert set(svg.get("aria-labelledby").split()) <= ids
    text = "".join(root.itertext())
    assert "Held-out loss from 2.000 to 1.710." in text
    assert len([id for id in (element.get("id") for element in root.iter()) if id]) == len(ids - {None})


@pytest.mark.parametrize(("has_passed", "expected"), [(True, "Passed"), (False, "Failed"), (None, "Turned off")])
def test_verdict_is_in_words(has_passed, expected):
    text = "".join(parsed(render(report(has_passed=has_passed))).itertext())
    assert [word for word in ("Passed", "Failed", "Turned off") if word in text] == [expected]


def test_run_without_metrics_and_extras_has_a_page():
    root = parsed(render(report(metrics=[], preview=(), parity=[], has_passed=None, samples=(), lengths=())))
    assert list(root.iter(f"{NAMESPACE}svg")) == []


def test_preferences_have_a_plot_of_their_own():
    metrics = [{"step": step, "loss": 0.7, "learning_rate": 0.1, "rewards/accuracies": step / 4} for step in (1, 2, 3)]
    metrics += [{"step": step, "eval_loss": 0.7, "eval_rewards/accuracies": step / 8} for step in (0, 3)]
    root = parsed(render(report(metrics=metrics, unit="per pair")))
    text = "".join(root.itertext())
    assert "preferred: 0.75 at the end. Of held-out pairs from 0.00 to 0.38." in text
    assert "loss (per pair)" in text


def test_losses_that_are_not_finite_leave_no_trace_of_nan():
    page = render(report(metrics=[{"step": 1, "loss": None, "learning_rate": 0.1}]))
    assert "no finite training loss" in page
    assert not re.search(r"\bnan\b", page)
