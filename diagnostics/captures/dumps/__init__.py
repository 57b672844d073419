"""Other tools' dumps of attention calls, read for ``convert``: one module a tool, and what they share.

``call``: a call, and every capture that it may be; ``names``: which tensor of a dump is which.
"""
