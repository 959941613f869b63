"""LLVM IR of what a Llama-like layer computes between its products, one pass over memory each.

`element` is the dtype of activations, float or bfloat. Arithmetic is in float32 and rounds to
bfloat16 where transformers' layers do; only the rotation rounds just once. Widths are multiples of
16.
"""

from __future__ import annotations

from collections.abc import Sequence

from fly.execution.kernels.ir import Function, Value, float_constant, module

_V = "<16 x float>"
_FOUR = "<4 x float>"
_LOWEST = -3.0e38  # a score
_EXP = (  # e^f for |f| <= ln 2 / 2, by Taylor's series: the largest error is 1e-7 of the value
    1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720,
)  # fmt: skip


class _Vectors(Function):
    """A function on vectors of 16 activations, which it computes with in float32."""

    def __init__(self, name: str, element: str) -> None:
        super().__init__(name)
        self.is_float, self._stored = element == "float", f"<16 x {element}>"
        self._element, self._bytes = element, 4 if element == "float" else 2

    def get(self, pointer: str, index: Value) -> str:
        found = self.load(self._stored, self.at(pointer, index, self._element), self._bytes)
        return found if self.is_float else self.op(f"fpext {self._stored} {found} to {_V}")

    def put(self, value: str, pointer: str, index: Value) -> None:
        at = self.at(pointer, index, self._element)
        if not self.is_float:
            value = self.op(f"fptrunc {_V} {value} to {self._stored}")
        self.store(self._stored, value, at, self._bytes)

    def rounded(self, value: str) -> str:
        """The value as the activations' dtype holds it."""
        if self.is_float:
            return value
        narrow = self.op(f"fptrunc {_V} {value} to {self._stored}")
        return self.op(f"fpext {self._stored} {narrow} to {_V}")

    def same(self, value: float) -> str:
        """A vector of one constant, of any width."""
        return f"splat (float {float_constant(value)})"

    def total(self, vector: str) -> str:
        """The sum of a vector's parts, always in the same order."""
        arguments = ("float 0.0", f"{_V} {vector}")
        return self.call("float", "vector.reduce.fadd.v16f32", *arguments, flags="reassoc")

    def totals(self, vectors: Sequence[str]) -> str:
        """The sums of four vectors' parts, as a vector of four; each has the bits of `total`."""

        def halves(left: str, right: str, width: int) -> str:
            starts = range(0, 32, 2 * width)
            low, high = (
                self.shuffle(_V, left, right, [s + skip + i for s in starts for i in range(width)])
                for skip in (0, width)
            )
            return self.op(f"fadd {_V} {low}, {high}")

        first, second = (halves(vectors[i], vectors[i + 1], 8) for i in (0, 2))
        quarters = halves(first, second, 4)
        pairs = halves(quarters, quarters, 2)
        sums = halves(pairs, pairs, 1)
        return self.shuffle(_V, sums, "poison", range(4))

    def single(self, bits: str) -> str:
        """The float32 whose bits an argument holds."""
        return self.op(f"bitcast i32 {self.op(f'trunc i64 {bits} to i32')} to float")


def norm(element: str) -> str:
    """@norm: rows of x, plus those of delta into sum if there are any, normalised to out.

    out = weight * (s / sqrt(mean(s^2) + eps)), s = x + delta. delta may be 0; the weight is
    float32; eps are a float32's bits.
    """
    f = _Vectors("norm", element)
    a = f.arguments(
        "ptr x, ptr delta, ptr sum, ptr weight, ptr out, i64 rows, i64 width, i64 eps, "
        "counter counter"
    )
    eps = f.single(a.eps)
    width = f.op(f"uitofp i64 {a.width} to float")
    is_alone = f.op(f"icmp eq ptr {a.delta}, null")
    source = f.select(is_alone, a.x, a.sum, "ptr")
    with f.shares(a.counter, a.rows) as row:
        base = f.mul(row, a.width)

        def add_delta() -> None:
            with f.loop(0, a.width, 16) as loop:
                at = f.add(base, loop.index)
                f.put(f.op(f"fadd {_V} {f.get(a.x, at)}, {f.get(a.delta, at)}"), a.sum, at)

        f.branch(is_alone, None, add_delta)
        with f.loop(0, a.width, 16, carried=[(_V, "zeroinitializer")]) as loop:
            x = f.get(source, f.add(base, loop.index))
            loop.values = [f.each("fma", _V, x, x, loop.values[0])]
        total = f.total(loop.values[0])
        safe = f.op(f"fadd float {f.op(f'fdiv float {total}, {width}')}, {eps}")
        root = f.call("float", "sqrt.f32", f"float {safe}")
        inverse = f.splat("float", 16, f.op(f"fdiv float 1.0, {root}"))
        with f.loop(0, a.width, 16) as loop:
            at = f.add(base, loop.index)
            scaled = f.rounded(f.op(f"fmul {_V} {f.get(source, at)}, {inverse}"))
            weight = f.load(_V, f.at(a.weight, loop.index, "float"), 4)
            f.put(f.op(f"fmul {_V} {scaled}, {weight}"), a.out, at)
    return module(f)


