"""What people call from Python: train, prepare, verify, merge, info. Wiring only; each part has its own module."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pyggtrain import models
from pyggtrain._version import __version__
from pyggtrain.adapters import AdapterFile, gguf_adapter
from pyggtrain.adapters.merge import Merged
from pyggtrain.adapters.merge import merge as merge_adapters
from pyggtrain.adapters.peft import weights_of
from pyggtrain.cores import num_usable_cores
from pyggtrain.data.chat_template import ChatTemplate, token_text
from pyggtrain.data.encode import load_examples
from pyggtrain.data.rows import read_rows
from pyggtrain.data.settings import DataSettings
from pyggtrain.data.spool import holds_rows, spool
from pyggtrain.data.tokens import TextEncoder
from pyggtrain.errors import AdapterError, ParityError
from pyggtrain.gguf import GGUFFile, Tokenizer
from pyggtrain.gguf.finite import check_finite
from pyggtrain.gguf.hub import local_path
from pyggtrain.gguf.imatrix import read_imatrix
from pyggtrain.gguf.readable import check_readable
from pyggtrain.model_info import ModelInfo, info
from pyggtrain.nn import LoraPair, Model
from pyggtrain.training.config import TrainConfig, build_config
from pyggtrain.training.data import learnt_pieces
from pyggtrain.training.masked_diffusion import masked_excerpts
from pyggtrain.training.memory import explained_out_of_memory
from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.objectives import Document
from pyggtrain.training.output import OutputFiles, explained_write_errors, write_text
from pyggtrain.training.prepare import Preparation, prepare
from pyggtrain.training.progress import Progress, describe_seconds, terminal_progress
from pyggtrain.training.record import make_record, sha256_of, train_command, write_record
from pyggtrain.training.report import Report, Sample, render
from pyggtrain.training.serving import modelfile, serve_lines
from pyggtrain.training.trainer import TrainSummary
from pyggtrain.validation.exact_match import ExactMatches, count_exact_matches
from pyggtrain.validation.llama_server import ServerRuntime
from pyggtrain.validation.merge_parity import verify_merge
from pyggtrain.validation.parity import ParitySettings, verify_adapter
from pyggtrain.validation.parity_report import ParityReport
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings
from pyggtrain.validation.trained_model import TrainedModel

__all__ = [
    "MergeResult",
    "ModelInfo",
    "TrainResult",
    "exact_matches",
    "info",
    "merge",
    "prepare",
    "run",
    "train",
    "verify",
    "write_report",
]

_SAMPLE_TOKENS = 128
# For checking an adapter without data.
_TEXT = (
    "The lighthouse keeper wrote down the weather every morning, even on days when the fog left nothing to see. Ships "
    "passed far out, and he knew most of them by the sound of their engines. When the new automatic lamp was "
    "installed, nobody told him to stop."
)


@dataclass(frozen=True)
class TrainResult:
    """Outcome of a run.

    Attributes:
        files: where everything was written; `files.adapter` is the adapter.
        summary: losses, steps, tokens.
        parity: comparison with llama.cpp; None if it was turned off.
        report: contents of the report page; `write_report` writes it again after a change. None on all processes of a
            run but the first, which alone compares and writes.
    """

    files: OutputFiles
    summary: TrainSummary
    parity: ParityReport | None
    report: Report | None


def train(
    model: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | Sequence[str] | Mapping[str, float] | Iterable[Mapping[str, Any]] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    config: TrainConfig | str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> TrainResult:
    """Train a LoRA adapter on an unchanged GGUF file, compare it with llama.cpp, and write it with record and report.

    Args:
        model: GGUF file.
        data: one or more files of rows, files with their weights, or rows: an iterable of dicts, such as a Hugging Face
            dataset. `eval_data` may be rows as well.
        output: adapter to write.
        config: a `TrainConfig`, or a YAML or TOML file of settings; the arguments win over it.
        progress: told about each step; by default a live line on a terminal, plain lines elsewhere, on stderr.
        settings: any other field of `TrainConfig`; unknown names are errors.

    Raises:
        ParityError: llama.cpp computes something else than what was trained; all files are written.
        TrainingInterrupted: Ctrl-C or SIGTERM; the checkpoint is written.
        PyggtrainError: anything else that a person can correct.
    """
    given = {**settings, "model": model, "data": data, "output": output}
    for name in ("data", "eval_data"):
        if holds_rows(given.get(name)):
            given[name] = spool(given[name])
    ready = prepare(build_config({name: value for name, value in given.items() if value is not None}, config))
    if not ready.processes.is_first:
        return run(ready, progress=Progress())
    progress = progress or terminal_progress()
    for name, fact in ready.facts.items():
        progress.message(f"{name}: {fact}")
    for line in ready.data.lines():
        progress.message(line)
    return run(ready, progress=progress)


def run(ready: Preparation, *, progress: Progress) -> TrainResult:
    """Train what `prepare` returned; see `train`."""
    config, files = ready.config, ready.files
    with explained_out_of_memory(ready.memory):
        trainer = ready.trainer(progress)
        summary = trainer.run()
    if not ready.processes.is_first:
        return TrainResult(files, summary, None, None)
    # Nothing here depends on time or paths: the same run gives the same bytes.
    provenance = {
        "version": __version__,
        "settings": json.dumps(trainer.origin.settings, sort_keys=True),
        "data_sha256": trainer.origin.data_sha256,
    }
    if config.hash_base:
        provenance["base.sha256"] = ready.base.sha256()
    if config.init_adapter is not None:
        provenance["init_adapter.sha256"] = sha256_of(weights_of(Path(config.init_adapter)))
    with explained_write_errors(files.adapter):
        gguf_adapter.save(
            files.adapter, ready.adapter, ready.base, provenance=provenance, overwrite=config.overwrite or config.resume
        )
    parity = _compare(ready) if config.verify else None
    samples = _answers(ready)
    record = make_record(ready, summary, json.loads(parity.to_json()) if parity is not None else None)
    write_record(files.record, record)
    report = _report(ready, summary, record, parity, samples)
    write_report(files, report)
    bos_token = token_text(ready.tokenizer, ready.tokenizer.bos_id)
    is_diffusion = ready.model.diffusion is not None
    write_text(
        files.modelfile,
        modelfile(ready.base.paths, files, ready.data.template, bos_token, is_diffusion=is_diffusion),
    )
    files.warning.unlink(missing_ok=True)
    if parity is not None and not parity.passed:
        write_text(files.warning, parity.table() + "\n")
        raise ParityError(
            f"{files.adapter}: llama.cpp computes something else than what was trained. "
            f"The adapter is kept; do not serve it.\n\n{parity.table()}\n\n"
            f"The numbers are also in {files.warning} and {files.report}."
        )
    return TrainResult(files, summary, parity, report)


def write_report(files: OutputFiles, report: Report) -> None:
    """Write the report page beside the adapter."""
    write_text(files.report, render(report))


def exact_matches(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    max_rows: int,
    num_threads: int = 0,
) -> ExactMatches:
    """Let llama.cpp answer chats without and with an adapter, and count what is right to the letter.

    Args:
        model: GGUF file with a chat template.
        adapter: GGUF adapter.
        data: rows of `messages` whose last one is the assistant's, in plain text: the wanted answer.
        max_rows: rows answered at most.
        num_threads: CPU threads; 0 takes all cores this process may use.

    Raises:
        AdapterError: the adapter does not fit the model.
    """
    base = GGUFFile.open(model)
    check_readable(base.path)
    gguf_adapter.check_against_base(gguf_adapter.load(adapter), base, ignore_hash=True)
    tokenizer = Tokenizer.from_gguf(model)
    encoder, template = TextEncoder(tokenizer), ChatTemplate.of_model(tokenizer)
    chats = [row.value["messages"] for row in islice(read_rows(data), max_rows)]
    prompts = [encoder.prompt(template.render(chat[:-1], add_generation_prompt=True).text) for chat in chats]
    wanted = [chat[-1]["content"] for chat in chats]
    # Room for an answer that is a little longer than any right one: enough to see that it does not end.
    max_new_tokens = max(len(tokenizer.encode(text)) for text in wanted) + 4
    with closing(_llama_cpp(local_path(model), prompts, max_new_tokens, num_threads)) as runtime:
        runtime.load_adapter(Path(adapter))
        return count_exact_matches(runtime, prompts, wanted, decode=tokenizer.decode, max_new_tokens=max_new_tokens)


def verify(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    data: Sequence[str | os.PathLike[str]] = (),
    *,
    runtime: str = "bridge",
    max_tokens: int = 256,
    num_threads: int = 0,
    ignore_hash: bool = False,
    hash_base: bool = False,
) -> ParityReport:
    """Compare what pyggtrain and llama.cpp compute with base and adapter.

    Args:
        model: GGUF file.
        adapter: GGUF adapter, whoever wrote it.
        data: files of rows to compare on; a built-in paragraph by default.
        runtime: "bridge", or the http address of a llama-server that has both loaded.
        max_tokens: tokens compared at most.
        num_threads: CPU threads; 0 takes all cores this process may use.
        ignore_hash: accept another base than the one trained on, such as another quantisation of it.
        hash_base: compare the hash of the whole base file as well, if training stored it.

    Returns:
        The report; it is the caller's part to look at `passed`.

    Raises:
        AdapterError: the adapter does not fit the base, or holds pairs that have no effect in llama.cpp.
    """
    base = GGUFFile.open(model)
    check_readable(base.path)
    check_finite(base, num_threads=num_threads or num_usable_cores())
    tokenizer = Tokenizer.from_gguf(base.path)
    file = gguf_adapter.load(adapter)
    gguf_adapter.check_against_base(file, base, ignore_hash=ignore_hash, hash_base=hash_base)
    loaded = models.load(base)
    _check_trainable(file, loaded)
    pairs = {}
    for name, (lora_a, lora_b) in file.pairs.items():
        pairs[name] = loaded.linears[name].lora = LoraPair(lora_a, lora_b, scale=file.scale(name))
    documents = _as_seen(loaded, _documents(data, tokenizer))
    settings = ParitySettings(max_tokens=max_tokens, num_threads=num_threads or num_usable_cores())
    served = None if runtime == "bridge" else ServerRuntime(runtime)
    return verify_adapter(
        base.path,
        Path(adapter),
        documents,
        ours=TrainedModel(loaded, pairs),
        settings=settings,
        served=served,
        is_causal=loaded.diffusion is None,
    )


@dataclass(frozen=True)
class MergeResult:
    """Outcome of a merge.

    Attributes:
        merged: the new file, and what rounding did to its tensors.
        parity: comparison with base + adapters in llama.cpp; None if it was turned off.
    """

    merged: Merged
    parity: ParityReport | None


def merge(
    model: str | os.PathLike[str],
    adapters: Sequence[tuple[str | os.PathLike[str], float]],
    output: str | os.PathLike[str],
    *,
    type: str | None = None,
    tensor_types: Mapping[str, str] | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    is_uniform_allowed: bool = False,
    ignore_hash: bool = False,
    overwrite: bool = False,
    data: Sequence[str | os.PathLike[str]] = (),
    verify: bool = True,
    max_tokens: int = 256,
    num_threads: int = 0,
) -> MergeResult:
    """Write adapters into a copy of their base model, and let llama.cpp compare the copy with base + adapters.

    Args:
        model: GGUF file; never changed.
        adapters: GGUF adapters, each with the scale it would be served with.
        output: GGUF file to write.
        type, tensor_types, is_uniform_allowed, ignore_hash, overwrite: as in `adapters.merge.merge`.
        imatrix: importance matrix made by llama-imatrix.
        data: files of rows to compare on; a built-in paragraph by default.
        verify: whether to compare.
        max_tokens: tokens compared at most.
        num_threads: CPU threads; 0 takes all cores this process may use.

    Returns:
        What was written; it is the caller's part to look at `parity.passed`.

    Raises:
        AdapterError: an adapter does not fit the base, or holds pairs that have no effect in llama.cpp.
        ConfigError, UnsupportedError: see `adapters.merge.merge`.
        OutputError: the file cannot be written.
    """
    base = GGUFFile.open(model)
    check_readable(base.path)
    files = [(gguf_adapter.load(path), scale) for path, scale in adapters]
    loaded = models.load(base)
    for file, _ in files:
        _check_trainable(file, loaded)
    num_threads = num_threads or num_usable_cores()
    with explained_write_errors(Path(output)):
        merged = merge_adapters(
            base,
            files,
            output,
            type=type,
            tensor_types=tensor_types,
            imatrix=None if imatrix is None else read_imatrix(imatrix),
            is_uniform_allowed=is_uniform_allowed,
            ignore_hash=ignore_hash,
            overwrite=overwrite,
            num_threads=num_threads,
        )
    if not verify:
        return MergeResult(merged, None)
    parity = verify_merge(
        base,
        [(file.path, scale) for file, scale in files],
        GGUFFile.open(output),
        merged.rounding,
        _as_seen(loaded, _documents(data, Tokenizer.from_gguf(model))),
        adaptable=loaded.linears,
        is_causal=loaded.diffusion is None,
        settings=ParitySettings(max_tokens=max_tokens, num_threads=num_threads),
    )
    return MergeResult(merged, parity)


def _check_trainable(file: AdapterFile, model: Model) -> None:
    for name in file.pairs:
        if name not in model.linears:
            raise AdapterError(
                f"{name} in {file.path}: {model.untrainable.get(name, 'is no linear of the model')}. Train without it."
            )


def _documents(
    data: Sequence[str | os.PathLike[str]], tokenizer: Tokenizer
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Rows to compare on; without files a built-in paragraph."""
    examples, _ = load_examples(data or [{"text": _TEXT}], tokenizer, DataSettings(too_long="drop"))
    return [(example.input_ids, example.labels) for example in examples]


