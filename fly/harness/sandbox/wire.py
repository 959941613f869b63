"""What the judge and the program say to each other: lines of JSON that hold plain data only.

The two processes share two pipes and nothing else. Nothing that arrives is executed, imported or
unpickled: a program that writes its own bytes into the pipe can only answer as data.
Standard library only: in isolated mode fly cannot be imported.
"""

import builtins
import json
import os
import sys
import types
from abc import ABC, abstractmethod
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MOST_BYTES = 64 << 20  # of one message
_RECURSION = 5000  # the limit while a value crosses; a list in a list takes two to four

# Types whose values cross as their constructor's arguments. They are found by module and name,
# because a sender that has not loaded the module has no such values.
_VALUES: dict[tuple[str, str], Callable[[Any], list]] = {
    ("builtins", "complex"): lambda x: [x.real, x.imag],
    ("builtins", "range"): lambda x: [x.start, x.stop, x.step],
    ("builtins", "slice"): lambda x: [x.start, x.stop, x.step],
    ("types", "EllipsisType"): lambda x: [],
    ("decimal", "Decimal"): lambda x: [str(x)],
    ("fractions", "Fraction"): lambda x: [x.numerator, x.denominator],
    ("datetime", "timedelta"): lambda x: [x.days, x.seconds, x.microseconds],
    ("datetime", "datetime"): lambda x: [
        x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond, x.tzinfo,
    ],  # before date, its base class
    ("datetime", "timezone"): lambda x: [x.utcoffset(None)],
    ("datetime", "date"): lambda x: [x.year, x.month, x.day],
    ("datetime", "time"): lambda x: [x.hour, x.minute, x.second, x.microsecond, x.tzinfo],
    ("collections", "OrderedDict"): lambda x: [list(x.items())],
}  # fmt: skip
# Types whose values cross as their items, and how they are made from them.
_ITERATED: dict[str, tuple[Any, Callable[..., Any]]] = {
    **{kind.__name__: (kind, kind) for kind in (list, tuple, set, frozenset, deque)},
    "dict_keys": (type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    "dict_items": (type({}.items()), lambda items: dict(items).items()),
}
_CONTAINERS = (list, tuple, dict, set, deque, bytearray)


class Gone(BaseException):  # no test's `except Exception` may take it for the program's error
    """The other process closed its pipe."""


class Garbled(BaseException):
    """What arrived is not a message, as `Peer` describes them."""


class CannotBeAsked(BaseException):
    """The tests need something that another process cannot be asked for."""


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Let values cross that are nested as deep as a program of the usual limit can make them."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def encode(value: Any, refer: Callable[[Any], list]) -> Any:
    """`value` as JSON. Subclasses cross as their base type; `refer` names what is not data."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < 1 << 63 else ["int", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        text = str.__str__(value)
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON would join a pair of surrogates into one letter
            return ["text", text.encode("utf-8", "surrogatepass").hex()]
        return text
    if isinstance(value, (bytes, bytearray)):
        return ["bytearray" if isinstance(value, bytearray) else "bytes", bytes(value).hex()]
    for name, (kind, _) in _ITERATED.items():
        if isinstance(value, kind):
            return [name, [encode(item, refer) for item in value]]
    for (module, name), arguments in _VALUES.items():
        known: Any = getattr(sys.modules.get(module), name, ())
        if isinstance(value, known):
            return ["value", module, name, [encode(x, refer) for x in arguments(value)]]
    if isinstance(value, (dict, ChainMap, UserDict, types.MappingProxyType)):
        return ["dict", [[encode(k, refer), encode(v, refer)] for k, v in value.items()]]
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
        return encode(value.item(), refer)
    if isinstance(value, type) and value in vars(builtins).values():
        return ["type", value.__name__]
    if isinstance(value, BaseException) and type(value) in vars(builtins).values():
        return encode_error(value)
    return refer(value)


def encode_error(error: BaseException) -> list:
    """An exception as JSON: its type's name and those of its bases, and its arguments."""
    try:
        # An OSError's arguments lack the names of its files.
        given = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args
        arguments = encode(list(given), _refuse)
    except BaseException:
        arguments = ["list", [text_of(error)]]
    return ["error", [str(base.__name__) for base in type(error).__mro__], arguments]


def decode(data: Any, resolve: Callable[[list], Any]) -> Any:
    """The value behind `data`; `resolve` finds what `refer` named. Raises Garbled."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    try:
        kind, *rest = data
        if kind == "int":
            return int(rest[0], 16)
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(rest[0])
        if kind == "text":
            return bytes.fromhex(rest[0]).decode("utf-8", "surrogatepass")
        if kind == "error":
            return _exception(rest[0], decode(rest[1], resolve))
        if kind in _ITERATED:
            return _ITERATED[kind][1](decode(item, resolve) for item in rest[0])
        if kind == "dict":
            return {decode(k, resolve): decode(v, resolve) for k, v in rest[0]}
        if kind == "value":
            module, name, sent = rest
            _VALUES[module, name]  # no other names
            arguments = [decode(x, resolve) for x in sent]
            if any(isinstance(argument, (bytes, bytearray)) for argument in arguments):
                raise Garbled("a pickled value")
            return getattr(__import__(module), name)(*arguments)
        if kind == "type":
            named = getattr(builtins, str(rest[0]))
            return named if isinstance(named, type) else resolve(data)
        return resolve(data)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise Garbled(text_of(error)) from None


def rebuild(old: Any, new: Any) -> None:
    """Update containers in place with the content that the other side left in them."""
    if isinstance(old, (list, tuple)) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new)):
            if isinstance(before, _CONTAINERS) and type(before) is type(after):
                rebuild(before, after)
            elif isinstance(old, list):
                old[index] = after
    elif isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set, deque)):
        old.clear()
        (old.extend if isinstance(old, deque) else old.update)(new)


class Peer(ABC):
    """One of the two processes: asks the other to do something, and answers it meanwhile.

    A message is a line of JSON: ["ask", operation, object, arguments, keywords], or an answer to
    the last one open: ["value", value, {position or name: argument that was changed}] or
    ["raised", the exception, as `encode_error` writes it].
    """

    def __init__(self, receive: int, send: int) -> None:
        self._receive = os.fdopen(receive, "rb")
        self._send = send
        self._write = os.write  # which a program may replace
        self._mine: list[Any] = []  # what the other side may ask for, by number
        self._numbers: dict[int, int] = {}  # id -> number; the list above keeps the ids valid

    @abstractmethod
    def perform(self, operation: str, target: Any, args: list, kwargs: dict) -> Any:
        """Do what the other side asks for."""

    @abstractmethod
    def resolve(self, data: list) -> Any:
        """The object behind a reference. Raises Garbled."""

    def refer(self, value: Any) -> list:
        """A reference to an object that is not data."""
        number = self._numbers.setdefault(id(value), len(self._mine))
        if number == len(self._mine):
            self._mine.append(value)
        return ["object", number]

    def found(self, number: Any) -> Any:
        """An object of this side, by its number."""
        try:
            return self._mine[number]
        except (LookupError, TypeError):
            raise Garbled("no such object") from None

    @deep_recursion()
    def put(self, message: list) -> None:
        """Send a message. Raises Gone."""
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[self._write(self._send, data) :]
        except OSError:
            raise Gone from None

    @deep_recursion()
    def get(self) -> list:
        """The next message. Raises Gone, Garbled."""
        try:
            line = self._receive.readline(MOST_BYTES)
        except OSError:
            raise Gone from None
        if not line.endswith(b"\n"):
            if len(line) == MOST_BYTES:
                raise Garbled("an answer of more than 64 MiB")
            raise Gone
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Garbled(text_of(error)) from None
        if not (isinstance(message, list) and message and isinstance(message[0], str)):
            raise Garbled("not a message")
        return message

    def ask(self, operation: str, target: Any, args: Sequence, kwargs: dict | None = None) -> Any:
        """Have the other side perform something. Raises what it raised there, Gone, Garbled."""
        with deep_recursion():
            sent = [encode(argument, self.refer) for argument in args]
            named = {name: encode(value, self.refer) for name, value in (kwargs or {}).items()}
        self.put(["ask", operation, target, sent, named])
        while (message := self.get())[0] == "ask":
            self.answer(message)
        try:
            return self.read_answer(message, dict(enumerate(args)) | (kwargs or {}))
        except StopIteration as error:
            if operation == "next":
                raise
            raise RuntimeError("StopIteration") from error  # it would end a loop of the tests'

    @deep_recursion()
    def read_answer(self, message: list, given: dict) -> Any:
        """What the other side answers, with what it changed in the arguments that it was given.
        Raises what it raised, Garbled."""
        try:
            kind, answer, *rest = message
            if kind == "value":
                for place, changed in rest[0].items():
                    place = int(place) if place.isdigit() else place
                    rebuild(given[place], decode(changed, self.resolve))
                return decode(answer, self.resolve)
            _, names, arguments = answer
            error = _exception(names, decode(arguments, self.resolve))
        except (ValueError, TypeError, LookupError, AttributeError) as problem:
            raise Garbled(text_of(problem)) from None
        raise error

    def answer(self, message: list) -> None:
        """Perform one question and send what came of it. Raises Gone, Garbled."""
        try:
            _, operation, target, sent, named = message
            with deep_recursion():
                args = [decode(argument, self.resolve) for argument in sent]
                kwargs = {name: decode(value, self.resolve) for name, value in named.items()}
            result = self.perform(operation, target, args, kwargs)
            with deep_recursion():
                value = encode(result, self.refer)
                before = dict(enumerate(sent)) | named
                after = dict(enumerate(args)) | kwargs
                now = {place: encode(argument, self.refer) for place, argument in after.items()}
                changed = {place: new for place, new in now.items() if new != before[place]}
        except (Gone, Garbled, CannotBeAsked):
            raise
        except BaseException as error:
            self.tell(error)
        else:
            self.put(["value", value, changed])

    @deep_recursion()
    def tell(self, error: BaseException) -> None:
        """Send an exception."""
        self.put(["raised", encode_error(error)])


def text_of(error: BaseException) -> str:
    """An exception's type and text, printable and short."""
    try:
        text = f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        text = f"{type(error).__name__}: cannot be printed"
    return printable(text)


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _refuse(value: Any) -> list:
    raise TypeError(f"{type(value).__name__} is no data")


def _exception(names: list[str], arguments: list) -> BaseException:
    """An exception of the first built-in type among the names; of a new type, if that is a base."""
    for name in names:
        kind = vars(builtins).get(name)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            own = kind if name == names[0] else type(names[0][:100], (kind,), {})
            try:
                return own(*arguments)
            except TypeError:  # UnicodeDecodeError and the like want more
                continue
    raise Garbled("not an exception")