def gated(element: str) -> str:
    """@gated: silu(gate) * up of rows [gate | up], each `width` wide."""
    f = _Vectors("gated", element)
    a = f.arguments("ptr x, ptr out, i64 rows, i64 width, counter counter")
    with f.shares(a.counter, a.rows) as row:
        out_row = f.mul(row, a.width)
        gate_row = f.mul(out_row, 2)
        up_row = f.add(gate_row, a.width)
        with f.loop(0, a.width, 16) as loop:
            gate_at, up_at, out_at = (f.add(at, loop.index) for at in (gate_row, up_row, out_row))
            gate = f.get(a.x, gate_at)
            exp = _exp(f, f.op(f"fneg {_V} {gate}"))
            below = f.op(f"fadd {_V} {exp}, splat (float 1.0)")
            silu = f.rounded(f.op(f"fdiv {_V} {gate}, {below}"))
            f.put(f.op(f"fmul {_V} {silu}, {f.get(a.x, up_at)}"), a.out, out_at)
    return module(f)


def _exp(f: _Vectors, value: str) -> str:
    """e^value: with value as n ln 2 + rest, e^rest by a series, 2^n by its exponent's bits."""
    below = f.each("minnum", _V, value, f.same(87.0), flags="nnan")
    value = f.each("maxnum", _V, below, f.same(-87.0), flags="nnan")
    n = f.each("rint", _V, f.op(f"fmul {_V} {value}, {f.same(1.4426950408889634)}"))
    minus_n, rest = f.op(f"fneg {_V} {n}"), value
    # ln 2 in two parts, the first with few bits, so that n times it is exact
    for part in (0.693359375, -2.12194440e-4):
        rest = f.each("fma", _V, minus_n, f.same(part), rest)
    power = f.same(_EXP[-1])
    for coefficient in reversed(_EXP[:-1]):
        power = f.each("fma", _V, power, rest, f.same(coefficient))
    n_int = f.op(f"fptosi {_V} {n} to <16 x i32>")
    bits = f.op(f"bitcast {_V} {power} to <16 x i32>")
    shifted = f.op(f"shl <16 x i32> {n_int}, splat (i32 23)")
    return f.op(f"bitcast <16 x i32> {f.op(f'add <16 x i32> {bits}, {shifted}')} to {_V}")


def rotate(element: str) -> str:
    """@rotate: rotary positions for queries and keys, and keys and values into the cache.

    Rows are [queries | keys | values], one per token, `width` tokens per sequence; cosines and
    sines [rows, size]. Queries go to out, [sequences, heads, width, size]; keys and values to the
    cache's [slots, kv_heads, capacity, size], to the token's position. slot: of the first sequence.
    """
    f = _Vectors("rotate", element)
    a = f.arguments(
        "ptr x, ptr cos, ptr sin, ptr out, ptr keys, ptr values, ptr positions, i64 rows, "
        "i64 width, i64 heads, i64 kv_heads, i64 size, i64 capacity, i64 slot, counter counter"
    )
    half = f.div(a.size, 2)
    turned_heads = f.add(a.heads, a.kv_heads)
    all_heads = f.add(turned_heads, a.kv_heads)
    with f.shares(a.counter, a.rows) as row:
        sequence, token = f.div(row, a.width), f.rem(row, a.width)
        position = f.load("i64", f.at(a.positions, row, "i64"), 8)
        x_row, angle_row = f.mul(row, f.mul(all_heads, a.size)), f.mul(row, a.size)
        slot = f.add(a.slot, sequence)
        with f.loop(0, all_heads) as loop:
            head = loop.index
            x_head = f.add(x_row, f.mul(head, a.size))
            is_query = f.compare("ult", head, a.heads)
            is_turned = f.compare("ult", head, turned_heads)
            query_row = f.add(f.mul(f.add(f.mul(sequence, a.heads), head), a.width), token)
            kv_head = f.sub(head, f.select(is_turned, a.heads, turned_heads))
            kv_row = f.add(f.mul(f.add(f.mul(slot, a.kv_heads), kv_head), a.capacity), position)
            to_head = f.mul(f.select(is_query, query_row, kv_row), a.size)
            cached = f.select(is_turned, a.keys, a.values, "ptr")
            to = f.select(is_query, a.out, cached, "ptr")

            def turn() -> None:
                with f.loop(0, half, 16) as loop:
                    i, j = loop.index, f.add(loop.index, half)
                    low, high = f.get(a.x, f.add(x_head, i)), f.get(a.x, f.add(x_head, j))
                    minus_high = f.op(f"fneg {_V} {high}")
                    for at, straight, crossed in ((i, low, minus_high), (j, high, low)):
                        angle = f.add(angle_row, at)
                        product = f.op(f"fmul {_V} {straight}, {f.get(a.cos, angle)}")
                        turned = f.each("fma", _V, crossed, f.get(a.sin, angle), product)
                        f.put(turned, to, f.add(to_head, at))

            def copy() -> None:
                with f.loop(0, a.size, 16) as loop:
                    value = f.get(a.x, f.add(x_head, loop.index))
                    f.put(value, to, f.add(to_head, loop.index))

            f.branch(is_turned, turn, copy)
    return module(f)


