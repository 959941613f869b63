"""LLVM IR of products with GGUF's quantised weights, as they lie in the file: [columns, blocks].

Weights are unpacked to bfloat16 a few blocks at a time, once for all rows of the pass; the sums are
those of the products of bfloat16 weights, in the same order, and so have the same bits.

On AMX, 32 unpacked weights of a column are a row of a tile: weights are the first factor of a tile
product and inputs the second, the other way round than in tiles.py, so that weights need not be
transposed. Inputs are transposed instead, once per pass: [inputs / 2, rows] pairs.
"""

from __future__ import annotations

from types import SimpleNamespace

from fly.execution.kernels.formats import Unpacking, transpose
from fly.execution.kernels.ir import PANEL, PRODUCT, Function, module
from fly.execution.kernels.tiles import LINE, ROWS, TILE, W_TILE, X_TILE, TileFunction

_COLUMNS = 2  # whose blocks are unpacked between tile products
_FLOATS = "<16 x float>"


def transpose_tile(f: Function, at: str) -> None:
    """Exchange rows and columns of a tile of sums in memory."""
    lines = [f.load(_FLOATS, f.at(at, LINE * index), 64) for index in range(ROWS)]
    for index, line in enumerate(transpose(f, lines, "float")):
        f.store(_FLOATS, line, f.at(at, LINE * index), 64)


def product(unpacking: Unpacking) -> str:
    """IR of `@product(ptr arguments)`, one thread's share, for up to 32 rows, on AMX.

    While a block of 16 columns is unpacked, the one before it is multiplied: either alone leaves
    the other's unit idle.
    """
    f = TileFunction("product", int8=False, unpacking=unpacking)
    a = f.arguments(PRODUCT)
    f.configure(f.at(a.configurations, f.mul(f.sub(a.rows, 1), 64)))
    f.branch(
        f.compare("ule", a.rows, ROWS),
        lambda: _few(f, a, unpacking, 1),
        lambda: _few(f, a, unpacking, 2),
    )
    f.run("x86.tilerelease")
    return module(f)


def _few(f: TileFunction, a: SimpleNamespace, unpacking: Unpacking, row_tiles: int) -> None:
    """Stages of a pipeline: a block's scales, its weights, its products."""
    steps = unpacking.weights // 32  # of tiles, in a block
    per_turn = _COLUMNS if steps > 1 else PANEL
    blocks = f.div(a.steps, steps)
    row_bytes = f.mul(blocks, unpacking.bytes)
    x_step = f.mul(a.x_line, ROWS)
    buffers = f.op(f"alloca i8, i64 {2 * steps * TILE}, align 64")
    scratch = f.op(f"alloca i8, i64 {2 * PANEL * unpacking.scratch}, align 64")
    sums = f.op(f"alloca i8, i64 {2 * TILE}, align 64")
    with f.panel_groups(a) as (first, end):
        units = f.mul(f.sub(end, first), blocks)
        carried = [("i64", value) for value in (first, "0", first, "0", first, "0")]
        with f.loop(0, f.add(units, 2), carried=carried) as loop:
            stages = [loop.values[i : i + 2] for i in (0, 2, 4)]
            odd = f.op(f"and i64 {loop.index}, 1")
            even = f.sub(1, odd)

            def halves(buffer: str, size: int) -> list[str]:
                return [f.at(buffer, f.mul(which, size)) for which in (odd, even)]

            prepared, ready = halves(scratch, PANEL * unpacking.scratch)
            unpacked, before = halves(buffers, steps * TILE)
            starts = []
            for panel, block in stages[:2]:
                start = f.add(f.mul(f.column(a, panel), row_bytes), f.mul(block, unpacking.bytes))
                starts.append(("ptr", f.at(a.w, start)))
            x_block = f.at(a.x, f.mul(f.mul(stages[2][1], steps), x_step))
            with f.loop(0, PANEL // per_turn, carried=starts) as turn:
                to_prepare, to_unpack = turn.values
                tiles = steps * per_turn // PANEL
                for t in range(tiles):
                    step = f.add(f.mul(turn.index, tiles), t)
                    f.load_tile(W_TILE, f.at(before, f.mul(step, TILE)))
                    x = f.at(x_block, f.mul(step, x_step))
                    for r in range(row_tiles):
                        f.load_tile(X_TILE + r, f.at(x, LINE * r), a.x_line)
                        f.multiply(2 * r, X_TILE + r, W_TILE)
                for c in range(per_turn):
                    own = f.add(f.mul(turn.index, per_turn), c)
                    of_column = f.mul(own, unpacking.scratch)
                    unpacking.prepare(f, to_prepare, f.at(prepared, of_column))
                    ahead = f.at(to_prepare, f.mul(row_bytes, PANEL))
                    for offset in range(0, unpacking.bytes, LINE):
                        f.prefetch(f.at(ahead, offset), 2)
                    to = f.at(unpacked, f.mul(own, LINE))
                    values = unpacking.lines(f, to_unpack, f.at(ready, of_column))
                    for index, value in enumerate(values):
                        f.store("<32 x i16>", value, f.at(to, TILE * index), 64)
                    to_prepare, to_unpack = f.at(to_prepare, row_bytes), f.at(to_unpack, row_bytes)
                turn.values = [to_prepare, to_unpack]

            def finish() -> None:
                for r in range(row_tiles):
                    f.store_tile(2 * r, f.at(sums, TILE * r))
                _finish(f, a, sums, stages[2][0], row_tiles)

            def restart() -> None:
                f.branch(f.compare("uge", loop.index, 2), finish)
                for r in range(row_tiles):
                    f.zero_tile(2 * r)

            was_last = f.compare("eq", f.add(stages[2][1], 1), blocks)
            is_early = f.compare("ult", loop.index, 2)
            f.branch(f.op(f"or i1 {was_last}, {is_early}"), restart)
            panel, block = stages[0]
            next_block = f.add(block, 1)
            ends = f.compare("eq", next_block, blocks)
            next_panel = f.min(f.add(panel, f.op(f"zext i1 {ends} to i64")), f.sub(end, 1))
            loop.values = [
                next_panel, f.select(ends, 0, next_block), *stages[0], *stages[1],
            ]  # fmt: skip


def _finish(f: TileFunction, a: SimpleNamespace, sums: str, panel: str, row_tiles: int) -> None:
    """From sums [16 columns, 16 rows] to results, row by row."""
    for r in range(row_tiles):
        transpose_tile(f, f.at(sums, TILE * r))
    column = f.column(a, panel)
    out = f.at(a.out, column, "bfloat")
    with f.loop(0, a.rows) as loop:
        of_row = f.at(sums, f.mul(loop.index, LINE))
        f.finish(a, of_row, column, f.at(out, f.mul(loop.index, a.out_stride)), "")
