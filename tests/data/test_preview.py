from array import array

from pyggtrain.data.examples import Example
from pyggtrain.data.preview import preview
from pyggtrain.gguf import Tokenizer


def example(tokenizer: Tokenizer, *parts: tuple[str, bool]) -> Example:
    ids: list[int] = []
    labels: list[int] = []
    for text, is_learnt in parts:
        new = tokenizer.encode(text, parse_special=True)
        ids += new
        labels += new if is_learnt else [-100] * len(new)
    return Example(array("i", ids), array("i", labels), "chat.jsonl:1")


def test_learnt_text_is_set_off_in_plain_text_and_in_colour(smollm2_tokenizer: Tokenizer) -> None:
    row = example(
        smollm2_tokenizer, ("<|im_start|>user\nhé<|im_end|>\n", False), ("日本<|im_end|>", True), ("\n", False)
    )
    assert preview(row, smollm2_tokenizer, color=False) == "<|im_start|>user\nhé<|im_end|>\n«日本<|im_end|>»\n"
    coloured = preview(row, smollm2_tokenizer, color=True)
    assert "\x1b[32m«日本<|im_end|>»\x1b[0m" in coloured
    assert "\x1b[2m<|im_start|>user\nhé<|im_end|>\n\x1b[0m" in coloured


def test_data_cannot_steer_the_terminal(smollm2_tokenizer: Tokenizer) -> None:
    row = example(smollm2_tokenizer, ("a\x1b[2J\x07\u202eb\tc\n", True))
    assert preview(row, smollm2_tokenizer, color=False) == "«a\\x1b[2J\\x07\\u202eb\tc\n»"


def test_long_passages_are_cut_in_the_middle(smollm2_tokenizer: Tokenizer) -> None:
    row = example(smollm2_tokenizer, ("a" + "x" * 500 + "z", True))
    assert preview(row, smollm2_tokenizer, color=False, max_chars=10) == "«axxxx [... 492 characters ...] xxxxz»"
