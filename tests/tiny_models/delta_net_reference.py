"""qwen35, qwen35moe and qwen3next in plain torch and float64, written for a reader: recurrences token by token, experts
in a loop.

Mathematics after llama.cpp's qwen35.cpp, qwen35moe.cpp, qwen3next.cpp and delta-net-base.cpp; everything in the file's
own order.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from pyggtrain.kernels.reference.causal_conv1d import causal_conv1d_forward
from pyggtrain.kernels.reference.gated_delta_rule import gated_delta_rule_forward
from pyggtrain.kernels.reference.gated_rms_norm import gated_rms_norm_forward

# lora_a, lora_b and alpha / rank by name of the weight.
Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]


class Reference:
    """Logits of a model with pairs.

    Args:
        keys: the file's metadata without the architecture's prefix.
        weights: by name, float64.
        pairs: of any of them.
    """

    def __init__(self, keys: Mapping[str, Any], weights: Mapping[str, torch.Tensor], pairs: Pairs) -> None:
        self.keys, self.weights, self.pairs = keys, weights, pairs
        self.eps: float = keys["attention.layer_norm_rms_epsilon"]

    def linear(self, name: str, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """x Wᵀ + s (x Aᵀ) Bᵀ; a weight that is a vector is one row."""
        weight = self.weights[name] if expert is None else self.weights[name][expert]
        y = x @ (weight[None] if weight.dim() == 1 else weight).t()
        if name not in self.pairs:
            return y
        lora_a, lora_b, scale = self.pairs[name]
        if expert is not None:
            lora_a, lora_b = lora_a[expert], lora_b[expert]
        return y + scale * (x @ lora_a.t()) @ lora_b.t()

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weights[name]

    def logits(self, tokens: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        """[T, V] of documents that begin at `bounds`, the last of which is T."""
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.keys["block_count"]):
            block = f"blk.{layer}."
            mixer = self.delta_net if f"{block}ssm_out.weight" in self.weights else self.attention
            x = x + mixer(block, self.norm(f"{block}attn_norm.weight", x), bounds)
            y = self.norm(f"{block}post_attention_norm.weight", x)
            is_dense = f"{block}ffn_gate.weight" in self.weights
            x = x + (self.feed_forward(block, "", y) if is_dense else self.experts(block, y))
        head = "output.weight" if "output.weight" in self.weights else "token_embd.weight"
        return self.linear(head, self.norm("output_norm.weight", x))

    def delta_net(self, block: str, x: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        key_heads, heads, size = (self.keys[f"ssm.{key}"] for key in ("group_count", "time_step_rank", "state_size"))
        mixed = causal_conv1d_forward(
            self.linear(f"{block}attn_qkv.weight", x),
            self.weights[f"{block}ssm_conv1d.weight"],
            bounds,
            has_silu=True,
            num_normed=2 * key_heads,
            head_size=size,
            eps=self.eps,
        )
        q, k, v = (part.unflatten(1, (-1, size)) for part in mixed.split([key_heads * size] * 2 + [heads * size], 1))
        if f"{block}ssm_ba.weight" in self.weights:
            # qwen3next: the value heads of a key head lie side by side; for each key head, their betas, then alphas.
            gates = self.linear(f"{block}ssm_ba.weight", x).unflatten(1, (key_heads, 2, -1))
            beta, alpha = gates.transpose(1, 2).flatten(2).unbind(1)
            q, k = (part.repeat_interleave(heads // key_heads, 1) for part in (q, k))
        else:
            beta, alpha = (self.linear(f"{block}ssm_{gate}.weight", x) for gate in ("beta", "alpha"))
        step = F.softplus(alpha + self.weights[f"{block}ssm_dt.bias"])
        log_decay = self.weights[f"{block}ssm_a"] * step
        o = gated_delta_rule_forward(q, k, v, log_decay, beta.sigmoid(), bounds, scale=size**-0.5)
        z = self.linear(f"{block}attn_gate.weight", x).unflatten(1, (-1, size))
        o = gated_rms_norm_forward(o, z, self.weights[f"{block}ssm_norm.weight"], eps=self.eps)
        return self.linear(f"{block}ssm_out.weight", o.flatten(1))

    def attention(self, block: str, x: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        heads, kv_heads, size = (self.keys[f"attention.{key}"] for key in ("head_count", "head_count_kv", "key_length"))
        q, gate = self.linear(f"{block}attn_q.weight", x).unflatten(1, (heads, 2, size)).unbind(2)
        k, v = (self.linear(f"{block}attn_{name}.weight", x).unflatten(1, (kv_heads, size)) for name in "kv")
        q, k = self.norm(f"{block}attn_q_norm.weight", q), self.norm(f"{block}attn_k_norm.weight", k)
        rows = []
        for start, end in pairwise(bounds):
            q_d, k_d = (self.rotated(part[start:end]).transpose(0, 1) for part in (q, k))
            v_d = v[start:end].transpose(0, 1)
            k_d, v_d = (part.repeat_interleave(heads // kv_heads, 0) for part in (k_d, v_d))
            is_later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
            scores = (q_d @ k_d.transpose(1, 2) * size**-0.5).masked_fill(is_later, -torch.inf)
            rows.append((scores.softmax(-1) @ v_d).transpose(0, 1))
        return self.linear(f"{block}attn_output.weight", (torch.cat(rows) * gate.sigmoid()).flatten(1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """The first numbers of each head turned, number i with number i + half of them."""
        half = self.keys["rope.dimension_count"] // 2
        frequencies = self.keys["rope.freq_base"] ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = (torch.arange(x.shape[0], dtype=x.dtype)[:, None] * frequencies)[:, None]
        a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), rest], -1)

    def feed_forward(self, block: str, suffix: str, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        fused = f"{block}ffn_gate_up{suffix}.weight"
        if fused in self.weights:
            gate, up = self.linear(fused, x, expert).chunk(2, -1)
        else:
            gate, up = (self.linear(f"{block}ffn_{name}{suffix}.weight", x, expert) for name in ("gate", "up"))
        return self.linear(f"{block}ffn_down{suffix}.weight", F.silu(gate) * up, expert)

    def experts(self, block: str, x: torch.Tensor) -> torch.Tensor:
        """The chosen experts by their share, and the shared one by its gate. What is chosen has no gradient."""
        shares = self.linear(f"{block}ffn_gate_inp.weight", x).softmax(-1)
        top, chosen = shares.topk(self.keys["expert_used_count"], -1)
        top = top / top.sum(-1, keepdim=True)
        y = self.feed_forward(block, "_shexp", x) * self.linear(f"{block}ffn_gate_inp_shexp.weight", x).sigmoid()
        for expert in range(self.keys["expert_count"]):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            given = self.feed_forward(block, "_exps", x[token], expert) * top[token, slot, None]
            y = y.index_add(0, token, given)
        return y
