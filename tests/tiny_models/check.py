"""What is asked of an imported model: logits, adapters and gradients, against llama.cpp and against itself.

Every check is about a file of F32 weights, on two documents in one batch, of which llama.cpp sees each alone.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from pyggtrain import _bridge
from pyggtrain.adapters import LoraAdapter, LoraConfig, attach, save
from pyggtrain.gguf import GGUFFile, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.graph.lowering import LOWERINGS
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import Batch

LENGTHS = (70, 20)
# Of models that group tokens in blocks, the largest of 128.
LENGTHS_OF_BLOCKS = (150,)
# For slopes: with few tokens it is rare that a step carries one across the edge of a router's choice.
FEW = (12, 7)
CONTEXT = 256

# Relative to the rms of llama.cpp's logits.
MAX_ERROR = 1e-4
# The same where ggml reads GELU from its table (steps of half precision, 5e-4 of a value), if a twin
# of the file whose gates leave the table agrees within `MAX_ERROR`.
MAX_TABLE_ERROR = 2e-2
# By what the twin's gates are larger: GELU of a number beyond 10 is the number itself, or 0.
TWIN_FACTOR = 1e6
# An adapter's effect must stand clear of the error that is allowed.
MIN_EFFECT = 1e-3
# Slopes along the gradient from differences of float32 losses, of models with kinks (clamps, routers).
MAX_SLOPE_ERROR = 0.1


@dataclass
class Findings:
    """What was found on one file.

    Attributes:
        error: of the logits.
        bound: what it must stay below: `MAX_ERROR`, or twice what llama.cpp differs from itself if that is more (many
            layers of GELU from a table whose steps are rounded half precision).
        has_table: ggml's table of GELU stood in for the function.
        effects: by kind of weight, what its pairs alone change in llama.cpp's logits.
        adapter_errors: by kind of weight, our logits with its pairs from llama.cpp's with them.
        adapter_bounds: what these must stay below, as `bound`, or `MAX_TABLE_ERROR` where `twin_errors` allows it.
        twin_errors: by kind of weight whose pairs' error is beyond `bound`, that of the file's twin (`twin_of`).
        slope_errors: by kind of weight, the gradient's size from the loss's slope along it, relative.
        untrained: kinds of tensors that cannot be trained, with the reason.
        seconds: of all this.
    """

    error: float = float("nan")
    bound: float = MAX_ERROR
    has_table: bool = False
    effects: dict[str, float] = field(default_factory=dict)
    adapter_errors: dict[str, float] = field(default_factory=dict)
    adapter_bounds: dict[str, float] = field(default_factory=dict)
    twin_errors: dict[str, float] = field(default_factory=dict)
    slope_errors: dict[str, float] = field(default_factory=dict)
    untrained: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def faults(self) -> list[str]:
        """What is not as it must be."""
        found = [] if self.error <= self.bound else [f"logits are off by {self.error:.1e} of their size"]
        found += [f"{kind}: no effect ({effect:.1e})" for kind, effect in self.effects.items() if effect < MIN_EFFECT]
        found += [
            f"{kind}: logits with its adapter are off by {error:.1e}"
            for kind, error in self.adapter_errors.items()
            if not error <= self.adapter_bounds[kind]
        ]
        found += [
            f"{kind}: gradient is off by {error:.1e}"
            for kind, error in self.slope_errors.items()
            if not error <= MAX_SLOPE_ERROR
        ]
        return found


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def kind_of(name: str) -> str:
    return re.sub(r"blk\.\d+\.", "", name.removesuffix(".weight"))


def make_batch(num_known: int, lengths: Sequence[int]) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(1, num_known, (length,), generator=generator).tolist() for length in lengths]
    return Batch.from_documents([(tokens, tokens) for tokens in ids])


def served(session: _bridge.Session, batch: Batch) -> torch.Tensor:
    """llama.cpp's logits, each document by itself."""
    tokens, bounds = batch.tokens_T.tolist(), batch.cu_seqlens.tolist()
    return torch.cat([torch.from_dlpack(session.logits(tokens[start:end])) for start, end in pairwise(bounds)])


def spread(model: ImportedModel, path: Path, batch: Batch, logits: torch.Tensor, adapter: Path | None = None) -> float:
    """What llama.cpp's logits differ from its own when it computes one token at a time; 0 of a model that cannot."""
    if model.diffusion is not None:
        return 0.0
    session = _bridge.Session(str(path), num_ctx=CONTEXT, num_ubatch=1, num_threads=1, kv_type="F32")
    try:
        if adapter is not None:
            session.set_adapters([(session.load_adapter(str(adapter)), 1.0)])
        return relative(served(session, batch), logits)
    finally:
        session.close()


