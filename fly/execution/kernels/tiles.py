"""LLVM IR of matrix products in AMX tiles: bfloat16 by bfloat16, or int8 by int8, from and to
bfloat16.

Weights lie in the panels of vector.py, so one tile of weights, 16 steps of 32 bits by 16 columns,
is 1 KiB in a row. Up to 16 rows of inputs make one tile: a pass over 16 rows reads the weights once
and costs what a pass over one row does. A row's sums are added up in the same order however many
rows share the pass. blocks.py has the products of more than 32 rows.

Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights. Every kernel numbers them so, so that one
configuration (`configuration`) serves all kernels for the same rows.
"""

from __future__ import annotations

from fly.execution.kernels.vector import PANEL, product_arguments

_ROWS = 16  # of a tile
_ROW_BYTES = 64
_TILE_BYTES = _ROWS * _ROW_BYTES
_PREFETCH = 2048  # bytes ahead of the weights in use
_SIDE_BY_SIDE = {1: 4, 2: 2}  # panels that a kernel for so many row tiles walks through at once


def configuration(rows: int) -> bytes:
    """The tile configuration for a chunk of 1 to 32 rows (Intel's manual, LDTILECFG)."""
    data = bytearray(64)
    data[0] = 1  # palette
    upper, lower = min(rows, _ROWS), max(rows - _ROWS, 0)
    sums = [upper] * 4 if not lower else [upper, upper, lower, lower]
    for tile, tile_rows in enumerate([*sums, upper, lower or upper, _ROWS, _ROWS]):
        data[16 + 2 * tile] = _ROW_BYTES
        data[48 + tile] = tile_rows
    return bytes(data)


def product(*, int8: bool) -> str:
    """IR of `@product(ptr arguments)`, one thread's share, for up to 32 rows; see
    vector.product."""
    multiply = "tdpbssd" if int8 else "tdpbf16ps"
    shapes = [
        (row_tiles, panels) for row_tiles, most in _SIDE_BY_SIDE.items() for panels in {1, most}
    ]
    parts = [declarations(multiply)]
    for row_tiles, panels in shapes:
        parts.append(_sums(row_tiles, panels, multiply))
        parts.append(_finish(row_tiles, panels, int8=int8))
    return "\n".join([*parts, _chunk(), _task()])


def declarations(multiply: str) -> str:
    return f"""
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.{multiply}(i8, i8, i8)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.umin.i64(i64, i64)
"""


def sum_tile(row_tiles: int, row_tile: int, panel: int) -> int:
    return panel if row_tiles == 1 else 2 * row_tile + panel


