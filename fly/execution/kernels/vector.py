"""LLVM IR of matrix products in vector registers: bfloat16 weights, or int8 inputs and weights.

Weights lie in panels of 16 output columns. Within a panel, consecutive inputs of one column lie
side by side in 32 bits: two bfloat16, or four int8. A micro-kernel keeps the sums of `m` rows by
some panels in registers while it walks over the inputs in order, so a row's sums are added up in
the same order, and have the same bits, however many rows share the pass.

Panels are prefetched further ahead than hardware does across pages; with one stream of weights per
core that alone halved the time of a pass over 4 rows (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from fly.execution.kernels.formats import PANEL_BYTES, Unpacking, unpack_columns
from fly.execution.kernels.ir import PANEL, PRODUCT, Function, Value, module

_PREFETCH = 4096  # bytes ahead of the weights in use
_FLOATS = f"<{PANEL} x float>"


@dataclass(frozen=True)
class Vectors:
    """lanes: 32-bit lanes of a register. registers: how many may hold sums. most_rows: of a
    micro-kernel. dot: whether one instruction multiplies and adds the 32 bits of each lane: four
    int8 (VNNI), or two bfloat16 (AVX512-BF16)."""

    lanes: int
    registers: int
    most_rows: int
    dot: bool = False


AVX2 = Vectors(lanes=8, registers=12, most_rows=6)
AVX512 = Vectors(lanes=16, registers=24, most_rows=12)
AVX512_DOT = Vectors(lanes=16, registers=24, most_rows=12, dot=True)


class _Kind:
    """Inputs and weights, and how they are multiplied.

    A step is what the loop over inputs takes at a time: step_bytes of a row's inputs, 32 bits of
    every column's weights. sum: the type of a vector of sums. most_rows: of a micro-kernel.
    """

    step_bytes: int

    def __init__(self, vectors: Vectors) -> None:
        self.lanes, self.most_rows = vectors.lanes, vectors.most_rows
        self.sum = f"<{self.lanes} x float>"
        self._registers, self._dot = vectors.registers, vectors.dot

    def panels(self, rows: int) -> int:
        """Panels that a micro-kernel for so many rows walks through side by side."""
        return max(1, min(4, self._registers // (rows * (PANEL // self.lanes))))

    def weights(self, f: Function, w: str, part: int) -> list[str]:
        """What `step` takes of a step's weights, from column `part` of their panel on."""
        return self.unpack(f, f.load(f"<{self.lanes} x i32>", f.at(w, 4 * part), 4))

    def unpack(self, f: Function, loaded: str) -> list[str]:
        raise NotImplementedError

    def step(self, f: Function, x: str, weights: list[list[str]], sums: list[str]) -> list[str]:
        """The sums, after adding the products of the inputs at x and the weights of each."""
        raise NotImplementedError


class _Bfloat16(_Kind):
    """float32 inputs times bfloat16 weights: a bfloat16 is the upper half of a float32."""

    step_bytes = 8

    def unpack(self, f: Function, loaded: str) -> list[str]:
        """The even and the odd inputs' weights."""
        ints = f"<{self.lanes} x i32>"
        low = f.op(f"shl {ints} {loaded}, splat (i32 16)")
        high = f.op(f"and {ints} {loaded}, splat (i32 -65536)")
        return [f.op(f"bitcast {ints} {half} to {self.sum}") for half in (low, high)]

    def step(self, f: Function, x: str, weights: list[list[str]], sums: list[str]) -> list[str]:
        for half in range(2):
            one = f.load("float", f.at(x, 4 * half), 4)
            value = f.splat("float", self.lanes, one)
            sums = [
                self._fma(f, value, halves[half], total) for halves, total in zip(weights, sums)
            ]
        return sums

    def _fma(self, f: Function, *values: str) -> str:
        typed = (f"{self.sum} {value}" for value in values)
        return f.call(self.sum, f"fma.v{self.lanes}f32", *typed)


