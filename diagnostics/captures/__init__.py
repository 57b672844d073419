"""What was recorded: captures (format 1) in memory and in files.

``capture`` has ``Capture``, and what makes one valid; ``metadata`` what it says about itself. ``loading`` reads
captures from safetensors, .pt and .npz files; ``files`` writes files whole or not at all. ``merge`` puts together what
the ranks of one run wrote, ``selection`` says which heads are looked at. ``dumps`` reads other tools' dumps, one module
a tool; ``hardware`` keeps what was measured of a GPU.
"""
