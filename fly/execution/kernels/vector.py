"""LLVM IR of matrix products in vector registers: bfloat16 weights, or int8 weights and inputs.

Weights lie in panels of 16 output columns. Within a panel, consecutive inputs of one column lie
side by side in 32 bits: two bfloat16, or four int8. A micro-kernel keeps the sums of `m` rows by
some panels in registers while it walks over the inputs in order, so a row's sums are added up in
the same order, and have the same bits, however many rows share the pass.

Panels are prefetched further ahead than hardware does across pages; with one stream of weights per
core that alone halved the time of a pass over 4 rows (docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from fly.execution.kernels.formats import Unpacking, columns_buffers, unpack_columns
from fly.execution.kernels.ir import PANEL, PRODUCT, Function, module

_PREFETCH = 4096  # bytes ahead of the weights in use


@dataclass(frozen=True)
class Vectors:
    """lanes: 32-bit lanes of a register. registers: how many may hold sums. most_rows: of a
    micro-kernel. dot: whether one instruction multiplies and adds the 32 bits of each lane: four
    int8 (VNNI), or two bfloat16 (AVX512-BF16)."""

    lanes: int
    registers: int
    most_rows: int
    dot: bool = False

    def panels(self, rows: int) -> int:
        """Panels that a micro-kernel for so many rows walks through side by side."""
        return max(1, min(4, self.registers // (rows * (PANEL // self.lanes))))


AVX2 = Vectors(lanes=8, registers=12, most_rows=6)
AVX512 = Vectors(lanes=16, registers=24, most_rows=12)
AVX512_DOT = Vectors(lanes=16, registers=24, most_rows=12, dot=True)


class _Bfloat16:
    """float32 inputs times bfloat16 weights: a bfloat16 is the upper half of a float32."""

    step_bytes = 8  # of a row's inputs, per 32 bits of a column's weights

    def __init__(self, vectors: Vectors) -> None:
        self.lanes = vectors.lanes
        self.sum = f"<{self.lanes} x float>"

    def weights(self, f: Function, loaded: str) -> list[str]:
        """What `step` takes of a vector of weights: here the even and the odd inputs' weights."""
        ints = f"<{self.lanes} x i32>"
        low = f.op(f"shl {ints} {loaded}, splat (i32 16)")
        high = f.op(f"and {ints} {loaded}, splat (i32 -65536)")
        return [f.op(f"bitcast {ints} {half} to {self.sum}") for half in (low, high)]

    def step(self, f: Function, x: str, weights: list[list[str]], sums: list[str]) -> list[str]:
        """The sums, after adding the products of the inputs at x and the weights of each."""
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


class _Bfloat16Dot:
    """bfloat16 inputs times bfloat16 weights; the instruction adds up a pair in float32."""

    step_bytes = 4

    def __init__(self, vectors: Vectors) -> None:
        self.lanes = vectors.lanes
        self.sum = f"<{self.lanes} x float>"
        self._pairs = f"<{2 * self.lanes} x bfloat>"

    def weights(self, f: Function, loaded: str) -> list[str]:
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


class _Int8:
    """Unsigned int8 inputs, 128 being zero and scaled per row, times int8 weights, scaled per
    column. Weights stay within -64..63, so that AVX2's sums of two products fit into 16 bits."""

    step_bytes = 4

    def __init__(self, vectors: Vectors) -> None:
        self.lanes = vectors.lanes
        self.sum = f"<{self.lanes} x i32>"
        self._bytes = f"<{4 * self.lanes} x i8>"
        self._dot = vectors.dot

    def weights(self, f: Function, loaded: str) -> list[str]:
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


_Kind = _Bfloat16 | _Bfloat16Dot | _Int8


def _kind(vectors: Vectors, *, int8: bool) -> _Kind:
    if int8:
        return _Int8(vectors)
    return _Bfloat16Dot(vectors) if vectors.dot else _Bfloat16(vectors)


def product(vectors: Vectors, *, int8: bool = False, unpacking: Unpacking | None = None) -> str:
    """IR of `@product(ptr arguments)`, one thread's share of [rows, inputs] x [inputs, columns].

    Its arguments are those of `ir.PRODUCT`. Quantised weights are unpacked, a group of panels at a
    time, into the thread's part of `scratch`.
    """
    kind = _kind(vectors, int8=int8)
    shapes = sorted(
        {
            (rows, panels)
            for most in range(1, vectors.most_rows + 1)
            for rows in (most, most - 1)
            for panels in (1, vectors.panels(most))
            if rows
        }
    )
    # for so many rows a micro-kernel takes so many panels side by side
    widths = [vectors.panels(max(1, rows)) for rows in range(vectors.most_rows + 1)]
    table = ", ".join(f"i64 {width}" for width in widths)
    micro = [_micro(kind, vectors, rows, panels) for rows, panels in shapes]
    code = module(*micro, _dispatch(shapes), _task(vectors, kind.step_bytes, unpacking))
    return f"@widths = private constant [{len(widths)} x i64] [{table}]\n{code}"


