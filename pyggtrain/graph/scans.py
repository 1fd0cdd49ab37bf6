"""Recurrences with decay, a chunk of tokens at a time: inside a chunk matrix products, between chunks one state.

With G the sum of log decays from a chunk's first token on, what token s put into the state has faded by exp(G_t - G_s)
when token t reads it. Differences are masked before the exponential, so nothing overflows, whatever the decay.

State space (Dao & Gu 2024, eq. 6 and 20): y_t = Σ_{s <= t} exp(G_t - G_s) (c_t·b_s) x_s + exp(G_t) S c_t.

Gated delta rule (Yang et al. 2024, section 3.3): the values u that really enter the state solve a unit lower triangular
system, u_t = b_t (v_t - exp(G_t) S k_t - Σ_{s < t} exp(G_t - G_s) (k_t·k_s) u_s), and then y is as above with q, k, u
for c, b, x. (With a decay for each head and documents `ops.gated_delta_rule` does it.) RWKV-6 and 7 (Peng et al. 2024,
eq. 17; 2025) are of these two kinds. Decays are one for each head, or one for each channel of a key, which then stands
inside the dot products.
"""

import math

import torch
from torch.nn import functional

# Tokens of a chunk with one decay for each head: matrices of 64 x 64. With one for each channel they are 16 x 16 x K.
CHUNK = 64
CHUNK_BY_CHANNEL = 16
# Tokens whose chunks are computed at the same time.
SPAN = 2048


