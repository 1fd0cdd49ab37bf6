"""Causal attention over packed documents: grouped heads, sliding window, soft-cap, sinks.

    z_ts = softmax_scale q_t . k_s,  capped: z = c tanh(z / c)        for first_key_t <= s <= t, else -inf
    p_ts = exp(z_ts - lse_t),  lse_t = log(sum_s exp(z_ts) + exp(sink))
    o_t  = sum_s p_ts v_s                                                           (Dao 2023, algorithm 1)

Documents and window are one thing here: the first key that a token sees. Both it and the last query that a key is seen
by grow along the packed row, so a block of queries runs from the first key of its first row to its own last row; only
blocks at the two ends need a mask. Nothing needs the lengths of documents on the host, so a CUDA graph of it serves any
batch of as many tokens.

Backward, with D_t = o_t . do_t and everything of a block made again from q, k and lse      (Dao 2023, algorithm 2):

    dv_s = sum_t p_ts do_t          dz_ts = p_ts (do_t . v_s - D_t) (1 - (z_ts / c)^2 when capped)
    dq_t = softmax_scale sum_s dz_ts k_s          dk_s = softmax_scale sum_t dz_ts q_t

Two kernels, one summing over keys and one over queries (all query heads of a key head in one program): 7 products
instead of 5, no atomics, the same bits on every run. Heads of 256 sum dk and dv one after the other (8 products), as
both do not fit the registers; and where blocks and key heads make too few programs to fill a card, each takes part of
the query heads, and a third kernel adds up the parts (float32). A sink is a constant of the model and gets no gradient.

Saved: o and lse (float32, natural logarithm, [H, T]). Products of bfloat16 accumulate in float32; p and dz are rounded
to the inputs' dtype for the second product. Head size up to 256, q, k and v alike.

On Hopper, cuDNN is faster for documents of one length without any of the options; docs/performance.md has both.

    mask.py       which keys a token sees; checks (no Triton)
    scores.py     device functions that forward and backward share, and tile sizes
    forward.py    attention_forward
    backward.py   attention_backward
"""
