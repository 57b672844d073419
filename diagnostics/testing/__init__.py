"""Kernels in, result out: ``probe``, ``check``, ``assert_unbiased``, ``selftest`` and ``round_to``."""
