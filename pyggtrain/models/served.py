"""How each architecture of the pinned llama.cpp is served, and what was found when a tiny model of it was checked.

The list of architectures is llama.cpp's own. What was found is kept in `graph/architectures.json`, which
tests/tiny_models/sweep.py writes: it makes a tiny model of every architecture, compares the imported graph with
llama.cpp, and trains each kind of weight. tests/graph/test_architectures.py finds the same again.
"""

from dataclasses import dataclass
from typing import Any

from pyggtrain.graph.record import known_architectures, recorded
from pyggtrain.models import ARCHITECTURES

_DRAFT = "drafts tokens for another model, whose hidden states it reads: there is no text to train it on alone"
_ENCODER = "turns a text into vectors and gives no logits of tokens"
# What llama.cpp's sources say of architectures that are not served; why a tiny model of one fails is beside the point.
REASONS = {
    **dict.fromkeys(("dflash", "eagle3", "gemma4-assistant"), _DRAFT),
    **dict.fromkeys(
        ("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert"), _ENCODER
    ),
    **dict.fromkeys(("neo-bert", "nomic-bert", "nomic-bert-moe", "t5encoder"), _ENCODER),
    "chameleon": "gives other logits for a text in one piece than in several: llama.cpp suppresses image tokens in "
    "the first row of a batch alone (models/chameleon.cpp)",
    "clip": "turns images or sound into embeddings for another model",
    "graniteswitch": "carries adapters of its own, and llama.cpp multiplies the weights of its layers outside of the "
    "path of further ones (models/granite-switch.cpp): none would have an effect",
    "gptj": "is a name without a graph: llama.cpp does not run it",
    "t5": "is an encoder with a decoder, which reads what the encoder made of another text",
    "wavtokenizer-dec": "turns codes into sound",
}


@dataclass(frozen=True)
class Served:
    """One architecture.

    Attributes:
        name: `general.architecture`.
        way: "native" (hand-written), "graph" (llama.cpp's own graph, imported) or "not yet".
        why: of "not yet": what is in the way.
        error: rms of the difference of the tiny model's logits from llama.cpp's, over the rms of these.
        adapter_error: the same with an adapter, the largest of all kinds of weight.
        trained: kinds of weight whose pairs changed llama.cpp's logits as ours and whose gradient was the loss's slope.
    """

    name: str
    way: str
    why: str = ""
    error: float | None = None
    adapter_error: float | None = None
    trained: tuple[str, ...] = ()


def served() -> list[Served]:
    """Every architecture that the pinned llama.cpp knows, in its own order."""
    found = recorded()
    return [_served(name, found.get(name, {"models": {"any": "was not tried"}})) for name in known_architectures()]


def _served(name: str, found: dict[str, Any]) -> Served:
    reasons = list(found["models"].values())
    is_verified = not all(reasons)
    way = "native" if name in ARCHITECTURES else "graph" if is_verified else "not yet"
    if not is_verified:
        return Served(name, way, REASONS.get(name, reasons[0]))
    return Served(
        name, way, error=found["error"], adapter_error=found["adapter_error"], trained=tuple(found["trained"])
    )
