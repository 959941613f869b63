"""The exceptions whose text is meant for the user."""


class FlyError(ValueError):
    """Bad input. The message is one line: the field, the value, the fix.

    The command line prints it without a traceback and exits with status 2.
    """


class LostProcessError(FlyError):
    """Another process of the run has ended, or does not answer."""
