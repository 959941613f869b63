"""The exceptions whose text is meant for the user, and what their texts are made of."""

from __future__ import annotations

from collections.abc import Sequence


class FlyError(ValueError):
    """Bad input. The message is one line: the setting, its value, and what to change.

    The command line prints it without a traceback and exits with status 2.
    """


class LostProcessError(FlyError):
    """Another process of the run has ended, or does not answer."""


def summarize_names(names: Sequence[str]) -> str:
    """The first three of them, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def reason_of(error: BaseException) -> str:
    """Why a library refused, to be put into a line: the first of its error's own, at most 300
    characters; the error's class where that says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