def _sums(row_tiles: int, panels: int, multiply: str) -> str:
    """All inputs of the row tiles times `panels` panels, into the scratch buffer, a KiB a tile."""
    tiles = [(r, p, sum_tile(row_tiles, r, p)) for r in range(row_tiles) for p in range(panels)]
    lines = [
        f"define internal void @sums_{row_tiles}_{panels}(ptr %x, ptr %w, ptr %scratch, "
        "i64 %steps, i64 %x_stride, i64 %panel_bytes) {",
        "entry:",
        f"%x1_o = mul i64 %x_stride, {_ROWS}",
        "%x0_p = getelementptr i8, ptr %x, i64 0",
        "%x1_p = getelementptr i8, ptr %x, i64 %x1_o",
    ]
    for panel in range(panels):
        lines.append(f"%w{panel}_o = mul i64 %panel_bytes, {panel}")
        lines.append(f"%w{panel}_p = getelementptr i8, ptr %w, i64 %w{panel}_o")
    lines += [f"call void @llvm.x86.tilezero(i8 {tile})" for _, _, tile in tiles]
    lines += [
        "br label %loop",
        "loop:",
        "%k = phi i64 [0, %entry], [%k_next, %loop]",
        f"%k_x = mul i64 %k, {_ROW_BYTES}",
        f"%k_w = mul i64 %k, {_TILE_BYTES}",
    ]
    for r in range(row_tiles):
        lines.append(f"%x{r}_k = getelementptr i8, ptr %x{r}_p, i64 %k_x")
        lines.append(f"call void @llvm.x86.tileloadd64(i8 {4 + r}, ptr %x{r}_k, i64 %x_stride)")
    for panel in range(panels):
        w = f"w{panel}_k"
        lines.append(f"%{w} = getelementptr i8, ptr %w{panel}_p, i64 %k_w")
        for line in range(_TILE_BYTES // 64):
            ahead = _PREFETCH + 64 * line
            lines.append(f"%{w}_{line} = getelementptr i8, ptr %{w}, i64 {ahead}")
            lines.append(f"call void @llvm.prefetch.p0(ptr %{w}_{line}, i32 0, i32 3, i32 1)")
        weights = 6 + panel % 2
        lines.append(f"call void @llvm.x86.tileloadd64(i8 {weights}, ptr %{w}, i64 64)")
        for r in range(row_tiles):
            total = sum_tile(row_tiles, r, panel)
            lines.append(f"call void @llvm.x86.{multiply}(i8 {total}, i8 {4 + r}, i8 {weights})")
    lines += [
        "%k_next = add nuw i64 %k, 1",
        "%done = icmp eq i64 %k_next, %steps",
        "br i1 %done, label %store, label %loop",
        "store:",
    ]
    for r, panel, tile in tiles:
        at = _TILE_BYTES * (r * panels + panel)
        lines.append(f"%t{tile} = getelementptr i8, ptr %scratch, i64 {at}")
        lines.append(f"call void @llvm.x86.tilestored64(i8 {tile}, ptr %t{tile}, i64 64)")
    return "\n".join([*lines, "ret void", "}"])


def _finish(row_tiles: int, panels: int, *, int8: bool) -> str:
    """From sums in the scratch buffer to results, row by row."""
    lines = [
        f"define internal void @finish_{row_tiles}_{panels}(ptr %a, ptr %scratch, ptr %out, "
        "i64 %column, i64 %rows, i64 %out_stride) {",
        "entry:",
        *result_arguments(int8=int8),
        "br label %loop",
        "loop:",
        "%i = phi i64 [0, %entry], [%i_next, %loop]",
        f"%tile = udiv i64 %i, {_ROWS}",
        f"%tile_row = urem i64 %i, {_ROWS}",
        f"%tile_o = mul i64 %tile, {_TILE_BYTES * panels}",
        f"%row_o = mul i64 %tile_row, {_ROW_BYTES}",
        "%at = add i64 %tile_o, %row_o",
        "%out_o = mul i64 %i, %out_stride",
        "%out_p = getelementptr i8, ptr %out, i64 %out_o",
        *row_scale("%i", int8=int8),
    ]
    for p in range(panels):
        lines += [
            f"%at{p} = add i64 %at, {_TILE_BYTES * p}",
            f"%s{p}_at = getelementptr i8, ptr %scratch, i64 %at{p}",
            f"%column{p} = add i64 %column, {PANEL * p}",
            f"%out{p}_at = getelementptr i8, ptr %out_p, i64 {2 * PANEL * p}",
            *result(f"s{p}", f"%column{p}", f"%out{p}_at", int8=int8),
        ]
    lines += [
        "%i_next = add nuw i64 %i, 1",
        "%done = icmp eq i64 %i_next, %rows",
        "br i1 %done, label %exit, label %loop",
        "exit:",
    ]
    return "\n".join([*lines, "ret void", "}"])


def result_arguments(*, int8: bool) -> list[str]:
    """What `result` and `row_scale` read of `kernels._Arguments`."""
    fields = {"bias": 2, "scale": 10, "row_scale": 12} if int8 else {"bias": 2}
    lines = []
    for name, index in fields.items():
        lines.append(f"%{name}_f = getelementptr i64, ptr %a, i64 {index}")
        lines.append(f"%{name}_p = load ptr, ptr %{name}_f")
    return lines


def row_scale(row: str, *, int8: bool) -> list[str]:
    """%rs: what int8 sums of a row are multiplied by."""
    if not int8:
        return []
    return [
        f"%rs_at = getelementptr float, ptr %row_scale_p, i64 {row}",
        "%rs_one = load float, ptr %rs_at, align 4",
        "%rs_in = insertelement <16 x float> poison, float %rs_one, i32 0",
        "%rs = shufflevector <16 x float> %rs_in, <16 x float> poison, <16 x i32> zeroinitializer",
    ]


def result(name: str, column: str, out: str, *, int8: bool) -> list[str]:
    """16 sums at %{name}_at to bfloat16 at `out`: scales (int8), bias, rounding."""
    lines = [
        f"%{name}_bias_at = getelementptr float, ptr %bias_p, i64 {column}",
        f"%{name}_bias = load <16 x float>, ptr %{name}_bias_at, align 4",
    ]
    if int8:
        lines += [
            f"%{name}_i = load <16 x i32>, ptr %{name}_at, align 64",
            f"%{name}_f = sitofp <16 x i32> %{name}_i to <16 x float>",
            f"%{name}_scale_at = getelementptr float, ptr %scale_p, i64 {column}",
            f"%{name}_scale = load <16 x float>, ptr %{name}_scale_at, align 4",
            f"%{name}_c = fmul <16 x float> %{name}_f, %{name}_scale",
            f"%{name} = fmul <16 x float> %{name}_c, %rs",
        ]
    else:
        lines.append(f"%{name} = load <16 x float>, ptr %{name}_at, align 64")
    return [
        *lines,
        f"%{name}_y = fadd <16 x float> %{name}, %{name}_bias",
        f"%{name}_b = fptrunc <16 x float> %{name}_y to <16 x bfloat>",
        f"store <16 x bfloat> %{name}_b, ptr {out}, align 2",
    ]


def _chunk() -> str:
    """@chunk: up to 32 rows times the panels from %panel to %end."""
    typed = (
        "ptr %a, ptr %scratch, ptr %x, ptr %w, ptr %out, i64 %rows, i64 %steps, "
        "i64 %x_stride, i64 %out_stride, i64 %panel_bytes"
    )
    parts = []
    for row_tiles, most in _SIDE_BY_SIDE.items():
        calls = {
            panels: f"""
  call void @sums_{row_tiles}_{panels}(ptr %x, ptr %w_p, ptr %scratch, i64 %steps, i64 %x_stride,
                                       i64 %panel_bytes)
  call void @finish_{row_tiles}_{panels}(ptr %a, ptr %scratch, ptr %out_p, i64 %column,
                                         i64 %rows, i64 %out_stride)"""
            for panels in (1, most)
        }
        parts.append(f"""
define internal void @chunk_{row_tiles}(i64 %panel, i64 %end, {typed}) {{
entry:
  br label %loop
loop:
  %p = phi i64 [%panel, %entry], [%p_next, %next]
  %w_o = mul i64 %p, %panel_bytes
  %w_p = getelementptr i8, ptr %w, i64 %w_o
  %column = mul i64 %p, {PANEL}
  %out_p = getelementptr bfloat, ptr %out, i64 %column
  %left = sub i64 %end, %p
  %whole = icmp uge i64 %left, {most}
  %step = select i1 %whole, i64 {most}, i64 1
  br i1 %whole, label %several, label %one
several:{calls[most]}
  br label %next
one:{calls[1]}
  br label %next
next:
  %p_next = add i64 %p, %step
  %done = icmp uge i64 %p_next, %end
  br i1 %done, label %exit, label %loop
exit:
  ret void
}}""")
    return "\n".join(parts)


def _task() -> str:
    """Groups of panels from the counter, for up to 32 rows."""
    typed = (
        "i64 %first, i64 %end, ptr %a, ptr %scratch, ptr %x, ptr %w, ptr %out, i64 %rows, "
        "i64 %steps, i64 %x_stride, i64 %out_stride, i64 %panel_bytes"
    )
    return f"""
define void @product(ptr %a) {{
entry:
{product_arguments()}
  %configurations_f = getelementptr i64, ptr %a, i64 13
  %configurations = load ptr, ptr %configurations_f
  %x_stride = mul i64 %steps, {_ROW_BYTES}
  %panel_bytes = mul i64 %steps, {_TILE_BYTES}
  %scratch = alloca i8, i64 {4 * _TILE_BYTES}, align 64
  %rows_1 = sub i64 %rows, 1
  %configuration_o = mul i64 %rows_1, 64
  %configuration = getelementptr i8, ptr %configurations, i64 %configuration_o
  call void @llvm.x86.ldtilecfg(ptr %configuration)
  %one_tile = icmp ule i64 %rows, {_ROWS}
  br label %group
group:
  %first = atomicrmw add ptr %counter, i64 %grab monotonic
  %any = icmp ult i64 %first, %panels
  br i1 %any, label %begin, label %exit
begin:
  %to = add i64 %first, %grab
  %end = call i64 @llvm.umin.i64(i64 %to, i64 %panels)
  br i1 %one_tile, label %one, label %two
one:
  call void @chunk_1({typed})
  br label %group
two:
  call void @chunk_2({typed})
  br label %group
exit:
  call void @llvm.x86.tilerelease()
  ret void
}}
"""
