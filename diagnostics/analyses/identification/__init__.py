"""Which recipe and schedule made an observation: ``attn-diag identify``."""
