"""What users give, read strictly: JSON, and the shape of what it holds. Refused in one line."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter, ValidationError

from fly.errors import FlyError

# A part of a run's file names.
Name = Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]
# lm-eval's, which is a part of a file name, too: `group::task`, `education_(profession_level)`
TaskName = Annotated[str, StringConstraints(pattern=r"^[^/\\\x00-\x1f\x7f]+$")]

# what ast.literal_eval, and so lm-eval's readers of key=value, raises for invalid text
NO_LITERAL = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)

_adapter = cache(TypeAdapter[Any])
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _shortened.maxlong = 200


def shown(value: Any) -> str:
    """`repr`, cut where it would be long or deep."""
    return _shortened.repr(value)


def hint(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """For a name that is not known: the nearest one that is, or what else helps."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise


def parse(text: str, where: str) -> Any:
    """The value of a JSON text; `where` names its source in errors.

    Raises FlyError also for a key that is there twice, for numbers of more digits than Python
    reads, and for nesting that is too deep for it.
    """
    try:
        return json.loads(text, object_pairs_hook=_unrepeated)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        if "\n" in text:
            place = f"line {error.lineno}, {place}"
        raise FlyError(f"{where}: not valid JSON at {place}: {error.msg}") from None
    except FlyError as error:
        raise FlyError(f"{where}: {error}") from None
    except RecursionError:
        raise FlyError(f"{where}: not valid JSON: nested too deeply") from None
    except ValueError:
        raise FlyError(f"{where}: a number has too many digits: shorten it") from None


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise FlyError(f"key {shown(twice)} is there twice: remove one")
    return found


def bytes_of(path: Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FlyError(f"{where}: cannot be read: {error.strerror}") from None


def text_of(path: Path, where: str) -> str:
    """A file's text, which must be UTF-8."""
    return _decode(bytes_of(path, where), where)


def iterate_lines(path: Path) -> Iterator[str]:
    """A file's lines with their line breaks, read as they are asked for. The last one may lack its
    line break; its last character may be incomplete, and is left out then."""
    start = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                is_whole = line.endswith(b"\n")
                yield _decode(line, str(path), start, may_be_torn=not is_whole)
                start += len(line)
    except OSError as error:
        raise FlyError(f"{path}: cannot be read: {error.strerror}") from None


def _decode(data: bytes, where: str, start: int = 0, *, may_be_torn: bool = False) -> str:
    """start: where the data begins in its file."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if may_be_torn and error.reason == "unexpected end of data":
            return data[: error.start].decode("utf-8")
        at = start + error.start
        raise FlyError(f"{where}: cannot be read: not UTF-8 at byte {at}") from None


def read_object(path: Path, where: str | None = None) -> dict[str, Any]:
    """The one JSON object in a file."""
    where = where or str(path)
    value = parse(text_of(path, where), where)
    if not isinstance(value, dict):
        raise FlyError(f"{where}: must hold one JSON object, got {type(value).__name__}")
    return value


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Raise FlyError if what was read is of another type; it is not changed. Types are strict."""
    try:
        _adapter(shape).validate_python(value, strict=True)
    except ValidationError as error:
        raise FlyError(problem(error, where)) from None


def parse_as(text: str, shape: Any) -> Any:
    """The value of a JSON text of this shape, with the keys that the shape names alone; None where
    `parse` and `check_shape` have to say what is wrong."""
    try:
        return _adapter(shape).validate_json(text, strict=True)
    except ValidationError:
        return None


def problem(error: ValidationError, where: str) -> str:
    """The first thing that is wrong: the field, its value, what it should be."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{field} is missing ({where})"
    message = first["msg"][0].lower() + first["msg"][1:].replace("a valid tuple", "a list")
    return f"{field}{'=' * bool(field)}{shown(first['input'])} ({where}): {message}"
