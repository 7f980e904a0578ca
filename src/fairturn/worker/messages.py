"""Frames between the worker and a child: a length and JSON. Nothing is pickled."""

import json
import os
from collections import deque

FRAME_BYTES_MAX = 64 * 1_048_576  # room for the largest result, quoted in JSON
_LENGTH_BYTES = 4
_READ_BYTES = 262_144
# A permit is the number of its epoch; 32 bits, so that none is reused while a child is busy.
PERMIT_BYTES = 4
EPOCHS = 1 << 8 * PERMIT_BYTES

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().decode


class FrameError(Exception):
    """The bytes are not a valid message."""


def pack(message: object) -> bytes:
    """Encode a message. ASCII can represent every str, also one with surrogates."""
    body = _encode(message).encode("ascii")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameDecoder:
    """Decodes messages from a stream of bytes."""

    def __init__(self) -> None:
        self._piece = bytearray()

    def feed(self, piece: bytes) -> list[object]:
        """Add bytes and return the messages that are complete; raises `FrameError`."""
        self._piece += piece
        messages: list[object] = []
        at = 0
        while len(self._piece) - at >= _LENGTH_BYTES:
            size = int.from_bytes(self._piece[at : at + _LENGTH_BYTES], "big")
            if size > FRAME_BYTES_MAX:
                raise FrameError(
                    f"a message has {size:,} bytes; at most {FRAME_BYTES_MAX:,} are allowed"
                )
            end = at + _LENGTH_BYTES + size
            if end > len(self._piece):
                break
            try:
                messages.append(_decode(self._piece[at + _LENGTH_BYTES : end].decode("ascii")))
            except (ValueError, RecursionError) as error:
                raise FrameError(f"a message is not JSON: {error}") from error
            at = end
        del self._piece[:at]
        return messages


class FrameReader:
    """Reads messages from a blocking file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._frames = FrameDecoder()
        self._messages: deque[object] = deque()

    def read(self) -> object:
        """Return the next message; raises `EOFError` at the end."""
        while not self._messages:
            piece = os.read(self._descriptor, _READ_BYTES)
            if not piece:
                raise EOFError
            self._messages.extend(self._frames.feed(piece))
        return self._messages.popleft()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a blocking descriptor."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