def _as_seen(model: Model, documents: list[Document]) -> list[Document]:
    """Documents as the model is fed them: some tokens masked, if it is one that fills these in."""
    return documents if model.diffusion is None else masked_excerpts(model, documents)


def _compare(ready: Preparation) -> ParityReport:
    config = ready.config
    model, pairs = ready.whole_model()
    report = verify_adapter(
        ready.base.path,
        ready.files.adapter,
        _as_seen(model, ready.data.documents()),
        ours=TrainedModel(model, pairs),
        settings=ParitySettings(max_tokens=config.verify_tokens, num_threads=config.num_threads or num_usable_cores()),
        served=None if config.runtime == "bridge" else ServerRuntime(config.runtime),
        is_causal=ready.model.diffusion is None,
    )
    if config.compute != "fp8":
        return report
    return replace(report, notes=(*report.notes, _IN_HALF_PRECISION))


_IN_HALF_PRECISION = (
    "The adapter was compared with products in half precision. What 8-bit floats cost in training, the held-out loss "
    "says."
)


def _answers(ready: Preparation) -> list[Sample]:
    """Let llama.cpp answer `sample_prompts` without and with the adapter."""
    if not ready.config.sample_prompts:
        return []
    encoder, template = TextEncoder(ready.tokenizer), ready.data.template
    prompts = []
    for text in ready.config.sample_prompts:
        rendered = (
            text
            if template is None
            else template.render([{"role": "user", "content": text}], add_generation_prompt=True).text
        )
        prompts.append(encoder.prompt(rendered))
    with closing(_llama_cpp(ready.base.path, prompts, _SAMPLE_TOKENS, ready.config.num_threads)) as runtime:
        runtime.load_adapter(ready.files.adapter)
        before, after = (
            [ready.tokenizer.decode(runtime.generate(prompt, _SAMPLE_TOKENS, scale=scale)) for prompt in prompts]
            for scale in (None, 1.0)
        )
    return [Sample(*texts) for texts in zip(ready.config.sample_prompts, before, after, strict=True)]


