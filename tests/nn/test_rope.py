"""nn.rope: the rotation table is the one that ggml uses."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain import _bridge, models
from pyggtrain.gguf import GGUFFile, quantize_tensor, write_gguf
from pyggtrain.nn import RopeSettings, YarnSettings

HEAD, VOCAB = 32, 8


@dataclass
class Case:
    metadata: dict[str, Any] = field(default_factory=dict)
    factors: str | None = None
    num_tokens: int = 1001


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 8.0,
    "llama.rope.scaling.original_context_length": 512,
}
CASES = {
    "plain": Case(),
    "another base": Case({"llama.rope.freq_base": 500000.0}),
    "rope_freqs at position 10,000": Case({"llama.rope.freq_base": 500000.0}, "rope_freqs", num_tokens=10_001),
    "linear": Case({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0}),
    "none ignores the factor": Case({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 3.0}),
    "yarn": Case(YARN),
    "yarn with its own attn_factor": Case({**YARN, "llama.rope.scaling.attn_factor": 1.3}),
    "longrope, short": Case(
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.original_context_length": 1024},
        "rope_factors_short",
    ),
    "longrope, long": Case(
        {
            "llama.rope.scaling.type": "longrope",
            "llama.rope.scaling.original_context_length": 512,
            "llama.rope.scaling.attn_factor": 1.2,
        },
        "rope_factors_long",
    ),
}


def write_model(path: Path, case: Case, num_ctx: int) -> GGUFFile:
    """One layer whose queries are (1, 0, 1, 0, ...) everywhere, so that rotated they are (cos, sin, cos, sin, ...)."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    values = {
        "token_embd.weight": random(VOCAB, HEAD),
        "output_norm.weight": torch.ones(HEAD),
        "blk.0.attn_norm.weight": torch.ones(HEAD),
        "blk.0.attn_q.weight": torch.zeros(HEAD, HEAD),
        "blk.0.attn_q.bias": torch.tensor([1.0, 0.0]).repeat(HEAD // 2),
        "blk.0.ffn_norm.weight": torch.ones(HEAD),
        **{f"blk.0.{name}.weight": random(HEAD, HEAD) for name in ("attn_k", "attn_v", "attn_output")},
        **{f"blk.0.{name}.weight": random(HEAD, HEAD) for name in ("ffn_gate", "ffn_up", "ffn_down")},
    }
    factors = {
        "rope_freqs": 1 + 7 * torch.rand(HEAD // 2, generator=generator),
        "rope_factors_short": 1 + torch.rand(HEAD // 2, generator=generator),
        "rope_factors_long": 1 + 7 * torch.rand(HEAD // 2, generator=generator),
    }
    names = (
        ["rope_factors_short", "rope_factors_long"]
        if (case.factors or "").startswith("rope_factors")
        else [case.factors]
    )
    values.update({f"{name}.weight": factors[name] for name in names if name})
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": num_ctx,
        "llama.embedding_length": HEAD,
        "llama.feed_forward_length": HEAD,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "no_vocab",
        **case.metadata,
    }
    write_gguf(path, metadata, [quantize_tensor(name, tensor, "F32") for name, tensor in values.items()])
    return GGUFFile.open(path)


@pytest.mark.parametrize("name", CASES)
def test_table_is_that_of_ggml(tmp_path, name):
    case = CASES[name]
    num_ctx = -(-case.num_tokens // 256) * 256
    file = write_model(tmp_path / "model.gguf", case, num_ctx)
    tables = models.load(file).rope.settings.tables(torch.arange(case.num_tokens))
    session = _bridge.Session(
        str(file.path), num_ctx=num_ctx, num_ubatch=512, num_threads=1, kv_type="F32", flash_attention=False
    )
    captured = session.eval_tensors([1] * case.num_tokens, ["Qcur-0"])
    served = torch.cat([torch.from_dlpack(view) for _, op, view in captured if op == "ROPE"]).view(-1, HEAD // 2, 2)
    assert served.shape[0] == case.num_tokens
    torch.testing.assert_close(tables.cos_TP, served[..., 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(tables.sin_TP, served[..., 1], rtol=0, atol=1e-6)


def test_rounding_of_ggml_is_not_the_formula():
    # Why every step is rounded: in exact arithmetic the table at position 10,000 is another one.
    settings = RopeSettings(dimension_count=64, freq_base=500000.0, pairing="NORM")
    theta = 10_000 * 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    difference = (settings.tables(torch.tensor([10_000])).cos_TP[0] - theta.cos()).abs().max()
    assert difference > 1e-5


def test_rows_follow_the_positions():
    settings = RopeSettings(dimension_count=16, freq_base=10000.0, pairing="NEOX")
    whole = settings.tables(torch.arange(9))
    chosen = settings.tables(torch.tensor([0, 1, 0, 8]))
    assert torch.equal(chosen.cos_TP, whole.cos_TP[[0, 1, 0, 8]])
    assert chosen.pairing == "NEOX"
    assert torch.equal(whole.cos_TP[0], torch.ones(8)) and torch.equal(whole.sin_TP[0], torch.zeros(8))


def test_yarn_magnitude_is_one_plus_a_tenth_of_the_logarithm():
    settings = RopeSettings(16, 10000.0, "NORM", freq_scale=1 / 40, attn_factor=0.5, yarn=YarnSettings(4096))
    assert settings.magnitude() == pytest.approx(0.5 * (1 + 0.1 * 3.6888794541139363), rel=1e-6)
    assert RopeSettings(16, 10000.0, "NORM", freq_scale=1 / 40).magnitude() == 1.0
