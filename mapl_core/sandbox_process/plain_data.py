"""Plain data as bytes: what may cross between a trusted test and the program it tests.

Only exact built-in types are written, and reading makes nothing but them, so a value that arrives has no methods of the
program's making: no permissive `__eq__`, no lazy object. Neither pickle (runs code) nor JSON (no tuples, sets, bytes)
would do.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict

MAX_DEPTH = 100
SEQUENCES = {list: b"l", tuple: b"t", set: b"S", frozenset: b"z"}
BUILDERS = {tag: kind for kind, tag in SEQUENCES.items()}
DICTIONARIES = (dict, OrderedDict, Counter, defaultdict)
LENGTH = struct.Struct(">I")
FLOAT = struct.Struct(">d")
COMPLEX = struct.Struct(">dd")


def dumps(value: object) -> bytes:
    """The bytes of a value made of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict.

    OrderedDict, Counter and defaultdict are written as dict.

    Raises:
        TypeError: for any other type, subclasses of these included.
        ValueError: if the value is nested more than `MAX_DEPTH` deep (or contains itself).
    """
    out = bytearray()
    _write(value, out, 0)
    return bytes(out)


def _write(value: object, out: bytearray, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    kind = type(value)
    if value is None:
        out += b"N"
    elif kind is bool:
        out += b"T" if value else b"F"
    elif kind is int:
        _block(b"i", value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True), out)
    elif kind is float:
        out += b"f" + FLOAT.pack(value)
    elif kind is complex:
        out += b"c" + COMPLEX.pack(value.real, value.imag)
    elif kind is str:
        _block(b"s", value.encode("utf-8", "surrogatepass"), out)
    elif kind is bytes:
        _block(b"b", value, out)
    elif kind in SEQUENCES:
        out += SEQUENCES[kind] + LENGTH.pack(len(value))
        for item in value:
            _write(item, out, depth + 1)
    elif kind in DICTIONARIES:
        out += b"d" + LENGTH.pack(len(value))
        for key, item in dict.items(value):
            _write(key, out, depth + 1)
            _write(item, out, depth + 1)
    else:
        raise TypeError(f"{kind.__name__} is not plain data")


def _block(tag: bytes, body: bytes, out: bytearray) -> None:
    out += tag + LENGTH.pack(len(body))
    out += body


def loads(data: bytes) -> object:
    """The value of these bytes, whoever wrote them.

    Raises:
        ValueError: for anything that `dumps` could not have written.
    """
    try:
        value, end = _read(memoryview(data), 0, 0)
    except (struct.error, IndexError, UnicodeDecodeError, TypeError) as error:  # TypeError: an unhashable key or member
        raise ValueError(f"malformed data ({error})") from None
    if end != len(data):
        raise ValueError("malformed data (something follows the value)")
    return value


def _read(data: memoryview, at: int, depth: int) -> tuple[object, int]:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    tag, at = bytes(data[at : at + 1]), at + 1
    if tag in CONSTANTS:
        return CONSTANTS[tag], at
    if tag == b"f":
        return FLOAT.unpack_from(data, at)[0], at + FLOAT.size
    if tag == b"c":
        return complex(*COMPLEX.unpack_from(data, at)), at + COMPLEX.size
    size, at = LENGTH.unpack_from(data, at)[0], at + LENGTH.size
    if size > len(data) - at:  # every byte of a block and every item takes room: no huge object from a few bytes
        raise ValueError("malformed data (cut short)")
    if tag in b"isb" and tag:
        body = bytes(data[at : at + size])
        return READERS[tag](body), at + size
    items = []
    for _ in range(2 * size if tag == b"d" else size):
        item, at = _read(data, at, depth + 1)
        items.append(item)
    if tag == b"d":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    if tag not in BUILDERS:
        raise ValueError(f"malformed data (unknown tag {tag!r})")
    return BUILDERS[tag](items), at


CONSTANTS = {b"N": None, b"T": True, b"F": False}
READERS = {
    b"i": lambda body: int.from_bytes(body, "big", signed=True),
    b"s": lambda body: body.decode("utf-8", "surrogatepass"),
    b"b": bytes,
}
