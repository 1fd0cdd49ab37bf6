import json
from pathlib import Path
from typing import Any

import pytest

from pyggtrain.data.rows import read_rows
from pyggtrain.errors import DataError


def rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(row.source, row.value) for row in read_rows(path)]


def written(folder: Path, data: bytes, name: str = "d.csv") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


CLEAN = [("d.csv:2", {"prompt": "1+1=", "completion": "2"}), ("d.csv:3", {"prompt": "é", "completion": "ü"})]


@pytest.mark.parametrize(
    "data",
    [
        "prompt,completion\n1+1=,2\né,ü\n",
        "prompt,completion\r\n1+1=,2\r\né,ü\r\n",
        "\ufeffprompt,completion\n1+1=,2\né,ü",
        "prompt;completion\n1+1=;2\né;ü\n",
        "prompt\tcompletion\n1+1=\t2\né\tü\n",
        '"prompt","completion"\n"1+1=","2"\n"é","ü"\n',
        "prompt,completion\n1+1=,2\né,ü\n\n\n",
    ],
    ids=["LF", "CRLF", "BOM, no final newline", "semicolon", "tab", "quoted", "blank lines"],
)
def test_csv_of_every_kind_gives_the_same_rows(tmp_path: Path, data: str) -> None:
    assert rows(written(tmp_path, data.encode())) == CLEAN


def test_cells_may_hold_line_breaks_separators_quotes_and_u2028(tmp_path: Path) -> None:
    text = 'a\r\nb, "c"; \u2028d'
    cell = text.replace('"', '""')
    path = written(tmp_path, f'prompt,completion\n"{cell}",x\ny,z\n'.encode())
    assert rows(path) == [
        ("d.csv:2", {"prompt": text, "completion": "x"}),
        ("d.csv:4", {"prompt": "y", "completion": "z"}),
    ]


def test_lists_stand_in_cells_as_json(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    cell = json.dumps(chat).replace('"', '""')
    path = written(tmp_path, f'messages,tools\n"{cell}",\n'.encode())
    assert rows(path) == [("d.csv:2", {"messages": chat})]
    with pytest.raises(DataError, match=r"d\.csv:2: column 'messages' holds no valid JSON"):
        rows(written(tmp_path, b"messages,id\nhello,1\n"))


def test_a_cell_may_be_a_book(tmp_path: Path) -> None:
    text = "word " * 100_000
    assert rows(written(tmp_path, f"text,id\n{text},1\n".encode()))[0][1]["text"] == text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a,b\n1,2\n1,2,3\n", r"d\.csv:3 has 3 cells; the header names 2 columns"),
        (b'a,b\n1,"2\n3,4\n', r"d\.csv:2: unexpected end of data"),
        (b'a,b\n1,"2"3\n', r"d\.csv:2: .* Put texts with quotes"),
        (b"a,b\nx,\xff\n", r"d\.csv:2 is not UTF-8: byte 0xff"),
        (b"a,b\nx,\0\n", r"d\.csv:2 holds a NUL byte"),
        (b"", r"d\.csv:1 is no header"),
        (b"a,a\n1,2\n", r"d\.csv:1 is no header"),
        (b'{"text": "x"}\n', r"d\.csv:1 is JSON, but the extension says CSV"),
        ("a,b\n1,2".encode("utf-16"), r"d\.csv:1 is UTF-16"),
    ],
)
def test_damage_stops_with_file_and_line(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        rows(written(tmp_path, data))


def test_parquet_rows_lose_the_keys_that_the_table_filled_with_none(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
    ] * 300
    path = tmp_path / "no-extension-needed"
    pq.write_table(pa.table({"messages": chats, "id": list(range(600))}), path)
    read = rows(path)
    assert len(read) == 600
    assert read[0] == ("no-extension-needed:1", {"messages": chats[0], "id": 0})
    assert read[1][1]["messages"][1] == {"role": "assistant", "tool_calls": [call]}
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="is a damaged Parquet file"):
        rows(path)


def test_hugging_face_datasets_are_tables_and_lists_of_dicts_are_not() -> None:
    class Dataset(list[dict[str, Any]]):
        features = ("messages",)

    value = {"messages": [{"role": "user", "content": "q", "name": None}]}
    assert [row.value for row in read_rows(Dataset([value]))] == [{"messages": [{"role": "user", "content": "q"}]}]
    assert [row.value for row in read_rows([value])] == [value]
