"""Where and how a quantity is wrong. Where to begin:

- ``find`` goes from an ``evidence`` to patterns: ``places`` and ``lines`` first, then how they came about
- guesses by quantity: O in ``forward``, LSE and delta in ``rowwise``, dQ, dK and dV in ``backward``
- guesses by cause: ``readings`` (mask, scale, softcap, another head), ``lost_parts``, ``not_cleared``, ``misread``,
  ``other_scale``, ``parts_of_heads``, ``of_*``
- ``of_capture`` runs them on a capture, ``worded`` says what was found
"""