class _Bfloat16Dot(_Kind):
    """bfloat16 inputs times bfloat16 weights; the instruction adds up a pair in float32."""

    step_bytes = 4

    def __init__(self, vectors: Vectors) -> None:
        super().__init__(vectors)
        self._pairs = f"<{2 * self.lanes} x bfloat>"

    def unpack(self, f: Function, loaded: str) -> list[str]:
        return [f.op(f"bitcast <{self.lanes} x i32> {loaded} to {self._pairs}")]

    def step(self, f: Function, x: str, weights: list[list[str]], sums: list[str]) -> list[str]:
        two = f.splat("i32", self.lanes, f.load("i32", x, 2))
        value = f.op(f"bitcast <{self.lanes} x i32> {two} to {self._pairs}")
        factor = f"{self._pairs} {value}"
        return [
            f.call(
                self.sum,
                "x86.avx512bf16.dpbf16ps.512",
                f"{self.sum} {total}",
                f"{self._pairs} {w}",
                factor,
            )
            for (w,), total in zip(weights, sums)
        ]


class _Int8(_Kind):
    """Unsigned int8 inputs, 128 being zero and scaled per row, times int8 weights, scaled per
    column. Weights stay within -64..63, so that AVX2's sums of two products fit into 16 bits."""

    step_bytes = 4

    def __init__(self, vectors: Vectors) -> None:
        super().__init__(vectors)
        self.sum = f"<{self.lanes} x i32>"
        self._bytes = f"<{4 * self.lanes} x i8>"

    def unpack(self, f: Function, loaded: str) -> list[str]:
        return [f.op(f"bitcast {self.sum} {loaded} to {self._bytes}")]

    def step(self, f: Function, x: str, weights: list[list[str]], sums: list[str]) -> list[str]:
        four = f.splat("i32", self.lanes, f.load("i32", x, 1))
        value = f.op(f"bitcast {self.sum} {four} to {self._bytes}")
        return [self._added(f, value, w, total) for (w,), total in zip(weights, sums)]

    def _added(self, f: Function, value: str, weights: str, total: str) -> str:
        factors = (f"{self._bytes} {value}", f"{self._bytes} {weights}")
        if self._dot:  # the vectors of bytes are this intrinsic's type from LLVM 22 on
            return f.call(self.sum, "x86.avx512.vpdpbusd.512", f"{self.sum} {total}", *factors)
        pairs = f.call("<16 x i16>", "x86.avx2.pmadd.ub.sw", *factors)
        ones = "<16 x i16> splat (i16 1)"
        fours = f.call(self.sum, "x86.avx2.pmadd.wd", f"<16 x i16> {pairs}", ones)
        return f.op(f"add {self.sum} {total}, {fours}")


def _kind(vectors: Vectors, weights: str) -> _Kind:
    if weights == "bfloat16":
        return _Bfloat16Dot(vectors) if vectors.dot else _Bfloat16(vectors)
    return _Int8(vectors)


def product(vectors: Vectors, weights: str = "bfloat16", unpacking: Unpacking | None = None) -> str:
    """IR of `@product(ptr arguments)`, one thread's share of [rows, inputs] x [inputs, columns].

    Its arguments are those of `ir.PRODUCT`; results are float32. weights: bfloat16 or int8. Those
    of a GGUF format are unpacked, so many of a few panels that they stay in the first cache, into
    the thread's part of `scratch`; sums wait in the results.
    """
    kind = _kind(vectors, weights)
    shapes = sorted(
        {
            (rows, panels)
            for most in range(1, kind.most_rows + 1)
            for rows in (most, most - 1)
            for panels in (1, kind.panels(most))
            if rows
        }
    )
    # for so many rows a micro-kernel takes so many panels side by side
    widths = [kind.panels(max(1, rows)) for rows in range(kind.most_rows + 1)]
    table = ", ".join(f"i64 {width}" for width in widths)
    is_part = unpacking is not None
    micro = [_micro(kind, rows, panels, is_part=is_part) for rows, panels in shapes]
    code = module(*micro, _dispatch(shapes), _task(kind, unpacking))
    return f"@widths = private constant [{len(widths)} x i64] [{table}]\n{code}"


