"""Explicit float32 vectors for numba kernels, as wide as the CPU's registers. Without this module, numba would rely on
LLVM's automatic vectorization. Addresses are int64, in bytes.

Elements in memory are float32, bfloat16 or float16. An integer code (see `CODES`) selects the type at run time, so that
one compiled kernel serves all three. Arithmetic is float32.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from engine.cpu.jit import cpu_features, inlined

LANES = 16 if "avx512f" in cpu_features() else 8
# The largest block of a matrix product that fits into the registers: its rows, and the vectors in each row.
PANEL_ROWS, PANEL_VECTORS = 6, 4 if LANES == 16 else 2
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
CODES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__("float32 vector")


VECTOR = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, of: _VectorType) -> None:
        super().__init__(manager, of, ir.VectorType(_FLOAT, LANES))


def _of(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def _constant(element: Any, value: float, lanes: int = LANES) -> Any:
    return ir.Constant(_of(element, lanes), [value] * lanes)


def emit_pointer(builder: Any, address: Any, to: Any) -> Any:
    return builder.inttoptr(address, to.as_pointer())


def emit_load(builder: Any, address: Any, lanes: int, code: int) -> Any:
    """Load `lanes` elements, widened to float32."""
    if code == FLOAT32:
        return builder.load(emit_pointer(builder, address, _of(_FLOAT, lanes)), align=4)
    if code == FLOAT16:
        halves = builder.load(emit_pointer(builder, address, _of(ir.HalfType(), lanes)), align=2)
        return builder.fpext(halves, _of(_FLOAT, lanes))
    shorts = builder.load(emit_pointer(builder, address, _of(ir.IntType(16), lanes)), align=2)
    bits = builder.shl(builder.zext(shorts, _of(_INT, lanes)), _constant(_INT, 16, lanes))
    return builder.bitcast(bits, _of(_FLOAT, lanes))


def _store(builder: Any, vector: Any, address: Any, lanes: int, code: int) -> None:
    """Store a vector. Each element is rounded to the nearest value of the type, ties to even."""
    if code == FLOAT16:
        vector = builder.fptrunc(vector, _of(ir.HalfType(), lanes))
    elif code == BFLOAT16:
        bits = builder.bitcast(vector, _of(_INT, lanes))
        last = builder.and_(builder.lshr(bits, _constant(_INT, 16, lanes)), _constant(_INT, 1, lanes))
        rounded = builder.add(builder.add(bits, last), _constant(_INT, 0x7FFF, lanes))
        nan = builder.fcmp_unordered("uno", vector, vector)
        rounded = builder.select(nan, _constant(_INT, 0x7FC00000, lanes), rounded)
        vector = builder.trunc(builder.lshr(rounded, _constant(_INT, 16, lanes)), _of(ir.IntType(16), lanes))
    builder.store(vector, emit_pointer(builder, address, vector.type), align=4 if code == FLOAT32 else 2)


def written(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """Return a function that kernels can call. `emit(builder, *values)` writes the function's LLVM code."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        written = emit(builder, *values)
        return context.get_dummy_value() if result is types.void else written

    def typed(_typing: Any, *_given: Any) -> Any:
        return result(*arguments), code

    names = ["typing", *(f"value{index}" for index in range(len(arguments)))]
    typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in names])  # type: ignore[attr-defined]
    return intrinsic(typed)


def emit_splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_of(_FLOAT, LANES), ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_of(_INT, LANES), [0] * LANES))


