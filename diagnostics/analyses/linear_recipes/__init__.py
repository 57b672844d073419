"""Linear attention's recipes: ``identify_linear``, ``attribute_linear``, ``what_if_linear``."""