def attention(element: str, size: int, group: int, heads_at_once: int, parts_at_once: int) -> str:
    """@attention: causal attention of heads of `size`, a few queries of one token at a time.

    queries [sequences, heads, width, size]; keys and values in the cache's [slots, kv_heads,
    capacity, size], the query's own position included; out [sequences, width, heads, size]. slot:
    of the first sequence; scale: a float32's bits. `group` heads share keys and values;
    `heads_at_once` of them (up to four) go through these together, `parts_at_once` vectors of a
    value at a time. Every sum of a query goes through the keys in their order, so its result has
    the same bits whatever else is in the pass. Scores lie on the stack: 4 bytes for each key and
    head.
    """
    f = _Vectors("attention", element)
    a = f.arguments(
        "ptr queries, ptr keys, ptr values, ptr positions, ptr out, i64 sequences, i64 width, "
        "i64 heads, i64 kv_heads, i64 capacity, i64 slot, i64 scale, counter counter"
    )
    blocks = -(-group // heads_at_once)
    count = -(-group // blocks)  # queries at a time
    together, parts = range(count), range(0, size, 16)
    scale = f.splat("float", 4, f.single(a.scale))
    row_of_scores = f.add(a.capacity, 16)
    scores = f.op(f"alloca float, i64 {f.mul(row_of_scores, count)}, align 64")
    scores_of = [f.at(scores, f.mul(row_of_scores, i), "float") for i in together]
    query = f.op(f"alloca float, i64 {count * size}, align 64")
    with f.shares(a.counter, f.mul(f.mul(a.sequences, a.width), f.mul(a.kv_heads, blocks))) as item:
        rest, token = f.div(item, a.width), f.rem(item, a.width)
        rest, block = f.div(rest, blocks), f.rem(rest, blocks)
        sequence, kv_head = f.div(rest, a.kv_heads), f.rem(rest, a.kv_heads)
        at = f.add(f.mul(sequence, a.width), token)
        keys = f.add(f.load("i64", f.at(a.positions, at, "i64"), 8), 1)
        slot_head = f.add(f.mul(f.add(a.slot, sequence), a.kv_heads), kv_head)
        past = f.mul(f.mul(slot_head, a.capacity), size)
        # the last block takes heads of the one before again, rather than go beyond the group
        in_group = f.min(f.mul(block, count), group - count)
        first_head = f.add(f.mul(kv_head, group), in_group)
        for i in together:
            head = f.add(f.add(f.mul(sequence, a.heads), first_head), i)
            query_at = f.mul(f.add(f.mul(head, a.width), token), size)
            for part in parts:
                value = f.get(a.queries, f.add(query_at, part))
                f.store(_V, value, f.at(query, i * size + part, "float"), 64)
        with f.loop(0, keys, carried=[(_FOUR, f.same(_LOWEST))]) as key:
            row = f.add(past, f.mul(key.index, size))
            dots = ["zeroinitializer"] * count
            for part in parts:
                of_key = f.get(a.keys, f.add(row, part))
                for i in together:
                    of_query = f.load(_V, f.at(query, i * size + part, "float"), 64)
                    dots[i] = f.each("fma", _V, of_query, of_key, dots[i])
            totals = f.totals([dots[min(i, count - 1)] for i in range(4)])
            score = f.op(f"fmul {_FOUR} {totals}, {scale}")
            for i in together:
                one = f.op(f"extractelement {_FOUR} {score}, i32 {i}")
                f.store("float", one, f.at(scores_of[i], key.index, "float"), 4)
            key.values = [f.each("maxnum", _FOUR, key.values[0], score, flags="nnan")]
        shares = [_softmax(f, scores_of[i], keys, key.values[0], i) for i in together]
        for start in range(0, len(parts), parts_at_once):
            some = parts[start : start + parts_at_once]
            zeros = [(_V, "zeroinitializer") for _ in together for _ in some]
            with f.loop(0, keys, carried=zeros) as key:
                row = f.add(past, f.mul(key.index, size))
                of_value = [f.get(a.values, f.add(row, part)) for part in some]
                for i in together:
                    weight_at = f.at(scores_of[i], key.index, "float")
                    weight = f.splat_at("float", 16, weight_at, 4)
                    for j, value in enumerate(of_value, i * len(some)):
                        key.values[j] = f.each("fma", _V, weight, value, key.values[j])
            for i in together:
                to = f.mul(f.add(f.mul(at, a.heads), f.add(first_head, i)), size)
                for j, part in enumerate(some, i * len(some)):
                    mixed = f.op(f"fmul {_V} {key.values[j]}, {shares[i]}")
                    f.put(mixed, a.out, f.add(to, part))
    return module(f)


def _softmax(f: _Vectors, scores: str, keys: str, most: str, query: int) -> str:
    """Turn a query's scores into weights; returns a vector of 1 / their sum. most: the largest
    score of each of four queries."""
    largest = f.op(f"extractelement {_FOUR} {most}, i32 {query}")
    behind = f.at(scores, keys, "float")
    f.store(_V, f.same(_LOWEST), behind, 4)  # no weight to speak of
    largest_16 = f.splat("float", 16, largest)
    with f.loop(0, keys, 16, carried=[(_V, "zeroinitializer")]) as block:
        place = f.at(scores, block.index, "float")
        weights = _exp(f, f.op(f"fsub {_V} {f.load(_V, place, 4)}, {largest_16}"))
        f.store(_V, weights, place, 4)
        block.values = [f.op(f"fadd {_V} {block.values[0]}, {weights}")]
    return f.splat("float", 16, f.op(f"fdiv float 1.0, {f.total(block.values[0])}"))


def quantize(element: str) -> str:
    """@quantize: rows to int8, scaled so that each row's largest magnitude becomes 127.

    float32 rows get 128 added, as the products in vector registers take unsigned inputs.
    """
    f = _Vectors("quantize", element)
    a = f.arguments("ptr x, ptr int8, ptr scales, i64 rows, i64 width, counter counter")
    with f.shares(a.counter, a.rows) as row:
        base = f.mul(row, a.width)
        with f.loop(0, a.width, 16, carried=[(_V, "zeroinitializer")]) as loop:
            size = f.each("fabs", _V, f.get(a.x, f.add(base, loop.index)))
            loop.values = [f.each("maxnum", _V, loop.values[0], size, flags="nnan")]
        sizes = f"{_V} {loop.values[0]}"
        largest = f.call("float", "vector.reduce.fmax.v16f32", sizes, flags="nnan")
        tiny = float_constant(2.0**-126)
        safe = f.call("float", "maxnum.f32", f"float {largest}", f"float {tiny}", flags="nnan")
        scale = f.op(f"fdiv float {safe}, 1.270000e+02")
        f.store("float", scale, f.at(a.scales, row, "float"), 4)
        inverse = f.splat("float", 16, f.op(f"fdiv float 1.270000e+02, {safe}"))

        with f.loop(0, a.width, 16) as loop:
            index = f.add(base, loop.index)
            scaled = f.op(f"fmul {_V} {f.get(a.x, index)}, {inverse}")
            ints = f.op(f"fptosi {_V} {f.each('rint', _V, scaled)} to <16 x i32>")
            int8 = f.op(f"trunc <16 x i32> {ints} to <16 x i8>")
            if f.is_float:
                int8 = f.op(f"xor <16 x i8> {int8}, splat (i8 -128)")
            f.store("<16 x i8>", int8, f.at(a.int8, index), 1)
    return module(f)
