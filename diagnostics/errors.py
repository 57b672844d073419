"""The errors a user can cause, and does not need a traceback for."""


class AttnDiagError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(AttnDiagError):
    """A file, tensor or option that cannot be used. The message says what was expected, what came, what to do."""
