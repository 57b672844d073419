"""Attention calls of a running model, as their kernels saw them: ``capture``, and what the monitor listens to."""