def bound_by(spread: float) -> float:
    """What an error must stay below where llama.cpp differs from itself by `spread`; that may be anything, this not."""
    return max(MAX_ERROR, 2 * spread) if 2 * spread <= MAX_TABLE_ERROR else MAX_ERROR


@contextmanager
def ggml_gelu_table() -> Iterator[list[str]]:
    """Models made inside compute GELU as ggml's CPU code does: from a table of half-precision numbers.

    Training computes the function. That llama.cpp's rounding is all that lies between the two is shown here. Gives the
    names of the operations that took the table.
    """
    taken: list[str] = []

    def table(x: torch.Tensor) -> torch.Tensor:
        # In float32, as the table is made: x + x in half precision first, then the tanh form.
        half = x.detach().half().float()
        value = 0.5 * half * (1 + torch.tanh(0.79788456080286535587989211986876 * half * (1 + 0.044715 * half * half)))
        value = torch.where(x <= -10, 0.0, torch.where(x >= 10, x, value.half().float()))
        smooth = torch.nn.functional.gelu(x, approximate="tanh")
        return smooth + (value - smooth).detach()

    def gelu(graph, node):  # type: ignore[no-untyped-def]
        taken.append(node.name)
        return lambda frame, x: table(x)

    def geglu(graph, node):  # type: ignore[no-untyped-def]
        taken.append(node.name)
        is_swapped = bool(node.integer(1))

        def kernel(frame, gate, up=None):  # type: ignore[no-untyped-def]
            if up is None:
                gate, up = reversed(gate.chunk(2, -1)) if is_swapped else gate.chunk(2, -1)
            return table(gate) * up

        return kernel

    originals = {name: LOWERINGS[name] for name in ("UNARY.GELU", "GLU.GEGLU")}
    LOWERINGS.update({"UNARY.GELU": gelu, "GLU.GEGLU": geglu})
    try:
        yield taken
    finally:
        LOWERINGS.update(originals)


def check(path: Path) -> Findings:
    """Ask everything of a file's model.

    Raises:
        PyggtrainError: it cannot be imported.
    """
    started = time.monotonic()
    torch.set_num_threads(1)
    file = GGUFFile.open(path)
    findings = Findings()
    with ggml_gelu_table() as taken:
        model = ImportedModel(file, compute="exact")
    findings.has_table = bool(taken)
    for name, reason in model.untrainable.items():
        findings.untrained.setdefault(kind_of(name), reason)
    session = _bridge.Session(str(path), num_ctx=CONTEXT, num_ubatch=CONTEXT, num_threads=1, kv_type="F32")
    try:
        batch = make_batch(session.num_tokens, LENGTHS if model.unit is None else LENGTHS_OF_BLOCKS)
        base = served(session, batch)
        with torch.no_grad():
            findings.error = relative(model.logits(batch), base)
        if not findings.error <= MAX_ERROR:
            findings.bound = bound_by(spread(model, path, batch, base))
        if findings.error <= findings.bound:
            _check_adapters(model, file, session, batch, base, findings)
    finally:
        session.close()
    findings.seconds = time.monotonic() - started
    return findings


def _check_adapters(
    model: ImportedModel,
    file: GGUFFile,
    session: _bridge.Session,
    batch: Batch,
    base: torch.Tensor,
    findings: Findings,
) -> None:
    """Pairs on all weights of one kind at a time, in llama.cpp, in the model, and along their gradient."""
    few = make_batch(session.num_tokens, FEW)
    by_kind: dict[str, list[str]] = {}
    for name in model.linears:
        by_kind.setdefault(kind_of(name), []).append(name)
    for kind, names in by_kind.items():
        adapter = attached(model, names)
        error, bound, wanted = adapter_error(model, file, session, batch, adapter)
        findings.adapter_errors[kind], findings.adapter_bounds[kind] = error, bound
        findings.effects[kind] = relative(wanted, base)
        if error > bound and findings.has_table:
            with twin_of(file) as (twin, twin_file, twin_session):
                twin_adapter = attached(twin, names, factor=twin_factor(names[0]))
                twin_error, twin_bound, _ = adapter_error(twin, twin_file, twin_session, batch, twin_adapter)
            findings.twin_errors[kind] = twin_error
            if twin_error <= twin_bound:
                findings.adapter_bounds[kind] = MAX_TABLE_ERROR
        pair = adapter.pairs[names[-1]]
        halves = [pair.lora_a, pair.lora_b]
        error = slope_error(model, halves, few)
        # What compresses blocks of tokens learns nothing from a document shorter than a block.
        if error > MAX_SLOPE_ERROR:
            error = min(error, slope_error(model, halves, batch))
        findings.slope_errors[kind] = error
        for name in names:
            model.linears[name].lora = None


