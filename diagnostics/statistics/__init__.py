"""Means, families of tests, intervals and bands: what can be said of numbers that scatter. numpy and scipy alone.

``means`` tests a mean of signed errors, ``welch`` a difference of two, ``sizes`` bounds a ratio of two sizes, ``sums``
puts a band around running sums over steps, ``drift`` around one over rows, ``orders`` tests whether numbers grow.
"""
