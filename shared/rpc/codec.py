"""The msgpack codec of the control plane: a dataclass is encoded as an array of its fields, in order.

A field is omitted if it and all fields after it have their defaults. Many `TokenDelta`s need 3 of their 12 fields. If
the array is shorter than the dataclass, the missing fields take their defaults. If the array is longer, the extra
fields are skipped. Therefore, processes of successive versions can exchange messages, as long as no default changes.

The decoder raises `DecodeError`, which names the field, at the first value that does not have the type of its field.
Only this module imports msgpack.
"""

import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast

import msgpack
from grpclib.encoding.base import CodecBase

MAX_MESSAGE_BYTES = 64 << 20  # enough for the images of a request; KV is not sent by RPC
MAX_ITEMS = 1 << 20  # maximum number of items of a message, in all its lists and maps together
DATACLASS_ITEMS = 16  # a dataclass in a list counts as this many items, because it costs more to build
MAX_FIELDS = 256  # maximum number of fields in one dataclass, including fields of later versions
NIL = b"\xc0"
BAD_BYTES = (ValueError, msgpack.UnpackException)
T = TypeVar("T")


class DecodeError(ValueError):
    """The bytes are not a message of the expected type."""


def encode(message: object) -> bytes:
    return cast(bytes, msgpack.packb(message, default=_as_array, use_bin_type=True))


def decode(data: bytes, kind: type[T]) -> T:
    """Decode one message of type `kind`.

    Raises DecodeError if `data` is incomplete or too long, or if a value has a wrong type. Invalid data takes no more
    time and memory than the largest valid message.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise DecodeError(f"{kind.__name__}: {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    source = _Source(data)
    value = _reader(cast(Any, kind), kind.__name__)(source)
    if source.tell() != len(data):
        raise DecodeError(f"{kind.__name__}: {len(data) - source.tell()} bytes follow its end")
    return cast(T, value)


def _as_array(message: object) -> list[Any]:
    kind = cast(Any, type(message))
    names = _field_names(kind)
    count = len(names)
    for name, default in _defaults(kind):
        if getattr(message, name) != default:
            break
        count -= 1
    return [getattr(message, name) for name in names[:count]]


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the names and defaults of the fields that have a default, beginning with the last field."""
    given = {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(kind)}
    return tuple((name, default) for name, default in reversed(given.items()) if default is not MISSING)


class _Source:
    """The bytes of one message. `value` reads a scalar, and rejects a list or map without building it."""

    __slots__ = ("_items_left", "array", "data", "map", "skip", "tell", "value")

    def __init__(self, data: bytes) -> None:
        # These limits apply only to `unpack`, which reads scalars. Lists, dicts and dataclasses are read in two steps:
        # `array` or `map` reads the header, which states the number of items, and then the items are read one by one.
        unpacker = msgpack.Unpacker(
            None, raw=False, max_buffer_size=max(1, len(data)), max_array_len=0, max_map_len=0, max_ext_len=0
        )
        unpacker.feed(data)
        self.data = data
        self.array = unpacker.read_array_header
        self.map = unpacker.read_map_header
        self.skip = unpacker.skip
        self.tell = unpacker.tell
        self.value = unpacker.unpack
        self._items_left = MAX_ITEMS

    def count(self, header: Callable[[], int], cost: int, where: str, what: str) -> int:
        """Read the header of a list or map, and return its length. Raises DecodeError if it is too long."""
        try:
            number = header()
        except BAD_BYTES:
            raise DecodeError(f"{where} is not {what}") from None
        self._items_left -= number * cost
        if self._items_left < 0:
            raise DecodeError(f"{where} has {number} items: too many for one message")
        return number


Read = Callable[[_Source], Any]


@cache
def _reader(hint: Any, where: str) -> Read:
    """Return a function that reads a value of type `hint`. Error messages call the value `where`."""
    if is_dataclass(hint):
        return _dataclass_reader(cast(type, hint), where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {Union, types.UnionType}:
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _optional_reader(_reader(hint, where))
    inner = [_reader(argument, where) for argument in arguments]
    if origin is list:
        item, cost = inner[0], DATACLASS_ITEMS if is_dataclass(arguments[0]) else 1
        return lambda source: [item(source) for _ in range(source.count(source.array, cost, where, "a list"))]
    if origin is dict:
        return _dict_reader(inner[0], inner[1], where)
    return _scalar_reader(hint, where)


def _scalar_reader(kind: type, where: str) -> Read:
    def read(source: _Source) -> Any:
        try:
            value = source.value()
        except BAD_BYTES as error:
            raise DecodeError(f"{where} is not a valid {kind.__name__}: {str(error) or type(error).__name__}") from None
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise DecodeError(f"{where} is {type(value).__name__}, not {kind.__name__}")

    return read


def _optional_reader(inner: Read) -> Read:
    def read(source: _Source) -> Any:
        at = source.tell()
        return source.value() if source.data[at : at + 1] == NIL else inner(source)

    return read


def _dict_reader(key: Read, item: Read, where: str) -> Read:
    def read(source: _Source) -> Any:
        count = source.count(source.map, 1, where, "a dict")
        found = {key(source): item(source) for _ in range(count)}
        if len(found) < count:
            raise DecodeError(f"{where} has a duplicate key")
        return found

    return read


def _dataclass_reader(kind: type, where: str) -> Read:
    hints = typing.get_type_hints(kind)
    members = [_reader(hints[name], f"{kind.__name__}.{name}") for name in _field_names(kind)]
    required = sum(field.default is MISSING and field.default_factory is MISSING for field in fields(kind))

    def read(source: _Source) -> Any:
        count = source.count(source.array, 0, where, "an array")
        if not required <= count <= MAX_FIELDS:
            raise DecodeError(f"{where} is not an array of at least {required} fields")
        values = [member(source) for member in members[:count]]
        for _ in range(count - len(members)):
            try:
                source.skip()
            except BAD_BYTES as error:
                raise DecodeError(f"{where}: {str(error) or type(error).__name__}") from None
        return kind(*values)

    return read


@dataclass(frozen=True)
class MessageCodec(CodecBase):
    """The codec in the form that grpclib requires, for `content-type: application/grpc+msgpack`."""

    __content_subtype__ = "msgpack"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return encode(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        return decode(data, message_type)
