"""Messages on a file descriptor: four bytes of length, then the body."""

from __future__ import annotations

import os
import struct

LENGTH = struct.Struct(">I")
LARGEST = 8 * 2**20  # bytes


def read_exactly(descriptor: int, size: int) -> bytes:
    """Raises EOFError if the other side is gone."""
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 16))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive(descriptor: int) -> bytes:
    """The next message; raises ValueError for one that is too large."""
    size = LENGTH.unpack(read_exactly(descriptor, LENGTH.size))[0]
    if size > LARGEST:
        raise ValueError(f"a message of {size} bytes; at most {LARGEST} are taken")
    return read_exactly(descriptor, size)


def send(descriptor: int, body: bytes) -> None:
    if len(body) > LARGEST:
        raise ValueError(f"a message of {len(body)} bytes; at most {LARGEST} are taken")
    data = memoryview(LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]
