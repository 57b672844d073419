"""``python -m attn_diag``."""

from attn_diag.cli import main

main()
