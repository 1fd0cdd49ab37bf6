"""Real conversations of several turns, in many languages, from PyPI's chatterbot-corpus: the whole road on SmolLM2."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import pyggtrain
from pyggtrain.data import DataSettings, load_examples
from pyggtrain.gguf import Tokenizer

# The one in C is ten times faster; not every wheel of pyyaml has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def corpus(*languages: str) -> Iterator[dict[str, Any]]:
    """Conversations as rows of messages; a last question without an answer is left out."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    assert spec is not None and spec.origin is not None, "pip install chatterbot-corpus==1.3.3 (part of the test extra)"
    for language in languages:
        for path in sorted((Path(spec.origin).parent / "data" / language).glob("*.yml")):
            for turns in yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)["conversations"]:
                texts = [str(turn) for turn in turns[: len(turns) // 2 * 2]]
                if texts and all(text.strip() for text in texts):
                    roles = ("user", "assistant") * (len(texts) // 2)
                    yield {
                        "messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
                    }


def test_every_answer_of_every_language_is_learnt_and_nothing_else(smollm2_path: Path) -> None:
    rows = list(corpus("english", "german", "japanese", "hebrew", "hindi", "russian"))
    assert len(rows) > 2000
    assert sum(len(row["messages"]) > 2 for row in rows) > 20
    tokenizer = Tokenizer.from_gguf(smollm2_path)
    examples, report = load_examples(rows, tokenizer, DataSettings(too_long="drop"))
    assert report.num_kept >= len(rows) - 2
    for row, example in zip(rows, examples, strict=len(rows) == len(examples)):
        learnt = b"".join(tokenizer.piece(token) for token in example.labels if token >= 0).decode()
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert learnt == "".join(f"{answer}<|im_end|>" for answer in answers)


@pytest.mark.slow
def test_rows_from_python_train_end_to_end_on_smollm2(smollm2_path: Path, tmp_path: Path) -> None:
    result = pyggtrain.train(
        smollm2_path,
        corpus("english"),
        tmp_path / "adapter.gguf",
        packing=True,
        max_seq_length=128,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=3,
        num_threads=1,
        warmup_steps=0,
        learning_rate=1e-3,
        eval_split=0.006,
        verify_tokens=32,
    )
    assert result.parity is not None and result.parity.passed
    assert result.summary.first_eval_loss is not None and result.summary.eval_loss is not None
    assert result.summary.eval_loss < result.summary.first_eval_loss
    record = json.loads(result.files.record.read_text(encoding="utf-8"))
    # The rows lie in a file, so that the command of the record repeats the run.
    (path,) = record["data"]["files"]
    assert path in record["command"]
    assert len(Path(path).read_bytes().splitlines()) == sum(1 for _ in corpus("english"))
    assert record["settings"]["packing"] is True
