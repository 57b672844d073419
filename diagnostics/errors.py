"""The errors a user can cause, and does not need a traceback for."""

from attn_diag.printing import inert, printable


class AttnDiagError(Exception):
    """Base of every error this package raises on purpose. Its message is one line, whatever the names in it."""

    def __init__(self, message: str) -> None:
        super().__init__(inert(printable(message)))


class InputError(AttnDiagError):
    """A file, tensor or option that cannot be used. The message says what was expected, what came, what to do."""
