"""The msgpack codec of the control plane: dataclasses as arrays in field order, checked for type on arrival.

A shorter array than the dataclass takes the missing fields' defaults, a longer one is cut: both neighbours of a
version understand it. Anything else that does not fit raises `Malformed`, naming the field. The only importer of
msgpack.
"""

import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast

import msgpack
from grpclib.encoding.base import CodecBase

MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # a 4-million-token prompt; KV never travels here
MAX_ITEMS = 1 << 20
T = TypeVar("T")


class Malformed(ValueError):
    """The bytes are not a message of the type asked for."""


def encode(message: object) -> bytes:
    return cast(bytes, msgpack.packb(message, default=_as_array, use_bin_type=True))


def decode(data: bytes, kind: type[T]) -> T:
    """Raises Malformed when `data` is not one `kind`, whole and well-typed."""
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:  # TypeError: a list as a key
        raise Malformed(f"{kind.__name__}: {str(error) or type(error).__name__}") from None
    check: Check = _checker(cast(Any, kind))
    return cast(T, check(value, kind.__name__))


def _as_array(message: object) -> list[Any]:
    assert is_dataclass(message), f"{type(message).__name__} is not a message"
    return [getattr(message, name) for name in _field_names(cast(Any, type(message)))]


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


Check = Callable[[Any, str], Any]


@cache
def _checker(hint: Any) -> Check:
    """A function that returns the value of type `hint` that a msgpack value stands for."""
    if is_dataclass(hint):
        return _dataclass_checker(cast(type, hint))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return _list_checker(_checker(arguments[0]))
    if origin is dict:
        return _dict_checker(_checker(arguments[0]), _checker(arguments[1]))
    if origin in {Union, types.UnionType}:
        (some,) = (argument for argument in arguments if argument is not type(None))
        inner = _checker(some)
        return lambda value, where: None if value is None else inner(value, where)
    if hint is float:
        return _float
    assert hint in {int, str, bytes, bool}, f"no check for {hint}"
    return _exact_checker(hint)


def _exact_checker(kind: type) -> Check:
    def check(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise Malformed(f"{where} is {type(value).__name__}, not {kind.__name__}")
        return value

    return check


def _float(value: Any, where: str) -> float:
    if type(value) not in {int, float}:
        raise Malformed(f"{where} is {type(value).__name__}, not float")
    return float(value)


def _list_checker(inner: Check) -> Check:
    def check(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise Malformed(f"{where} is {type(value).__name__}, not list")
        return [inner(item, where) for item in value]

    return check


def _dict_checker(key: Check, inner: Check) -> Check:
    def check(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise Malformed(f"{where} is {type(value).__name__}, not dict")
        return {key(name, where): inner(item, where) for name, item in value.items()}

    return check


def _dataclass_checker(kind: type) -> Check:
    hints = typing.get_type_hints(kind)
    members = [(f"{kind.__name__}.{field.name}", _checker(hints[field.name])) for field in fields(kind)]
    required = sum(field.default is MISSING and field.default_factory is MISSING for field in fields(kind))

    def check(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) < required:
            raise Malformed(f"{where} is not an array of at least {required} fields")
        pairs = zip(members, value, strict=False)
        return kind(*[inner(item, name) for (name, inner), item in pairs])

    return check


@dataclass(frozen=True)
class MessageCodec(CodecBase):
    """For grpclib: `content-type: application/grpc+msgpack`."""

    __content_subtype__ = "msgpack"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return encode(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        return decode(data, message_type)
