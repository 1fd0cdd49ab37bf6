"""What a file holds, told from its header."""

import subprocess
import sys

from pyggtrain.cli import main
from pyggtrain.cli.tables import facts_table, table
from pyggtrain.gguf import TypedValue, write_gguf
from pyggtrain.model_info import info


def test_types_and_sizes_of_a_real_file(smollm2_path, capsys):
    assert main(["info", str(smollm2_path)]) == 0
    text = capsys.readouterr().out
    assert "llama.block_count" in text and "93.8 MiB in 272 tensors" in text
    assert "Q4_1      210  106,168,320  63.3   5.00" in text
    # A template of many lines takes one.
    assert max(map(len, text.splitlines())) < 160 + len(str(smollm2_path))


def test_tensors_are_listed_on_request(smollm2_path, capsys):
    main(["info", str(smollm2_path), "--tensors"])
    assert "blk.29.ffn_down.weight" in capsys.readouterr().out


def test_control_characters_of_a_strangers_file_do_not_reach_the_terminal(tmp_path, capsys):
    path = tmp_path / "strange.gguf"
    write_gguf(
        path, {"general.architecture": "llama", "general.name": "a\x1b[2Jb\nc", "x": TypedValue("arr[str]", ["y"])}, []
    )
    assert info(path).facts()["general.name"] == "a\\x1b[2Jb\\nc"
    main(["info", str(path)])
    assert "\x1b" not in capsys.readouterr().out


def test_info_needs_no_torch(smollm2_path):
    code = f"""
import sys
from pyggtrain.cli import main
main(["info", {str(smollm2_path)!r}])
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_tables_align_numbers_to_the_right():
    assert table([["name", "count"], ["a", "1,234"], ["bcdef", "5"]]).splitlines() == [
        "name   count",
        "-----  -----",
        "a      1,234",
        "bcdef      5",
    ]
    assert facts_table({"a": "1", "long name": "2"}) == "a          1\nlong name  2"
