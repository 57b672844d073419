"""Where and how a quantity is wrong: ``find_patterns`` of an ``Evidence``, ``with_patterns`` of a verdict."""
