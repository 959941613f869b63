"""LLVM IR of what stands between the products of a Llama-like layer, one pass over memory each.

`element` is the dtype of activations, float or bfloat; arithmetic is in float32 and rounds to
bfloat16 where transformers' layers do, but for the rotation, which rounds once. Rows are handed out
to threads by a counter, the last argument of each function. Widths are multiples of 16.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_V = "<16 x float>"
_EXP = (  # e^f for |f| <= ln 2 / 2, by Taylor's series: the largest error is 1e-7 of the value
    1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720,
)  # fmt: skip


def _hex(value: float) -> str:
    """A float32 constant as LLVM writes it: the bits of the same number as a double."""
    single = struct.unpack("f", struct.pack("f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"


class _Writer:
    """Lines of one function: fields of the arguments, loads and stores of 16 elements."""

    def __init__(self, element: str, name: str, fields: Sequence[str]) -> None:
        self.element, self.bytes = element, 4 if element == "float" else 2
        self._count = 0
        self.lines = [f"define void @{name}(ptr %a) {{", "entry:"]
        for index, field in enumerate(fields):
            kind = "i64" if field.islower() else "ptr"
            self.lines.append(f"%{field}_at_a = getelementptr i64, ptr %a, i64 {index}")
            self.lines.append(f"%{field} = load {kind}, ptr %{field}_at_a")
        self.lines.append(f"%counter = getelementptr i64, ptr %a, i64 {len(fields)}")

    def add(self, *lines: str) -> None:
        self.lines += lines

    def new(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def op(self, text: str) -> str:
        name = self.new()
        self.lines.append(f"{name} = {text}")
        return name

    def row_loop(self, rows: str) -> None:
        """Open the loop over rows: %row is this turn's; `next_row` closes it."""
        self.add(
            "br label %next_row",
            "next_row:",
            "%row = atomicrmw add ptr %counter, i64 1 monotonic",
            f"%some = icmp ult i64 %row, {rows}",
            "br i1 %some, label %begin, label %exit",
            "begin:",
        )

    def close(self) -> str:
        self.add("exit:", "ret void", "}")
        return "\n".join(self.lines)

    def at(self, pointer: str, index: str, element: str | None = None) -> str:
        return self.op(f"getelementptr {element or self.element}, ptr {pointer}, i64 {index}")

    def load(self, pointer: str, index: str) -> str:
        where = self.at(pointer, index)
        loaded = self.op(f"load <16 x {self.element}>, ptr {where}, align {self.bytes}")
        return (
            loaded if self.element == "float" else self.op(f"fpext <16 x bfloat> {loaded} to {_V}")
        )

    def store(self, value: str, pointer: str, index: str) -> None:
        where = self.at(pointer, index)
        if self.element != "float":
            value = self.op(f"fptrunc {_V} {value} to <16 x bfloat>")
        self.add(f"store <16 x {self.element}> {value}, ptr {where}, align {self.bytes}")

    def rounded(self, value: str) -> str:
        """The value as the activations' dtype holds it."""
        if self.element == "float":
            return value
        narrow = self.op(f"fptrunc {_V} {value} to <16 x bfloat>")
        return self.op(f"fpext <16 x bfloat> {narrow} to {_V}")

    def splat(self, scalar: str) -> str:
        one = self.op(f"insertelement {_V} poison, float {scalar}, i32 0")
        return self.op(f"shufflevector {_V} {one}, {_V} poison, <16 x i32> zeroinitializer")