def state_space(
    x: torch.Tensor, log_decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = exp(log_decay_t) S_{t-1} + x_t b_tᵀ, y_t = S_t c_t.

    All chunks of a span of tokens at once: what their states are when they begin is one more product, of chunks by
    chunks.

    Args:
        x: [Q, T, H, P].
        log_decay: [Q, T, H], at most 0.
        b, c: [Q, T, G, N], H % G == 0: head h reads group h // (H / G).
        state: S_0, [Q, H, P, N].

    Returns:
        y [Q, T, H, P] and the last state.
    """
    outputs = []
    for first in range(0, x.shape[1], SPAN):
        span = slice(first, first + SPAN)
        y, state = _state_space_span(x[:, span], log_decay[:, span], b[:, span], c[:, span], state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def _state_space_span(
    x: torch.Tensor, log_decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `state_space`, of at most `SPAN` tokens. Letters: c is chunks, l tokens of one, g groups, r heads of one."""
    num_sequences, num_tokens, num_heads, width = x.shape
    num_groups = b.shape[2]
    # Tokens behind the end put nothing into the state and do not fade it.
    missing = -num_tokens % CHUNK
    x, b, c = (functional.pad(part, (0, 0, 0, 0, 0, missing)) for part in (x, b, c))
    log_decay = functional.pad(log_decay, (0, 0, 0, missing))

    def grouped(part: torch.Tensor) -> torch.Tensor:
        """[Q, T, heads, ...] -> [Q, c, g, r, l, ...]."""
        num_each = part.shape[2] // num_groups
        chunks = part.reshape(num_sequences, -1, CHUNK, num_groups, num_each, *part.shape[3:])
        return chunks.permute(0, 1, 3, 4, 2, *range(5, chunks.dim()))

    g = grouped(log_decay).cumsum(-1)
    x, b, c = grouped(x), grouped(b).squeeze(3), grouped(c).squeeze(3)
    weights = (c @ b.transpose(-1, -2)).unsqueeze(3) * _faded(g.unsqueeze(-1)).squeeze(-1)
    y = weights @ x
    # What each chunk alone leaves behind, [Q, c, g, r, P, N], and how all of it has faded when a later one begins.
    last = g[..., -1:]
    left = (x * (last - g).exp().unsqueeze(-1)).transpose(-1, -2).flatten(3, 4) @ b
    total = torch.cat([torch.zeros_like(last[:, :1]), last], 1).squeeze(-1).cumsum(1)
    num_chunks = left.shape[1]
    is_later = torch.ones(num_chunks + 1, num_chunks + 1, dtype=torch.bool, device=x.device).triu(1)
    faded = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(is_later[..., None, None], -math.inf).exp()
    start = state.reshape(num_sequences, 1, num_groups, -1, *state.shape[2:])
    entering = torch.cat([start, left.view(*left.shape[:3], -1, width, left.shape[-1])], 1)
    states = torch.einsum("qijgr,qjgrpn->qigrpn", faded, entering)
    before, state = states[:, :-1], states[:, -1].flatten(1, 2)
    seen = c @ before.flatten(3, 4).transpose(-1, -2)
    seen = seen.view(*seen.shape[:-1], -1, width).transpose(3, 4)
    y = y + g.exp().unsqueeze(-1) * seen
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(num_sequences, -1, num_heads, width)
    return y[:, :num_tokens], state


def state_space_by_state(
    x: torch.Tensor, log_decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = S_{t-1} diag(exp log_decay_t) + x_t b_tᵀ, y_t = S_t c_t: as `state_space`, one decay for each state.

    The states of a chunk are made by doubling (Hillis & Steele 1986): two tokens' steps are one step with the product
    of their decays, so log2 of a chunk's length passes over all of it replace as many small steps as it has tokens.

    Args:
        x: [Q, T, H, P].
        log_decay: [Q, T, H, N], at most 0.
        b, c: [Q, T, H, N].
        state: S_0, [Q, H, P, N].
    """
    outputs = []
    for first in range(0, x.shape[1], CHUNK):
        x_t, g_t, b_t, c_t = (part[:, first : first + CHUNK] for part in (x, log_decay, b, c))
        entering, decay = x_t.unsqueeze(-1) * b_t.unsqueeze(-2), g_t.exp().unsqueeze(-2)
        entering = torch.cat([entering[:, :1] + decay[:, :1] * state.unsqueeze(1), entering[:, 1:]], 1)
        distance = 1
        while distance < x_t.shape[1]:
            faded = decay[:, distance:] * entering[:, :-distance]
            entering = torch.cat([entering[:, :distance], entering[:, distance:] + faded], 1)
            decay = torch.cat([decay[:, :distance], decay[:, distance:] * decay[:, :-distance]], 1)
            distance *= 2
        outputs.append((entering @ c_t.unsqueeze(-1)).squeeze(-1))
        state = entering[:, -1]
    return torch.cat(outputs, 1), state


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = D_t S_{t-1} + beta_t (v_t - D_t S_{t-1} k_t) k_tᵀ with D_t S = S diag(exp log_decay_t), y_t = S_t q_t.

    Args:
        q, k: [Q, T, H, K].
        v: [Q, T, H, V].
        log_decay: [Q, T, H, 1] or, by channel, [Q, T, H, K]; at most 0.
        beta: [Q, T, H, 1].
        state: S_0, [Q, H, V, K].

    Returns:
        y [Q, T, H, V] and the last state.
    """
    is_by_channel = log_decay.shape[-1] > 1
    size = CHUNK_BY_CHANNEL if is_by_channel else CHUNK
    outputs = []
    q, k, v, log_decay, beta = (part.transpose(1, 2) for part in (q, k, v, log_decay, beta))
    for first in range(0, q.shape[2], size):
        q_t, k_t, v_t, g_t, beta_t = (part[:, :, first : first + size] for part in (q, k, v, log_decay, beta))
        g_t = g_t.cumsum(2)
        faded = _faded(g_t)
        if is_by_channel:
            kept = faded * k_t.unsqueeze(-3)
            keys, scores = ((part.unsqueeze(-2) * kept).sum(-1) for part in (k_t, q_t))
        else:
            keys, scores = (part @ k_t.transpose(-1, -2) * faded.squeeze(-1) for part in (k_t, q_t))
        # Of the system only what lies below the diagonal is read; that is 1.
        wanted = beta_t * (v_t - (k_t * g_t.exp()) @ state.transpose(-1, -2))
        u_t = torch.linalg.solve_triangular(beta_t * keys, wanted, upper=False, unitriangular=True)
        outputs.append(scores @ u_t + (q_t * g_t.exp()) @ state.transpose(-1, -2))
        last = g_t[:, :, -1:]
        state = state * last.exp() + u_t.transpose(-1, -2) @ (k_t * (last - g_t).exp())
    return torch.cat(outputs, 2).transpose(1, 2), state


def rwkv_6(
    k: torch.Tensor, v: torch.Tensor, r: torch.Tensor, decay: torch.Tensor, bonus: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y_t = (S_{t-1} + v_t (u ∘ k_t)ᵀ) r_t, S_t = S_{t-1} diag(w_t) + v_t k_tᵀ.

    Args:
        k, v, r: [Q, T, H, K].
        decay: w, [Q, T, H, K], above 0 and at most 1.
        bonus: u, [H, K].
        state: S_0, [Q, H, K, K].

    Returns:
        y [Q, T, H, K] and the last state.
    """
    outputs = []
    k, v, r, log_decay = (part.transpose(1, 2) for part in (k, v, r, _log(decay)))
    for first in range(0, k.shape[2], CHUNK_BY_CHANNEL):
        k_t, v_t, r_t, g_t = (part[:, :, first : first + CHUNK_BY_CHANNEL] for part in (k, v, r, log_decay))
        # A token meets the state before its own decay.
        before, g_t = g_t.cumsum(2) - g_t, g_t.cumsum(2)
        pairs = (r_t.unsqueeze(-2) * _faded_between(before, g_t) * k_t.unsqueeze(-3)).sum(-1)
        own = (r_t * bonus.unsqueeze(-2) * k_t).sum(-1, keepdim=True) * v_t
        outputs.append(pairs @ v_t + own + (r_t * before.exp()) @ state.transpose(-1, -2))
        last = g_t[:, :, -1:]
        state = state * last.exp() + v_t.transpose(-1, -2) @ (k_t * (last - g_t).exp())
    return torch.cat(outputs, 2).transpose(1, 2), state


def rwkv_7(
    r: torch.Tensor,
    decay: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = S_{t-1} diag(w_t) + (S_{t-1} a_t) b_tᵀ + v_t k_tᵀ, y_t = S_t r_t.

    What token t takes out, z_t = S_{t-1} a_t, depends on what earlier ones of its chunk took out: a unit lower
    triangular system, as in the delta rule.

    Args:
        r, k, v, a, b: [Q, T, H, K].
        decay: w, [Q, T, H, K], above 0 and at most 1.
        state: S_0, [Q, H, K, K].

    Returns:
        y [Q, T, H, K] and the last state.
    """
    outputs = []
    r, k, v, a, b, log_decay = (part.transpose(1, 2) for part in (r, k, v, a, b, _log(decay)))
    for first in range(0, k.shape[2], CHUNK_BY_CHANNEL):
        r_t, k_t, v_t, a_t, b_t, g_t = (
            part[:, :, first : first + CHUNK_BY_CHANNEL] for part in (r, k, v, a, b, log_decay)
        )
        before, g_t = g_t.cumsum(2) - g_t, g_t.cumsum(2)
        a_faded = a_t.unsqueeze(-2) * _faded_between(before, g_t)
        r_faded = r_t.unsqueeze(-2) * _faded(g_t)
        of_b, of_k = ((a_faded * part.unsqueeze(-3)).sum(-1) for part in (b_t, k_t))
        wanted = (a_t * before.exp()) @ state.transpose(-1, -2) + of_k @ v_t
        # Of the system only what lies below the diagonal is read; that is 1.
        z_t = torch.linalg.solve_triangular(-of_b, wanted, upper=False, unitriangular=True)
        of_b, of_k = ((r_faded * part.unsqueeze(-3)).sum(-1) for part in (b_t, k_t))
        outputs.append((r_t * g_t.exp()) @ state.transpose(-1, -2) + of_b @ z_t + of_k @ v_t)
        last = g_t[:, :, -1:]
        left = (last - g_t).exp()
        state = state * last.exp() + z_t.transpose(-1, -2) @ (b_t * left) + v_t.transpose(-1, -2) @ (k_t * left)
    return torch.cat(outputs, 2).transpose(1, 2), state


def _log(decay: torch.Tensor) -> torch.Tensor:
    """A decay that has underflown to 0 has no logarithm; what it leaves of a state is as little as nothing."""
    return decay.clamp(min=1e-30).log()


def _faded_between(before: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """exp(before_t - G_s) for s < t, else 0: [.., T, K] each -> [.., T, T, K]."""
    num_tokens = g.shape[-2]
    is_not_earlier = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=g.device).triu().unsqueeze(-1)
    return (before.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(is_not_earlier, -math.inf).exp()


def _faded(g: torch.Tensor) -> torch.Tensor:
    """exp(G_t - G_s) for s <= t, 0 for later s: [.., T, K] -> [.., T, T, K]."""
    num_tokens = g.shape[-2]
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=g.device).triu(1).unsqueeze(-1)
    return (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(is_later, -math.inf).exp()
