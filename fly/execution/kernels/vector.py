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
from dataclasses import dataclass, replace
from types import SimpleNamespace

from fly.execution.kernels.formats import PANEL_BYTES, Unpacking, unpack_columns
from fly.execution.kernels.ir import PANEL, PRODUCT, Function, Value, module

_PREFETCH = 4096  # bytes ahead of the weights in use
_FLOATS = f"<{PANEL} x float>"


@dataclass(frozen=True)
class Vectors:
    """lanes: 32-bit lanes of a register. registers: how many may hold sums. most_rows: of a
    micro-kernel. has_dot: whether one instruction multiplies and adds the 32 bits of each lane:
    four int8 (VNNI), or two bfloat16 (AVX512-BF16)."""

    lanes: int
    registers: int
    most_rows: int
    has_dot: bool = False

    def panels(self, rows: int) -> int:
        """Panels that a micro-kernel for so many rows walks through side by side."""
        return max(1, min(4, self.registers // (rows * (PANEL // self.lanes))))


AVX2 = Vectors(lanes=8, registers=12, most_rows=6)
AVX512 = Vectors(lanes=16, registers=24, most_rows=12)
AVX512_DOT = replace(AVX512, has_dot=True)


class _Kind:
    """Inputs and weights, and how they are multiplied: here float32 by bfloat16, which is the upper
    half of a float32.

    A step is what the loop over inputs takes at a time: step_bytes of a row's inputs, 32 bits of
    every column's weights. sum: the type of a vector of sums.
    """

    step_bytes = 8

    def __init__(self, vectors: Vectors) -> None:
        self.vectors, lanes = vectors, vectors.lanes
        self.ints, self.floats = f"<{lanes} x i32>", f"<{lanes} x float>"
        self.sum = self.floats

    def unpack(self, f: Function, loaded: str) -> list[str]:
        """What `step` takes of a step's weights: the even and the odd inputs'."""
        low = f.op(f"shl {self.ints} {loaded}, splat (i32 16)")
        high = f.op(f"and {self.ints} {loaded}, splat (i32 -65536)")
        return [f.op(f"bitcast {self.ints} {half} to {self.floats}") for half in (low, high)]

    def step(self, f: Function, x: str, weights: list[list[str]], sums: list[str]) -> list[str]:
        """The sums, after adding the products of the inputs at x and the weights of each."""
        for half in range(2):
            value = f.splat_at("float", self.vectors.lanes, f.at(x, 4 * half), 4)
            sums = [
                f.each("fma", self.sum, value, halves[half], total)
                for halves, total in zip(weights, sums)
            ]
        return sums


class _Dot(_Kind):
    """A step's products of a row and a column are added up 32 bits by 32 bits."""

    step_bytes = 4
    factors: str  # the type of a vector of inputs, and of weights

    def unpack(self, f: Function, loaded: str) -> list[str]:
        return [f.op(f"bitcast {self.ints} {loaded} to {self.factors}")]

    def step(self, f: Function, x: str, weights: list[list[str]], sums: list[str]) -> list[str]:
        inputs = f.splat_at("i32", self.vectors.lanes, x, 1)
        value = f.op(f"bitcast {self.ints} {inputs} to {self.factors}")
        return [self.add(f, total, value, w) for (w,), total in zip(weights, sums)]

    def add(self, f: Function, total: str, value: str, weights: str) -> str:
        raise NotImplementedError


class _Bfloat16(_Dot):
    """bfloat16 inputs times bfloat16 weights; the instruction adds up a pair in float32."""

    def __init__(self, vectors: Vectors) -> None:
        super().__init__(vectors)
        self.factors = f"<{2 * vectors.lanes} x bfloat>"

    def add(self, f: Function, total: str, value: str, weights: str) -> str:
        typed = (f"{self.sum} {total}", f"{self.factors} {weights}", f"{self.factors} {value}")
        return f.call(self.sum, "x86.avx512bf16.dpbf16ps.512", *typed)


class _Int8(_Dot):
    """Unsigned int8 inputs, 128 being zero and scaled per row, times int8 weights, scaled per
    column. Weights stay within -64..63, so that AVX2's sums of two products fit into 16 bits."""

    def __init__(self, vectors: Vectors) -> None:
        super().__init__(vectors)
        self.sum, self.factors = self.ints, f"<{4 * vectors.lanes} x i8>"

    def add(self, f: Function, total: str, value: str, weights: str) -> str:
        typed = (f"{self.factors} {value}", f"{self.factors} {weights}")
        if self.vectors.has_dot:  # the vectors of bytes are this intrinsic's type from LLVM 22 on
            return f.call(self.sum, "x86.avx512.vpdpbusd.512", f"{self.sum} {total}", *typed)
        pairs = f.call("<16 x i16>", "x86.avx2.pmadd.ub.sw", *typed)
        ones = "<16 x i16> splat (i16 1)"
        fours = f.call(self.sum, "x86.avx2.pmadd.wd", f"<16 x i16> {pairs}", ones)
        return f.op(f"add {self.sum} {total}, {fours}")


def product(vectors: Vectors, weights: str = "bfloat16", unpacking: Unpacking | None = None) -> str:
    """IR of `@product(ptr arguments)`, one thread's share of [rows, inputs] x [inputs, columns].

    Its arguments are those of `ir.PRODUCT`; results are float32. weights: bfloat16 or int8. Those
    of a GGUF format are unpacked, so many of a few panels that they stay in the first cache, into
    the thread's part of `scratch`; sums wait in the results.
    """
    if weights == "int8":
        kind: _Kind = _Int8(vectors)
    else:
        kind = _Bfloat16(vectors) if vectors.has_dot else _Kind(vectors)
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
    lanes, ints, floats = kind.vectors.lanes, kind.ints, kind.floats
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
            weights += [kind.unpack(f, f.load(ints, f.at(w, 4 * part), 4)) for part in parts]
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
    if isinstance(kind, _Int8):
        scales, offsets = of_columns(a.scale, floats), of_columns(a.offset, ints)
        row_scales = []
        for row in range(rows):
            scale_at = f.at(a.row_scale, f.add("%row", row), "float")
            row_scales.append(f.splat_at("float", lanes, scale_at, 4))
    for index, (y, place) in enumerate(zip(loop.values, places)):
        row, cell = divmod(index, len(cells))
        if isinstance(kind, _Int8):
            y = f.op(f"sub {ints} {y}, {offsets[cell]}")
            y = f.op(f"sitofp {ints} {y} to {floats}")
            y = f.op(f"fmul {floats} {y}, {scales[cell]}")
            y = f.op(f"fmul {floats} {y}, {row_scales[row]}")
        y = f.op(f"fadd {floats} {y}, {bias[cell]}")
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
    most = kind.vectors.most_rows
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
