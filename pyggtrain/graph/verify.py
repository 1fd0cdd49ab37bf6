"""Does the imported model compute what llama.cpp computes? Asked before it is trained on, with the file itself.

Both compute the same tokens. In a file of F32 weights they differ by rounding alone. In a quantised file llama.cpp
also rounds every product's input to 8 bits, which the model need not do (`compute`), and small differences grow from
layer to layer: measured 4 % of the logits' rms on SmolLM2-135M Q4_1 and gemma-3-270m Q4_K_M, where a wrong operation
gives about 100 %. gemma-3-270m in Q3_K is 16 % off: there the rounding is taken out on both sides.
A model in half precision rounds as well: 1 % on tiny F32 files (tests/tiny_models/on_gpu.py).

A model that differs by more is searched for the first value that does.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch.utils.dlpack import from_dlpack

from pyggtrain import _bridge
from pyggtrain.errors import ParityError
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.cache import remembered
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import Batch
from pyggtrain.ops.quant_matmul import HALF_DTYPES

NUM_TOKENS = 64
# Relative to the rms of llama.cpp's value.
BOUND_F32 = 1e-3
BOUND_QUANTISED = 0.15
# Of llama.cpp's own noise, where that is larger: how far a model may be, and what may be left without the rounding.
# GELU is a table of half precision in llama.cpp, which gives about a hundredth of what 8 bits do.
NOISE_FACTOR = 2.0
MAX_REMAINDER = 0.1
_UNQUANTISED = frozenset({"F32", "I32"})
_CONTEXT = 256


@dataclass(frozen=True)
class Verification:
    """How far the imported model is from llama.cpp.

    Attributes:
        error: rms of the difference of the logits over the rms of llama.cpp's.
        bound: what it had to stay below.
        kl: mean Kullback-Leibler divergence from llama.cpp's next-token distribution, in nats.
        num_tokens: that were compared.
    """

    error: float
    bound: float
    kl: float
    num_tokens: int


def verify_once(file: GGUFFile, model: ImportedModel) -> Verification:
    """`verify`, whose result is kept on disk for the file's header and this build (`graph.cache`).

    A model is made of the file's graph and the package's sources, and both are in the key. What a damaged file's
    weights do is no matter of the graph.
    """

    def read(text: bytes) -> Verification:
        return Verification(**json.loads(text))

    return remembered(file, f"verify {model.question}", lambda: json.dumps(asdict(verify(file, model))).encode(), read)


def verify(file: GGUFFile, model: ImportedModel) -> Verification:
    """Compare the model of a file, without adapter, with llama.cpp on 64 tokens spread over the vocabulary (on as many
    as a document is filled up to, where it is).

    Args:
        file: whose weights the model has.
        model: of this file.

    Raises:
        ParityError: they differ; the message names the first value that does.
        BridgeError: llama.cpp cannot run the file.
    """
    bound = bound_of(file, model.dtype)
    session = _session(file)
    try:
        tokens = spread_tokens(session.num_tokens, NUM_TOKENS if model.unit is None else model.unit)
        batch = Batch.from_documents([(tokens, tokens)]).to(next(model.buffers()).device)
        served = from_dlpack(session.logits(tokens))
        with torch.no_grad():
            logits = model.logits(batch).float().cpu()
            error = relative_error(logits, served)
            if not error <= bound and bound != BOUND_F32:
                bound = _bound_by_rounding(file, model, tokens, served, bound)
            if not error <= bound:
                raise ParityError(
                    f"{file.path}: llama.cpp's graph, run in torch, gives logits that are {error:.2g} of their size "
                    f"away from llama.cpp's (needed: {bound:g}). {_first_difference(model, session, batch, bound)} "
                    "Please report the architecture."
                )
        kl = torch.nn.functional.kl_div(
            logits.log_softmax(-1), served.log_softmax(-1), log_target=True, reduction="batchmean"
        )
    finally:
        session.close()
    return Verification(error, bound, float(kl), len(tokens))


def bound_of(file: GGUFFile, dtype: torch.dtype) -> float:
    """What the error of a file's model must stay below, computed in a dtype."""
    is_quantised = any(tensor.type not in _UNQUANTISED for tensor in file.tensors.values())
    return BOUND_QUANTISED if is_quantised or dtype in HALF_DTYPES else BOUND_F32


def _session(file: GGUFFile, *, exact_products: bool = False) -> _bridge.Session:
    return _bridge.Session(
        str(file.path),
        num_ctx=_CONTEXT,
        num_ubatch=_CONTEXT,
        num_threads=torch.get_num_threads(),
        kv_type="F32",
        use_mmap=file.is_mapped,
        exact_products=exact_products,
    )


def _bound_by_rounding(
    file: GGUFFile, model: ImportedModel, tokens: list[int], served: torch.Tensor, bound: float
) -> float:
    """The bound for a file of few bits, whose logits the rounding of inputs moves further than `bound`.

    Without that rounding, llama.cpp's products taken from decoded weights, most of the difference has to go. Then the
    graph is right, and how far llama.cpp is from itself without rounding is the yardstick. Otherwise `bound` stays.
    """
    session = _session(file, exact_products=True)
    try:
        exact = from_dlpack(session.logits(tokens))
    finally:
        session.close()
    twin = ImportedModel(file, compute="exact", num_ctx=model.num_ctx)
    noise = relative_error(served, exact)
    remainder = relative_error(twin.logits(Batch.from_documents([(tokens, tokens)])), exact)
    return max(bound, NOISE_FACTOR * noise) if remainder <= max(BOUND_F32, MAX_REMAINDER * noise) else bound


def spread_tokens(num_known: int, num_tokens: int) -> list[int]:
    """`num_tokens` tokens spread over a vocabulary of `num_known`."""
    stride = max(1, num_known // num_tokens)
    return [place * stride % num_known for place in range(num_tokens)]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """rms of the difference over rms of what is wanted (on the CPU); NaN counts as different."""
    size = wanted.float().square().mean().sqrt()
    difference = found.flatten().float().to(wanted.device) - wanted.flatten().float()
    return float(difference.square().mean().sqrt() / size.clamp(min=1e-20))


def _first_difference(model: ImportedModel, session: _bridge.Session, batch: Batch, bound: float) -> str:
    """A sentence on the first value that differs from all that llama.cpp has under its name."""
    tokens = batch.tokens_T.tolist()
    for name, value in _values(model, batch):
        # A name may stand for several nodes in a row (a product, its reshaping, its rotation): any of equal size may
        # be meant.
        served = [from_dlpack(view) for _, _, view in session.eval_tensors(tokens, [name])]
        errors = [relative_error(value, other) for other in served if other.numel() == value.numel()]
        if errors and not min(errors) <= bound:
            return f"The first value that differs is '{name}', by {min(errors):.2g} of its size."
    return "Every value that has a name in llama.cpp agrees by itself."


def _values(model: ImportedModel, batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Every value that llama.cpp gives a name of its own, in the order of computing."""
    for step, value in model.run_steps(batch):
        if step.name and not step.name.startswith(("node_", " ")):
            yield step.name, value
