"""The gated delta rule over packed documents, a chunk of tokens at a time.

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}ᵀ k_t))ᵀ,   o_t = scale S_tᵀ q_t;   S = 0 at first

The mathematics of both directions stands in `pyggtrain.kernels.gated_delta_rule`, whose kernels compute it on a GPU.
Here it is for a CPU, in torch, in the same letters: what belongs to single chunks (systems, weights between pairs of
tokens, gradients) is one batch of products over all chunks and heads; only the states pass from chunk to chunk, and
those of all documents at once. Saved: the inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pyggtrain.kernels.gated_delta_rule.chunks import CHUNK, Chunks
from pyggtrain.ops.operation import operation


@operation("gated_delta_rule")
def _gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    first_token: torch.Tensor,
    cu_seqlens: torch.Tensor,
    first_chunk: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    chunks = Chunks(q.shape[0], first_token, cu_seqlens, first_chunk)
    if q.is_cuda:
        from pyggtrain.kernels.gated_delta_rule.forward import gated_delta_rule_forward

        return gated_delta_rule_forward(*_whole_heads(q, k, v), log_decay, beta, chunks, scale=scale)[0]
    parts = _Parts.make(q, k, v, log_decay, beta, chunks)
    _, u, states = parts.run_states()
    o = (parts.grown * parts.q) @ states + (parts.q @ parts.k.transpose(-1, -2) * parts.decay) @ u
    return parts.places.tokens_of(o) * scale


@_gated_delta_rule.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    first_token: torch.Tensor,
    cu_seqlens: torch.Tensor,
    first_chunk: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return v.new_empty(v.shape)


@operation("gated_delta_rule_backward")
def _gated_delta_rule_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    first_token: torch.Tensor,
    cu_seqlens: torch.Tensor,
    first_chunk: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chunks = Chunks(q.shape[0], first_token, cu_seqlens, first_chunk)
    if q.is_cuda:
        from pyggtrain.kernels.gated_delta_rule.backward import gated_delta_rule_backward

        heads = _whole_heads(q, k, v)
        return gated_delta_rule_backward(do.contiguous(), *heads, log_decay, beta, chunks, scale=scale)
    parts = _Parts.make(q, k, v, log_decay, beta, chunks)
    return parts.gradients(parts.places.chunks_of(do) * scale, scale, q.shape[1])


@_gated_delta_rule_backward.register_fake
def _(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    first_token: torch.Tensor,
    cu_seqlens: torch.Tensor,
    first_chunk: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv, d_decay, d_beta = (x.new_empty(x.shape) for x in (q, k, v, log_decay, beta))
    return dq, dk, dv, d_decay, d_beta


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.scale = inputs[8]


def _backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    arguments: tuple[Any, ...] = (*ctx.saved_tensors, ctx.scale)
    return *_gated_delta_rule_backward(do, *arguments), None, None, None, None


_gated_delta_rule.register_autograd(_backward, setup_context=_save)


def gated_delta_rule(
    q_TNK: torch.Tensor,
    k_TNK: torch.Tensor,
    v_TGV: torch.Tensor,
    log_decay_TG: torch.Tensor,
    beta_TG: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
) -> torch.Tensor:
    """o_t = scale S_tᵀ q_t of each value head, whose state S begins empty with each document.

    Args:
        q_TNK, k_TNK: [T, N, K], float32; on a GPU also bfloat16 or float16, and K of 16, 32, 64 or 128.
        v_TGV: [T, G, V] in q's dtype. Value head h reads key head h mod N.
        log_decay_TG: g, float32 [T, G], at most 0.
        beta_TG: float32 [T, G].
        chunks: of the documents, on the tokens' device. Many calls for one batch should share one.
        scale: of the outputs.

    Returns:
        [T, G, V].

    Raises:
        ValueError: heads do not group, or the documents do not cover the tokens.
    """
    num_tokens, num_key_heads, _ = q_TNK.shape
    if v_TGV.shape[1] % num_key_heads:
        raise ValueError(f"{v_TGV.shape[1]} value heads do not lie over {num_key_heads} key heads")
    if chunks.num_tokens != num_tokens:
        raise ValueError(f"documents cover {chunks.num_tokens} tokens: needed {num_tokens}")
    o_TGV: torch.Tensor = _gated_delta_rule(
        q_TNK,
        k_TNK,
        v_TGV,
        log_decay_TG,
        beta_TG,
        chunks.first_token,
        chunks.cu_seqlens,
        chunks.first_chunk,
        scale,
    )
    return o_TGV


def _whole_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


@dataclass(frozen=True, eq=False)
class _Places:
    """Which token stands where in a batch of chunks, whose documents advance together.

    Chunks are ordered by their number within their document, and then by document, long ones first: what one step of
    the recurrence takes lies side by side, and so do the states that it changes.

    Attributes:
        tokens: int64 [N, C], of each place; behind a chunk's end any token.
        is_token: bool [N, C].
        place: int64 [T], the place of each token.
        counts: chunks of each step.
    """

    tokens: torch.Tensor
    is_token: torch.Tensor
    place: torch.Tensor
    counts: list[int]

    @staticmethod
    def of(chunks: Chunks) -> "_Places":
        # In numpy: a rehearsal makes no torch tensor with numbers in it, and these decide sizes.
        first_token, first_chunk = chunks.first_token.numpy(), chunks.first_chunk.numpy()
        lengths = np.diff(first_chunk)
        rank = np.argsort(np.argsort(-lengths, kind="stable"))
        document = np.repeat(np.arange(lengths.size), lengths)
        step = np.arange(document.size) - first_chunk[document]
        order = np.lexsort((rank[document], step))
        first, end = (part[order, None].astype(np.int64) for part in (first_token[:-1], first_token[1:]))
        tokens = first + np.arange(CHUNK)
        is_token = tokens < end
        place = np.empty(chunks.num_tokens, np.int64)
        place[tokens[is_token]] = np.flatnonzero(is_token)
        return _Places(
            torch.from_numpy(np.minimum(tokens, end - 1)),
            torch.from_numpy(is_token),
            torch.from_numpy(place),
            np.bincount(step).tolist(),
        )

    def chunks_of(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, K] as [N, H, C, K], 0 behind the chunks' ends."""
        rows = x.index_select(0, self.tokens.flatten()).view(*self.tokens.shape, *x.shape[1:])
        return rows.mul_(self.is_token[..., None, None]).transpose(1, 2).contiguous()

    def tokens_of(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H, C, K] as [T, H, K]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.place)

    def steps(self) -> Iterator[slice]:
        """The chunks of each step in turn."""
        first = 0
        for count in self.counts:
            yield slice(first, first + count)
            first += count