def _reduce(combine: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an emitter that combines all lanes of a vector, in an order that depends only on the number of lanes."""

    def emit(builder: Any, vector: Any) -> Any:
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            low, high = (
                builder.shuffle_vector(vector, vector, ir.Constant(_of(_INT, lanes), list(range(start, start + lanes))))
                for start in (0, lanes)
            )
            vector = combine(builder, low, high)
        return builder.extract_element(vector, ir.Constant(_INT, 0))

    return emit


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def emit_multiply_add(builder: Any, one: Any, other: Any, added: Any) -> Any:
    kind = added.type
    name = f"llvm.fmuladd.v{kind.count}f32"
    function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [one, other, added])


def emit_prefetch(builder: Any, address: Any) -> Any:
    name, pointer = "llvm.prefetch.p0", emit_pointer(builder, address, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [pointer, *(ir.Constant(_INT, value) for value in (0, 2, 1))])  # read, level 2, data


def emit_fetch(builder: Any, ahead: Any, index: Any, lines: Any) -> None:
    """Prefetch `lines` cache lines in round `index` of a loop. The lines of all rounds are contiguous, from `ahead`."""
    first = builder.mul(index, lines)
    with cgutils.for_range(builder, lines, intp=_LONG) as loop:
        offset = builder.shl(builder.add(first, loop.index), ir.Constant(_LONG, 6))
        emit_prefetch(builder, builder.add(ahead, offset))


def cases(builder: Any, value: Any, values: Iterable[int]) -> Iterator[int]:
    """Yield each of `values`. The code that the caller emits after a value is yielded becomes a branch that runs if
    `value` equals the yielded value."""
    after = builder.append_basic_block("after")
    switch = builder.switch(builder.trunc(value, _INT), after)
    for one in values:
        block = builder.append_basic_block(f"case{one}")
        switch.add_case(ir.Constant(_INT, one), block)
        builder.position_at_end(block)
        yield one
        builder.branch(after)
    builder.position_at_end(after)


def _power_of_two(builder: Any, shifted: Any) -> Any:
    """Return 2 to the power of the integer in the low bits of `shifted`."""
    bits = builder.shl(builder.bitcast(shifted, _of(_INT, LANES)), _constant(_INT, 23))
    return builder.bitcast(builder.add(bits, _constant(_INT, 127 << 23)), shifted.type)


def _put_low_bytes(builder: Any, vector: Any, at: Any) -> None:
    low = builder.trunc(builder.bitcast(vector, _of(_INT, LANES)), _of(ir.IntType(8), LANES))
    builder.store(low, emit_pointer(builder, at, low.type), align=1)


def _keep_range(builder: Any, vector: Any, low: Any, high: Any, other: Any) -> Any:
    lane = ir.Constant(_of(_LONG, LANES), list(range(LANES)))

    def all_lanes(value: Any) -> Any:
        one = builder.insert_element(ir.Constant(_of(_LONG, LANES), ir.Undefined), value, ir.Constant(_INT, 0))
        return builder.shuffle_vector(one, one, ir.Constant(_of(_INT, LANES), [0] * LANES))

    inside = builder.and_(
        builder.icmp_signed(">=", lane, all_lanes(low)), builder.icmp_signed("<", lane, all_lanes(high))
    )
    return builder.select(inside, vector, other)


_V, _F, _I = VECTOR, types.float32, types.int64
_VALUES = types.CPointer(_I)  # type: ignore[attr-defined]
splat = written(_V, (_F,), emit_splat)
multiply_add = written(_V, (_V, _V, _V), emit_multiply_add)  # one * other + added
larger = written(_V, (_V, _V), _larger)  # returns the second operand if either is NaN
where_less = written(
    _V, (_V, _V, _V, _V), lambda b, one, other, yes, no: b.select(b.fcmp_ordered("<", one, other), yes, no)
)
keep_range = written(_V, (_V, _I, _I, _V), _keep_range)  # takes lanes i < low and i >= high from the other vector
total = written(_F, (_V,), _reduce(lambda b, one, other: b.fadd(one, other)))
largest = written(_F, (_V,), _reduce(_larger))
address_at = written(_I, (_I,), lambda b, at: b.load(emit_pointer(b, at, _LONG)))  # an int64 in memory
put_address = written(types.void, (_I, _I), lambda b, value, at: b.store(value, emit_pointer(b, at, _LONG)))
index_at = written(_I, (_I,), lambda b, at: b.sext(b.load(emit_pointer(b, at, _INT)), _LONG))  # an int32 in memory
number_at = written(_F, (_I,), lambda b, at: b.load(emit_pointer(b, at, _FLOAT)))
put_number = written(types.void, (_F, _I), lambda b, value, at: b.store(value, emit_pointer(b, at, _FLOAT)))
pointer_to = written(types.voidptr, (_I,), lambda b, at: emit_pointer(b, at, ir.IntType(8)))  # for numba.carray
put_low_bytes = written(types.void, (_V, _I), _put_low_bytes)  # stores the low byte of each lane
prefetch = written(types.void, (_I,), emit_prefetch)  # loads the cache line at an address into the level-2 cache
# Takes the next piece of work: atomically increments a kernel's first value, a counter that all threads share.
take_next = written(_I, (_VALUES,), lambda b, values: b.atomic_rmw("add", values, ir.Constant(_LONG, 1), "monotonic"))
_set_lane = written(_V, (_V, _I, _F), lambda b, vector, lane, value: b.insert_element(vector, value, lane))
_lane = written(_F, (_V, _I), lambda b, vector, lane: b.extract_element(vector, lane))
_power_of_two_of = written(_V, (_V,), _power_of_two)


def _load_number(builder: Any, address: Any, code: Any) -> Any:
    found = cgutils.alloca_once(builder, _FLOAT)
    for one in cases(builder, code, CODES.values()):
        value = emit_load(builder, address, 1, one)
        builder.store(builder.extract_element(value, ir.Constant(_INT, 0)), found)
    return builder.load(found)


def _load_vector(builder: Any, address: Any, code: Any) -> Any:
    found = cgutils.alloca_once(builder, _of(_FLOAT, LANES))
    for one in cases(builder, code, CODES.values()):
        builder.store(emit_load(builder, address, LANES, one), found)
    return builder.load(found)


def _store_number(builder: Any, value: Any, address: Any, code: Any) -> None:
    vector = builder.insert_element(ir.Constant(_of(_FLOAT, 1), ir.Undefined), value, ir.Constant(_INT, 0))
    for one in cases(builder, code, CODES.values()):
        _store(builder, vector, address, 1, one)


def _store_vector(builder: Any, vector: Any, address: Any, code: Any) -> None:
    for one in cases(builder, code, CODES.values()):
        _store(builder, vector, address, LANES, one)


load = written(_V, (_I,), lambda b, at: emit_load(b, at, LANES, FLOAT32))
store = written(types.void, (_V, _I), lambda b, vector, at: _store(b, vector, at, LANES, FLOAT32))
_load_as, _number_as = written(_V, (_I, _I), _load_vector), written(_F, (_I, _I), _load_number)
_store_as, _put_as = written(types.void, (_V, _I, _I), _store_vector), written(types.void, (_F, _I, _I), _store_number)


def _operate(symbol: Callable[[Any, Any], Any], name: str) -> None:
    """Implement the operator `symbol` for two vectors. The builder's method `name` emits LLVM's instruction for it."""

    @type_callable(symbol)  # type: ignore[untyped-decorator]
    def typing(_context: Any) -> Any:
        return lambda one, other: VECTOR if isinstance(one, _VectorType) and isinstance(other, _VectorType) else None

    lower_builtin(symbol, VECTOR, VECTOR)(lambda _, builder, __, values: getattr(builder, name)(*values))


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operate(_symbol, _name)


@inlined
def load_some(address: int, count: int, code: int) -> Any:
    """Load `count` elements, at most LANES, and set the other lanes to 0."""
    if count >= LANES:
        return _load_as(address, code)
    vector, size = splat(0.0), 4 if code == FLOAT32 else 2
    for lane in range(count):
        vector = _set_lane(vector, lane, _number_as(address + size * lane, code))
    return vector


@inlined
def store_some(vector: Any, address: int, count: int, code: int) -> None:
    """Store the first `count` lanes, or all lanes if `count` exceeds LANES."""
    if count >= LANES:
        _store_as(vector, address, code)
        return
    size = 4 if code == FLOAT32 else 2
    for lane in range(count):
        _put_as(_lane(vector, lane), address + size * lane, code)


@inlined
def exponential(x: Any) -> Any:
    """Return e**x as computed by Cephes' expf (relative error: 1e-7), but 0 for x < -87 and e**88 for x > 88."""
    least, most = splat(-87.0), splat(88.0)
    clamped = where_less(most, x, most, where_less(x, least, least, x))
    # Adding 1.5 * 2**23 to the number rounds it to an integer, which is then in the low bits of the sum.
    shifted = multiply_add(clamped, splat(1.44269504088896341), splat(12582912.0))
    power = shifted - splat(12582912.0)
    rest = multiply_add(power, splat(2.12194440e-4), multiply_add(power, splat(-0.693359375), clamped))
    series = splat(1.9875691500e-4)
    series = multiply_add(series, rest, splat(1.3981999507e-3))
    series = multiply_add(series, rest, splat(8.3334519073e-3))
    series = multiply_add(series, rest, splat(4.1665795894e-2))
    series = multiply_add(series, rest, splat(1.6666665459e-1))
    series = multiply_add(series, rest, splat(5.0000001201e-1))
    series = multiply_add(series, rest * rest, rest + splat(1.0))
    # Multiply by the power of two, because adding to the exponent's bits would turn a NaN into a number.
    return where_less(x, least, splat(0.0), series * _power_of_two_of(shifted))


@inlined
def two_to_the(x: Any) -> Any:
    """Return 2**x for x <= 0, computed as in Cephes (relative error for x >= -126: 2e-7), and 0 for x < -126.5."""
    least = splat(-127.0)  # the exponent bits of 2**-127 are 0, so the result is 0
    shift = splat(12582912.0)  # puts the rounded integer into the low bits, as in `exponential`
    clamped = where_less(x, least, least, x)
    shifted = clamped + shift
    rest = clamped - (shifted - shift)
    series = multiply_add(splat(1.535336188e-4), rest, splat(1.339887440e-3))
    series = multiply_add(series, rest, splat(9.618437357e-3))
    series = multiply_add(series, rest, splat(5.550332471e-2))
    series = multiply_add(series, rest, splat(2.402264791e-1))
    series = multiply_add(series, rest, splat(6.931472028e-1))
    return multiply_add(series, rest, splat(1.0)) * _power_of_two_of(shifted)
