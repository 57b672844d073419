"""Kernels in, result out: ``probe``, ``check``, ``replay``, ``assert_unbiased``, ``selftest``,
``round_to`` and ``quantize``."""
