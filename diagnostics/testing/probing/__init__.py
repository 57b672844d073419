"""Probes of any attention callable: ``attn_diag.probe`` and ``attn-diag probe``."""
