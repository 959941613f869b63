"""The judge's process: runs the tests, and asks the program's process for every call in them.

The program is not here: what it returns arrives as plain data and is compared as data, so that
no `__eq__`, patch or trace of its own takes part in the verdict. Objects that are not data stay
with the program; a `Remote` represents each of them here, and is equal to nothing but itself.
"""

import ast
import builtins
import importlib
import sys
import types
from collections.abc import Iterator, ValuesView
from functools import partialmethod
from typing import Any

from wire import CannotBeAsked, Garbled, Gone, Peer, Pipes, encode, printable, text_of


class Judge(Peer):
    """Asks the program; lets it call nothing but the functions that the tests handed to it."""

    def __init__(self, pipes: Pipes) -> None:
        super().__init__(pipes)
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
        if kind != "object" or type(number) is not int:
            raise Garbled("not a value")
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number)
        return self._remotes[number]

    def refer(self, value: Any) -> list:
        if isinstance(value, Remote):
            return ["yours", vars(value)["_number"]]
        if isinstance(value, (Iterator, ValuesView)):
            return ["iterator", encode(list(value), self.refer)]
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


def _ask(remote: Remote, operation: str, /, *args: Any, **kwargs: Any) -> Any:
    own = vars(remote)
    return own["_judge"].ask(operation, own["_number"], args, kwargs)


for _name in ("call", "getattr", "setattr", "getitem", "setitem", "contains", "iter", "next",
              "len", "bool", "int", "float", "str", "repr"):  # fmt: skip
    setattr(Remote, f"__{_name}__", partialmethod(_ask, _name))


def run(tests: str, pipes: Pipes) -> tuple[str, str]:
    """Judge the program behind `pipes`: (reason, detail). It passes if all tests run through."""
    judge = Judge(pipes)
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    try:
        judge.receive()
        tree = ast.parse(tests)
        wanted = _names_left_open(tree)
        modules = wanted & sys.stdlib_module_names & _names_with_attributes(tree)
        for name, value in judge.ask("globals", None, sorted(wanted)).items():
            if isinstance(value, Remote) and name in modules:
                value = importlib.import_module(name)  # the judge's own, not the program's
            if name in wanted:
                vars(module)[name] = value
        exec(compile(tree, "<tests>", "exec"), vars(module))
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


def _names_left_open(tests: ast.Module) -> set[str]:
    """The names that the tests take from the program, before their own definitions replace any.

    Built-in names are among them only where the tests need no other name of the program, as when
    they test a function called `sum`.
    """
    used: set[str] = set()
    defined: set[str] = set()
    for node in ast.walk(tests):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
    own = {name for name in used if not hasattr(builtins, name)}
    return own if own - defined else used


def _names_with_attributes(tests: ast.Module) -> set[str]:
    """`math` of `math.isclose(...)`."""
    nodes = (node.value for node in ast.walk(tests) if isinstance(node, ast.Attribute))
    return {node.id for node in nodes if isinstance(node, ast.Name)}
