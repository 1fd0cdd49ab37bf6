"""Proof that an adapter means the same in llama.cpp as it did in training."""
