"""LLVM IR that unpacks GGUF's quantised weights into bfloat16.

A format's values are those of the gguf package's dequantisation, which computes in float32, rounded
to bfloat16. Blocks are read as they lie in the file, a row of a weight after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from fly.execution.kernels.ir import PANEL, Function, float_constant, module

_LINE = 32  # weights that are unpacked into one vector
_LINE_BYTES = 64
_TILE = PANEL * _LINE_BYTES  # bytes of so many weights of 16 columns
PANEL_BYTES = 2 * PANEL * 256  # of a panel's unpacked weights, where they are unpacked in steps
SCRATCH = 4 * PANEL_BYTES + 48 * _LINE_BYTES  # bytes: four panels are unpacked at once at most
_BYTES, _HALF_BYTES = "<32 x i8>", "<16 x i8>"
_SIGNS = 0x80808080 - 2**32  # the sign of each byte
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

    def write_pairs(self, f: Function, rows: list[str], factors: str, out: str) -> None:
        """Unpack the blocks of 16 columns at `rows`: of each two weights that follow one another, a
        line of 64 bytes with a lane of 32 bits per column. factors: room for what is needed on the
        way, 48 vectors."""
        raise NotImplementedError

    def _scaled_pairs(
        self, f: Function, levels: list[str], mask: int, scale: str, more: str
    ) -> Iterator[str]:
        """levels * scale + more, four levels in each lane: those bits of each byte that `mask` has.

        A level that is not moved to the end of its lane is a power of two too large, and its scale
        as much too small: both are exact.
        """
        end = (mask & -mask).bit_length() - 1
        places = [8 * byte + end for byte in range(4)]
        is_signed = mask << 24 >> 31 > 0  # the last level would be negative
        scales = [_times(f, scale, 2.0**-place) for place in places]
        if is_signed:
            scales[3] = scale
        for four in levels:
            values = []
            for byte, place in enumerate(places):
                if is_signed and byte == 3:
                    level = f.op(f"lshr {_INTS} {four}, splat (i32 {place})")
                else:
                    level = f.op(f"and {_INTS} {four}, splat (i32 {mask << 8 * byte})")
                value = f.op(f"sitofp {_INTS} {level} to {_FLOATS}")
                values.append(f.each("fma", _FLOATS, value, scales[byte], more))
            yield self._pair(f, values[0], values[1])
            yield self._pair(f, values[2], values[3])

    def _pair(self, f: Function, low: str, high: str) -> str:
        """Two vectors of 16 float32 as one of 16 pairs of bfloat16."""
        if self._dots:
            both = self._round(f, low, high)
            lanes = [lane for column in range(PANEL) for lane in (column, PANEL + column)]
            mixed = f.shuffle(_WORDS, both, "poison", lanes)
            return f.op(f"bitcast {_WORDS} {mixed} to {_INTS}")
        lower, upper = _rounded_bits(f, low), _rounded_bits(f, high)
        lower = f.op(f"lshr {_INTS} {lower}, splat (i32 16)")
        upper = f.op(f"and {_INTS} {upper}, splat (i32 -65536)")
        return f.op(f"or {_INTS} {upper}, {lower}")

    def _round(self, f: Function, low: str, high: str) -> str:
        """Two vectors of 16 float32 as one of 32 bfloat16."""
        if self._dots:
            kind, name = "<32 x bfloat>", "x86.avx512bf16.cvtne2ps2bf16.512"
            pair = f.call(kind, name, f"{_FLOATS} {high}", f"{_FLOATS} {low}")
            return f.op(f"bitcast {kind} {pair} to {_WORDS}")
        halves = []
        for part in (low, high):
            bits = f.op(f"lshr {_INTS} {_rounded_bits(f, part)}, splat (i32 16)")
            halves.append(f.op(f"trunc {_INTS} {bits} to <16 x i16>"))
        return f.shuffle("<16 x i16>", halves[0], halves[1], range(32))

    def _scaled(
        self, f: Function, levels: list[str], scales: list[str], minimum: str | None
    ) -> str:
        """Twice 16 signed bytes times a scale, less the minimum."""
        parts = []
        for bytes_, scale in zip(levels, scales):
            value = f.op(f"sitofp {_HALF_BYTES} {bytes_} to {_FLOATS}")
            if minimum is None:
                parts.append(f.op(f"fmul {_FLOATS} {value}, {scale}"))
            else:
                parts.append(_less(f, value, scale, minimum))
        return self._round(f, *parts)


def _write(f: Function, out: str, lines: Iterator[str]) -> str:
    """Store vectors one after the other; returns where the next one goes."""
    for line in lines:
        f.store(_INTS, line, out, 64)
        out = f.at(out, _LINE_BYTES)
    return out


def _vector_at(f: Function, at: str, index: int) -> str:
    return f.load(_FLOATS, f.at(at, _LINE_BYTES * index), 64)


def _rounded_bits(f: Function, values: str) -> str:
    """float32 whose upper halves are the nearest bfloat16, ties to even."""
    bits = f.op(f"bitcast {_FLOATS} {values} to {_INTS}")
    upper = f.op(f"lshr {_INTS} {bits}, splat (i32 16)")
    odd = f.op(f"and {_INTS} {upper}, splat (i32 1)")
    bits = f.op(f"add {_INTS} {bits}, splat (i32 32767)")
    return f.op(f"add {_INTS} {bits}, {odd}")


def _times(f: Function, values: str, factor: float) -> str:
    return f.op(f"fmul {_FLOATS} {values}, splat (float {float_constant(factor)})")


def _dwords(f: Function, rows: list[str], offset: int, count: int) -> list[str]:
    """`count` times the next 32 bits of each of 16 rows: 1, 4, 8 or 16."""
    places = [f.at(row, offset) for row in rows]
    if count == 1:
        return [_gathered(f, places, "i32")]
    vectors = []
    for first in range(count):
        parts = [f.load(f"<{count} x i32>", place, 1) for place in places[first::count]]
        width = count
        while len(parts) > 1:
            two = zip(parts[::2], parts[1::2])
            parts = [f.shuffle(f"<{width} x i32>", *each, range(2 * width)) for each in two]
            width *= 2
        vectors += parts
    return transpose(f, vectors, "i32")


def _gathered(f: Function, places: list[str], element: str) -> str:
    vector = "poison"
    for lane, place in enumerate(places):
        value = f.load(element, place, 1)
        vector = f.op(f"insertelement <16 x {element}> {vector}, {element} {value}, i32 {lane}")
    return vector


def _gathered_halves(f: Function, rows: list[str], offset: int) -> str:
    """A float16 of each row as float32."""
    halves = _gathered(f, [f.at(row, offset) for row in rows], "half")
    return f.op(f"fpext <16 x half> {halves} to {_FLOATS}")


def _bits(f: Function, vector: str, shift: int, mask: int) -> str:
    """Lanes of 32 bits, shifted right (left if negative), and those bits of each byte."""
    if shift:
        way = "lshr" if shift > 0 else "shl"
        vector = f.op(f"{way} {_INTS} {vector}, splat (i32 {abs(shift)})")
    return f.op(f"and {_INTS} {vector}, splat (i32 {mask * 0x01010101})")


def _as_floats(f: Function, ints: str, byte: int) -> str:
    """The unsigned byte of each lane."""
    if byte:
        ints = f.op(f"lshr {_INTS} {ints}, splat (i32 {8 * byte})")
    ints = f.op(f"and {_INTS} {ints}, splat (i32 255)")
    return f.op(f"sitofp {_INTS} {ints} to {_FLOATS}")


def _half_of(f: Function, ints: str, *, upper: bool) -> str:
    """The lower or the upper 16 bits of each lane, a float16, as float32."""
    if upper:
        ints = f.op(f"lshr {_INTS} {ints}, splat (i32 16)")
    words = f.op(f"trunc {_INTS} {ints} to <16 x i16>")
    halves = f.op(f"bitcast <16 x i16> {words} to <16 x half>")
    return f.op(f"fpext <16 x half> {halves} to {_FLOATS}")


def _halves(f: Function, bytes_: str) -> list[str]:
    """32 bytes as twice 16."""
    return [f.shuffle(_BYTES, bytes_, "poison", range(i, i + 16)) for i in (0, 16)]


def _half(f: Function, at: str) -> str:
    """A float16 in memory as float32."""
    return f.op(f"fpext half {f.load('half', at, 1)} to float")


def _less(f: Function, levels: str, scale: str, minimum: str) -> str:
    """levels * scale - minimum. The products are exact: scales have 17 bits, levels at most 5."""
    negative = f.op(f"fneg {_FLOATS} {minimum}")
    return f.each("fma", _FLOATS, levels, scale, negative)


class _Blocks32(Unpacking):
    """A float16 scale and 32 levels."""

    zero: float

    def lines(self, f: Function, block: str, scratch: str) -> list[str]:
        scale = f.splat("float", 16, _half(f, block))
        return [self._scaled(f, _halves(f, self._levels(f, f.at(block, 2))), [scale] * 2, None)]

    def write_pairs(self, f: Function, rows: list[str], factors: str, out: str) -> None:
        scale = _gathered_halves(f, rows, 0)
        more = _times(f, scale, -self.zero)
        for levels, mask in self._fours(f, rows):
            out = _write(f, out, self._scaled_pairs(f, levels, mask, scale, more))

    def _levels(self, f: Function, at: str) -> str:
        raise NotImplementedError

    def _fours(self, f: Function, rows: list[str]) -> list[tuple[list[str], int]]:
        """Lanes of four levels, `zero` being zero, and which bits of each byte they are."""
        raise NotImplementedError

    def _nibbles32(self, f: Function, at: str) -> str:
        """Lower nibbles of 16 bytes, then their upper ones."""
        half = f.load(_HALF_BYTES, at, 1)
        upper = f.op(f"lshr {_HALF_BYTES} {half}, splat (i8 4)")
        lower = f.op(f"and {_HALF_BYTES} {half}, splat (i8 15)")
        return f.shuffle(_HALF_BYTES, lower, upper, range(32))


class _Q8(_Blocks32):
    bytes = 34
    zero = 128.0

    def _fours(self, f: Function, rows: list[str]) -> list[tuple[list[str], int]]:
        signed = _dwords(f, rows, 2, 8)
        return [([f.op(f"xor {_INTS} {four}, splat (i32 {_SIGNS})") for four in signed], 255)]

    def _levels(self, f: Function, at: str) -> str:
        return f.load(_BYTES, at, 1)


class _Q4(_Blocks32):
    bytes = 18
    zero = 8.0

    def _fours(self, f: Function, rows: list[str]) -> list[tuple[list[str], int]]:
        both = _dwords(f, rows, 2, 4)
        return [(both, 15), (both, 240)]

    def _levels(self, f: Function, at: str) -> str:
        return f.op(f"sub {_BYTES} {self._nibbles32(f, at)}, splat (i8 8)")


class _Q5(_Blocks32):
    bytes = 22
    zero = 16.0

    def _fours(self, f: Function, rows: list[str]) -> list[tuple[list[str], int]]:
        (bits,) = _dwords(f, rows, 2, 1)
        both = _dwords(f, rows, 6, 4)
        levels = [_bits(f, four, shift, 15) for shift in (0, 4) for four in both]
        return [([self._with_fifth(f, each, bits, 4 * i) for i, each in enumerate(levels)], 31)]

    def _with_fifth(self, f: Function, levels: str, bits: str, first: int) -> str:
        """Four levels with bits `first` and the next three."""
        nibble = f.op(f"lshr {_INTS} {bits}, splat (i32 {first})") if first else bits
        nibble = f.op(f"and {_INTS} {nibble}, splat (i32 15)")
        spread = f.op(f"mul {_INTS} {nibble}, splat (i32 {0x00204081})")  # a bit in each byte
        return f.op(f"or {_INTS} {levels}, {_bits(f, spread, -4, 16)}")

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
        values = f.op(f"uitofp {_HALF_BYTES} {six_bits} to {_FLOATS}")
        halves = f.op(f"bitcast {four} {head} to <8 x half>")
        factors = f.shuffle("<8 x half>", halves, "poison", [0] * 8 + [1] * 8)
        factors = f.op(f"fpext <16 x half> {factors} to {_FLOATS}")
        f.store(_FLOATS, f.op(f"fmul {_FLOATS} {values}, {factors}"), scratch, 64)

    def write_pairs(self, f: Function, rows: list[str], factors: str, out: str) -> None:
        head, low, middle, high = _dwords(f, rows, 0, 4)
        six = [  # bits of scales and minimums, four in each
            (_bits(f, low, 0, 63), _bits(f, middle, 0, 63)),
            tuple(
                f.op(f"or {_INTS} {_bits(f, high, shift, 15)}, {_bits(f, upper, 2, 48)}")
                for shift, upper in ((0, low), (4, middle))
            ),
        ]
        scale = _half_of(f, head, upper=False)
        least = f.op(f"fneg {_FLOATS} {_half_of(f, head, upper=True)}")
        for index in range(8):
            for part, factor in enumerate((scale, least)):
                bits = _as_floats(f, six[index // 4][part], index % 4)
                value = f.op(f"fmul {_FLOATS} {bits}, {factor}")
                f.store(_FLOATS, value, f.at(factors, _LINE_BYTES * (2 * index + part)), 64)
        fifths = f.at(factors, 16 * _LINE_BYTES)
        self._prepare_fifths(f, rows, fifths)
        with f.loop(0, 4) as loop:
            ahead = f.add(f.mul(loop.index, 32), self.bytes - 128)
            both = _dwords(f, [f.at(row, ahead) for row in rows], 0, 8)
            own = f.at(factors, f.mul(loop.index, 4 * _LINE_BYTES))
            to = f.at(out, f.mul(loop.index, 32 * _LINE_BYTES))
            for half in range(2):
                scale, more = (_vector_at(f, own, 2 * half + part) for part in range(2))
                levels, mask = self._fours(f, both, fifths, half)
                to = _write(f, to, self._scaled_pairs(f, levels, mask, scale, more))

    def _prepare_fifths(self, f: Function, rows: list[str], fifths: str) -> None:
        """Write lanes with a fifth bit of each weight, where a format has it."""

    def _fours(self, f: Function, both: list[str], fifths: str, half: int) -> tuple[list[str], int]:
        """Lanes of four levels of 32 weights, and which bits of each byte they are."""
        return both, 240 if half else 15

    def lines(self, f: Function, block: str, scratch: str) -> list[str]:
        if not self._words:
            return [self._line(f, block, scratch, index) for index in range(8)]
        return [line for pair in range(4) for line in self._look_up(f, block, scratch, pair)]

    def _line(self, f: Function, block: str, scratch: str, index: int) -> str:
        levels = self._levels(f, block, index)
        scale, minimum = self._scales(f, scratch, index)
        return self._scaled(f, _halves(f, levels), [scale] * 2, minimum)

    def _scales(self, f: Function, scratch: str, index: int) -> list[str]:
        """The scale and the minimum of 32 weights, as `prepare` wrote them."""
        return [f.splat_at("float", 16, f.at(scratch, at + 4 * index), 4) for at in (0, 32)]

    def _levels(self, f: Function, block: str, index: int) -> str:
        bytes_ = f.load(_BYTES, f.at(block, self.bytes - 128 + 32 * (index // 2)), 1)
        if index % 2:
            return f.op(f"lshr {_BYTES} {bytes_}, splat (i8 4)")
        return f.op(f"and {_BYTES} {bytes_}, splat (i8 15)")

    def _look_up(self, f: Function, block: str, scratch: str, pair: int) -> list[str]:
        """Lower and upper nibbles of 32 bytes: 16 values of each, in one table of 32."""
        bytes_ = f.load(_BYTES, f.at(block, 16 + 32 * pair), 1)
        levels = "<" + ", ".join(f"float {level}.0" for level in range(16)) + ">"
        scales = [self._scales(f, scratch, 2 * pair + i) for i in range(2)]
        table = self._round(f, *(_less(f, levels, *scale) for scale in scales))
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

    def _prepare_fifths(self, f: Function, rows: list[str], fifths: str) -> None:
        for index, four in enumerate(_dwords(f, rows, 16, 8)):
            f.store(_INTS, four, f.at(fifths, _LINE_BYTES * index), 64)

    def _fours(self, f: Function, both: list[str], fifths: str, half: int) -> tuple[list[str], int]:
        levels = []
        for index, four in enumerate(both):
            at = f.at(fifths, _LINE_BYTES * index)
            bits = f.load(_INTS, at, 64)
            fifth = _bits(f, bits, half - 4, 16)
            levels.append(f.op(f"or {_INTS} {_bits(f, four, 4 * half, 15)}, {fifth}"))
            if half:  # the next turn's bits
                f.store(_INTS, f.op(f"lshr {_INTS} {bits}, splat (i32 2)"), at, 64)
        return levels, 31

    def lines(self, f: Function, block: str, scratch: str) -> list[str]:
        return [self._line(f, block, scratch, index) for index in range(8)]

    def _levels(self, f: Function, block: str, index: int) -> str:
        fifth = f.load(_BYTES, f.at(block, 16), 1)
        bit = f.op(f"lshr {_BYTES} {fifth}, splat (i8 {index})")
        bit = f.op(f"and {_BYTES} {bit}, splat (i8 1)")
        bit = f.op(f"shl {_BYTES} {bit}, splat (i8 4)")
        return f.op(f"or {_BYTES} {super()._levels(f, block, index)}, {bit}")


class _Q6K(Unpacking):
    """256 weights: 6 bits of each, 8 bits of scale per 16 weights, and their float16 factor."""

    weights = 256
    bytes = 210
    factors = (208,)
    scratch = 64 + 256  # scales, and levels: bytes are widened faster from memory

    def prepare(self, f: Function, block: str, scratch: str) -> None:
        bytes_ = f.load(_HALF_BYTES, f.at(block, 192), 1)
        values = f.op(f"sitofp {_HALF_BYTES} {bytes_} to {_FLOATS}")
        factor = f.splat("float", 16, _half(f, f.at(block, 208)))
        f.store(_FLOATS, f.op(f"fmul {_FLOATS} {values}, {factor}"), scratch, 64)
        kind = "<64 x i8>"
        for half in range(2):
            low = f.load(_INTS, f.at(block, 64 * half), 1)
            high = f.load(_BYTES, f.at(block, 128 + 32 * half), 1)
            quarter = f.op(f"lshr {_BYTES} {high}, splat (i8 2)")
            both = f.shuffle(_BYTES, high, quarter, range(64))
            upper = f.op(f"bitcast {kind} {both} to {_INTS}")
            for part in range(2):
                nibbles, more = _bits(f, low, 4 * part, 15), _bits(f, upper, 4 * part - 4, 48)
                both = f.op(f"bitcast {_INTS} {f.op(f'or {_INTS} {nibbles}, {more}')} to {kind}")
                levels = f.op(f"sub {kind} {both}, splat (i8 32)")
                f.store(kind, levels, f.at(scratch, 64 + 128 * half + 64 * part), 64)

    def write_pairs(self, f: Function, rows: list[str], factors: str, out: str) -> None:
        factor = _gathered_halves(f, rows, 208)
        for index, four in enumerate(_dwords(f, rows, 192, 4)):
            biased = f.op(f"xor {_INTS} {four}, splat (i32 {_SIGNS})")  # by 128
            for byte in range(4):
                scale = f.op(f"fsub {_FLOATS} {_as_floats(f, biased, byte)}, splat (float 128.0)")
                scale = f.op(f"fmul {_FLOATS} {scale}, {factor}")
                f.store(_FLOATS, scale, f.at(factors, _LINE_BYTES * (4 * index + byte)), 64)
        with f.loop(0, 4) as loop:  # halves of a block, halves of its lines
            half, part = f.div(loop.index, 2), f.rem(loop.index, 2)
            first = f.mul(part, 16)
            lows_at, highs_at = (
                [f.at(row, f.add(f.mul(half, size), first)) for row in rows] for size in (64, 32)
            )
            lows = [_dwords(f, lows_at, 32 * place, 4) for place in range(2)]
            highs = _dwords(f, highs_at, 128, 4)
            own = f.at(factors, f.add(f.mul(half, 8 * _LINE_BYTES), f.mul(part, _LINE_BYTES)))
            to = f.at(out, f.add(f.mul(half, 64 * _LINE_BYTES), f.mul(part, 8 * _LINE_BYTES)))
            for quarter in range(4):
                scale = _vector_at(f, own, 2 * quarter)
                levels = [
                    f.op(
                        f"or {_INTS} {_bits(f, low, 4 * (quarter // 2), 15)}, "
                        f"{_bits(f, high, 2 * quarter - 4, 48)}"
                    )
                    for low, high in zip(lows[quarter % 2], highs)
                ]
                lines = self._scaled_pairs(f, levels, 63, scale, _times(f, scale, -32.0))
                _write(f, f.at(to, 16 * _LINE_BYTES * quarter), lines)

    def lines(self, f: Function, block: str, scratch: str) -> list[str]:
        lines = []
        for index in range(8):
            at = f.at(scratch, 64 + _LINE * index)
            levels = [f.load(_HALF_BYTES, f.at(at, 16 * i), 16) for i in range(2)]
            scales_at = (f.at(scratch, 8 * index + 4 * i) for i in range(2))
            scales = [f.splat_at("float", 16, scale_at, 4) for scale_at in scales_at]
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
    """n vectors of 16 lanes, 4, 8 or 16: lanes and vectors exchanged, n lanes at a time."""
    typed = f"<16 x {element}>"
    for size in (size for size in (1, 2, 4, 8) if size < len(vectors)):
        low = [lane if not lane & size else 16 + lane - size for lane in range(16)]
        high = [lane + size if not lane & size else 16 + lane for lane in range(16)]
        mixed = list(vectors)
        for first in range(len(vectors)):
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
    with f.loop(panel, panel_end) as each:
        start = f.at(a.w, f.add(f.mul(first_column(f, a, each.index), row_bytes), block_at))
        to = f.at(unpacked, f.mul(f.sub(each.index, panel), 8 * _TILE))
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


def unpack_columns(
    f: Function,
    a: SimpleNamespace,
    unpacking: Unpacking,
    panel: str,
    count: str,
    block: str,
    block_end: str,
    out: str,
    factors: str,
) -> None:
    """Unpack some blocks of `count` panels into the layout of vector.py, PANEL_BYTES apart.
    factors: room for 48 vectors."""
    step_bytes = unpacking.weights // 2 * _LINE_BYTES
    row_bytes = f.mul(f.div(a.steps, unpacking.weights // 2), unpacking.bytes)
    last = f.sub(a.columns, 1)
    # the blocks that come next: further on in these panels, or the first ones of the next panels
    further = f.mul(f.sub(block_end, block), unpacking.bytes)
    back = f.sub(f.mul(f.mul(count, PANEL), row_bytes), f.mul(block, unpacking.bytes))
    is_last = f.compare("eq", f.mul(block_end, unpacking.bytes), row_bytes)
    ahead = f.select(is_last, back, further)
    with f.loop(0, count) as each:
        first = f.mul(f.add(panel, each.index), PANEL)
        columns = [f.min(f.add(first, column), last) for column in range(PANEL)]
        starts = [f.at(a.w, f.mul(column, row_bytes)) for column in columns]
        to = f.at(out, f.mul(each.index, PANEL_BYTES))
        with f.loop(block, block_end) as loop:
            block_at = f.mul(loop.index, unpacking.bytes)
            rows = [f.at(start, block_at) for start in starts]
            for row in rows:
                for offset in range(0, unpacking.bytes, _LINE_BYTES):
                    f.prefetch(f.at(f.at(row, ahead), offset), 2)
            step_at = f.at(to, f.mul(f.sub(loop.index, block), step_bytes))
            unpacking.write_pairs(f, rows, factors, step_at)


def panels(unpacking: Unpacking) -> str:
    """IR of `@panels(ptr arguments)`, one thread's share: a weight as panels of vector.py."""
    f = Function("panels")
    a = f.arguments("ptr w, ptr out, i64 steps, i64 columns, i64 panels, counter counter")
    factors = f.op(f"alloca i8, i64 {48 * _LINE_BYTES}, align 64")
    panel_bytes = f.mul(a.steps, 4 * PANEL)
    blocks = f.div(a.steps, unpacking.weights // 2)
    with f.shares(a.counter, a.panels) as panel:
        to = f.at(a.out, f.mul(panel, panel_bytes))
        unpack_columns(f, a, unpacking, panel, "1", "0", blocks, to, factors)
    return module(f)
