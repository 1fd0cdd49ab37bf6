"""`pyggtrain data`: rows are shown as they will be learnt, and a set that would train nothing fails."""

import json
from pathlib import Path

import pytest

from pyggtrain.cli import main


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def written(tmp_path):
    def write(*rows: dict, name: str = "chat.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["data", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_preview_shows_what_is_learnt_read_and_dropped_and_how_long_rows_are(capsys, written, smollm2_path: Path):
    path = written(chat("hello", "a b c"), chat("q", "word " * 60), chat("q", ""), chat("later", "a"))
    model = ("--model", str(smollm2_path))
    code, out, _ = run(capsys, "preview", path, *model, "--max-seq-length", "40", "--too-long", "truncate")
    assert code == 0
    assert "chat.jsonl:1: 36 tokens, 4 learnt, 0 dropped" in out
    assert "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n«a b c<|im_end|>»\n" in out
    assert "chat.jsonl:2: 94 tokens, 62 learnt, 54 dropped" in out
    assert " word»[- word" in out
    assert "chat.jsonl:3: cannot be used: message 2 is an empty assistant turn" in out
    assert "later" not in out
    assert "1 of 3 rows (33.3 %) are longer than 40" in out
    assert out.splitlines()[-2].split()[-1] == "94"
    _, out, _ = run(capsys, "preview", path, *model, "--max-seq-length", "40", "--rows", "1", "--skip", "1")
    assert "94 tokens, 62 learnt, 94 dropped, dropped: 94 tokens, limit 40" in out
    assert "hello" not in out
    _, out, _ = run(capsys, "preview", path, *model, "--rows", "1", "--tokens")
    assert "«a| b| c|<|im_end|>»" in out


def test_preview_shows_both_answers_of_a_pair(capsys, written, smollm2_path: Path):
    path = written({"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    code, out, _ = run(capsys, "preview", path, "--model", str(smollm2_path))
    assert code == 0
    assert "chat.jsonl:1 chosen: " in out and "chat.jsonl:1 rejected: " in out
    assert "2+2=«4<|im_end|>»" in out and "2+2=«5<|im_end|>»" in out


def test_check_reads_all_rows_and_reports(capsys, written, smollm2_path: Path):
    path = written(*(chat("q", "a " * number) for number in range(1, 30)))
    code, out, _ = run(capsys, "check", path, "--model", str(smollm2_path))
    assert code == 0
    assert "29 rows read (messages), 29 kept, 0 dropped" in out
    assert "1 of these rows are held out" in out


def test_check_fails_on_a_set_that_would_train_nothing_and_names_the_rows(capsys, written, smollm2_path: Path):
    model = ("--model", str(smollm2_path))
    code, _, err = run(capsys, "check", written(chat("q", "word " * 60)), *model, "--max-seq-length", "40")
    assert code == 2
    assert "Nothing is left to train on: all 1 rows were dropped" in err and "chat.jsonl:1: " in err
    code, _, err = run(capsys, "check", written(chat("q", "a"), chat("q", ""), chat("q", "a")), *model)
    assert code == 2
    assert "1 of 3 rows cannot be used" in err and "chat.jsonl:2: message 2 is an empty" in err


def test_settings_come_from_a_file_as_for_training(capsys, written, tmp_path, smollm2_path: Path):
    path = written(chat("q", "word " * 60), chat("q", "a"))
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {smollm2_path}\ndata: [{path}]\noutput: a.gguf\nmax_seq_length: 50\n")
    code, out, _ = run(capsys, "check", "-c", str(config))
    assert code == 0
    assert "2 rows read (messages), 1 kept, 1 dropped" in out


def test_mistakes_are_explained(capsys):
    assert run(capsys)[0] == 0
    code, _, err = run(capsys, "chek")
    assert code == 2 and "there are preview, check" in err
    code, _, err = run(capsys, "check", "d.jsonl")
    assert code == 2 and "model: missing" in err
