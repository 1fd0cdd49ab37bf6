"""Which weights of a file llama.cpp changes by an adapter, without a model: needs neither torch nor weights."""

from pathlib import Path

from pyggtrain.graph.capture import LENGTHS, capture
from pyggtrain.graph.ir import fit
from pyggtrain.graph.rewrite import Reach, rewritten


def adapter_reach(path: Path) -> Reach:
    """What an adapter on every tensor reaches in llama.cpp's own graph of a file.

    Raises:
        BridgeError: llama.cpp cannot build the graph, with its reason.
    """
    return rewritten(fit(capture(path, lengths=LENGTHS[:1])))[1]