def norm(element: str) -> str:
    """@norm: rows of X, plus those of DELTA into SUM if there are any, normalised to OUT.

    out = weight * (s / sqrt(mean(s^2) + eps)), s = x + delta. Arguments: X, DELTA (or 0), SUM,
    WEIGHT (float32), OUT, rows, width, eps (a float32's bits).
    """
    w = _Writer(element, "norm", ("X", "DELTA", "SUM", "WEIGHT", "OUT", "rows", "width", "eps"))
    w.add(
        "%eps_i = trunc i64 %eps to i32",
        "%eps_1 = bitcast i32 %eps_i to float",
        "%width_f = uitofp i64 %width to float",
        "%alone = icmp eq ptr %DELTA, null",
        "%source = select i1 %alone, ptr %X, ptr %SUM",
    )
    w.row_loop("%rows")
    w.add("%base = mul i64 %row, %width", "br i1 %alone, label %measure, label %adding", "adding:")
    w.add("%i = phi i64 [0, %begin], [%i_next, %adding]", "%i_at = add i64 %base, %i")
    total = w.op(f"fadd {_V} {w.load('%X', '%i_at')}, {w.load('%DELTA', '%i_at')}")
    w.store(total, "%SUM", "%i_at")
    w.add("%i_next = add nuw i64 %i, 16", "%added = icmp uge i64 %i_next, %width")
    w.add("br i1 %added, label %measure, label %adding", "measure:")
    w.add(
        "%j = phi i64 [0, %begin], [0, %adding], [%j_next, %measure]",
        f"%squares = phi {_V} [zeroinitializer, %begin], [zeroinitializer, %adding], "
        "[%squares_next, %measure]",
        "%j_at = add i64 %base, %j",
    )
    x = w.load("%source", "%j_at")
    w.add(
        f"%squares_next = call {_V} @llvm.fma.v16f32({_V} {x}, {_V} {x}, {_V} %squares)",
        "%j_next = add nuw i64 %j, 16",
        "%measured = icmp uge i64 %j_next, %width",
        "br i1 %measured, label %scale, label %measure",
        "scale:",
        f"%sum = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {_V} %squares_next)",
        "%mean = fdiv float %sum, %width_f",
        "%safe = fadd float %mean, %eps_1",
        "%root = call float @llvm.sqrt.f32(float %safe)",
        "%inverse = fdiv float 1.0, %root",
    )
    inverse = w.splat("%inverse")
    w.add("br label %write", "write:", "%k = phi i64 [0, %scale], [%k_next, %write]")
    w.add("%k_at = add i64 %base, %k")
    scaled = w.rounded(w.op(f"fmul {_V} {w.load('%source', '%k_at')}, {inverse}"))
    weight_at = w.at("%WEIGHT", "%k", "float")
    weight = w.op(f"load {_V}, ptr {weight_at}, align 4")
    w.store(w.op(f"fmul {_V} {scaled}, {weight}"), "%OUT", "%k_at")
    w.add("%k_next = add nuw i64 %k, 16", "%written = icmp uge i64 %k_next, %width")
    w.add("br i1 %written, label %next_row, label %write")
    return f"""
declare {_V} @llvm.fma.v16f32({_V}, {_V}, {_V})
declare float @llvm.vector.reduce.fadd.v16f32(float, {_V})
declare float @llvm.sqrt.f32(float)
{w.close()}"""


def gated(element: str) -> str:
    """@gated: silu(gate) * up of rows [gate | up]. Arguments: X, OUT, rows, width (of OUT)."""
    w = _Writer(element, "gated", ("X", "OUT", "rows", "width"))
    w.row_loop("%rows")
    w.add(
        "%out_0 = mul i64 %row, %width",
        "%gate_0 = mul i64 %out_0, 2",
        "%up_0 = add i64 %gate_0, %width",
        "br label %loop",
        "loop:",
        "%i = phi i64 [0, %begin], [%i_next, %loop]",
        "%gate_i = add i64 %gate_0, %i",
        "%up_i = add i64 %up_0, %i",
        "%out_i = add i64 %out_0, %i",
    )
    gate = w.load("%X", "%gate_i")
    # 1 / (1 + e^-g): -g as n ln 2 + f, e^f by a series, 2^n by its exponent's bits
    limit = f"splat (float {_hex(87.0)})"
    minus = w.op(f"fneg {_V} {gate}")
    low = w.op(f"call nnan {_V} @llvm.minnum.v16f32({_V} {minus}, {_V} {limit})")
    arg = w.op(f"call nnan {_V} @llvm.maxnum.v16f32({_V} {low}, {_V} splat (float {_hex(-87.0)}))")
    n_raw = w.op(f"fmul {_V} {arg}, splat (float {_hex(1.4426950408889634)})")
    n = w.op(f"call {_V} @llvm.rint.v16f32({_V} {n_raw})")
    minus_n = w.op(f"fneg {_V} {n}")
    # ln 2 in two parts, the first with few bits, so that n times it is exact
    f = arg
    for part in (0.693359375, -2.12194440e-4):
        f = w.op(
            f"call {_V} @llvm.fma.v16f32({_V} {minus_n}, {_V} splat (float {_hex(part)}), {_V} {f})"
        )
    power = f"splat (float {_hex(_EXP[-1])})"
    for coefficient in reversed(_EXP[:-1]):
        constant = f"splat (float {_hex(coefficient)})"
        power = w.op(f"call {_V} @llvm.fma.v16f32({_V} {power}, {_V} {f}, {_V} {constant})")
    n_int = w.op(f"fptosi {_V} {n} to <16 x i32>")
    bits = w.op(f"bitcast {_V} {power} to <16 x i32>")
    shifted = w.op(f"shl <16 x i32> {n_int}, splat (i32 23)")
    scaled = w.op(f"add <16 x i32> {bits}, {shifted}")
    exp = w.op(f"bitcast <16 x i32> {scaled} to {_V}")
    below = w.op(f"fadd {_V} {exp}, splat (float 1.0)")
    silu = w.rounded(w.op(f"fdiv {_V} {gate}, {below}"))
    w.store(w.op(f"fmul {_V} {silu}, {w.load('%X', '%up_i')}"), "%OUT", "%out_i")
    w.add("%i_next = add nuw i64 %i, 16", "%done = icmp uge i64 %i_next, %width")
    w.add("br i1 %done, label %next_row, label %loop")
    return f"""
declare {_V} @llvm.fma.v16f32({_V}, {_V}, {_V})
declare {_V} @llvm.rint.v16f32({_V})
declare {_V} @llvm.minnum.v16f32({_V}, {_V})
declare {_V} @llvm.maxnum.v16f32({_V}, {_V})
{w.close()}"""


