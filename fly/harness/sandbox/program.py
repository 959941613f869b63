"""The program's process: executes what a model wrote, then does what the tests ask of it.

It holds no verdict, no secret and no test: only the two pipes over which it is asked for calls.
Whatever the program does to this code, it can only change what it answers.
"""

import _thread
import gc
import operator
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

from wire import CannotBeAsked, Garbled, Gone, Peer, decode

_THREAD_GRACE = 0.5  # seconds a thread that is just finishing may still take


def _enter(manager: Any) -> Any:
    return type(manager).__enter__(manager)


def _exit(manager: Any, error: BaseException | None) -> Any:
    trace = error and error.__traceback__
    return type(manager).__exit__(manager, error and type(error), error, trace)


def _run(coroutine: types.CoroutineType) -> Any:
    import asyncio  # which few programs need

    return asyncio.run(coroutine)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__.lstrip("_"): function
    for function in (
        getattr, setattr, delattr, operator.getitem, operator.setitem, operator.delitem,
        operator.contains, iter, next, len, bool, int, float, str, repr, _enter, _exit, _run,
    )
}  # fmt: skip


class ProgramPeer(Peer):
    """Answers for the module that the source became."""

    def __init__(self, receive: int, send: int) -> None:
        super().__init__(receive, send)
        self.module = types.ModuleType("program")  # code_eval runs no __main__ block either
        sys.modules["program"] = self.module
        self._process = os.getpid()

    def put(self, message: list) -> None:
        """Of a copy that the program forks, nothing is sent."""
        if os.getpid() != self._process:
            raise Gone
        super().put(message)

    def perform(self, operation: str, target: Any, args: list, kwargs: dict) -> Any:
        if operation == "globals":
            return {name: vars(self.module)[name] for name in args if name in vars(self.module)}
        if operation == "threads":
            _close_executors()
            deadline = time.monotonic() + _THREAD_GRACE
            while _thread._count() and time.monotonic() < deadline:
                time.sleep(0.002)
            return _thread._count()
        found = self.found(target)
        if operation == "call":
            return found(*args, **kwargs)
        if operation == "isinstance":
            return isinstance(args[0], found)
        return _OPERATIONS[operation](found, *args)

    def resolve(self, data: list) -> Any:
        kind, number = data
        if kind == "yours":
            return self.found(number)
        if kind == "iterator":
            return iter(decode(number, self.resolve))
        return _Tests(self, number)

    def refer(self, value: Any) -> list:
        if isinstance(value, _Tests):
            return value.reference
        reference = super().refer(value)
        return ["coroutine", reference[1]] if type(value) is types.CoroutineType else reference


class _Tests:
    """A function of the tests', handed to the program as an argument."""

    def __init__(self, program: ProgramPeer, number: int) -> None:
        self.reference = ["yours", number]
        self._program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.ask("call", self.reference[1], args, kwargs)


def _close_executors() -> None:
    """Close what Python closes at its end: executors that were left open, and are idle or not."""
    if futures := sys.modules.get("concurrent.futures"):
        for value in gc.get_objects():
            if issubclass(type(value), futures.Executor):
                value.shutdown(wait=False)


def run(source: str, pipes: Sequence[int]) -> None:
    """Execute the source and answer for it."""
    program = ProgramPeer(*pipes)
    try:
        try:
            exec(compile(source, "<program>", "exec"), program.module.__dict__)
        except BaseException as error:
            program.tell(error)
            return
        program.put(["value", None, {}])  # the source ran to its end
        while True:
            program.answer(program.get())
    except (Gone, Garbled, CannotBeAsked):
        pass
