"""From figures to a verdict: each quantity is judged in ``quality``, a head's labels are given in ``verdict``."""
