"""The processes of a run, each of which decodes requests of its own, and what they exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from fly.errors import LostProcessError

_T = TypeVar("_T")
_PATIENCE = timedelta(weeks=52)  # a process waits until the others have decoded their share
_LOST = (
    "connection closed", "connection reset", "broken pipe", "remote process exited", "timed out",
)  # fmt: skip


class Ranks:
    """`size` processes, of which this is number `rank`; by default one that is alone.

    All of them must create it, and call its methods in the same order. What is exchanged goes over
    gloo on the host, which notices at once if a process has ended. Methods raise LostProcessError
    if one has.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        if size > 1:
            self._group = distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def exchange(self, value: _T) -> list[_T]:
        """Everybody's value, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self._noticing_loss():
            distributed.all_gather_object(found, value, group=self._group)
        return found

    def broadcast(self, value: _T) -> _T:
        """The first process's value, which may be large."""
        values = [value]
        if self.size > 1:
            with self._noticing_loss():
                distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def gather(self, value: _T) -> list[_T] | None:
        """Everybody's value, by rank, in the first process; None in the others."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._noticing_loss():
            distributed.gather_object(value, found, dst=0, group=self._group)
        return found

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if any(word in str(error).lower() for word in _LOST):
                raise LostProcessError(
                    f"rank {self.rank}: another process of this run has ended: its own last line "
                    "or its launcher says why"
                ) from error
            raise