_TYPED = (  # parameters of the micro-kernels
    "ptr %a, ptr %x, ptr %w, ptr %out, i64 %column, i64 %row, i64 %steps, i64 %x_stride, "
    "i64 %out_stride, i64 %panel_bytes"
)


def _micro(kind: _Kind, rows: int, panels: int, *, is_part: bool) -> Function:
    """@micro_ROWS_PANELS: inputs of `rows` rows times `panels` panels.

    is_part: of some inputs; the sums go on from those in the results, and are not finished. A
    function of its own: written into the product, it gets worse registers from LLVM.
    """
    lanes = kind.lanes
    ints, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    parts = range(0, PANEL, lanes)  # first columns of the vectors of a panel
    cells = [PANEL * panel + part for panel in range(panels) for part in parts]
    f = Function(f"micro_{rows}_{panels}", _TYPED)
    x_rows = [f.at("%x", f.mul("%x_stride", row)) for row in range(rows)]
    w_panels = [f.at("%w", f.mul("%panel_bytes", panel)) for panel in range(panels)]
    places = [
        f.at(f.at("%out", f.mul("%out_stride", row)), cell, "float")
        for row in range(rows)
        for cell in cells
    ]
    starts = ["zeroinitializer"] * len(places)
    if is_part:
        starts = [f.load(kind.sum, place, 4) for place in places]
    with f.loop(0, "%steps", carried=[(kind.sum, start) for start in starts]) as loop:
        w_step = f.mul(loop.index, 4 * PANEL)
        x_step = f.mul(loop.index, kind.step_bytes)
        weights = []
        for w_panel in w_panels:
            w = f.at(w_panel, w_step)
            if not is_part:
                f.prefetch(f.at(w, _PREFETCH), 3)
            weights += [kind.weights(f, w, part) for part in parts]
        for row, x_row in enumerate(x_rows):
            sums = slice(row * len(cells), (row + 1) * len(cells))
            loop.values[sums] = kind.step(f, f.at(x_row, x_step), weights, loop.values[sums])
    if is_part:
        for value, place in zip(loop.values, places):
            f.store(kind.sum, value, place, 4)
        return f
    a = f.arguments(PRODUCT)

    def of_columns(field: str, vector: str) -> list[str]:
        columns = (f.add("%column", cell) for cell in cells)
        return [f.load(vector, f.at(field, column, "i32"), 4) for column in columns]

    bias = of_columns(a.bias, floats)
    results = iter(zip(loop.values, places))
    if isinstance(kind, _Int8):
        scales, offsets = of_columns(a.scale, floats), of_columns(a.offset, ints)
        row_scales = []
        for row in range(rows):
            scale = f.load("float", f.at(a.row_scale, f.add("%row", row), "float"), 4)
            row_scales.append(f.splat("float", lanes, scale))
    for row in range(rows):
        for index in range(len(cells)):
            y, place = next(results)
            if isinstance(kind, _Int8):
                y = f.op(f"sub {ints} {y}, {offsets[index]}")
                y = f.op(f"sitofp {ints} {y} to {floats}")
                y = f.op(f"fmul {floats} {y}, {scales[index]}")
                y = f.op(f"fmul {floats} {y}, {row_scales[row]}")
            y = f.op(f"fadd {floats} {y}, {bias[index]}")
            f.store(floats, y, place, 2)
    return f


def _dispatch(shapes: list[tuple[int, int]]) -> Function:
    """@micro: the micro-kernel for so many rows and panels."""
    f = Function("micro", f"i64 %rows, i64 %panels, {_TYPED}")
    which = f.add(f.mul("%rows", 16), "%panels")
    cases = {16 * rows + panels: f"micro_{rows}_{panels}" for rows, panels in shapes}
    labels = " ".join(f"i64 {case}, label %k{case}" for case in cases)
    f.do(f"switch i64 {which}, label %k{min(cases)} [{labels}]")
    for case, name in cases.items():
        f.do(f"k{case}:\ncall void @{name}({_TYPED})\nbr label %done")
    f.do("done:")
    return f