def _llama_cpp(base: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_threads: int) -> BridgeRuntime:
    num_ctx = max(map(len, prompts)) + max_new_tokens
    return BridgeRuntime(
        base, RuntimeSettings(num_ctx=num_ctx, num_ubatch=num_ctx, num_threads=num_threads or num_usable_cores())
    )


def _report(
    ready: Preparation,
    summary: TrainSummary,
    record: Mapping[str, Any],
    parity: ParityReport | None,
    samples: Sequence[Sample],
) -> Report:
    return Report(
        title=ready.files.adapter.name,
        command=train_command(ready.config, ready.processes.local_count),
        serve=serve_lines(ready.config, ready.files, is_diffusion=ready.model.diffusion is not None),
        summary={**_result_facts(ready.config, summary), **ready.facts},
        data=ready.data.lines(),
        metrics=list(read_metrics(ready.files.metrics)),
        preview=learnt_pieces(ready.data.rows.example(0), ready.tokenizer),
        samples=samples,
        lengths=[*ready.data.held_out.lengths.tolist(), *ready.data.rows.lengths.tolist()],
        unit="nats per learnt token" if ready.config.method == "sft" else "per pair",
        parity=parity.rows() if parity is not None else [],
        has_passed=parity.passed if parity is not None else None,
        settings=record["settings"],
        versions=record["versions"],
    )


def _result_facts(config: TrainConfig, summary: TrainSummary) -> dict[str, str]:
    unit = "nats per learnt token" if config.method == "sft" else "per pair"
    facts = {"training loss": f"{summary.loss:.4f} {unit} in the last logged steps"}
    if summary.num_steps < summary.num_planned_steps:
        facts["stopped early"] = (
            f"after step {summary.num_steps} of {summary.num_planned_steps}: the held-out loss did not become better"
        )
    if summary.first_eval_loss is not None and summary.eval_loss is not None:
        facts["held-out loss"] = f"{summary.first_eval_loss:.4f} before, {summary.eval_loss:.4f} after"
        if summary.best_step is not None:
            facts["held-out loss"] += f" (step {summary.best_step}, the best one, is in the adapter)"
    if summary.num_skipped:
        facts["skipped"] = f"{summary.num_skipped} steps, because a gradient was not finite"
    facts["time"] = f"{summary.num_tokens:,} tokens in {describe_seconds(summary.seconds)}"
    return facts
