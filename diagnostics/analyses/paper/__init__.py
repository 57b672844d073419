"""The figures of Qiu & Yao (arXiv 2510.04212) redrawn from captures: ``attn-diag figures``."""
