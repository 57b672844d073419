"""``attn-diag diff``: which head of B is which of A, and what changed beyond chance."""
