"""Inputs that have a rule of their own."""

import torch

from pyggtrain.graph.inputs import ngram_rows
from pyggtrain.graph.ir import Ngrams

EOS = 5
NGRAMS = Ngrams(
    ngram_size=3,
    heads_per_ngram=2,
    eos_token_id=EOS,
    # Beyond 2^63, so that products wrap and the hash is a number that a signed one would call negative.
    layer_multipliers=(0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    head_offsets=(0, 101, 204, 311),
    head_vocab_sizes=(101, 103, 107, 109),
)


def rows_one_by_one(tokens: list[int]) -> list[list[int]]:
    """qwen4exp's rule, token by token, in Python's numbers without a limit."""
    found = []
    for place, token in enumerate(tokens):
        words, is_cut = [token], False
        for distance in range(1, NGRAMS.ngram_size):
            earlier = tokens[place - distance] if place >= distance else EOS
            is_cut = is_cut or earlier == EOS
            words.append(EOS if is_cut else earlier)
        rows = []
        for size in range(2, NGRAMS.ngram_size + 1):
            mixed = 0
            for word, multiplier in zip(words[:size], NGRAMS.layer_multipliers, strict=False):
                mixed ^= word * multiplier % 2**64
            for _ in range(NGRAMS.heads_per_ngram):
                head = len(rows)
                rows.append(mixed % NGRAMS.head_vocab_sizes[head] + NGRAMS.head_offsets[head])
        found.append(rows)
    return found


def test_rows_by_ngrams_follow_the_rule_across_ends_of_text() -> None:
    tokens = [7, 8, EOS, 9, 70000, EOS, EOS, 3, 2, 1, 123456]
    assert ngram_rows(torch.tensor(tokens), NGRAMS).tolist() == rows_one_by_one(tokens)
