"""The gated delta rule over packed documents, in chunks of 64 tokens (Yang et al. 2024, sections 3.2 and 3.3).

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}ᵀ k_t))ᵀ,   o_t = scale S_tᵀ q_t;   S = 0 at first

q, k [T, N, K], v and o [T, G, V], g (log decay, at most 0) and beta float32 [T, G]. Value head h reads key head h mod
N: the order of a GGUF file, in which value heads are tiled over key heads (transformers groups them).

In a chunk, with gamma_t the sum of g from its first token to t, D_ts = exp(gamma_t - gamma_s) for s <= t, E_t =
exp(gamma_t), F_t = exp(gamma_last - gamma_t) and S the state that the chunk begins with:

    A_ts = beta_t D_ts k_t·k_s for s < t                X = (I + A)⁻¹
    U = X (beta ∘ v) - W S                              W = X (beta E ∘ k)
    O = scale (E ∘ q S + P U)                           P_ts = D_ts q_t·k_s for s <= t
    S' = E_last S + (F ∘ k)ᵀ U

Backward. With Z the gradient of S', R = beta (v - E k S) (so that U = X R) and c for scale:

    dU = c Pᵀ dO + F ∘ k Z             dR = Xᵀ dU             dS = E_last Z + c (E ∘ q)ᵀ dO - Wᵀ dU
    dv = beta dR                       dP = c dO Uᵀ           dA = -dR Uᵀ, as d(I + A)⁻¹ = -X dA X
    dq = c E ∘ dO Sᵀ + (dP ∘ D) k
    dk = F ∘ U Zᵀ - beta E ∘ dR Sᵀ + (dP ∘ D)ᵀ q + M k + Mᵀ k,  M = dA ∘ beta D
    dbeta_t = dR_t·(v_t - E_t (k S)_t) + Σ_s (dA A)_ts / beta_t
    dgamma_t = c E_t (dO Sᵀ)_t·q_t - beta_t E_t (dR Sᵀ)_t·k_t - F_t (U Zᵀ)_t·k_t
               + Σ_s (dP P + dA A)_ts - Σ_s (dP P + dA A)_st
               and at the last token also E_last <Z, S> + Σ_t F_t (U Zᵀ)_t·k_t
    dg_t = Σ_{r >= t} dgamma_r

Only the two recurrences over S and Z are serial; all else is one program for each chunk and head. gamma, D, A, X, S and
Z are float32 whatever the inputs; what enters a product is rounded to the inputs' dtype, sums are float32. Differences
of gamma are masked before the exponential: above the diagonal they would overflow. X comes from forward substitution in
blocks of 16 and products of blocks. (The product (I - A)(I + A²)(I + A⁴)... needs no substitution, but where keys
repeat its powers grow like binomials, and float32 does not hold their differences.)

Saved: nothing but the inputs; backward makes W, U and the states again. Heads of 16, 32, 64 or 128 numbers.

    chunks.py     where chunks begin (no Triton)
    tiles.py      device functions that forward and backward share, tile sizes, checks
    forward.py    gated_delta_rule_forward
    backward.py   gated_delta_rule_backward
"""
