"""Kernels in, result out: ``probe``, ``check``, ``replay``, ``assert_unbiased``, ``selftest`` and ``round_to``."""
