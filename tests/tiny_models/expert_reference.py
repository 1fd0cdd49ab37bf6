"""Models of experts in plain torch and float64, written for a reader: all experts compute all tokens.

Mathematics after llama.cpp's llama.cpp, qwen2moe.cpp, qwen3moe.cpp and gpt-oss.cpp; everything in the file's own order.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from delta_net_reference import Pairs, Reference
from dense_models import HEAD


class ExpertReference(Reference):
    """Logits of a model with pairs."""

    def __init__(
        self, architecture: str, keys: Mapping[str, Any], weights: Mapping[str, torch.Tensor], pairs: Pairs
    ) -> None:
        super().__init__(keys, weights, pairs)
        self.architecture = architecture

    def linear(self, name: str, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        y = super().linear(name, x, expert)
        bias = self.weights.get(name.replace(".weight", ".bias"))
        return y if bias is None else y + (bias if expert is None else bias[expert])

    def logits(self, tokens: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        x = self.weights["token_embd.weight"][tokens]
        norm = "post_attention_norm" if self.architecture == "gpt-oss" else "ffn_norm"
        for layer in range(self.keys["block_count"]):
            block = f"blk.{layer}."
            x = x + self.attention(block, self.norm(f"{block}attn_norm.weight", x), bounds)
            x = x + self.experts(block, self.norm(f"{block}{norm}.weight", x))
        return self.linear("output.weight", self.norm("output_norm.weight", x))

    def attention(self, block: str, x: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        heads, kv_heads, size = self.keys["attention.head_count"], self.keys["attention.head_count_kv"], HEAD
        q, k, v = (
            self.linear(f"{block}attn_{name}.weight", x).unflatten(1, (count, size))
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if self.architecture == "qwen3moe":
            q, k = self.norm(f"{block}attn_q_norm.weight", q), self.norm(f"{block}attn_k_norm.weight", k)
        is_windowed = self.architecture == "gpt-oss" and int(block.split(".")[1]) % 2 == 0
        rows = []
        for start, end in pairwise(bounds):
            q_d, k_d = (self.rotated(part[start:end]).transpose(0, 1) for part in (q, k))
            k_d, v_d = (part.repeat_interleave(heads // kv_heads, 0) for part in (k_d, v[start:end].transpose(0, 1)))
            place = torch.arange(end - start)
            distance = place[:, None] - place
            hidden = distance < 0
            if is_windowed:
                hidden |= distance >= self.keys["attention.sliding_window"]
            weights = (q_d @ k_d.transpose(1, 2) * size**-0.5).masked_fill(hidden, -torch.inf).exp()
            total = weights.sum(-1, keepdim=True)
            if self.architecture == "gpt-oss":
                total = total + self.weights[f"{block}attn_sinks.weight"].exp()[:, None, None]
            rows.append((weights / total @ v_d).transpose(0, 1))
        return self.linear(f"{block}attn_output.weight", torch.cat(rows).flatten(1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """llama turns neighbouring numbers of a head, the others number i with number i + half of them."""
        if self.architecture != "llama":
            return super().rotated(x)
        return super().rotated(x.unflatten(-1, (-1, 2)).mT.flatten(-2)).unflatten(-1, (2, -1)).mT.flatten(-2)

    def feed_forward(self, block: str, suffix: str, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        if self.architecture != "gpt-oss":
            return super().feed_forward(block, suffix, x, expert)
        gate, up = (self.linear(f"{block}ffn_{name}{suffix}.weight", x, expert) for name in ("gate", "up"))
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return self.linear(f"{block}ffn_down{suffix}.weight", gate * (1.702 * gate).sigmoid() * (up + 1), expert)

    def experts(self, block: str, x: torch.Tensor) -> torch.Tensor:
        """All experts compute all tokens; those that were not chosen have the share 0."""
        scores = self.linear(f"{block}ffn_gate_inp.weight", x)
        if self.architecture == "gpt-oss":
            top, chosen = scores.topk(self.keys["expert_used_count"], -1)
            top = top.softmax(-1)
        else:
            top, chosen = scores.softmax(-1).topk(self.keys["expert_used_count"], -1)
            # qwen2moe leaves the chosen shares as they are.
            top = top if self.architecture == "qwen2moe" else top / top.sum(-1, keepdim=True)
        shares = torch.zeros_like(scores).scatter(1, chosen, top)
        y = torch.zeros_like(x)
        for expert in range(self.keys["expert_count"]):
            y = y + shares[:, expert, None] * self.feed_forward(block, "_exps", x, expert)
        if self.architecture == "qwen2moe":
            gate = F.sigmoid(self.linear(f"{block}ffn_gate_inp_shexp.weight", x))
            y = y + gate * self.feed_forward(block, "_shexp", x)
        return y