def rotate(element: str) -> str:
    """@rotate: rotary positions for queries and keys, and keys and values into the cache.

    Rows are [queries | keys | values], one per token, `width` tokens per sequence; cosines and
    sines [rows, size]. Queries go to OUT, [sequences, heads, width, size]; keys and values to the
    cache's [slots, kv_heads, capacity, size], to the token's position. Arguments: X, COS, SIN, OUT,
    KEYS, VALUES, POSITIONS, rows, width, heads, kv (heads), size, capacity, slot (the first).
    """
    fields = ("X", "COS", "SIN", "OUT", "KEYS", "VALUES", "POSITIONS")
    w = _Writer(
        element, "rotate", (*fields, "rows", "width", "heads", "kv", "size", "capacity", "slot")
    )
    w.add("%half = udiv i64 %size, 2", "%both = add i64 %heads, %kv", "%all = add i64 %both, %kv")
    w.row_loop("%rows")
    w.add(
        "%sequence = udiv i64 %row, %width",
        "%token = urem i64 %row, %width",
        "%position_at = getelementptr i64, ptr %POSITIONS, i64 %row",
        "%position = load i64, ptr %position_at",
        "%row_size = mul i64 %all, %size",
        "%x_0 = mul i64 %row, %row_size",
        "%angle_0 = mul i64 %row, %size",
        "%cache_slot = add i64 %slot, %sequence",
        "br label %head",
        "head:",
        "%h = phi i64 [0, %begin], [%h_next, %head_end]",
        "%x_h = mul i64 %h, %size",
        "%x_at = add i64 %x_0, %x_h",
        "%is_query = icmp ult i64 %h, %heads",
        "%is_turned = icmp ult i64 %h, %both",
        # where a query goes
        "%q_1 = mul i64 %sequence, %heads",
        "%q_2 = add i64 %q_1, %h",
        "%q_3 = mul i64 %q_2, %width",
        "%q_4 = add i64 %q_3, %token",
        # where a key or value goes
        "%first = select i1 %is_turned, i64 %heads, i64 %both",
        "%kv_head = sub i64 %h, %first",
        "%c_1 = mul i64 %cache_slot, %kv",
        "%c_2 = add i64 %c_1, %kv_head",
        "%c_3 = mul i64 %c_2, %capacity",
        "%c_4 = add i64 %c_3, %position",
        "%to_row = select i1 %is_query, i64 %q_4, i64 %c_4",
        "%to_at = mul i64 %to_row, %size",
        "%cached = select i1 %is_turned, ptr %KEYS, ptr %VALUES",
        "%to = select i1 %is_query, ptr %OUT, ptr %cached",
        "br i1 %is_turned, label %turn, label %copy",
        "turn:",
        "%i = phi i64 [0, %head], [%i_next, %turn]",
        "%j = add i64 %i, %half",
        "%x_i = add i64 %x_at, %i",
        "%x_j = add i64 %x_at, %j",
        "%a_i = add i64 %angle_0, %i",
        "%a_j = add i64 %angle_0, %j",
        "%to_i = add i64 %to_at, %i",
        "%to_j = add i64 %to_at, %j",
    )
    low, high = w.load("%X", "%x_i"), w.load("%X", "%x_j")
    for cos_at, straight, crossed, sign, where in (
        ("%a_i", low, high, "fneg", "%to_i"),
        ("%a_j", high, low, None, "%to_j"),
    ):
        if sign:
            crossed = w.op(f"fneg {_V} {crossed}")
        product = w.op(f"fmul {_V} {straight}, {w.load('%COS', cos_at)}")
        sine = w.load("%SIN", cos_at)
        turned = w.op(f"call {_V} @llvm.fma.v16f32({_V} {crossed}, {_V} {sine}, {_V} {product})")
        w.store(turned, "%to", where)
    w.add(
        "%i_next = add nuw i64 %i, 16",
        "%turned = icmp uge i64 %i_next, %half",
        "br i1 %turned, label %head_end, label %turn",
        "copy:",
        "%c = phi i64 [0, %head], [%c_next, %copy]",
        "%x_c = add i64 %x_at, %c",
        "%to_c = add i64 %to_at, %c",
    )
    w.store(w.load("%X", "%x_c"), "%to", "%to_c")
    w.add(
        "%c_next = add nuw i64 %c, 16",
        "%copied = icmp uge i64 %c_next, %size",
        "br i1 %copied, label %head_end, label %copy",
        "head_end:",
        "%h_next = add nuw i64 %h, 1",
        "%heads_done = icmp uge i64 %h_next, %all",
        "br i1 %heads_done, label %next_row, label %head",
    )
    return f"""
declare {_V} @llvm.fma.v16f32({_V}, {_V}, {_V})
{w.close()}"""
