"""One line in other people's trainers: Hugging Face, Lightning, Accelerate. Public names: ``attn_diag``."""
