"""attn-diag: signed rounding-error diagnostics for low-precision attention.

    import attn_diag
    diagnosis = attn_diag.inspect(q, k, v, o=o, do=do, causal="top-left")
    print(diagnosis.report())

Names are imported on first use, so that importing the package (and ``attn-diag --help``) needs no torch; which there
are, and where each is defined, stands in ``__init__.pyi`` alone.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
