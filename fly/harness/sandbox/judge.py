"""The judge's process: runs the tests, and asks the program's process for every call in them.

The program is not here: what it returns arrives as plain data and is compared as data, so that
no `__eq__`, patch or trace of its own takes part in the verdict. Objects that are not data stay
with the program; a `Remote` represents each of them here, and is equal to nothing but itself.
"""

import ast
import builtins
import dis
import importlib
import sys
import types
from collections.abc import Iterator, Sequence, ValuesView
from functools import partialmethod
from typing import Any

from wire import CannotBeAsked, Garbled, Gone, Peer, encode, encode_error, printable, text_of

_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
# Built-in types, except those whose results are read from others (`map`): helpers of tests.
_TYPES = {name for name, value in vars(builtins).items() if isinstance(value, type)} - {
    "enumerate", "filter", "map", "reversed", "zip",
}  # fmt: skip


class Judge(Peer):
    """Asks the program; lets it call nothing but the functions that the tests handed to it."""

    def __init__(self, receive: int, send: int) -> None:
        super().__init__(receive, send)
        self._remotes: dict[int, Remote] = {}

    def perform(self, operation: str, target: Any, args: list, kwargs: dict) -> Any:
        function = self.found(target)
        if operation != "call":
            raise Garbled(f"asks for {operation}")
        return function(*args, **kwargs)

    def resolve(self, data: list) -> Any:
        kind, number = data
        if kind == "yours":
            return self.found(number)
        if kind not in ("object", "coroutine") or type(number) is not int:
            raise Garbled("not a value")
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number)
        remote = self._remotes[number]
        return _run_coroutine(remote) if kind == "coroutine" else remote

    def refer(self, value: Any) -> list:
        if isinstance(value, Remote):
            return ["yours", vars(value)["_number"]]
        if isinstance(value, (Iterator, ValuesView)):
            return ["iterator", encode(list(value), self.refer)]
        if isinstance(value, BaseException):
            return encode_error(value)
        if not callable(value):
            raise CannotBeAsked(
                f"the tests hand over a {type(value).__name__}: no data, no function"
            )
        return super().refer(value)


class Remote:
    """An object of the program's that is not data: every operation on it is asked of the program.

    Its other special methods are set below.
    """

    def __init__(self, judge: Judge, number: int) -> None:
        vars(self).update(_judge=judge, _number=number)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(_ask(self, "isinstance", value))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _ask(self, "exit", error)  # without its answer, which could suppress a failed assertion


def _ask(remote: Remote, operation: str, /, *args: Any, **kwargs: Any) -> Any:
    own = vars(remote)
    return own["_judge"].ask(operation, own["_number"], args, kwargs)


for _name in ("call", "getattr", "setattr", "getitem", "setitem", "contains", "iter", "next",
              "len", "bool", "int", "float", "str", "repr", "delattr", "delitem",
              "enter"):  # fmt: skip
    setattr(Remote, f"__{_name}__", partialmethod(_ask, _name))


async def _run_coroutine(remote: Remote) -> Any:
    """A coroutine of the program's: it runs there, to its end, when the tests await it."""
    return _ask(remote, "run")


def run(tests: str, pipes: Sequence[int]) -> tuple[str, str]:
    """Judge the program behind `pipes`: (reason, detail). It passes if all tests run through."""
    judge = Judge(*pipes)
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    try:
        judge.read_answer(judge.get(), {})  # to the question that starting the program amounts to
        tree = ast.parse(tests)
        code = compile(tree, "<tests>", "exec")
        lacking, tested = _names_of_the_program(tree, code)
        given = judge.ask("globals", None, sorted(lacking | tested))
        for name in tested - given.keys():
            raise NameError(f"name '{name}' is not defined by the program")
        for name in _modules(tree, lacking):
            if isinstance(given.get(name), Remote):
                given[name] = importlib.import_module(name)  # the judge's own, not the program's
        vars(module).update((name, given[name]) for name in lacking | tested if name in given)
        exec(code, vars(module))
        if judge.ask("threads", None, ()):
            return "threads", "a thread was still running at the end"
    except Gone:
        return "gone", ""
    except Garbled as error:
        return "garbled", printable(f"the program's answer makes no sense: {error}")
    except CannotBeAsked as error:
        return "sandbox", str(error)
    except SystemExit as error:
        return "exit", text_of(error)
    except BaseException as error:
        return "exception", text_of(error)
    return "passed", ""


def _names_of_the_program(tests: ast.Module, code: types.CodeType) -> tuple[set[str], set[str]]:
    """The names that the tests take from the program: those that Python lacks, and at most one of
    Python's own, where the tests need no other and so test a function called `sum`, say.
    """
    unset = _names_unset(code)
    lacking = {name for name in unset if not hasattr(builtins, name)}
    needed = lacking - _modules(tests, lacking)
    return lacking, set() if needed else _name_under_test(tests, unset - lacking)


def _names_unset(code: types.CodeType) -> set[str]:
    """The names that the tests read from their module before they have set them themselves."""
    found, own = _reads_and_sets(code)
    parts = [code]
    for part in parts:
        parts += [inner for inner in part.co_consts if isinstance(inner, types.CodeType)]
    return found.union(*(_reads_and_sets(part)[0] - own for part in parts[1:]))


def _reads_and_sets(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The names that a piece of code reads before it has set them, and those that it sets."""
    reads: set[str] = set()
    sets: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_NAME", "STORE_GLOBAL"):
            sets.add(step.argval)
        elif step.opname in _READS and step.argval not in sets:
            reads.add(step.argval)
    return reads, sets


def _name_under_test(tests: ast.Module, names: set[str]) -> set[str]:
    """Which of the built-in names the tested function bears: one, or none if none is called.

    The one that the tests hand to a function of their own (`check(sum)`) or give a name of theirs;
    else the first that they call for such an argument, in an assertion or anywhere. Functions that
    are applied to another's result (`sorted` in `sorted(max(x))`) and types are only helpers.
    """
    nodes = list(ast.walk(tests))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    arguments = [
        value
        for call in _calls(tests)
        if _id(call.func) in own
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
    ]
    assigned = [node.value for node in nodes if isinstance(node, ast.Assign)]
    asserted = [node.test for node in nodes if isinstance(node, ast.Assert)]
    if handed := [name for name in map(_id, (*arguments, *assigned)) if name in names]:
        return {min(handed, key=_TYPES.__contains__)}
    for places in (arguments, asserted, [tests]):
        calls = [call for place in places for call in _calls(place) if _id(call.func) in names]
        inner = {call: {_id(other.func) for other in _calls(call)} for call in calls}
        helpers = {
            _id(call.func) for call in calls if inner[call] & names - _TYPES - {_id(call.func)}
        }
        if calls:
            return {min((_id(call.func) for call in calls), key=(helpers | _TYPES).__contains__)}
    return set()


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in a piece of the tests, each after those in its arguments."""
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    if isinstance(node, ast.Call):
        yield node


def _id(node: ast.AST) -> str:
    """`f` of `f`; nothing of other expressions."""
    return node.id if isinstance(node, ast.Name) else ""


def _modules(tests: ast.Module, names: set[str]) -> set[str]:
    """Python's modules among the names: `math` of `math.isclose(...)`."""
    owners = {_id(node.value) for node in ast.walk(tests) if isinstance(node, ast.Attribute)}
    return names & sys.stdlib_module_names & owners
