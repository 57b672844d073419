"""Two runs of the same tokens: where they part, and why. Where to begin:

- ``mismatch`` is the command; ``tokens`` and ``pairing`` put the captures of each run together, and side by side
- ``layers`` is one layer of both, ``split`` what its difference of O consists of, ``causes`` what makes it, in words
- causes in O: ``hypotheses`` and ``fit``, ``coarse``, ``small``, ``stray``, ``nonfinite``
- causes in x, q, k and v: ``rotation``, ``norms``, ``weights``, ``storage``, ``cache``
- rings: ``rings``, ``hops``, ``merges``
- the output projection's sum over ranks: ``sums``, ``outputs``, ``reduced``, ``reductions``
- what would be left: ``repairs``; the log-probabilities' metrics: ``logprobs``
"""
