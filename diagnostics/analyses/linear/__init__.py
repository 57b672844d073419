"""Linear attention: ``inspect``, ``diff``, ``identify``, ``attribute`` and ``what_if``, and what these stand on."""
