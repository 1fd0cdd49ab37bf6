import codecs
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyggtrain.data.rows import Row, read_rows
from pyggtrain.errors import DataError

ROWS = [{"text": "one"}, {"text": "zwei\u2028drei\u0085"}, {"text": 'quote " brace } bracket ] \\ end', "n": [1, [2]]}]


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def jsonl(rows: list[dict[str, Any]], end: str = "\n", **options: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, **options) + end for row in rows)


def error_of(path: Path) -> str:
    with pytest.raises(DataError) as raised:
        list(read_rows(path))
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", jsonl(ROWS)),
        ("a.json", json.dumps(ROWS)),
        ("array-in.jsonl", json.dumps(ROWS, ensure_ascii=False)),
        ("pretty.json", json.dumps(ROWS, indent=2)),
        ("lines-in.json", jsonl(ROWS)),
    ],
)
def test_form_is_read_from_the_first_byte_and_not_from_the_extension(tmp_path: Path, name: str, text: str) -> None:
    assert [row.value for row in read_rows(write(tmp_path / name, text))] == ROWS


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(jsonl(ROWS, end="\r\n"), id="CRLF"),
        pytest.param(codecs.BOM_UTF8 + jsonl(ROWS).encode(), id="BOM"),
        pytest.param("\n \t\n" + jsonl(ROWS, end="\n\n\r\n") + "\n", id="blank lines"),
        pytest.param(jsonl(ROWS).rstrip("\n"), id="no final newline"),
        pytest.param(
            codecs.BOM_UTF8 + b"\r\n[" + b",\r\n".join(jsonl([row]).strip().encode() for row in ROWS) + b"]\r\n",
            id="array",
        ),
    ],
)
def test_line_ends_bom_and_blank_lines_do_not_change_the_rows(tmp_path: Path, data: bytes | str) -> None:
    assert [row.value for row in read_rows(write(tmp_path / "rows.jsonl", data))] == ROWS


def test_sources_name_the_line_on_which_a_row_begins(tmp_path: Path) -> None:
    lines = write(tmp_path / "chat.jsonl", "\n" + jsonl(ROWS, end="\n\n"))
    assert [row.source for row in read_rows(lines)] == ["chat.jsonl:2", "chat.jsonl:4", "chat.jsonl:6"]
    array = write(tmp_path / "chat.json", '[{"text": "a"},\n {"text": "b"}, {"text":\n "c"}\n,\n{"text": "d"}]')
    assert [row.source for row in read_rows(array)] == [f"chat.json:{line}" for line in (1, 2, 2, 5)]


def test_escapes_of_line_ends_and_nul_are_data(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", '{"text": "a\\r\\nb\\u0000c"}\n')
    assert next(read_rows(path)).value == {"text": "a\r\nb\0c"}


def test_array_is_cut_right_wherever_a_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*ROWS, {"text": "\\" * 5 + '"' * 3, "deep": {"a": [{}, {"b": "]"}]}}]
    path = write(tmp_path / "rows.json", json.dumps(rows, ensure_ascii=False, indent=1))
    for size in range(1, 40):
        monkeypatch.setattr("pyggtrain.data.rows._CHUNK_BYTES", size)
        assert [row.value for row in read_rows(path)] == rows, size


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        pytest.param('{"a": 1}\n{"a": 1} {"a": 2}\n', 2, "one JSON object on each line", id="two objects on one line"),
        pytest.param('{\n  "a": 1\n}\n', 1, "pretty-printed", id="pretty-printed object"),
        pytest.param('{"a": "x', 1, "invalid JSON|Unterminated|does not end|valid JSON", id="cut off"),
        pytest.param('{"a": 1}\n{"a": \x01}\n', 2, "valid JSON", id="control character"),
        pytest.param('{"a": 1}\n[1]\n', 2, "must be a JSON object", id="list as row"),
        pytest.param('[{"a": 1}, 2]', 1, "must be a JSON object", id="number in array"),
        pytest.param('[{"a": 1},\n{"a": 2},\n]', 3, "comma", id="trailing comma"),
        pytest.param('[{"a": 1}\n{"a": 2}]', 2, "second value", id="comma missing"),
        pytest.param('[{"a": "x\n"}]', 1, "not closed", id="line break in string"),
        pytest.param('[{"a": 1}]\nrest', 1, "follows the end", id="text behind array"),
        pytest.param(b'{"a": 1}\n{"a": "\xff"}\n', 2, "not UTF-8: byte 0xff", id="invalid byte"),
        pytest.param(b'[{"a": 1},\n{"b": 1, \n"a": "\xff"}]', 3, "not UTF-8: byte 0xff", id="invalid byte in array"),
        pytest.param('{"a": "ok \\ud83d\\ude00"}\n{"a": "\\ud83d"}\n', 2, "surrogate", id="lone surrogate"),
        pytest.param('{"a": 1}\n{"a": "\0"}\n', 2, "NUL", id="raw NUL"),
        pytest.param('{"a": 1}'.encode("utf-16"), 1, "UTF-16", id="UTF-16 with BOM"),
        pytest.param('{"a": 1}'.encode("utf-16-le"), 1, "UTF-16", id="UTF-16 without BOM"),
        pytest.param("\nquestion,answer\n", 2, "begins with 'q'", id="CSV"),
        pytest.param("[" * 100_000, 1, "no closing", id="brackets only"),
        pytest.param('{"a": ' + "[" * 100_000 + "}", 1, "nested too deeply|valid JSON", id="deep nesting"),
        pytest.param('{"a": ' + "9" * 5000 + "}", 1, "digits", id="huge integer"),
    ],
)
def test_damage_is_named_with_its_line(tmp_path: Path, data: bytes | str, line: int, words: str) -> None:
    message = error_of(write(tmp_path / "rows.jsonl", data))
    assert "rows.jsonl" in message
    assert any(word in message for word in words.split("|")), message
    assert f"rows.jsonl:{line}" in message or f"line {line}" in message, message


