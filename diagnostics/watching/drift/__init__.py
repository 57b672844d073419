"""Where dtypes drift under mixed precision: ``trace_dtypes``, ``check_qkv`` and ``attn-diag dtypes``."""
