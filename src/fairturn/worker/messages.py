"""Messages between the worker and a child: a length, then JSON. Nothing is pickled."""

import json
import os
from collections import deque

FRAME_BYTES_MAX = 64 * 1_048_576  # four times the largest result, which JSON may double
_LENGTH_BYTES = 4
_READ_BYTES = 262_144
# A permit is the epoch that it belongs to: so many that none comes again while a child is busy.
PERMIT_BYTES = 4
EPOCHS = 1 << 8 * PERMIT_BYTES

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().decode


class FrameError(Exception):
    """What came is no message."""


def pack(message: object) -> bytes:
    """A message as bytes: ASCII throughout, so that every text of Python fits."""
    body = _encode(message).encode("ascii")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class Frames:
    """Puts messages together from the pieces in which they come."""

    def __init__(self) -> None:
        self._piece = bytearray()

    def feed(self, piece: bytes) -> list[object]:
        """The messages that are complete now."""
        self._piece += piece
        messages: list[object] = []
        at = 0
        while len(self._piece) - at >= _LENGTH_BYTES:
            size = int.from_bytes(self._piece[at : at + _LENGTH_BYTES], "big")
            if size > FRAME_BYTES_MAX:
                raise FrameError(f"a message of {size:,} bytes is announced")
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


class Reader:
    """Messages from a file descriptor, one at a time, waiting for each."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._frames = Frames()
        self._messages: deque[object] = deque()

    def read(self) -> object:
        """The next message; `EOFError` when there is no more."""
        while not self._messages:
            piece = os.read(self._descriptor, _READ_BYTES)
            if not piece:
                raise EOFError
            self._messages.extend(self._frames.feed(piece))
        return self._messages.popleft()


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, waiting where it must."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
