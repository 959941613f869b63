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

PANEL = 16  # output columns
_PREFETCH = 4096  # bytes ahead of the weights in use


@dataclass(frozen=True)
class Vectors:
    """lanes: 32-bit lanes of a register. registers: how many may hold sums. most_rows: of a
    micro-kernel. dot: whether one instruction multiplies and adds four int8 (VNNI)."""

    lanes: int
    registers: int
    most_rows: int
    dot: bool = False

    def panels(self, rows: int) -> int:
        """Panels that a micro-kernel for so many rows walks through side by side."""
        return max(1, min(4, self.registers // (rows * (PANEL // self.lanes))))


AVX2 = Vectors(lanes=8, registers=12, most_rows=6)
AVX512 = Vectors(lanes=16, registers=24, most_rows=12)
AVX512_VNNI = Vectors(lanes=16, registers=24, most_rows=12, dot=True)


class _Bfloat16:
    """float32 inputs times bfloat16 weights: a bfloat16 is the upper half of a float32."""

    inputs = 2  # per 32 bits of weights
    input_bytes = 4

    def __init__(self, vectors: Vectors) -> None:
        self.lanes = vectors.lanes
        self.sum = f"<{self.lanes} x float>"

    def declarations(self) -> str:
        return f"declare {self.sum} @llvm.fma.v{self.lanes}f32({self.sum}, {self.sum}, {self.sum})"

    def weights(self, name: str, loaded: str) -> list[str]:
        ints = f"<{self.lanes} x i32>"
        return [
            f"%{name}_low = shl {ints} {loaded}, splat (i32 16)",
            f"%{name}_0 = bitcast {ints} %{name}_low to {self.sum}",
            f"%{name}_high = and {ints} {loaded}, splat (i32 -65536)",
            f"%{name}_1 = bitcast {ints} %{name}_high to {self.sum}",
        ]

    def step(self, row: int, sums: list[tuple[str, str]]) -> list[str]:
        """Add one 32-bit step of the weights times row `row`; sums: (sum, weights) by name."""
        lines = []
        for half in range(2):
            x = f"x{row}_{half}"
            lines += [
                f"%{x}_at = getelementptr i8, ptr %x{row}_k, i64 {4 * half}",
                f"%{x}_one = load float, ptr %{x}_at, align 4",
                *_splat(x, "float", self.lanes),
            ]
            for total, weights in sums:
                before = f"%{total}" if half == 0 else f"%{total}_half"
                after = f"%{total}_half" if half == 0 else f"%{total}_next"
                lines.append(
                    f"{after} = call {self.sum} @llvm.fma.v{self.lanes}f32("
                    f"{self.sum} %{x}, {self.sum} %{weights}_{half}, {self.sum} {before})"
                )
        return lines

    def result(self, name: str, total: str, row: int, column: str) -> list[str]:
        return [f"%{name} = fadd {self.sum} %{total}, {column}_bias"]


class _Int8:
    """Unsigned int8 inputs, 128 being zero and scaled per row, times int8 weights, scaled per
    column. Weights stay within -64..63, so that AVX2's sums of two products fit into 16 bits."""

    inputs = 4
    input_bytes = 1

    def __init__(self, vectors: Vectors) -> None:
        self.lanes = vectors.lanes
        self.sum = f"<{self.lanes} x i32>"
        self._dot = vectors.dot

    def declarations(self) -> str:
        if self._dot:
            # the vector of bytes is this intrinsic's type from LLVM 22 on
            return (
                "declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)"
            )
        return (
            "declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8>, <32 x i8>)\n"
            "declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)"
        )

    def weights(self, name: str, loaded: str) -> list[str]:
        return [f"%{name}_b = bitcast {self.sum} {loaded} to <{4 * self.lanes} x i8>"]

    def step(self, row: int, sums: list[tuple[str, str]]) -> list[str]:
        bytes_ = f"<{4 * self.lanes} x i8>"
        x = f"x{row}"
        lines = [
            f"%{x}_one = load i32, ptr %{x}_k, align 1",
            *_splat(x + "_i", "i32", self.lanes, one=f"%{x}_one"),
            f"%{x}_b = bitcast {self.sum} %{x}_i to {bytes_}",
        ]
        for total, weights in sums:
            if self._dot:
                lines.append(
                    f"%{total}_next = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512("
                    f"<16 x i32> %{total}, {bytes_} %{x}_b, {bytes_} %{weights}_b)"
                )
                continue
            lines += [
                f"%{total}_p = call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw("
                f"{bytes_} %{x}_b, {bytes_} %{weights}_b)",
                f"%{total}_w = call <8 x i32> @llvm.x86.avx2.pmadd.wd("
                f"<16 x i16> %{total}_p, <16 x i16> splat (i16 1))",
                f"%{total}_next = add <8 x i32> %{total}, %{total}_w",
            ]
        return lines

    def result(self, name: str, total: str, row: int, column: str) -> list[str]:
        floats = f"<{self.lanes} x float>"
        return [
            f"%{name}_o = sub {self.sum} %{total}, {column}_offset",
            f"%{name}_f = sitofp {self.sum} %{name}_o to {floats}",
            f"%{name}_c = fmul {floats} %{name}_f, {column}_scale",
            f"%{name}_r = fmul {floats} %{name}_c, %row{row}_scale",
            f"%{name} = fadd {floats} %{name}_r, {column}_bias",
        ]


def _splat(name: str, element: str, lanes: int, one: str | None = None) -> list[str]:
    vector = f"<{lanes} x {element}>"
    one = one or f"%{name}_one"
    return [
        f"%{name}_in = insertelement {vector} poison, {element} {one}, i32 0",
        f"%{name} = shufflevector {vector} %{name}_in, {vector} poison, "
        f"<{lanes} x i32> zeroinitializer",
    ]


def product(vectors: Vectors, *, int8: bool) -> str:
    """IR of `@product(ptr arguments)`, one thread's share of [rows, inputs] x [inputs, columns].

    `kernels.Arguments` lays the arguments out. Threads take groups of panels from a shared counter,
    so that one that is held up by other work on the machine does not hold up the rest.
    """
    kind = _Int8(vectors) if int8 else _Bfloat16(vectors)
    kernels = {
        (rows, panels)
        for most in range(1, vectors.most_rows + 1)
        for rows in (most, most - 1)
        for panels in (1, vectors.panels(most))
        if rows
    }
    parts = [kind.declarations(), "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"]
    parts += [_micro(kind, vectors, rows, panels) for rows, panels in sorted(kernels)]
    parts.append(_dispatch(vectors, sorted(kernels)))
    parts.append(_task(vectors, kind.inputs * kind.input_bytes))
    return "\n".join(parts)


def _micro(kind: _Bfloat16 | _Int8, vectors: Vectors, rows: int, panels: int) -> str:
    """All inputs of `rows` rows times `panels` panels."""
    lanes, parts = vectors.lanes, PANEL // vectors.lanes
    ints, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    cells = [(panel, part) for panel in range(panels) for part in range(parts)]
    sums = {(r, *cell): f"s{r}_{cell[0]}_{cell[1]}" for r in range(rows) for cell in cells}
    lines = [
        f"define internal void @micro_{rows}_{panels}(ptr %a, ptr %x, ptr %w, ptr %out, "
        "i64 %column, i64 %row, i64 %steps, i64 %x_stride, i64 %out_stride, i64 %panel_bytes) {",
        "entry:",
    ]
    for r in range(rows):
        lines.append(f"%x{r}_o = mul i64 %x_stride, {r}")
        lines.append(f"%x{r}_p = getelementptr i8, ptr %x, i64 %x{r}_o")
    for panel in range(panels):
        lines.append(f"%w{panel}_o = mul i64 %panel_bytes, {panel}")
        lines.append(f"%w{panel}_p = getelementptr i8, ptr %w, i64 %w{panel}_o")
    lines += ["br label %loop", "loop:", "%k = phi i64 [0, %entry], [%k_next, %loop]"]
    for name in sums.values():
        lines.append(f"%{name} = phi {kind.sum} [zeroinitializer, %entry], [%{name}_next, %loop]")
    lines.append(f"%k_w = mul i64 %k, {4 * PANEL}")
    lines.append(f"%k_x = mul i64 %k, {kind.inputs * kind.input_bytes}")
    for panel, part in cells:
        w = f"w{panel}_{part}"
        if part == 0:
            lines += [
                f"%w{panel}_k = getelementptr i8, ptr %w{panel}_p, i64 %k_w",
                f"%w{panel}_ahead = getelementptr i8, ptr %w{panel}_k, i64 {_PREFETCH}",
                f"call void @llvm.prefetch.p0(ptr %w{panel}_ahead, i32 0, i32 3, i32 1)",
            ]
        lines.append(f"%{w}_at = getelementptr i8, ptr %w{panel}_k, i64 {4 * lanes * part}")
        lines.append(f"%{w} = load {ints}, ptr %{w}_at, align 4")
        lines += kind.weights(w, f"%{w}")
    for r in range(rows):
        lines.append(f"%x{r}_k = getelementptr i8, ptr %x{r}_p, i64 %k_x")
        lines += kind.step(r, [(sums[r, panel, part], f"w{panel}_{part}") for panel, part in cells])
    lines += [
        "%k_next = add nuw i64 %k, 1",
        "%done = icmp eq i64 %k_next, %steps",
        "br i1 %done, label %store, label %loop",
        "store:",
    ]
    for field, name in ((2, "bias"), (10, "scale"), (11, "offset")):
        if name != "bias" and isinstance(kind, _Bfloat16):
            continue
        lines.append(f"%{name}_f = getelementptr i64, ptr %a, i64 {field}")
        lines.append(f"%{name}_p = load ptr, ptr %{name}_f")
        vector = ints if name == "offset" else floats
        for panel, part in cells:
            column = f"c{panel}_{part}_{name}"
            lines += [
                f"%{column}_i = add i64 %column, {PANEL * panel + lanes * part}",
                f"%{column}_at = getelementptr i32, ptr %{name}_p, i64 %{column}_i",
                f"%{column} = load {vector}, ptr %{column}_at, align 4",
            ]
    if isinstance(kind, _Int8):
        lines += ["%rs_f = getelementptr i64, ptr %a, i64 12", "%rs_p = load ptr, ptr %rs_f"]
        for r in range(rows):
            lines += [
                f"%row{r}_i = add i64 %row, {r}",
                f"%row{r}_at = getelementptr float, ptr %rs_p, i64 %row{r}_i",
                f"%row{r}_scale_one = load float, ptr %row{r}_at, align 4",
                *_splat(f"row{r}_scale", "float", lanes),
            ]
    for r in range(rows):
        lines.append(f"%out{r}_o = mul i64 %out_stride, {r}")
        lines.append(f"%out{r}_p = getelementptr i8, ptr %out, i64 %out{r}_o")
        for panel, part in cells:
            y = f"y{r}_{panel}_{part}"
            lines += kind.result(y, sums[r, panel, part] + "_next", r, f"%c{panel}_{part}")
            at = 4 * (PANEL * panel + lanes * part)
            lines.append(f"%{y}_at = getelementptr i8, ptr %out{r}_p, i64 {at}")
            lines.append(f"store {floats} %{y}, ptr %{y}_at, align 4")
    return "\n".join([*lines, "ret void", "}"])


def _dispatch(vectors: Vectors, kernels: list[tuple[int, int]]) -> str:
    """@micro: the micro-kernel for so many rows and panels."""
    typed = (
        "ptr %a, ptr %x, ptr %w, ptr %out, i64 %column, i64 %row, i64 %steps, i64 %x_stride, "
        "i64 %out_stride, i64 %panel_bytes"
    )
    lines = [
        f"define internal void @micro(i64 %rows, i64 %panels, {typed}) {{",
        "entry:",
        "%r = mul i64 %rows, 16",
        "%which = add i64 %r, %panels",
        f"switch i64 %which, label %k{16 + 1} [",
    ]
    lines += [f"i64 {16 * rows + panels}, label %k{16 * rows + panels}" for rows, panels in kernels]
    lines.append("]")
    for rows, panels in kernels:
        lines.append(f"k{16 * rows + panels}:")
        lines.append(f"call void @micro_{rows}_{panels}({typed})\nret void")
    return "\n".join([*lines, "}"])


def product_arguments() -> str:
    """What both kinds of `@product` read of their arguments (`kernels._Arguments`), by name."""
    fields = ("x", "w", None, "out", "steps", "rows", "panels", "out_stride", "grab")
    lines = ["  %counter = getelementptr i64, ptr %a, i64 9"]
    for index, name in enumerate(fields):
        if name is not None:
            kind = "ptr" if name in ("x", "w", "out") else "i64"
            lines.append(f"  %{name}_f = getelementptr i64, ptr %a, i64 {index}")
            lines.append(f"  %{name} = load {kind}, ptr %{name}_f")
    return "\n".join(lines)


def _task(vectors: Vectors, step_bytes: int) -> str:
    """Groups of panels from the counter; in a group, as many panels side by side as the rows allow;
    rows in chunks of even size, so that no chunk is much narrower than the others."""
    most = vectors.most_rows
    widths = ", ".join(f"i64 {vectors.panels(max(1, rows))}" for rows in range(most + 1))
    return f"""
@widths = private constant [{most + 1} x i64] [{widths}]
define void @product(ptr %a) {{
entry:
{product_arguments()}
  %x_stride = mul i64 %steps, {step_bytes}
  %panel_bytes = mul i64 %steps, {4 * PANEL}
  %rows_up = add i64 %rows, {most - 1}
  %chunks = udiv i64 %rows_up, {most}
  %small = udiv i64 %rows, %chunks
  %larger = urem i64 %rows, %chunks
  %some_larger = icmp ne i64 %larger, 0
  %one_more = zext i1 %some_larger to i64
  %largest = add i64 %small, %one_more
  %width_at = getelementptr [{most + 1} x i64], ptr @widths, i64 0, i64 %largest
  %width = load i64, ptr %width_at
  br label %group
group:
  %first = atomicrmw add ptr %counter, i64 %grab monotonic
  %any = icmp ult i64 %first, %panels
  br i1 %any, label %begin, label %exit
begin:
  %to = add i64 %first, %grab
  %end = call i64 @llvm.umin.i64(i64 %to, i64 %panels)
  br label %panel
panel:
  %p = phi i64 [%first, %begin], [%p_next, %panel_end]
  %left = sub i64 %end, %p
  %whole = icmp uge i64 %left, %width
  %now = select i1 %whole, i64 %width, i64 1
  %w_o = mul i64 %p, %panel_bytes
  %w_p = getelementptr i8, ptr %w, i64 %w_o
  %column = mul i64 %p, {PANEL}
  %out_p = getelementptr float, ptr %out, i64 %column
  br label %chunk
chunk:
  %c = phi i64 [0, %panel], [%c_next, %chunk]
  %row = phi i64 [0, %panel], [%row_next, %chunk]
  %is_larger = icmp ult i64 %c, %larger
  %more = zext i1 %is_larger to i64
  %m = add i64 %small, %more
  %x_o = mul i64 %row, %x_stride
  %x_p = getelementptr i8, ptr %x, i64 %x_o
  %row_o = mul i64 %row, %out_stride
  %row_p = getelementptr i8, ptr %out_p, i64 %row_o
  call void @micro(i64 %m, i64 %now, ptr %a, ptr %x_p, ptr %w_p, ptr %row_p, i64 %column, i64 %row,
                   i64 %steps, i64 %x_stride, i64 %out_stride, i64 %panel_bytes)
  %c_next = add i64 %c, 1
  %row_next = add i64 %row, %m
  %chunks_done = icmp eq i64 %c_next, %chunks
  br i1 %chunks_done, label %panel_end, label %chunk
panel_end:
  %p_next = add i64 %p, %now
  %panels_done = icmp uge i64 %p_next, %end
  br i1 %panels_done, label %group, label %panel
exit:
  ret void
}}
declare i64 @llvm.umin.i64(i64, i64)
"""


def quantize(source: str, *, unsigned: bool) -> str:
    """IR of `@quantize(ptr arguments)`: rows of float or bfloat (`source`) to int8, scaled per row.

    Each row's largest magnitude becomes 127; with `unsigned`, 128 is added. Rows are multiples of
    16 wide. Arguments: x, int8, scales, rows, width, counter.
    """
    bytes_ = 4 if source == "float" else 2
    flip = (
        "xor <16 x i8> %i8, splat (i8 -128)" if unsigned else "add <16 x i8> %i8, zeroinitializer"
    )
    wide = (
        "fpext <16 x bfloat> {} to <16 x float>"
        if source != "float"
        else "fadd <16 x float> {}, splat (float -0.0)"
    )
    return f"""
declare <16 x float> @llvm.fabs.v16f32(<16 x float>)
declare <16 x float> @llvm.maxnum.v16f32(<16 x float>, <16 x float>)
declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)
declare <16 x float> @llvm.rint.v16f32(<16 x float>)
declare float @llvm.maxnum.f32(float, float)
define void @quantize(ptr %a) {{
entry:
  %x = load ptr, ptr %a
  %q_f = getelementptr i64, ptr %a, i64 1
  %q = load ptr, ptr %q_f
  %s_f = getelementptr i64, ptr %a, i64 2
  %s = load ptr, ptr %s_f
  %rows_f = getelementptr i64, ptr %a, i64 3
  %rows = load i64, ptr %rows_f
  %width_f = getelementptr i64, ptr %a, i64 4
  %width = load i64, ptr %width_f
  %counter = getelementptr i64, ptr %a, i64 5
  br label %next
next:
  %row = atomicrmw add ptr %counter, i64 1 monotonic
  %any = icmp ult i64 %row, %rows
  br i1 %any, label %begin, label %exit
begin:
  %at = mul i64 %row, %width
  %x_row = getelementptr {source}, ptr %x, i64 %at
  %q_row = getelementptr i8, ptr %q, i64 %at
  br label %measure
measure:
  %i = phi i64 [0, %begin], [%i_next, %measure]
  %m = phi <16 x float> [zeroinitializer, %begin], [%m_next, %measure]
  %x_at = getelementptr {source}, ptr %x_row, i64 %i
  %v_in = load <16 x {source}>, ptr %x_at, align {bytes_}
  %v = {wide.format("%v_in")}
  %v_abs = call <16 x float> @llvm.fabs.v16f32(<16 x float> %v)
  %m_next = call nnan <16 x float> @llvm.maxnum.v16f32(<16 x float> %m, <16 x float> %v_abs)
  %i_next = add nuw i64 %i, 16
  %measured = icmp uge i64 %i_next, %width
  br i1 %measured, label %scale, label %measure
scale:
  %largest = call nnan float @llvm.vector.reduce.fmax.v16f32(<16 x float> %m_next)
  %safe = call nnan float @llvm.maxnum.f32(float %largest, float 0x3810000000000000)
  %step = fdiv float %safe, 1.270000e+02
  %s_at = getelementptr float, ptr %s, i64 %row
  store float %step, ptr %s_at, align 4
  %inverse = fdiv float 1.270000e+02, %safe
  %inv_in = insertelement <16 x float> poison, float %inverse, i32 0
  %inv = shufflevector <16 x float> %inv_in, <16 x float> poison, <16 x i32> zeroinitializer
  br label %convert
convert:
  %j = phi i64 [0, %scale], [%j_next, %convert]
  %y_at = getelementptr {source}, ptr %x_row, i64 %j
  %y_in = load <16 x {source}>, ptr %y_at, align {bytes_}
  %y = {wide.format("%y_in")}
  %y_scaled = fmul <16 x float> %y, %inv
  %y_round = call <16 x float> @llvm.rint.v16f32(<16 x float> %y_scaled)
  %i32 = fptosi <16 x float> %y_round to <16 x i32>
  %i8 = trunc <16 x i32> %i32 to <16 x i8>
  %o = {flip}
  %q_at = getelementptr i8, ptr %q_row, i64 %j
  store <16 x i8> %o, ptr %q_at, align 1
  %j_next = add nuw i64 %j, 16
  %converted = icmp uge i64 %j_next, %width
  br i1 %converted, label %next, label %convert
exit:
  ret void
}}
"""
