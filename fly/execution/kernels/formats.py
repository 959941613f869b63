"""LLVM IR that unpacks GGUF's quantised weights into bfloat16.

A format's values are those of the gguf package's dequantisation, which computes in float32, rounded
to bfloat16. Blocks are read as they lie in the file, a row of a weight after the other.
"""

from __future__ import annotations

from types import SimpleNamespace

from fly.execution.kernels.ir import PANEL, Function, module

_LINE = 32  # weights that are unpacked into one vector
_LINE_BYTES = 64
_TILE = PANEL * _LINE_BYTES  # bytes of so many weights of 16 columns
_BYTES, _HALF_BYTES = "<32 x i8>", "<16 x i8>"
_INTS, _FLOATS, _WORDS = "<16 x i32>", "<16 x float>", "<32 x i16>"


class Unpacking:
    """How one row's block of a format becomes vectors of 32 bfloat16, `<32 x i16>`.

    weights, bytes: of a block. factors: where its float16 numbers are. `prepare` writes what
    `lines` needs of a block, `scratch` bytes; formats with one scale per block need nothing.
    dots: whether the machine rounds to bfloat16 in one instruction. words: whether it permutes the
    words of a register of 512 bits.
    """

    weights = 32
    bytes: int
    scratch = 64
    factors: tuple[int, ...] = (0,)

    def __init__(self, *, dots: bool, words: bool) -> None:
        self._dots, self._words = dots, words

    def prepare(self, f: Function, block: str, scratch: str) -> None:
        """Write scales, and what else is faster from memory."""

    def lines(self, f: Function, block: str, scratch: str) -> list[str]:
        """The block's weights, 32 a vector."""
        raise NotImplementedError

    def _round(self, f: Function, low: str, high: str) -> str:
        """Two vectors of 16 float32 as one of 32 bfloat16."""
        if self._dots:
            kind, name = "<32 x bfloat>", "x86.avx512bf16.cvtne2ps2bf16.512"
            pair = f.call(kind, name, f"{_FLOATS} {high}", f"{_FLOATS} {low}")
            return f.op(f"bitcast {kind} {pair} to {_WORDS}")
        halves = []
        for part in (low, high):  # to the nearest, ties to even
            bits = f.op(f"bitcast {_FLOATS} {part} to {_INTS}")
            upper = f.op(f"lshr {_INTS} {bits}, splat (i32 16)")
            odd = f.op(f"and {_INTS} {upper}, splat (i32 1)")
            bits = f.op(f"add {_INTS} {bits}, splat (i32 32767)")
            bits = f.op(f"add {_INTS} {bits}, {odd}")
            bits = f.op(f"lshr {_INTS} {bits}, splat (i32 16)")
            halves.append(f.op(f"trunc {_INTS} {bits} to <16 x i16>"))
        return f.shuffle("<16 x i16>", halves[0], halves[1], range(32))

    def _scaled(
        self, f: Function, levels: list[str], scales: list[str], minimum: str | None
    ) -> str:
        """Twice 16 signed bytes times a scale, less the minimum."""
        parts = []
        for bytes_, scale in zip(levels, scales):
            ints = f.op(f"sext {_HALF_BYTES} {bytes_} to {_INTS}")
            value = f.op(f"sitofp {_INTS} {ints} to {_FLOATS}")
            if minimum is None:
                parts.append(f.op(f"fmul {_FLOATS} {value}, {scale}"))
            else:
                parts.append(_less(f, value, scale, minimum))
        return self._round(f, *parts)


def _halves(f: Function, bytes_: str) -> list[str]:
    """32 bytes as twice 16."""
    return [f.shuffle(_BYTES, bytes_, "poison", range(i, i + 16)) for i in (0, 16)]


def _half(f: Function, at: str) -> str:
    """A float16 in memory as float32."""
    return f.op(f"fpext half {f.load('half', at, 1)} to float")


def _less(f: Function, levels: str, scale: str, minimum: str) -> str:
    """levels * scale - minimum. The products are exact: scales have 17 bits, levels at most 5."""
    negative = f.op(f"fneg {_FLOATS} {minimum}")
    typed = (f"{_FLOATS} {value}" for value in (levels, scale, negative))
    return f.call(_FLOATS, "fma.v16f32", *typed)