_TYPED = (  # parameters of the micro-kernels
    "ptr %a, ptr %x, ptr %w, ptr %out, i64 %column, i64 %row, i64 %steps, i64 %x_stride, "
    "i64 %out_stride, i64 %panel_bytes"
)


def _micro(kind: _Kind, vectors: Vectors, rows: int, panels: int) -> Function:
    """@micro_ROWS_PANELS: all inputs of `rows` rows times `panels` panels.

    A function of its own: written into the product, it gets worse registers from LLVM.
    """
    lanes = vectors.lanes
    ints, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    parts = range(0, PANEL, lanes)  # first columns of the vectors of a panel
    cells = [PANEL * panel + part for panel in range(panels) for part in parts]
    f = Function(f"micro_{rows}_{panels}", _TYPED)
    x_rows = [f.at("%x", f.mul("%x_stride", row)) for row in range(rows)]
    w_panels = [f.at("%w", f.mul("%panel_bytes", panel)) for panel in range(panels)]
    zeros = [(kind.sum, "zeroinitializer")] * (rows * len(cells))
    with f.loop(0, "%steps", carried=zeros) as loop:
        w_step, x_step = f.mul(loop.index, 4 * PANEL), f.mul(loop.index, kind.step_bytes)
        weights = []
        for w_panel in w_panels:
            w = f.at(w_panel, w_step)
            f.prefetch(f.at(w, _PREFETCH), 3)
            weights += [kind.weights(f, f.load(ints, f.at(w, 4 * part), 4)) for part in parts]
        for row, x_row in enumerate(x_rows):
            sums = slice(row * len(cells), (row + 1) * len(cells))
            loop.values[sums] = kind.step(f, f.at(x_row, x_step), weights, loop.values[sums])
    a = f.arguments(PRODUCT)

    def of_columns(field: str, vector: str) -> list[str]:
        columns = (f.add("%column", cell) for cell in cells)
        return [f.load(vector, f.at(field, column, "i32"), 4) for column in columns]

    bias = of_columns(a.bias, floats)
    results = iter(loop.values)
    if isinstance(kind, _Int8):
        scales, offsets = of_columns(a.scale, floats), of_columns(a.offset, ints)
        row_scales = []
        for row in range(rows):
            scale = f.load("float", f.at(a.row_scale, f.add("%row", row), "float"), 4)
            row_scales.append(f.splat("float", lanes, scale))
    for row in range(rows):
        out_row = f.at("%out", f.mul("%out_stride", row))
        for index, cell in enumerate(cells):
            y = next(results)
            if isinstance(kind, _Int8):
                y = f.op(f"sub {ints} {y}, {offsets[index]}")
                y = f.op(f"sitofp {ints} {y} to {floats}")
                y = f.op(f"fmul {floats} {y}, {scales[index]}")
                y = f.op(f"fmul {floats} {y}, {row_scales[row]}")
            y = f.op(f"fadd {floats} {y}, {bias[index]}")
            f.store(floats, y, f.at(out_row, 4 * cell), 4)
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


def _task(vectors: Vectors, step_bytes: int, unpacking: Unpacking | None) -> Function:
    """Groups of panels from the counter; in a group, as many panels side by side as the rows allow;
    rows in chunks of even size, so that no chunk is much narrower than the others."""
    most = vectors.most_rows
    f = Function("product")
    a = f.arguments(PRODUCT)
    if unpacking is not None:
        thread = f.op(f"atomicrmw add ptr {a.threads}, i64 1 monotonic")
        unpacked = f.at(a.scratch, f.mul(thread, a.scratch_bytes))
        buffers = columns_buffers(f, unpacking)
    x_stride, panel_bytes = f.mul(a.steps, step_bytes), f.mul(a.steps, 4 * PANEL)
    chunks = f.div(f.add(a.rows, most - 1), most)
    small, larger = f.div(a.rows, chunks), f.rem(a.rows, chunks)  # so many have one row more
    one_more = f.op(f"zext i1 {f.compare('ne', larger, 0)} to i64")
    width = f.load("i64", f.at("@widths", f.add(small, one_more), "i64"), 8)
    with f.panel_groups(a) as (first, end), f.panels(first, end, width) as (panel, _, count):
        column = f.mul(panel, PANEL)
        if unpacking is None:
            w = f.at(a.w, f.mul(panel, panel_bytes))
        else:
            unpack_columns(f, a, unpacking, buffers, panel, count, unpacked)
            w = unpacked
        out_panel = f.at(a.out, column, "float")
        with f.loop(0, chunks, carried=[("i64", "0")]) as loop:
            (row,) = loop.values
            is_larger = f.compare("ult", loop.index, larger)
            rows = f.add(small, f.op(f"zext i1 {is_larger} to i64"))
            x, out = f.at(a.x, f.mul(row, x_stride)), f.at(out_panel, f.mul(row, a.out_stride))
            f.do(
                f"call void @micro(i64 {rows}, i64 {count}, ptr %a, ptr {x}, ptr {w}, ptr {out}, "
                f"i64 {column}, i64 {row}, i64 {a.steps}, i64 {x_stride}, i64 {a.out_stride}, "
                f"i64 {panel_bytes})"
            )
            loop.values = [f.add(row, rows)]
    return f
