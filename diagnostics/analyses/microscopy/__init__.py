"""One element of O, rounding by rounding, and the closed form of its error: ``attn-diag microscope``."""