def _splat_at(f: Function, at: str) -> str:
    return f.splat("float", 16, f.load("float", at, 4))


def _nibbles(f: Function, bytes_: str, *, upper: bool) -> str:
    if upper:
        return f.op(f"lshr {_BYTES} {bytes_}, splat (i8 4)")
    return f.op(f"and {_BYTES} {bytes_}, splat (i8 15)")


class _Blocks32(Unpacking):
    """A float16 scale and 32 levels."""

    def lines(self, f: Function, block: str, scratch: str) -> list[str]:
        scale = f.splat("float", 16, _half(f, block))
        return [self._scaled(f, _halves(f, self._levels(f, f.at(block, 2))), [scale] * 2, None)]

    def _levels(self, f: Function, at: str) -> str:
        raise NotImplementedError

    def _nibbles32(self, f: Function, at: str) -> str:
        """Lower nibbles of 16 bytes, then their upper ones."""
        half = f.load(_HALF_BYTES, at, 1)
        upper = f.op(f"lshr {_HALF_BYTES} {half}, splat (i8 4)")
        lower = f.op(f"and {_HALF_BYTES} {half}, splat (i8 15)")
        return f.shuffle(_HALF_BYTES, lower, upper, range(32))


class _Q8(_Blocks32):
    bytes = 34

    def _levels(self, f: Function, at: str) -> str:
        return f.load(_BYTES, at, 1)


class _Q4(_Blocks32):
    bytes = 18

    def _levels(self, f: Function, at: str) -> str:
        return f.op(f"sub {_BYTES} {self._nibbles32(f, at)}, splat (i8 8)")


class _Q5(_Blocks32):
    bytes = 22

    def _levels(self, f: Function, at: str) -> str:
        bits = f.op(f"bitcast i32 {f.load('i32', at, 1)} to <32 x i1>")
        # without its fifth bit, a level is 16 less
        low = self._nibbles32(f, f.at(at, 4))
        less = f.op(f"sub {_BYTES} {low}, splat (i8 16)")
        return f.op(f"select <32 x i1> {bits}, {_BYTES} {low}, {_BYTES} {less}")


class _Q4K(Unpacking):
    """256 weights: float16 factors of scales and minimums, 6 bits of each per 32, and 4 bits."""

    weights = 256
    bytes = 144
    factors = (0, 2)

    def prepare(self, f: Function, block: str, scratch: str) -> None:
        four = "<4 x i32>"
        head = f.load(four, block, 1)  # two factors, then 12 bytes of scales

        def constant(*lanes: int) -> str:
            return "<" + ", ".join(f"i32 {lane}" for lane in lanes) + ">"

        six, nibble, two = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
        low = f.op(
            f"lshr {four} {f.shuffle(four, head, 'poison', (1, 3, 2, 3))}, {constant(0, 0, 0, 4)}"
        )
        low = f.op(f"and {four} {low}, {constant(six, nibble, six, nibble)}")
        high = f.op(f"lshr {four} {f.shuffle(four, head, 'poison', (1, 1, 2, 2))}, splat (i32 2)")
        high = f.op(f"and {four} {high}, {constant(0, two, 0, two)}")
        six_bits = f.op(f"bitcast {four} {f.op(f'or {four} {low}, {high}')} to {_HALF_BYTES}")
        ints = f.op(f"zext {_HALF_BYTES} {six_bits} to {_INTS}")
        values = f.op(f"uitofp {_INTS} {ints} to {_FLOATS}")
        halves = f.op(f"bitcast {four} {head} to <8 x half>")
        factors = f.shuffle("<8 x half>", halves, "poison", [0] * 8 + [1] * 8)
        factors = f.op(f"fpext <16 x half> {factors} to {_FLOATS}")
        f.store(_FLOATS, f.op(f"fmul {_FLOATS} {values}, {factors}"), scratch, 64)

    def lines(self, f: Function, block: str, scratch: str) -> list[str]:
        lines = []
        for pair in range(4):
            bytes_ = f.load(_BYTES, f.at(block, 16 + 32 * pair), 1)
            scale = [_splat_at(f, f.at(scratch, 4 * (2 * pair + i))) for i in range(2)]
            minimum = [_splat_at(f, f.at(scratch, 32 + 4 * (2 * pair + i))) for i in range(2)]
            if self._words:
                lines += self._looked_up(f, bytes_, scale, minimum)
            else:
                for i in range(2):
                    levels = _nibbles(f, bytes_, upper=bool(i))
                    lines.append(self._scaled(f, _halves(f, levels), [scale[i]] * 2, minimum[i]))
        return lines

    def _looked_up(
        self, f: Function, bytes_: str, scales: list[str], minimums: list[str]
    ) -> list[str]:
        """Lower and upper nibbles of 32 bytes: 16 values of each, in one table of 32."""
        levels = "<" + ", ".join(f"float {level}.0" for level in range(16)) + ">"
        tables = []
        for scale, minimum in zip(scales, minimums):
            tables.append(_less(f, levels, scale, minimum))
        table = self._round(f, *tables)
        words = f.op(f"zext {_BYTES} {bytes_} to {_WORDS}")
        lower = f.op(f"and {_WORDS} {words}, splat (i16 15)")
        upper = f.op(f"lshr {_WORDS} {words}, splat (i16 4)")
        upper = f.op(f"or {_WORDS} {upper}, splat (i16 16)")
        name = "x86.avx512.permvar.hi.512"
        return [
            f.call(_WORDS, name, f"{_WORDS} {table}", f"{_WORDS} {index}")
            for index in (lower, upper)
        ]


