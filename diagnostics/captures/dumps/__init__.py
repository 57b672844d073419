"""Other tools' dumps of attention calls, converted to capture format 1: ``convert`` and ``attn-diag convert``."""