@pytest.mark.parametrize(
    ("data", "kind"), [(b"\x1f\x8b\x08", "gzip"), (b"PK\x03\x04", "zip"), (b"PAR1....", "Parquet")]
)
def test_binary_formats_are_recognised(tmp_path: Path, data: bytes, kind: str) -> None:
    assert kind in error_of(write(tmp_path / "rows.jsonl", data))


@pytest.mark.parametrize("data", [b"", b"\n \r\n", codecs.BOM_UTF8])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt"])
def test_empty_file_is_an_error(tmp_path: Path, data: bytes, name: str) -> None:
    assert "is empty" in error_of(write(tmp_path / name, data))


def test_missing_file_and_folder_are_errors(tmp_path: Path) -> None:
    assert "cannot be read" in error_of(tmp_path / "none.jsonl")
    assert "cannot be read" in error_of(tmp_path)


def test_text_file_is_one_document_with_line_feeds(tmp_path: Path) -> None:
    path = write(tmp_path / "book.txt", codecs.BOM_UTF8 + "{Preface}\r\n\r\n[One] ä\r\n".encode())
    assert list(read_rows(path)) == [Row({"text": "{Preface}\n\n[One] ä\n"}, "book.txt:1")]


def test_json_under_a_text_extension_is_refused(tmp_path: Path) -> None:
    assert ".jsonl" in error_of(write(tmp_path / "rows.txt", jsonl(ROWS)))
    assert "NUL" in error_of(write(tmp_path / "rows2.txt", "abc".encode("utf-16-le")))


def test_iterables_of_dicts_are_rows() -> None:
    assert list(read_rows(iter(ROWS[:2]))) == [Row(ROWS[0], "row 1"), Row(ROWS[1], "row 2")]
    with pytest.raises(DataError, match="row 2 is of type str"):
        list(read_rows([ROWS[0], "x"]))  # type: ignore[list-item]


def test_paths_with_any_characters_work_and_are_readable(tmp_path: Path) -> None:
    folder = tmp_path / "тест 日本 é \\ a"
    folder.mkdir()
    path = write(folder / "данные 日.jsonl", jsonl(ROWS) + "broken")
    rows = read_rows(str(path))
    assert next(rows) == Row(ROWS[0], "данные 日.jsonl:1")
    assert "данные 日.jsonl:4" in error_of(path)


def test_one_enormous_row_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", jsonl([{"text": "a"}, {"text": "b" * 8_000_000}, {"text": "c"}]))
    assert [len(row.value["text"]) for row in read_rows(path)] == [1, 8_000_000, 1]


@pytest.mark.parametrize("form", ["lines", "array"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, form: str) -> None:
    row = json.dumps({"text": "x" * 1000})
    text = "\n".join([row] * 8_000) if form == "lines" else "[" + ",".join([row] * 8_000) + "]"
    path = write(tmp_path / "rows.jsonl", text)

    def peak(rows: Iterator[Row]) -> tuple[int, int]:
        tracemalloc.start()
        count = sum(1 for _ in rows)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return count, most

    count, most = peak(read_rows(path))
    assert count == 8_000
    assert most < path.stat().st_size / 2, most
