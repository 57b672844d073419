"""``attn-diag inspect``: captures in, a diagnosis out."""