def _task(kind: _Kind, unpacking: Unpacking | None) -> Function:
    """Groups of panels from the counter; in a group, as many panels side by side as the rows allow;
    rows in chunks of even size, so that no chunk is much narrower than the others."""
    most = kind.most_rows
    f = Function("product")
    a = f.arguments(PRODUCT)
    x_stride, panel_bytes = f.mul(a.steps, kind.step_bytes), f.mul(a.steps, 4 * PANEL)
    chunks = f.div(f.add(a.rows, most - 1), most)
    small, larger = f.div(a.rows, chunks), f.rem(a.rows, chunks)  # so many have one row more
    one_more = f.op(f"zext i1 {f.compare('ne', larger, 0)} to i64")
    width = f.load("i64", f.at("@widths", f.add(small, one_more), "i64"), 8)

    def multiply(panel: str, count: str, x: str, w: str, steps: str, panel_bytes: Value) -> None:
        column = f.mul(panel, PANEL)
        out = f.at(a.out, column, "float")
        with f.loop(0, chunks, carried=[("i64", "0")]) as loop:
            (row,) = loop.values
            is_larger = f.compare("ult", loop.index, larger)
            rows = f.add(small, f.op(f"zext i1 {is_larger} to i64"))
            x_rows, out_rows = f.at(x, f.mul(row, x_stride)), f.at(out, f.mul(row, a.out_stride))
            f.do(
                f"call void @micro(i64 {rows}, i64 {count}, ptr %a, ptr {x_rows}, ptr {w}, "
                f"ptr {out_rows}, i64 {column}, i64 {row}, i64 {steps}, i64 {x_stride}, "
                f"i64 {a.out_stride}, i64 {panel_bytes})"
            )
            loop.values = [f.add(row, rows)]

    if unpacking is not None:
        thread = f.op(f"atomicrmw add ptr {a.threads}, i64 1 monotonic")
        unpacked = f.at(a.scratch, f.mul(thread, a.scratch_bytes))
        factors = f.at(unpacked, 4 * PANEL_BYTES)
        in_block, at_once = unpacking.weights // 2, 256 // unpacking.weights
        blocks = f.div(a.steps, in_block)
    with f.panel_groups(a) as (first, end), f.panels(first, end, width) as (panel, _, count):
        if unpacking is None:
            multiply(panel, count, a.x, f.at(a.w, f.mul(panel, panel_bytes)), a.steps, panel_bytes)
        else:
            _each_result(f, a, panel, count, lambda _sum, _bias: "zeroinitializer")
            with f.loop(0, blocks, at_once) as loop:
                block_end = f.min(f.add(loop.index, at_once), blocks)
                blocks_of = panel, count, loop.index, block_end
                unpack_columns(f, a, unpacking, *blocks_of, unpacked, factors)
                x = f.at(a.x, f.mul(loop.index, in_block * kind.step_bytes))
                steps = f.mul(f.sub(block_end, loop.index), in_block)
                multiply(panel, count, x, unpacked, steps, PANEL_BYTES)
            _each_result(
                f, a, panel, count, lambda sums, bias: f.op(f"fadd {_FLOATS} {sums}, {bias}")
            )
    return f


def _each_result(
    f: Function, a: SimpleNamespace, panel: str, count: str, change: Callable[[str, str], str]
) -> None:
    """Replace the results of panels by what `change` makes of them and the bias."""
    with f.loop(0, a.rows) as row, f.loop(0, count) as each:
        column = f.mul(f.add(panel, each.index), PANEL)
        at = f.at(f.at(a.out, f.mul(row.index, a.out_stride)), column, "float")
        bias = f.load(_FLOATS, f.at(a.bias, column, "float"), 4)
        f.store(_FLOATS, change(f.load(_FLOATS, at, 4), bias), at, 4)
