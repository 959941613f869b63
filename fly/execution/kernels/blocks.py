"""LLVM IR of products of many rows in AMX tiles: what prefill and wide verification passes do.

Many rows are bound by how fast tiles reach the matrix unit rather than by memory: a tile takes
longer to come from the second cache than the unit needs for a product. So the work goes in blocks.
`_STEPS` steps of a chunk of 32 rows (16 KiB) stay in the first cache while the same steps of
`PAIRS` pairs of panels go by; sums wait in a scratch buffer, which the second cache holds; and the
weights of the next block are prefetched a few lines per step, evenly over the chunks, so that
memory works while the matrix unit does.

Inputs are packed as tiles are read, [chunks, steps, 32 rows, 64 bytes]: rows that lie a power of
two apart would share few lines of the first cache.

Sums are added up in the order of tiles.py's product: a row has the same bits by either.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from fly.execution.kernels.formats import Unpacking, unpack_panels
from fly.execution.kernels.ir import PANEL, PRODUCT, module
from fly.execution.kernels.quantized import transpose_tile
from fly.execution.kernels.tiles import LINE, ROWS, TILE, W_TILE, X_TILE, TileFunction

CHUNK = 2 * ROWS
_STEPS = 8  # of 64 bytes of inputs, in a block
PAIRS = 8  # of panels, in a block
_CHUNKS = 16  # whose sums wait at once
_SUMS = 4 * TILE  # of a chunk and a pair of panels


def product(*, int8: bool = False, unpacking: Unpacking | None = None) -> str:
    """IR of `@product(ptr arguments)`, one thread's share, for packed inputs, or transposed chunks
    of them if weights are quantised, which are unpacked block by block."""
    f = TileFunction("product", int8=int8, unpacking=unpacking)
    a = f.arguments(PRODUCT)
    whole_chunk = f.at(a.configurations, 64 * (CHUNK - 1))
    f.configure(whole_chunk)
    chunk_bytes = f.mul(a.steps, 2 * TILE)
    chunks = f.div(f.add(a.rows, CHUNK - 1), CHUNK)
    if unpacking is None:
        panel_bytes = f.mul(a.steps, TILE)
        block_steps = f.mul(f.min(chunks, _CHUNKS), _STEPS)
        lines = f.div(f.add(block_steps, _STEPS * TILE // LINE - 1), block_steps)
        chunk_ahead = f.mul(lines, _STEPS * LINE)
    else:
        panel_bytes = str(_STEPS * TILE)
        unpacked = f.op(f"alloca i8, i64 {2 * PAIRS * _STEPS * TILE}, align 64")
        of_columns = f.op(f"alloca i8, i64 {PANEL * unpacking.scratch}, align 64")
    scratch = f.op(f"alloca i8, i64 {PAIRS * _CHUNKS * _SUMS}, align 64")
    with f.panel_groups(a) as (first, end), f.loop(first, end, 2 * PAIRS) as of_panels:
        block, block_end = of_panels.index, f.min(f.add(of_panels.index, 2 * PAIRS), end)
        with f.loop(0, chunks, _CHUNKS) as of_chunks, f.loop(0, a.steps, _STEPS) as of_steps:
            some, some_end = of_chunks.index, f.min(f.add(of_chunks.index, _CHUNKS), chunks)
            k, k_to = of_steps.index, f.add(of_steps.index, _STEPS)
            k_end, is_last = f.min(k_to, a.steps), f.compare("uge", k_to, a.steps)
            if unpacking is not None:
                unpack_panels(f, a, unpacking, unpacked, of_columns, block, block_end, k, k_end)
            with f.loop(some, some_end) as chunk:
                in_block = f.sub(chunk.index, some)
                sums = f.at(scratch, f.mul(in_block, _SUMS))
                x = f.at(a.x, f.mul(chunk.index, chunk_bytes))
                row = f.mul(chunk.index, CHUNK)
                rows = f.min(f.sub(a.rows, row), CHUNK)
                is_partial = f.compare("ult", rows, CHUNK)

                def narrow() -> None:
                    f.configure(f.at(a.configurations, f.mul(f.sub(rows, 1), 64)))

                f.branch(is_partial, narrow)
                with f.loop(block, block_end, 2) as pair:
                    panel, panel_in_block = pair.index, f.sub(pair.index, block)
                    if unpacking is None:
                        w = f.at(a.w, f.mul(panel, panel_bytes))
                        next_panels, next_steps = f.mul(panel_bytes, 2 * PAIRS), f.mul(k_to, TILE)
                        next_block = f.select(is_last, next_panels, next_steps)
                        ahead = f.at(w, f.add(f.mul(in_block, chunk_ahead), next_block))
                        prefetch = (ahead, lines)
                    else:  # as if the panels' first steps were there, too
                        w = f.at(unpacked, f.mul(panel_in_block, _STEPS * TILE))
                        w = f.at(w, f.sub(0, f.mul(k, TILE)))
                        prefetch = None
                    multiply = partial(
                        _block, f, x=x, w=w, start=k, end=k_end, panel_bytes=panel_bytes,
                        sums=f.at(sums, f.mul(panel_in_block, _CHUNKS * _SUMS // 2)),
                        prefetch=prefetch,
                    )  # fmt: skip
                    is_pair = f.compare("uge", f.sub(block_end, panel), 2)
                    f.branch(is_pair, partial(multiply, panels=2), partial(multiply, panels=1))
                f.branch(is_partial, lambda: f.configure(whole_chunk))
                f.branch(is_last, lambda: _finish(f, a, sums, block, block_end, row, rows))
    f.run("x86.tilerelease")
    return module(f)


def _block(
    f: TileFunction,
    *,
    panels: int,
    x: str,
    w: str,
    sums: str,
    start: str,
    end: str,
    panel_bytes: str,
    prefetch: tuple[str, str] | None,
) -> None:
    """Steps `start` to `end` of a chunk's inputs times one or two panels, added to the sums.

    prefetch: from where on, and how many lines of each panel in every step.
    """
    tiles = [2 * row_tile + panel for row_tile in range(2) for panel in range(panels)]
    stored = [f.at(sums, TILE * tile) for tile in tiles]
    panel_offsets = [f.mul(panel_bytes, panel) for panel in range(panels)]
    w_panels = [f.at(w, offset) for offset in panel_offsets]

    def zero() -> None:
        for tile in tiles:
            f.zero_tile(tile)

    def load() -> None:
        for tile, at in zip(tiles, stored):
            f.load_tile(tile, at)

    f.branch(f.compare("eq", start, 0), zero, load)
    with f.loop(start, end, carried=[("ptr", prefetch[0])] if prefetch else []) as loop:
        x_step = f.at(x, f.mul(loop.index, 2 * TILE))
        w_offset = f.mul(loop.index, TILE)
        lower_x, x_line = f.at(x_step, TILE), LINE
        if f.unpacking is not None:  # pairs of 32 rows, side by side
            lower_x, x_line = f.at(x_step, LINE), 2 * LINE
        w_step = [f.at(w_panel, w_offset) for w_panel in w_panels]
        f.load_tile(W_TILE, w_step[0])  # loads of tiles between the products that need them
        f.load_tile(X_TILE, x_step, x_line)
        f.multiply(0, X_TILE, W_TILE)
        if panels == 2:
            f.load_tile(W_TILE + 1, w_step[1])
            f.multiply(1, X_TILE, W_TILE + 1)
        f.load_tile(X_TILE + 1, lower_x, x_line)
        for panel in range(panels):
            f.multiply(2 + panel, X_TILE + 1, W_TILE + panel)
        if prefetch is not None:
            (ahead,), lines = loop.values, prefetch[1]
            with f.loop(0, lines) as line:
                line_at = f.mul(line.index, LINE)
                for offset in panel_offsets:
                    f.prefetch(f.at(ahead, f.add(line_at, offset)), 1)
            loop.values = [f.at(ahead, f.mul(lines, LINE))]
    for tile, at in zip(tiles, stored):
        f.store_tile(tile, at)


def _finish(
    f: TileFunction,
    a: SimpleNamespace,
    sums: str,
    block: str,
    block_end: str,
    first_row: str,
    rows: str,
) -> None:
    """From the sums of a chunk and of the panels of a block to results.

    Row by row, as results of a row lie side by side and those of other rows on other pages."""

    def tile_of(panel: str) -> str:
        """Where the panel's sums are, from those of the block's first one."""
        in_block = f.sub(panel, block)
        pair_at = f.mul(f.div(in_block, 2), _CHUNKS * _SUMS)
        return f.add(pair_at, f.mul(f.rem(in_block, 2), TILE))

    if f.unpacking is not None:
        with f.loop(block, block_end) as panel:
            tile = f.at(sums, tile_of(panel.index))
            for row_tile in range(2):
                transpose_tile(f, f.at(tile, 2 * TILE * row_tile))
    out = f.at(a.out, f.mul(first_row, a.out_stride))
    with f.loop(0, rows) as row:
        tile_at = f.mul(f.div(row.index, ROWS), 2 * TILE - ROWS * LINE)
        row_sums = f.at(sums, f.add(tile_at, f.mul(row.index, LINE)))
        out_row = f.at(out, f.mul(row.index, a.out_stride))
        scale = f.row_scale(a, f.add(first_row, row.index))
        with f.loop(block, block_end) as panel:
            column = f.column(a, panel.index)
            panel_sums = f.at(row_sums, tile_of(panel.index))
            f.finish(a, panel_sums, column, f.at(out_row, column, "bfloat"), scale)
