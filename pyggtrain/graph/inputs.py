"""What llama.cpp would write into a graph's inputs, from a batch. One function for each meaning that csrc/graph.cpp
gives.
"""

from collections.abc import Callable

import torch

from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Ngrams, Node
from pyggtrain.graph.lowering.attention import dense_mask, mask_of

Leaf = Callable[[Frame], torch.Tensor]


def _positions_4(frame: Frame, node: Node) -> torch.Tensor:
    """Text has one position three times and a fourth that is 0 (llama-graph.cpp, llm_graph_input_pos::set_input)."""
    positions = frame.batch.positions_T
    return torch.cat([positions, positions, positions, torch.zeros_like(positions)])


def _cells(frame: Frame, node: Node) -> torch.Tensor:
    """Each token's cell of an empty cache: its own number."""
    return torch.arange(frame.batch.num_tokens, device=frame.rows.device)


def _value_cells(frame: Frame, node: Node) -> torch.Tensor:
    """Where values go in an empty cache: each token's cell, or, where the cache holds numbers by channel, the place of
    each number of each token.
    """
    num_tokens = frame.batch.num_tokens
    num_channels = frame.shape(node.shape)[-1] // num_tokens
    cells = torch.arange(num_tokens, device=frame.rows.device)
    if num_channels == 1:
        return cells
    return cells.unsqueeze(1) + num_tokens * torch.arange(num_channels, device=frame.rows.device)


def _no_states(frame: Frame, node: Node) -> torch.Tensor:
    """Which state each sequence begins with; all of them are empty."""
    return torch.zeros(frame.shape(node.shape), dtype=torch.int64, device=frame.rows.device)


def _hadamard(frame: Frame, node: Node) -> torch.Tensor:
    """The orthogonal Hadamard matrix (Sylvester) that rotates cached keys or values; its own inverse."""
    size = frame.shape(node.shape)[-1]
    matrix = torch.ones(1, 1, device=frame.rows.device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div(size**0.5)


def _attn_temperature(frame: Frame, settings: tuple[float, float, float]) -> torch.Tensor:
    """Factor of each token's query: 1 + scale ln(1 + floor((position + offset) / floor)) (Llama 4)."""
    floor, scale, offset = settings
    steps = torch.floor((frame.batch.positions_T.float() + offset) / floor)
    return torch.log1p(steps) * scale + 1


def ngram_rows(tokens_T: torch.Tensor, ngrams: Ngrams) -> torch.Tensor:
    """Rows [T, heads] of the table for each token of one document, int64 (llama.cpp's qwen4exp.cpp, set_input).

    row = (t[p] m[0] ^ t[p-1] m[1] ^ ...) mod size + offset, in 64 bits that wrap. An end-of-text token and what lies
    before it, or before the document, reads as that token; a token's own end does not cut what it sees.
    """
    eos = ngrams.eos_token_id
    words = [tokens_T]
    is_cut = torch.zeros_like(tokens_T, dtype=torch.bool)
    for distance in range(1, ngrams.ngram_size):
        earlier = torch.nn.functional.pad(tokens_T, (distance, 0), value=eos)[: tokens_T.shape[0]]
        is_cut = is_cut | (earlier == eos)
        words.append(torch.where(is_cut, eos, earlier))
    rows: list[torch.Tensor] = []
    mixed = words[0] * _wrapped(ngrams.layer_multipliers[0])
    for word, multiplier in zip(words[1:], ngrams.layer_multipliers[1:], strict=False):
        mixed = mixed ^ (word * _wrapped(multiplier))
        for _ in range(ngrams.heads_per_ngram):
            size, offset = ngrams.head_vocab_sizes[len(rows)], ngrams.head_offsets[len(rows)]
            # The bits are unsigned: a negative number stands for 2^64 more.
            rest = torch.where(mixed < 0, (mixed.remainder(size) + pow(2, 64, size)) % size, mixed.remainder(size))
            rows.append(rest + offset)
    return torch.stack(rows, 1)


def _wrapped(number: int) -> int:
    """An unsigned number of 64 bits as the signed one of the same bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _given(node: Node) -> Leaf:
    """What llama.cpp wrote into an input of one document, the same in each run."""
    values = torch.frombuffer(bytearray(node.value), dtype=TYPES[node.type])
    if values.is_floating_point():
        values = values.float()
    return lambda frame: values.to(frame.rows.device).reshape(frame.shape(node.shape))


TYPES = {"f32": torch.float32, "f16": torch.float16, "i32": torch.int32, "i64": torch.int64}

INPUTS: dict[str, Callable[[Frame, Node], torch.Tensor]] = {
    "k_idxs": _cells,
    "k_idxs_swa": _cells,
    "k_rot": _hadamard,
    "k_rot_swa": _hadamard,
    "out_ids": lambda frame, node: frame.rows,
    "positions": lambda frame, node: frame.batch.positions_T,
    "positions_4": _positions_4,
    "s_copy": _no_states,
    "tokens": lambda frame, node: frame.batch.tokens_T,
    "v_idxs": _value_cells,
    "v_idxs_swa": _value_cells,
    "v_rot": _hadamard,
    "v_rot_swa": _hadamard,
}

MASKS = frozenset({"kq_mask", "kq_mask_swa"})


def input_of(graph: Graph, node: Node) -> Leaf:
    """How the value of an input is found in each run.

    Raises:
        UnsupportedError: nobody knows what this input means.
    """
    if node.name in MASKS:
        mask = mask_of(graph, node.name)
        return lambda frame: dense_mask(frame, mask, uses_alibi=graph.uses_alibi)
    if node.name == "attn_temperature":
        return lambda frame: _attn_temperature(frame, graph.attn_temperature).reshape(frame.shape(node.shape))
    if node.value:
        return _given(node)
    if node.name == "ngram_rows" and (ngrams := graph.ngrams) is not None:
        return lambda frame: ngram_rows(frame.batch.tokens_T, ngrams).reshape(frame.shape(node.shape))
    bind = INPUTS.get(node.name)
    if node.role == "unknown_input" or bind is None:
        known = ", ".join(sorted({*INPUTS, *MASKS, "attn_temperature"}))
        raise UnsupportedError(
            f"llama.cpp's graph of this model reads an input '{node.name}', whose meaning is not known here "
            f"(known: {known}). Use another model, or add it to pyggtrain.graph.inputs."
        )
    return lambda frame: bind(frame, node).reshape(frame.shape(node.shape))
