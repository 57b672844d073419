"""What would remove the errors: ``attn-diag what-if``."""
