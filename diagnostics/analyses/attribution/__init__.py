"""Which rounding site makes the errors: ``attn-diag attribute``."""
