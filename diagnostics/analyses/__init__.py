"""Captures in, results out: one module or folder for each command; the rules of a verdict are in ``verdicts``."""
