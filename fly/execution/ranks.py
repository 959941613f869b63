"""The processes of a run: what they exchange, and what the first one decides for all.

Data parallel, every process decodes requests of its own. Tensor parallel, all decode the same
requests, each with its shard of the target, and must never part: the first one drafts and judges
for all (`from_first`), and before every pass of the target all compare what they feed (`watch`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from fly.errors import FlyError, LostProcessError
from fly.execution.oom import is_out_of_memory

_T = TypeVar("_T")
PATIENCE = timedelta(minutes=10)  # of processes that do the same at the same time
_LOST = ("connection closed", "connection reset", "broken pipe", "remote process exited")
_LATE = ("timed out", "timeout")


class Ranks:
    """`size` processes, of which this is number `rank`; by default one that is alone.

    All of them must create it, and call its methods in the same order. patience: how long one waits
    for the others, PATIENCE by default. What is exchanged goes over gloo on the host, which notices
    at once if a process has ended. Methods raise LostProcessError if one has, or does not come in
    time.
    """

    def __init__(self, rank: int = 0, size: int = 1, patience: timedelta | None = None) -> None:
        self.rank, self.size = rank, size
        self._patience = patience or PATIENCE
        self._group: Any = None
        if size > 1:
            self._group = distributed.new_group(backend="gloo", timeout=self._patience)

    def exchange(self, what: str, value: Any = None) -> list[Any]:
        """Everybody's value, by rank. Raises FlyError if they are not all at the same `what`."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self._noticing_loss():
            distributed.all_gather_object(found, (what, value), group=self._group)
        if len({where for where, _ in found}) > 1:
            raise _parted(f"rank {rank} is at {where}" for rank, (where, _) in enumerate(found))
        return [value for _, value in found]

    def from_first(self, what: str, compute: Callable[[], _T]) -> _T:
        """What the first process computes; the others wait. If it runs out of memory, all do."""
        if self.size == 1:
            return compute()
        result, failure = None, None
        if self.rank == 0:
            try:
                result = compute()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
        first, failed = self.exchange(what, (result, failure is not None))[0]
        if failed:
            raise failure or MemoryError("the first process is out of memory")
        return first if result is None else result

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

    def watch(self, model: PreTrainedModel) -> None:
        """From now on compare what all feed to this model, before each of its passes.

        A pass of processes that have parted would wait for ever, or mix their numbers.
        """
        forward = model.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            fed = args[0] if args else kwargs["input_ids"]
            digests = self.exchange("a pass", _digest(fed, kwargs.get("position_ids")))
            if len(set(digests)) > 1:
                raise _parted(["their next passes are over different tokens"])
            with self._noticing_loss():
                return forward(*args, **kwargs)

        model.forward = watched

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            message = str(error).lower()
            if any(word in message for word in _LATE):
                raise LostProcessError(
                    f"rank {self.rank}: another process of this run did not answer within "
                    f"{self._patience.total_seconds():.0f} s: start the run again"
                ) from error
            if any(word in message for word in _LOST):
                raise LostProcessError(
                    f"rank {self.rank}: another process of this run has ended: its own last line "
                    "or its launcher says why"
                ) from error
            raise


def _digest(*tensors: Tensor | None) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            found.update(f"{tuple(tensor.shape)}".encode())
            found.update(tensor.to("cpu", torch.int64).contiguous().numpy().tobytes())
    return found.hexdigest()


def _parted(how: Any) -> FlyError:
    return FlyError(
        f"the processes of this run have parted: {', '.join(how)}: this is a defect of fly or of "
        "the machine; --resume goes on with what was finished"
    )
