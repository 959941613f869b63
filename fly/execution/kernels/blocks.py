"""LLVM IR of products of many rows in AMX tiles: what prefill and wide verification passes do.

Many rows are bound by how fast tiles reach the matrix unit rather than by memory: a tile takes
longer to come from the second cache than the unit needs for a product. So the work goes in blocks.
`_STEPS` steps of a chunk of 32 rows (16 KiB) stay in the first cache while the same steps of
`_PAIRS` pairs of panels go by; sums wait in a scratch buffer, which the second cache holds; and the
weights of the next block are prefetched a few lines per step, evenly over the chunks, so that
memory works while the matrix unit does.

Inputs are packed as tiles are read, [chunks, steps, 32 rows, 64 bytes]: rows that lie a power of
two apart would share few lines of the first cache.

Sums are added up in the order of tiles.py's product: a row has the same bits by either.
"""

from __future__ import annotations

from fly.execution.kernels import tiles
from fly.execution.kernels.vector import PANEL, product_arguments

CHUNK = 32  # rows
_STEPS = 8  # of 64 bytes of inputs, in a block
_PAIRS = 8  # of panels, in a block
_CHUNKS = 16  # whose sums wait at once
_TILE = 1024  # bytes
_LINE = 64  # bytes
_SUMS = 4 * _TILE  # of a chunk and a pair of panels


def pack() -> str:
    """IR of `@pack(ptr arguments)`, one thread's share: rows into the order of the product.

    Arguments: x, packed, rows, steps, counter. Rows that the last chunk lacks are left as they
    are: sums of other rows hold nothing of them.
    """
    copy = f"""
  %in_o = mul i64 %step, {_LINE}
  %in = getelementptr i8, ptr %x_row, i64 %in_o
  %line = load <16 x i32>, ptr %in, align 1
  %out_o = mul i64 %step, {CHUNK * _LINE}
  %out = getelementptr i8, ptr %packed_row, i64 %out_o
  store <16 x i32> %line, ptr %out, align 1"""
    return f"""
define void @pack(ptr %a) {{
entry:
  %x = load ptr, ptr %a
  %packed_f = getelementptr i64, ptr %a, i64 1
  %packed = load ptr, ptr %packed_f
  %rows_f = getelementptr i64, ptr %a, i64 2
  %rows = load i64, ptr %rows_f
  %steps_f = getelementptr i64, ptr %a, i64 3
  %steps = load i64, ptr %steps_f
  %counter = getelementptr i64, ptr %a, i64 4
  %row_bytes = mul i64 %steps, {_LINE}
  %chunk_bytes = mul i64 %steps, {CHUNK * _LINE}
  br label %next
next:
  %row = atomicrmw add ptr %counter, i64 1 monotonic
  %any = icmp ult i64 %row, %rows
  br i1 %any, label %begin, label %exit
begin:
  %x_o = mul i64 %row, %row_bytes
  %x_row = getelementptr i8, ptr %x, i64 %x_o
  %chunk = udiv i64 %row, {CHUNK}
  %chunk_o = mul i64 %chunk, %chunk_bytes
  %in_chunk = urem i64 %row, {CHUNK}
  %line_o = mul i64 %in_chunk, {_LINE}
  %packed_o = add i64 %chunk_o, %line_o
  %packed_row = getelementptr i8, ptr %packed, i64 %packed_o
{_loop("step", "0", "%steps", 1, copy)}
  br label %next
exit:
  ret void
}}
"""


def product(*, int8: bool) -> str:
    """IR of `@product(ptr arguments)`, one thread's share, for inputs that `@pack` has packed."""
    multiply = "tdpbssd" if int8 else "tdpbf16ps"
    parts = [tiles.declarations(multiply)]
    parts += [_block(panels, multiply) for panels in (1, 2)]
    return "\n".join([*parts, _finish(int8=int8), _task()])


