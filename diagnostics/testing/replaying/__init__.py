"""A capture through every kernel that is installed, each in a process of its own: ``attn_diag.replay``."""
