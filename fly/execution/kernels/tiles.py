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

from types import SimpleNamespace

from fly.execution.kernels.formats import Unpacking, first_column
from fly.execution.kernels.ir import PANEL, PRODUCT, Function, Value, module

ROWS = 16  # of a tile
LINE = 64  # bytes of a row of a tile
TILE = ROWS * LINE
X_TILE, W_TILE = 4, 6  # the first ones
_PREFETCH = 2048  # bytes ahead of the weights in use
_SIDE_BY_SIDE = {1: 4, 2: 2}  # panels that a kernel for so many row tiles walks through at once


def configuration(rows: int, *, quantized: bool = False) -> bytes:
    """The tile configuration for a chunk of 1 to 32 rows (Intel's manual, LDTILECFG).

    quantized: rows of the pass are columns of the tiles (quantized.py).
    """
    data = bytearray(64)
    data[0] = 1  # palette
    upper, lower = min(rows, ROWS), max(rows - ROWS, 0)
    sums = [upper] * 4 if not lower else [upper, upper, lower, lower]
    for tile, tile_rows in enumerate([*sums, upper, lower or upper, ROWS, ROWS]):
        data[16 + 2 * tile] = 4 * tile_rows if quantized else LINE
        data[48 + tile] = ROWS if quantized else tile_rows
    return bytes(data)


class TileFunction(Function):
    """A kernel on tiles. `int8`: of their elements, bfloat16 otherwise. unpacking: of quantised
    weights, which are the first factor of tile products (quantized.py)."""

    def __init__(self, name: str, *, int8: bool, unpacking: Unpacking | None = None) -> None:
        super().__init__(name)
        self._int8, self.unpacking = int8, unpacking

    def column(self, a: SimpleNamespace, panel: str) -> str:
        """A panel's first column."""
        if self.unpacking is not None:
            return first_column(self, a, panel)
        return self.mul(panel, PANEL)

    def configure(self, pointer: str) -> None:
        self.run("x86.ldtilecfg", f"ptr {pointer}")

    def zero_tile(self, tile: int) -> None:
        self.run("x86.tilezero", f"i8 {tile}")

    def load_tile(self, tile: int, pointer: str, stride: Value = LINE) -> None:
        self.run("x86.tileloadd64", f"i8 {tile}", f"ptr {pointer}", f"i64 {stride}")

    def store_tile(self, tile: int, pointer: str) -> None:
        self.run("x86.tilestored64", f"i8 {tile}", f"ptr {pointer}", f"i64 {LINE}")

    def multiply(self, total: int, x: int, w: int) -> None:
        """Add the product of two tiles to a third."""
        name = "tdpbssd" if self._int8 else "tdpbf16ps"
        first, second = (x, w) if self.unpacking is None else (w, x)
        self.run(f"x86.{name}", f"i8 {total}", f"i8 {first}", f"i8 {second}")

    def row_scale(self, a: SimpleNamespace, row: str) -> str:
        """What a row's int8 sums are multiplied by; unused for bfloat16."""
        if not self._int8:
            return ""
        return self.splat_at("float", 16, self.at(a.row_scale, row, "float"), 4)

    def finish(self, a: SimpleNamespace, sums: str, column: str, out: str, row_scale: str) -> None:
        """16 sums of one row to bfloat16 at `out`: scales (int8), bias, rounding."""
        floats = "<16 x float>"
        bias = self.load(floats, self.at(a.bias, column, "float"), 4)
        if self._int8:
            ints = self.load("<16 x i32>", sums, 64)
            y = self.op(f"sitofp <16 x i32> {ints} to {floats}")
            scale = self.load(floats, self.at(a.scale, column, "float"), 4)
            y = self.op(f"fmul {floats} {y}, {scale}")
            y = self.op(f"fmul {floats} {y}, {row_scale}")
        else:
            y = self.load(floats, sums, 64)
        y = self.op(f"fadd {floats} {y}, {bias}")
        self.store("<16 x bfloat>", self.op(f"fptrunc {floats} {y} to <16 x bfloat>"), out, 2)


def product(*, int8: bool) -> str:
    """IR of `@product(ptr arguments)`, one thread's share, for up to 32 rows; see
    vector.product."""
    f = TileFunction("product", int8=int8)
    a = f.arguments(PRODUCT)
    panel_bytes = f.mul(a.steps, TILE)
    scratch = f.op(f"alloca i8, i64 {4 * TILE}, align 64")
    f.configure(f.at(a.configurations, f.mul(f.sub(a.rows, 1), 64)))
    is_one_tile = f.compare("ule", a.rows, ROWS)
    with f.panel_groups(a) as (first, end):

        def chunk(row_tiles: int) -> None:
            most = _SIDE_BY_SIDE[row_tiles]
            with f.panels(first, end, most) as (panel, is_most, _):
                w, column = f.at(a.w, f.mul(panel, panel_bytes)), f.mul(panel, PANEL)
                out = f.at(a.out, column, "bfloat")

                def side_by_side(panels: int) -> None:
                    _sums(f, a, w, scratch, row_tiles, panels)
                    _finish(f, a, scratch, column, out, panels)

                f.branch(is_most, lambda: side_by_side(most), lambda: side_by_side(1))

        f.branch(is_one_tile, lambda: chunk(1), lambda: chunk(2))
    f.run("x86.tilerelease")
    return module(f)


def _sums(
    f: TileFunction, a: SimpleNamespace, w: str, scratch: str, row_tiles: int, panels: int
) -> None:
    """All inputs of the row tiles times `panels` panels, into the scratch buffer, a KiB a tile."""
    tiles = {  # row tile and panel: sums
        (r, p): p if row_tiles == 1 else 2 * r + p for r in range(row_tiles) for p in range(panels)
    }
    x_stride, panel_bytes = f.mul(a.steps, LINE), f.mul(a.steps, TILE)
    x_rows = [f.at(a.x, f.mul(x_stride, ROWS * r)) for r in range(row_tiles)]
    w_panels = [f.at(w, f.mul(panel_bytes, panel)) for panel in range(panels)]
    for tile in tiles.values():
        f.zero_tile(tile)
    with f.loop(0, a.steps) as loop:
        x_step, w_step = f.mul(loop.index, LINE), f.mul(loop.index, TILE)
        for r, x_row in enumerate(x_rows):
            f.load_tile(X_TILE + r, f.at(x_row, x_step), x_stride)
        for panel, w_panel in enumerate(w_panels):
            w_at = f.at(w_panel, w_step)
            for line in range(ROWS):
                f.prefetch(f.at(w_at, _PREFETCH + LINE * line), 3)
            weights = W_TILE + panel % 2
            f.load_tile(weights, w_at)
            for r in range(row_tiles):
                f.multiply(tiles[r, panel], X_TILE + r, weights)
    for (r, panel), tile in tiles.items():
        f.store_tile(tile, f.at(scratch, TILE * (r * panels + panel)))


def _finish(
    f: TileFunction, a: SimpleNamespace, scratch: str, column: str, out: str, panels: int
) -> None:
    """From sums in the scratch buffer to results, row by row."""
    with f.loop(0, a.rows) as loop:
        row = loop.index
        tile_at = f.mul(f.div(row, ROWS), TILE * panels)
        sums = f.add(tile_at, f.mul(f.rem(row, ROWS), LINE))
        out_row = f.at(out, f.mul(row, a.out_stride))
        scale = f.row_scale(a, row)
        for p in range(panels):
            of_panel = f.at(scratch, f.add(sums, TILE * p))
            at = f.at(out_row, 2 * PANEL * p)
            f.finish(a, of_panel, f.add(column, PANEL * p), at, scale)
