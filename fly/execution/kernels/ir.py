"""Writes LLVM IR, with Python's blocks and functions for loops and branches.

Values are strings: names in the IR (`%v3`) or constants. Arithmetic methods are on 64-bit integers.
Every kernel takes a pointer to its arguments, 64 bits each, and is called on several threads at
once, which take their shares of the work from a counter among the arguments (`Function.shares`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

Value = str | int

PANEL = 16  # output columns that lie side by side

# of every matrix product; after `configurations`, what those of quantised weights need
PRODUCT = (
    "ptr x, ptr w, ptr bias, ptr out, i64 steps, i64 rows, i64 panels, i64 out_stride, i64 grab, "
    "counter counter, ptr scale, ptr offset, ptr row_scale, ptr configurations, "
    "i64 columns, i64 x_line, ptr scratch, i64 scratch_bytes, counter threads"
)


def float_constant(value: float) -> str:
    """A float32 as LLVM writes it: the bits of the same number as a double."""
    single = struct.unpack("f", struct.pack("f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"


class Loop:
    """index: this turn's. values: what turns hand on; the body replaces them by the next turn's,
    and they are the last turn's after the loop. step: what is added to the index; the body may set
    it."""

    def __init__(self, index: str, values: list[str], step: Value) -> None:
        self.index, self.values, self.step = index, values, step


class Function:
    """A kernel under construction, or with parameters a function that kernels call."""

    def __init__(self, name: str, parameters: str | None = None) -> None:
        self.declarations: set[str] = set()
        linkage = "internal " if parameters else ""
        self._lines = [f"define {linkage}void @{name}({parameters or 'ptr %a'}) {{"]
        self._count = 0
        self._block = ""
        self._begin("entry")

    @property
    def definition(self) -> str:
        return "\n".join([*self._lines, "ret void", "}"])

    def _new(self, prefix: str = "%v") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _begin(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._block = label

    def _jump(self, label: str) -> None:
        self._lines.append(f"br label %{label}")

    def do(self, instruction: str) -> None:
        """Add an instruction that gives no value."""
        self._lines.append(instruction)

    def op(self, instruction: str) -> str:
        """Add an instruction; returns its value."""
        name = self._new()
        self._lines.append(f"{name} = {instruction}")
        return name

    def _intrinsic(self, result: str, name: str, arguments: Sequence[str]) -> str:
        types = ", ".join(re.findall(r"^(?:<[^>]*>|\w+)", argument)[0] for argument in arguments)
        self.declarations.add(f"declare {result} @llvm.{name}({types})")
        return f"{result} @llvm.{name}({', '.join(arguments)})"

    def call(self, result: str, name: str, *arguments: str, flags: str = "") -> str:
        """Call one of LLVM's intrinsics with arguments such as `i64 %v3`; returns its `result`."""
        return self.op(f"call {flags} {self._intrinsic(result, name, arguments)}")

    def each(self, name: str, kind: str, *values: str, flags: str = "") -> str:
        """Call an intrinsic on each lane of vectors of float32, `<16 x float>` say."""
        typed = (f"{kind} {value}" for value in values)
        return self.call(kind, f"{name}.v{kind.split()[0][1:]}f32", *typed, flags=flags)

    def run(self, name: str, *arguments: str) -> None:
        """Call one of LLVM's intrinsics that gives no value."""
        self.do(f"call {self._intrinsic('void', name, arguments)}")

    def arguments(self, fields: str) -> SimpleNamespace:
        """Load the kernel's arguments, by name: `ptr` and `i64` values, and the address of the
        `counter`."""
        found = SimpleNamespace()
        for index, field in enumerate(fields.split(", ")):
            kind, name = field.split()
            at = self.op(f"getelementptr i64, ptr %a, i64 {index}")
            setattr(found, name, at if kind == "counter" else self.op(f"load {kind}, ptr {at}"))
        return found

    def add(self, left: Value, right: Value) -> str:
        return self.op(f"add i64 {left}, {right}")

    def sub(self, left: Value, right: Value) -> str:
        return self.op(f"sub i64 {left}, {right}")

    def mul(self, left: Value, right: Value) -> str:
        return self.op(f"mul i64 {left}, {right}")

    def div(self, left: Value, right: Value) -> str:
        return self.op(f"udiv i64 {left}, {right}")

    def rem(self, left: Value, right: Value) -> str:
        return self.op(f"urem i64 {left}, {right}")

    def min(self, left: Value, right: Value) -> str:
        return self.call("i64", "umin.i64", f"i64 {left}", f"i64 {right}")

    def compare(self, how: str, left: Value, right: Value) -> str:
        return self.op(f"icmp {how} i64 {left}, {right}")

    def select(self, condition: str, then: Value, otherwise: Value, kind: str = "i64") -> str:
        return self.op(f"select i1 {condition}, {kind} {then}, {kind} {otherwise}")

    def at(self, pointer: str, index: Value, element: str = "i8") -> str:
        """Address of an element; in bytes by default."""
        return self.op(f"getelementptr {element}, ptr {pointer}, i64 {index}")

    def load(self, kind: str, pointer: str, align: int) -> str:
        return self.op(f"load {kind}, ptr {pointer}, align {align}")

    def store(self, kind: str, value: str, pointer: str, align: int) -> None:
        self.do(f"store {kind} {value}, ptr {pointer}, align {align}")

    def splat(self, element: str, lanes: int, value: str) -> str:
        """A vector of `lanes` times `value`."""
        vector = f"<{lanes} x {element}>"
        one = self.op(f"insertelement {vector} poison, {element} {value}, i32 0")
        return self.shuffle(vector, one, "poison", [0] * lanes)

    def splat_at(self, element: str, lanes: int, pointer: str, align: int) -> str:
        """A vector of `lanes` times the value in memory."""
        return self.splat(element, lanes, self.load(element, pointer, align))

    def shuffle(self, kind: str, left: str, right: str, lanes: Iterable[int]) -> str:
        """A vector of these lanes of two vectors, counted through both."""
        chosen = [f"i32 {lane}" for lane in lanes]
        places = f"<{len(chosen)} x i32> <{', '.join(chosen)}>"
        return self.op(f"shufflevector {kind} {left}, {kind} {right}, {places}")

    def prefetch(self, pointer: str, locality: int) -> None:
        self.run("prefetch.p0", f"ptr {pointer}", "i32 0", f"i32 {locality}", "i32 1")

    def branch(
        self,
        condition: str,
        then: Callable[[], None] | None,
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        """What `then` writes if the condition holds, else what `otherwise` writes."""
        labels, after = (self._new("then"), self._new("else")), self._new("after")
        self.do(f"br i1 {condition}, label %{labels[0]}, label %{labels[1]}")
        for label, write in zip(labels, (then, otherwise)):
            self._begin(label)
            if write is not None:
                write()
            self._jump(after)
        self._begin(after)

    @contextmanager
    def loop(
        self, start: Value, end: Value, step: Value = 1, carried: Sequence[tuple[str, str]] = ()
    ) -> Iterator[Loop]:
        """Repeat the block for start, start + step, ... while below `end`, but at least once.

        carried: type and first value of what turns hand on.
        """
        before, top, left = self._block, self._new("loop"), self._new("left")
        self._jump(top)
        self._begin(top)
        head = len(self._lines)
        index, names = self._new(), [self._new() for _ in carried]
        loop = Loop(index, [*names], step)
        yield loop
        following = self.op(f"add nuw i64 {index}, {loop.step}")
        phis = [("i64", index, start, following)]
        phis += [
            (kind, name, first, value)
            for (kind, first), name, value in zip(carried, names, loop.values)
        ]
        self._lines[head:head] = [
            f"{name} = phi {kind} [{first}, %{before}], [{value}, %{self._block}]"
            for kind, name, first, value in phis
        ]
        done = self.compare("eq" if loop.step == 1 else "uge", following, end)
        self.do(f"br i1 {done}, label %{left}, label %{top}")
        self._begin(left)

    @contextmanager
    def shares(self, counter: str, end: str, count: Value = 1) -> Iterator[str]:
        """Take `count` indices at a time from the counter while there are any below `end`; the
        block's value is the first of them.

        So a thread that is held up by other work on the machine does not hold up the rest.
        """
        more, body, left = self._new("more"), self._new("body"), self._new("left")
        self._jump(more)
        self._begin(more)
        first = self.op(f"atomicrmw add ptr {counter}, i64 {count} monotonic")
        any_left = self.compare("ult", first, end)
        self.do(f"br i1 {any_left}, label %{body}, label %{left}")
        self._begin(body)
        yield first
        self._jump(more)
        self._begin(left)

    @contextmanager
    def panel_groups(self, product: SimpleNamespace) -> Iterator[tuple[str, str]]:
        """This thread's groups of panels of a PRODUCT: the first panel, and the one after the
        last."""
        with self.shares(product.counter, product.panels, product.grab) as first:
            yield first, self.min(self.add(first, product.grab), product.panels)

    @contextmanager
    def panels(self, first: str, end: str, most: Value) -> Iterator[tuple[str, str, str]]:
        """Panels from `first` to `end`, `most` side by side while so many are left, then one by
        one: (panel, whether these are `most`, how many they are)."""
        with self.loop(first, end) as loop:
            is_most = self.compare("uge", self.sub(end, loop.index), most)
            loop.step = self.select(is_most, most, 1)
            yield loop.index, is_most, loop.step


def module(*functions: Function) -> str:
    """The IR of functions, and of what they call of LLVM's."""
    declarations = {line for function in functions for line in function.declarations}
    return "\n".join([*sorted(declarations), *(function.definition for function in functions)])