def attached(model: ImportedModel, names: Sequence[str], factor: float = 1.0) -> LoraAdapter:
    """Pairs that do something on weights of one kind; `factor` times as much."""
    rank = min(2, *(size for name in names for size in model.linears[name].shape[-2:]))
    adapter = attach(model, LoraConfig(r=rank, lora_alpha=2.0 * rank, target_modules=tuple(names)), seed=0)
    generator = torch.Generator().manual_seed(1)
    for pair in adapter.pairs.values():
        pair.lora_b.data = torch.randn(pair.lora_b.shape, generator=generator) * (0.3 * factor)
    return adapter


def adapter_error(
    model: ImportedModel, file: GGUFFile, session: _bridge.Session, batch: Batch, adapter: LoraAdapter
) -> tuple[float, float, torch.Tensor]:
    """Error of our logits with an adapter, what it must stay below, and llama.cpp's logits with it."""
    path = file.path.with_suffix(".adapter")
    save(path, adapter, file, overwrite=True)
    session.set_adapters([(session.load_adapter(str(path)), 1.0)])
    wanted = served(session, batch)
    session.set_adapters([])
    with torch.no_grad():
        error = relative(model.logits(batch), wanted)
    bound = MAX_ERROR if error <= MAX_ERROR else bound_by(spread(model, file.path, batch, wanted, path))
    path.unlink()
    return error, bound, wanted


def twin_factor(name: str) -> float:
    """By what a weight of the twin is larger: `TWIN_FACTOR` where its product goes through GELU."""
    return TWIN_FACTOR if kind_of(name) in ("ffn_gate", "inp_gate") else 1.0


@contextmanager
def twin_of(file: GGUFFile) -> Iterator[tuple[ImportedModel, GGUFFile, _bridge.Session]]:
    """A copy of a file of F32 weights with larger gates, as a model and in llama.cpp.

    What follows a gated feed-forward of the Gemmas is a norm, so all else keeps its size; but no gate meets the table
    of half-precision numbers any more, whose steps small differences of earlier layers cross.
    """
    path = file.path.with_suffix(".twin.gguf")
    tensors = [
        quantize_tensor(name, tensor.blocks.view(torch.float32).reshape(tensor.shape) * twin_factor(name), "F32")
        if twin_factor(name) != 1
        else tensor
        for name, tensor in file.tensors.items()
    ]
    write_gguf(path, typed_metadata(file), tensors)
    session = _bridge.Session(str(path), num_ctx=CONTEXT, num_ubatch=CONTEXT, num_threads=1, kv_type="F32")
    try:
        twin = GGUFFile.open(path)
        with ggml_gelu_table():
            model = ImportedModel(twin, compute="exact")
        yield model, twin, session
    finally:
        session.close()
        path.unlink()


def slope_error(model: ImportedModel, parameters: Sequence[torch.nn.Parameter], batch: Batch) -> float:
    """|slope of the loss along the gradient - size of the gradient| / size, the best of some steps; inf if there is
    none.

    A long step bends, a short one drowns in the rounding of float32, and any may cross the edge of a router's choice,
    where the loss jumps. So there are many, and losses are compared token by token: the rounding of one is that of a
    few nats, not of their sum.
    """
    loss, _ = model.loss(batch)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    if any(gradient is None or not gradient.isfinite().all() for gradient in gradients):
        return float("inf")
    size = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    if size == 0:
        return float("inf")
    length = float(torch.stack([parameter.detach().square().sum() for parameter in parameters]).sum().sqrt())
    errors = []
    # By what the loss changes, in nats, and by the share of the parameters' own length.
    shares = (0.03, 0.003, 0.0003, 0.0001, 0.00003)
    for step in (0.05 / size, 0.01 / size, 0.3 / size, 0.002 / size, *(share * length for share in shares)):

        def moved(sign: float, step: float = step) -> torch.Tensor:
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter += sign * step / size * gradient
                return -model.log_probs(batch).double()

        above, below = moved(1.0), moved(-2.0)
        moved(1.0)
        errors.append(abs(float((above - below).sum()) / (2 * step) - size) / size)
        if errors[-1] < MAX_SLOPE_ERROR / 10:
            break
    return min(errors)