class _Q5K(_Q4K):
    """As Q4_K, with a fifth bit of each weight."""

    bytes = 176

    def lines(self, f: Function, block: str, scratch: str) -> list[str]:
        fifth = f.load(_BYTES, f.at(block, 16), 1)
        lines = []
        for index in range(8):
            bytes_ = f.load(_BYTES, f.at(block, 48 + 32 * (index // 2)), 1)
            low = _nibbles(f, bytes_, upper=bool(index % 2))
            bit = f.op(f"lshr {_BYTES} {fifth}, splat (i8 {index})")
            bit = f.op(f"and {_BYTES} {bit}, splat (i8 1)")
            bit = f.op(f"shl {_BYTES} {bit}, splat (i8 4)")
            levels = f.op(f"or {_BYTES} {low}, {bit}")
            scale = _splat_at(f, f.at(scratch, 4 * index))
            minimum = _splat_at(f, f.at(scratch, 32 + 4 * index))
            lines.append(self._scaled(f, _halves(f, levels), [scale] * 2, minimum))
        return lines


class _Q6K(Unpacking):
    """256 weights: 6 bits of each, 8 bits of scale per 16 weights, and their float16 factor."""

    weights = 256
    bytes = 210
    factors = (208,)
    scratch = 64 + 256  # scales, and levels: bytes are widened faster from memory

    def prepare(self, f: Function, block: str, scratch: str) -> None:
        bytes_ = f.load(_HALF_BYTES, f.at(block, 192), 1)
        ints = f.op(f"sext {_HALF_BYTES} {bytes_} to {_INTS}")
        values = f.op(f"sitofp {_INTS} {ints} to {_FLOATS}")
        factor = f.splat("float", 16, _half(f, f.at(block, 208)))
        f.store(_FLOATS, f.op(f"fmul {_FLOATS} {values}, {factor}"), scratch, 64)
        kind, words = "<64 x i8>", "<32 x i16>"

        def bits(vector: str, operation: str, shift: int, mask: int) -> str:
            """Bits of each byte, shifted as if they were of words, which is one instruction."""
            if shift:
                vector = f.op(f"bitcast {kind} {vector} to {words}")
                vector = f.op(f"{operation} {words} {vector}, splat (i16 {shift})")
                vector = f.op(f"bitcast {words} {vector} to {kind}")
            return f.op(f"and {kind} {vector}, splat (i8 {mask})")

        for half in range(2):
            low = f.load(kind, f.at(block, 64 * half), 1)
            high = f.load(_BYTES, f.at(block, 128 + 32 * half), 1)
            quarter = f.op(f"lshr {_BYTES} {high}, splat (i8 2)")
            fourths = f.shuffle(_BYTES, high, quarter, range(64))
            for part, (shift, way) in enumerate(((4, "shl"), (0, ""))):
                nibbles = bits(low, "lshr", 4 * part, 15)
                levels = f.op(f"or {kind} {nibbles}, {bits(fourths, way, shift, 48)}")
                levels = f.op(f"sub {kind} {levels}, splat (i8 32)")
                f.store(kind, levels, f.at(scratch, 64 + 128 * half + 64 * part), 64)

    def lines(self, f: Function, block: str, scratch: str) -> list[str]:
        lines = []
        for index in range(8):
            at = f.at(scratch, 64 + _LINE * index)
            levels = [f.load(_HALF_BYTES, f.at(at, 16 * i), 16) for i in range(2)]
            scales = [_splat_at(f, f.at(scratch, 8 * index + 4 * i)) for i in range(2)]
            lines.append(self._scaled(f, levels, scales, None))
        return lines


FORMATS: dict[str, type[Unpacking]] = {
    "Q4_0": _Q4, "Q5_0": _Q5, "Q8_0": _Q8, "Q4_K": _Q4K, "Q5_K": _Q5K, "Q6_K": _Q6K
}  # fmt: skip


def rows(unpacking: Unpacking) -> str:
    """IR of `@rows(ptr arguments)`, one thread's share: rows of a weight, as bfloat16.

    Row ids[i], of `blocks` blocks, goes to out[i]; row_bytes are those of a row of the weight.
    """
    f = Function("rows")
    a = f.arguments("ptr w, ptr ids, ptr out, i64 rows, i64 blocks, i64 row_bytes, counter counter")
    scales = f.op(f"alloca i8, i64 {unpacking.scratch}, align 64")
    out_stride = f.mul(a.blocks, 2 * unpacking.weights)
    with f.shares(a.counter, a.rows) as row:
        w = f.at(a.w, f.mul(f.load("i64", f.at(a.ids, row, "i64"), 8), a.row_bytes))
        out = f.at(a.out, f.mul(row, out_stride))
        with f.loop(0, a.blocks) as loop:
            block = f.at(w, f.mul(loop.index, unpacking.bytes))
            unpacking.prepare(f, block, scales)
            to = f.at(out, f.mul(loop.index, 2 * unpacking.weights))
            for index, line in enumerate(unpacking.lines(f, block, scales)):
                f.store(_WORDS, line, f.at(to, 2 * _LINE * index), 2)
    return module(f)


def transpose(f: Function, vectors: list[str], element: str) -> list[str]:
    """16 vectors of 16 lanes, lanes and vectors exchanged."""
    typed = f"<16 x {element}>"
    for size in (1, 2, 4, 8):
        low = [lane if not lane & size else 16 + lane - size for lane in range(16)]
        high = [lane + size if not lane & size else 16 + lane for lane in range(16)]
        mixed = list(vectors)
        for first in range(16):
            if first & size:
                continue
            pair = vectors[first], vectors[first + size]
            for index, lanes in ((first, low), (first + size, high)):
                mixed[index] = f.shuffle(typed, *pair, lanes)
        vectors = mixed
    return vectors


def first_column(f: Function, a: SimpleNamespace, panel: str) -> str:
    """A panel's first column. Rows of quantised weights are not padded: the last panel may share
    columns with the one before it."""
    return f.min(f.mul(panel, PANEL), f.sub(a.columns, PANEL))


def unpack_panels(
    f: Function,
    a: SimpleNamespace,
    unpacking: Unpacking,
    unpacked: str,
    scratch: str,
    panel: str,
    panel_end: str,
    step: str,
    step_end: str,
) -> None:
    """Unpack steps of panels, [panels, 8 steps, 16 columns, 32]; steps begin with a block, and are
    either a whole one or several."""
    steps = unpacking.weights // 32
    row_bytes = f.mul(f.div(a.steps, steps), unpacking.bytes)
    block_at = f.mul(f.div(step, steps), unpacking.bytes)
    with f.loop_if_any(panel, panel_end) as index:
        start = f.at(a.w, f.add(f.mul(first_column(f, a, index), row_bytes), block_at))
        to = f.at(unpacked, f.mul(f.sub(index, panel), 8 * _TILE))
        if steps > 1:
            with f.loop(0, PANEL, carried=[("ptr", start)]) as loop:
                (at,) = loop.values
                unpacking.prepare(f, at, f.at(scratch, f.mul(loop.index, unpacking.scratch)))
                for offset in range(0, unpacking.bytes, _LINE_BYTES):
                    f.prefetch(f.at(at, unpacking.bytes + offset), 2)
                loop.values = [f.at(at, row_bytes)]
        with f.loop(0, PANEL, carried=[("ptr", start)]) as loop:
            (at,) = loop.values
            of_column = f.at(scratch, f.mul(loop.index, unpacking.scratch))
            line_at = f.at(to, f.mul(loop.index, _LINE_BYTES))
            with f.loop(step, step_end, steps, carried=[("ptr", at), ("ptr", line_at)]) as block:
                block_at, line_at = block.values
                for line, value in enumerate(unpacking.lines(f, block_at, of_column)):
                    f.store("<32 x i16>", value, f.at(line_at, _TILE * line), 64)
                block.values = [f.at(block_at, unpacking.bytes), f.at(line_at, _TILE * steps)]
            loop.values = [f.at(at, row_bytes)]


def columns_buffers(f: Function, unpacking: Unpacking) -> tuple[str, str]:
    """What `unpack_columns` needs on the stack: a block's scratch, and 16 unpacked blocks."""
    sizes = (unpacking.scratch, 2 * PANEL * unpacking.weights)
    scratch, lines = (f.op(f"alloca i8, i64 {size}, align 64") for size in sizes)
    return scratch, lines


def unpack_columns(
    f: Function,
    a: SimpleNamespace,
    unpacking: Unpacking,
    buffers: tuple[str, str],
    panel: str,
    count: str,
    out: str,
) -> None:
    """Unpack whole panels into the layout of vector.py. buffers: of `columns_buffers`."""
    tiles = unpacking.weights // 32  # in a block
    blocks = f.div(a.steps, tiles * PANEL)
    row_bytes, panel_bytes = f.mul(blocks, unpacking.bytes), f.mul(a.steps, 4 * PANEL)
    last = f.sub(a.columns, 1)
    scratch, lines = buffers
    with f.loop(0, count) as each:
        first = f.mul(f.add(panel, each.index), PANEL)
        to = f.at(out, f.mul(each.index, panel_bytes))
        with f.loop(0, blocks) as loop:
            block_at = f.mul(loop.index, unpacking.bytes)
            with f.loop(0, PANEL) as column:
                own = f.min(f.add(first, column.index), last)
                at = f.at(a.w, f.add(f.mul(own, row_bytes), block_at))
                ahead = f.at(at, f.mul(row_bytes, PANEL))
                for offset in range(0, unpacking.bytes, _LINE_BYTES):
                    f.prefetch(f.at(ahead, offset), 2)
                unpacking.prepare(f, at, scratch)
                line_at = f.at(lines, f.mul(column.index, _LINE_BYTES))
                for index, value in enumerate(unpacking.lines(f, at, scratch)):
                    f.store("<32 x i16>", value, f.at(line_at, _TILE * index), 64)
            with f.loop(0, tiles) as tile:
                tile_at = f.at(lines, f.mul(tile.index, _TILE))
                words = [
                    f.load("<16 x i32>", f.at(tile_at, _LINE_BYTES * c), 64) for c in range(PANEL)
                ]
                step = f.add(f.mul(loop.index, tiles), tile.index)
                step_at = f.at(to, f.mul(step, _TILE))
                for index, value in enumerate(transpose(f, words, "i32")):
                    f.store("<16 x i32>", value, f.at(step_at, _LINE_BYTES * index), 64)