def grab(panels: int, threads: int) -> int:
    """How many panels a thread takes at a time: whole blocks, if every thread gets as many."""
    shares = threads * max(1, round(panels / (2 * _PAIRS * threads)))
    return -(-panels // (2 * shares)) * 2


def _loop(name: str, start: str, end: str, step: int, body: str) -> str:
    """`body` for %name from start, by `step`, while below end."""
    return f"""  br label %{name}.enter
{name}.enter:
  br label %{name}.test
{name}.test:
  %{name} = phi i64 [{start}, %{name}.enter], [%{name}.next, %{name}.end]
  %{name}.more = icmp ult i64 %{name}, {end}
  br i1 %{name}.more, label %{name}.body, label %{name}.left
{name}.body:{body}
  br label %{name}.end
{name}.end:
  %{name}.next = add nuw i64 %{name}, {step}
  br label %{name}.test
{name}.left:"""


def _block(panels: int, multiply: str) -> str:
    """@block: steps %from to %to of a chunk's inputs times `panels` panels, added to the sums.

    In every step, `lines` lines per panel are prefetched, from `ahead` on.
    """
    tiles_of_sums = [(row_tile, panel) for row_tile in range(2) for panel in range(panels)]
    lines = [
        f"define internal void @block_{panels}(ptr %x, ptr %w, ptr %sums, i64 %from, i64 %to, "
        "i64 %panel_bytes, ptr %ahead, i64 %lines) {",
        "entry:",
    ]
    for row_tile, panel in tiles_of_sums:
        tile = tiles.sum_tile(2, row_tile, panel)
        at = _TILE * (2 * row_tile + panel)
        lines.append(f"%sums{tile} = getelementptr i8, ptr %sums, i64 {at}")
    for panel in range(panels):
        lines.append(f"%w{panel}_o = mul i64 %panel_bytes, {panel}")
        lines.append(f"%w{panel}_p = getelementptr i8, ptr %w, i64 %w{panel}_o")
    lines += ["%is_first = icmp eq i64 %from, 0", "br i1 %is_first, label %zero, label %load"]
    every_sum = [tiles.sum_tile(2, *place) for place in tiles_of_sums]
    lines.append("zero:")
    lines += [f"call void @llvm.x86.tilezero(i8 {tile})" for tile in every_sum]
    lines += ["br label %loop", "load:"]
    for tile in every_sum:
        lines.append(f"call void @llvm.x86.tileloadd64(i8 {tile}, ptr %sums{tile}, i64 {_LINE})")
    lines += [
        "br label %loop",
        "loop:",
        "%k = phi i64 [%from, %zero], [%from, %load], [%k_next, %line.left]",
        "%ahead_k = phi ptr [%ahead, %zero], [%ahead, %load], [%ahead_next, %line.left]",
        f"%k_x = mul i64 %k, {2 * _TILE}",
        f"%k_w = mul i64 %k, {_TILE}",
        "%x0_k = getelementptr i8, ptr %x, i64 %k_x",
        f"%x1_k = getelementptr i8, ptr %x0_k, i64 {_TILE}",
    ]
    for panel in range(panels):
        lines.append(f"%w{panel}_k = getelementptr i8, ptr %w{panel}_p, i64 %k_w")
    lines += [  # loads of tiles between the products that need them
        f"call void @llvm.x86.tileloadd64(i8 6, ptr %w0_k, i64 {_LINE})",
        f"call void @llvm.x86.tileloadd64(i8 4, ptr %x0_k, i64 {_LINE})",
        f"call void @llvm.x86.{multiply}(i8 {tiles.sum_tile(2, 0, 0)}, i8 4, i8 6)",
    ]
    if panels == 2:
        lines += [
            f"call void @llvm.x86.tileloadd64(i8 7, ptr %w1_k, i64 {_LINE})",
            f"call void @llvm.x86.{multiply}(i8 {tiles.sum_tile(2, 0, 1)}, i8 4, i8 7)",
        ]
    lines.append(f"call void @llvm.x86.tileloadd64(i8 5, ptr %x1_k, i64 {_LINE})")
    for panel in range(panels):
        total = tiles.sum_tile(2, 1, panel)
        lines.append(f"call void @llvm.x86.{multiply}(i8 {total}, i8 5, i8 {6 + panel})")
    prefetch = [f"  %line_o = mul i64 %line, {_LINE}"]
    for panel in range(panels):
        prefetch += [
            f"  %ahead{panel}_o = add i64 %line_o, %w{panel}_o",
            f"  %ahead{panel} = getelementptr i8, ptr %ahead_k, i64 %ahead{panel}_o",
            f"  call void @llvm.prefetch.p0(ptr %ahead{panel}, i32 0, i32 1, i32 1)",
        ]
    lines += [
        _loop("line", "0", "%lines", 1, "\n" + "\n".join(prefetch)),
        f"%ahead_o = mul i64 %lines, {_LINE}",
        "%ahead_next = getelementptr i8, ptr %ahead_k, i64 %ahead_o",
        "%k_next = add nuw i64 %k, 1",
        "%done = icmp uge i64 %k_next, %to",
        "br i1 %done, label %store, label %loop",
        "store:",
    ]
    for tile in every_sum:
        lines.append(f"call void @llvm.x86.tilestored64(i8 {tile}, ptr %sums{tile}, i64 {_LINE})")
    return "\n".join([*lines, "ret void", "}"])


def _finish(*, int8: bool) -> str:
    """@finish: from the sums of a chunk and of panels %block to %end to results.

    Row by row, as results of a row lie side by side and those of other rows on other pages."""
    panel = f"""
  %in_block = sub i64 %p, %block
  %pair = udiv i64 %in_block, 2
  %in_pair = urem i64 %in_block, 2
  %pair_o = mul i64 %pair, {_CHUNKS * _SUMS}
  %in_pair_o = mul i64 %in_pair, {_TILE}
  %panel_o = add i64 %pair_o, %in_pair_o
  %s_at = getelementptr i8, ptr %row_sums, i64 %panel_o
  %column = mul i64 %p, {PANEL}
  %out_p = getelementptr bfloat, ptr %out_row, i64 %column
""" + "\n".join(tiles.result("s", "%column", "%out_p", int8=int8))
    row = f"""
  %row = add i64 %first_row, %i
  %tile = udiv i64 %i, 16
  %tile_o = mul i64 %tile, {2 * _TILE - 16 * _LINE}
  %line_o = mul i64 %i, {_LINE}
  %row_o = add i64 %tile_o, %line_o
  %row_sums = getelementptr i8, ptr %sums, i64 %row_o
  %out_o = mul i64 %i, %out_stride
  %out_row = getelementptr i8, ptr %out, i64 %out_o
""" + "\n".join([*tiles.row_scale("%row", int8=int8), _loop("p", "%block", "%end", 1, panel)])
    arguments = "\n".join(tiles.result_arguments(int8=int8))
    return f"""
define internal void @finish(ptr %a, ptr %sums, ptr %out, i64 %block, i64 %end, i64 %first_row,
                             i64 %rows, i64 %out_stride) {{
entry:
{arguments}
{_loop("i", "0", "%rows", 1, row)}
  ret void
}}"""


def _task() -> str:
    """Groups of panels from the counter; within one, blocks as this file's head says."""
    arguments = (
        "ptr %x_p, ptr %w_p, ptr %sums, i64 %k, i64 %k_end, i64 %panel_bytes, ptr %ahead, "
        "i64 %lines"
    )
    pair = f"""
  %in_block = sub i64 %p, %block
  %sums_pair = mul i64 %in_block, {_CHUNKS * _SUMS // 2}
  %sums = getelementptr i8, ptr %sums_chunk_p, i64 %sums_pair
  %w_o = mul i64 %p, %panel_bytes
  %w_p = getelementptr i8, ptr %w, i64 %w_o
  %ahead_lines = mul i64 %c, %lines_per_chunk
  %ahead_chunk = mul i64 %ahead_lines, {_LINE}
  %ahead_o = add i64 %ahead_chunk, %ahead_block
  %ahead = getelementptr i8, ptr %w_p, i64 %ahead_o
  %panels_left = sub i64 %block_end, %p
  %is_pair = icmp uge i64 %panels_left, 2
  br i1 %is_pair, label %two, label %one
two:
  call void @block_2({arguments})
  br label %pair_done
one:
  call void @block_1({arguments})
  br label %pair_done
pair_done:"""
    chunk = f"""
  %c = sub i64 %chunk, %some
  %sums_chunk = mul i64 %c, {_SUMS}
  %sums_chunk_p = getelementptr i8, ptr %scratch, i64 %sums_chunk
  %x_o = mul i64 %chunk, %chunk_bytes
  %x_p = getelementptr i8, ptr %x, i64 %x_o
  %row = mul i64 %chunk, {CHUNK}
  %rows_left = sub i64 %rows, %row
  %m = call i64 @llvm.umin.i64(i64 %rows_left, i64 {CHUNK})
  %is_partial = icmp ult i64 %m, {CHUNK}
  br i1 %is_partial, label %narrow, label %multiply
narrow:
  %m_1 = sub i64 %m, 1
  %narrow_o = mul i64 %m_1, 64
  %narrow_p = getelementptr i8, ptr %configurations, i64 %narrow_o
  call void @llvm.x86.ldtilecfg(ptr %narrow_p)
  br label %multiply
multiply:
  %out_o = mul i64 %row, %out_stride
  %out_row = getelementptr i8, ptr %out, i64 %out_o
{_loop("p", "%block", "%block_end", 2, pair)}
  br i1 %is_partial, label %widen, label %finish
widen:
  call void @llvm.x86.ldtilecfg(ptr %configuration)
  br label %finish
finish:
  br i1 %is_last, label %results, label %chunk_done
results:
  call void @finish(ptr %a, ptr %sums_chunk_p, ptr %out_row, i64 %block, i64 %block_end, i64 %row,
                    i64 %m, i64 %out_stride)
  br label %chunk_done
chunk_done:"""
    steps = f"""
  %k_to = add i64 %k, {_STEPS}
  %k_end = call i64 @llvm.umin.i64(i64 %k_to, i64 %steps)
  %is_last = icmp uge i64 %k_to, %steps
  %k_o = mul i64 %k, {_TILE}
  %next_steps = add i64 %k_o, {_STEPS * _TILE}
  %next_panels = mul i64 %panel_bytes, {2 * _PAIRS}
  %ahead_block = select i1 %is_last, i64 %next_panels, i64 %next_steps
{_loop("chunk", "%some", "%some_end", 1, chunk)}"""
    some_chunks = f"""
  %some_to = add i64 %some, {_CHUNKS}
  %some_end = call i64 @llvm.umin.i64(i64 %some_to, i64 %chunks)
{_loop("k", "0", "%steps", _STEPS, steps)}"""
    block = f"""
  %block_to = add i64 %block, {2 * _PAIRS}
  %block_end = call i64 @llvm.umin.i64(i64 %block_to, i64 %end)
{_loop("some", "0", "%chunks", _CHUNKS, some_chunks)}"""
    return f"""
define void @product(ptr %a) {{
entry:
{product_arguments()}
  %configurations_f = getelementptr i64, ptr %a, i64 13
  %configurations = load ptr, ptr %configurations_f
  %configuration = getelementptr i8, ptr %configurations, i64 {64 * (CHUNK - 1)}
  call void @llvm.x86.ldtilecfg(ptr %configuration)
  %panel_bytes = mul i64 %steps, {_TILE}
  %chunk_bytes = mul i64 %steps, {2 * _TILE}
  %rows_up = add i64 %rows, {CHUNK - 1}
  %chunks = udiv i64 %rows_up, {CHUNK}
  %at_once = call i64 @llvm.umin.i64(i64 %chunks, i64 {_CHUNKS})
  %all_steps = mul i64 %at_once, {_STEPS}
  %all_lines = add i64 %all_steps, {_STEPS * _TILE // _LINE - 1}
  %lines = udiv i64 %all_lines, %all_steps
  %lines_per_chunk = mul i64 %lines, {_STEPS}
  %scratch = alloca i8, i64 {_PAIRS * _CHUNKS * _SUMS}, align 64
  br label %group
group:
  %first = atomicrmw add ptr %counter, i64 %grab monotonic
  %any = icmp ult i64 %first, %panels
  br i1 %any, label %begin, label %exit
begin:
  %to = add i64 %first, %grab
  %end = call i64 @llvm.umin.i64(i64 %to, i64 %panels)
{_loop("block", "%first", "%end", 2 * _PAIRS, block)}
  br label %group
exit:
  call void @llvm.x86.tilerelease()
  ret void
}}
"""