@dataclass(frozen=True, eq=False)
class _Parts:
    """All inputs as chunks, key heads repeated: q, k [N, G, C, K], v [N, G, C, V], beta, E (`grown`) and F (`fading`)
    [N, G, C, 1], E_last (`last`) [N, G, 1, 1], D (`decay`) and A (`system`) [N, G, C, C].
    """

    places: _Places
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    grown: torch.Tensor
    fading: torch.Tensor
    last: torch.Tensor
    decay: torch.Tensor
    system: torch.Tensor

    @staticmethod
    def make(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        chunks: Chunks,
    ) -> "_Parts":
        places = _Places.of(chunks)
        num_tiles = v.shape[1] // q.shape[1]
        q_C, k_C = (places.chunks_of(x).repeat(1, num_tiles, 1, 1) for x in (q, k))
        v_C, log_decay_C, beta_C = (places.chunks_of(x) for x in (v, log_decay.unsqueeze(-1), beta.unsqueeze(-1)))
        gamma = log_decay_C.cumsum(2)
        last = gamma[:, :, -1:]
        is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu_(1)
        decay = (gamma - gamma.transpose(-1, -2)).masked_fill_(is_later, -torch.inf).exp_()
        system = (k_C @ k_C.transpose(-1, -2)).mul_(decay).mul_(beta_C).tril_(-1)
        return _Parts(places, q_C, k_C, v_C, beta_C, gamma.exp(), (last - gamma).exp(), last.exp(), decay, system)

    def run_states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """W [N, G, C, K], U [N, G, C, V], and the state that each chunk begins with, [N, G, K, V]."""
        wanted = torch.cat([self.k * self.grown, self.v], -1).mul_(self.beta)
        solved = torch.linalg.solve_triangular(self.system, wanted, upper=False, unitriangular=True)
        w, u = solved.split([self.k.shape[-1], self.v.shape[-1]], -1)
        faded = (self.k * self.fading).transpose(-1, -2)
        states = self.k.new_empty(*self.k.shape[:2], self.k.shape[-1], self.v.shape[-1])
        state = states.new_zeros(self.places.counts[0], *states.shape[1:])
        u = u.contiguous()
        for part in self.places.steps():
            # Documents that have ended are the last ones.
            state = state[: part.stop - part.start]
            states[part] = state
            u[part] -= w[part] @ state
            state = state * self.last[part] + faded[part] @ u[part]
        return w, u, states

    def gradients(
        self, do: torch.Tensor, scale: float, num_key_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv, d_log_decay, d_beta in tokens, from c dO in chunks."""
        q, k, beta, grown, fading, decay = self.q, self.k, self.beta, self.grown, self.fading, self.decay
        w, u, states = self.run_states()
        scores = (q @ k.transpose(-1, -2)).mul_(decay)
        du, d_states = self._run_d_states(do, scores.transpose(-1, -2) @ do, w)
        dr = torch.linalg.solve_triangular(self.system.transpose(-1, -2), du, upper=True, unitriangular=True)
        d_scores = (do @ u.transpose(-1, -2)).tril_()
        d_system = (dr @ u.transpose(-1, -2)).neg_().tril_(-1)
        # What gamma gets from each pair of tokens: the weight between them times its gradient.
        pairs = scores.mul_(d_scores).addcmul_(d_system, self.system)
        d_gamma = pairs.sum(-1, keepdim=True) - pairs.sum(-2).unsqueeze(-1)
        del scores, pairs
        d_beta = (d_system * decay * (k @ k.transpose(-1, -2))).sum(-1, keepdim=True)
        d_scores.mul_(decay)
        d_system.mul_(decay).mul_(beta)

        dq = (do @ states.transpose(-1, -2)).mul_(grown)
        d_gamma += (dq * q).sum(-1, keepdim=True)
        dq += d_scores @ k
        seen = (dr @ states.transpose(-1, -2)).mul_(grown)
        of_seen = (seen * k).sum(-1, keepdim=True)
        d_beta += (dr * self.v).sum(-1, keepdim=True) - of_seen
        given = (u @ d_states.transpose(-1, -2)).mul_(fading)
        of_given = (given * k).sum(-1, keepdim=True)
        d_gamma -= of_seen * beta + of_given
        d_last = of_given.sum(2, keepdim=True) + self.last * (states * d_states).sum((2, 3), keepdim=True)
        dk = given - seen * beta + d_scores.transpose(-1, -2) @ q
        dk += (d_system + d_system.transpose(-1, -2)) @ k
        d_decay = d_gamma.flip(2).cumsum(2).flip(2) + d_last
        tokens_of = self.places.tokens_of
        num_tokens, key_size = self.places.place.shape[0], q.shape[-1]
        dq, dk = (tokens_of(part).view(num_tokens, -1, num_key_heads, key_size).sum(1) for part in (dq, dk))
        return dq, dk, tokens_of(dr * beta), tokens_of(d_decay).squeeze(-1), tokens_of(d_beta).squeeze(-1)

    def _run_d_states(self, do: torch.Tensor, du: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dU, whose part from the chunk's own outputs is given, and Z, the gradient of the state that each chunk ends
        with.
        """
        k_faded = self.k * self.fading
        q_grown = (self.q * self.grown).transpose(-1, -2)
        w = w.transpose(-1, -2)
        d_states = self.k.new_empty(*self.k.shape[:2], self.k.shape[-1], self.v.shape[-1])
        d_state = d_states.new_zeros(self.places.counts[0], *d_states.shape[1:])
        for part in reversed(list(self.places.steps())):
            num_documents = part.stop - part.start
            d_states[part] = d_state[:num_documents]
            du[part] += k_faded[part] @ d_states[part]
            d_state[:num_documents] *= self.last[part]
            d_state[:num_documents] += q_grown[part] @ do[part] - w[part] @ du[part]
        return du, d_states
