"""What stderr shows: one line for a step, throttled, and nothing a log file could not hold."""

import io

import pytest

from pyggtrain.training.metrics import EvalMetrics, StepMetrics
from pyggtrain.training.progress import LineProgress, LiveProgress, describe_seconds, terminal_progress


def metrics(step: int, skipped: str | None = None) -> StepMetrics:
    return StepMetrics(
        step=step,
        epoch=1.0,
        loss=1.23456,
        learning_rate=1e-4,
        grad_norm=1.0,
        tokens=10,
        supervised_tokens=5,
        tokens_per_second=1234.4,
        eta_seconds=245.0,
        elapsed_seconds=1.0,
        memory_mib=812.3,
        skipped_tensor=skipped,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_line_has_loss_speed_time_left_and_memory():
    stream = io.StringIO()
    progress = terminal_progress(stream)
    progress.start(300, 0)
    progress.step(metrics(12))
    assert stream.getvalue() == "step 12/300  loss 1.2346  1,234 tokens/s  4:05 left  812 MiB\n"


def test_lines_are_throttled_but_skips_and_the_end_are_always_told():
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.start(300, 0)
    for step in range(1, 301):
        progress.step(metrics(step, skipped="blk.0.attn_q.weight.lora_a" if step == 150 else None))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/300", "150/300", "300/300"]
    assert "SKIPPED: the gradient of blk.0.attn_q.weight.lora_a is not finite" in lines[1]


def test_live_display_ends_with_the_last_step_and_shows_messages_as_text():
    stream = Terminal()
    progress = terminal_progress(stream)
    assert isinstance(progress, LiveProgress)
    progress.start(2, 0)
    progress.step(metrics(1))
    progress.message("rows [red]dropped[/red]: 3")
    progress.evaluated(EvalMetrics(step=2, eval_loss=2.5, eval_tokens=7))
    progress.step(metrics(2))
    progress.stop()
    text = stream.getvalue()
    assert "rows [red]dropped[/red]: 3" in text
    assert "step 2/2" in text and "held-out loss 2.5000" in text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (245, "4:05"), (7389, "2:03:09")])
def test_times_read_like_a_clock(seconds, text):
    assert describe_seconds(seconds) == text
