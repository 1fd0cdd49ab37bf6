import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyggtrain.data.spool import holds_rows, spool
from pyggtrain.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYGGTRAIN_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_rows_become_lines_and_equal_rows_the_same_file(cache: Path) -> None:
    rows = [{"text": "é\u2028\n"}, {"text": "b"}]

    def generated() -> Iterator[dict[str, Any]]:
        yield from rows

    path = spool(generated())
    assert [json.loads(line) for line in path.read_bytes().split(b"\n") if line] == rows
    assert spool(rows) == path
    assert spool(rows[::-1]) != path
    assert {entry.suffix for entry in path.parent.iterdir()} == {".jsonl"}


def test_rows_that_are_no_text_are_refused_and_leave_nothing(cache: Path) -> None:
    for rows, words in (
        ([{"text": "a"}, {"image": object()}], "row 2 cannot be written as JSON"),
        ([{"text": "\ud83d"}], "row 1 cannot be written as JSON"),
        (["text"], "row 1 is of type str"),
    ):
        with pytest.raises(DataError, match=words):
            spool(rows)  # type: ignore[arg-type]
    assert list((cache / "rows").iterdir()) == []


def test_rows_and_paths_are_told_apart(tmp_path: Path) -> None:
    class Dataset:
        features = ("text",)

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter([{"text": "a"}])

    for paths in (None, "a.jsonl", tmp_path, ["a.jsonl", "b.csv:0.5"], {"a.jsonl": 0.5}, ()):
        assert not holds_rows(paths)
    for rows in ([{"text": "a"}], Dataset(), iter([{"text": "a"}]), ({"text": "a"},)):
        assert holds_rows(rows)
