"""Messages between the worker and a child: a length and JSON. Nothing is pickled."""

import binascii
import json
import os
from typing import Any, BinaryIO, NamedTuple

from fairturn.worker.handler import DocumentFields
from fairturn.worker.loader import Reference

FRAME_BYTES_MAX = 64 * 1_048_576  # room for the largest result, quoted in JSON
_LENGTH_BYTES = 4
READ_BYTES = 262_144
# A permit is the number of its epoch; 32 bits, so that none is reused while a child is busy.
PERMIT_BYTES = 4
EPOCHS = 1 << 8 * PERMIT_BYTES

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().decode


class ChildLimits(NamedTuple):
    """The limits of a child (memory, processes, size of a file), and when it is replaced (after
    documents, or growth of its memory)."""

    memory_bytes: int | None
    documents: int
    growth_bytes: int = 256 * 1_048_576
    processes: int | None = None
    file_bytes: int | None = None


class ChildConfig(NamedTuple):
    """The first message to a child."""

    handler: Reference
    main_module: dict[str, Any] | None  # the script that it is in, for `loader.load`
    path: list[str]  # `sys.path` of the worker
    folders: str  # the folder of the folders of attempts
    limits: ChildLimits


def to_json(fields: DocumentFields) -> DocumentFields:
    """Encode content as base64: JSON has no bytes."""
    body = fields.body
    if isinstance(body, bytes) and not fields.is_payload:
        fields = fields._replace(body=binascii.b2a_base64(body, newline=False).decode("ascii"))
    return fields


def from_json(values: list[Any]) -> DocumentFields:
    fields = DocumentFields(*values)
    if fields.body is not None and not fields.is_payload:
        fields = fields._replace(body=binascii.a2b_base64(fields.body))
    return fields


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


def read_message(stream: BinaryIO) -> Any:
    """Return the next message of a blocking stream; raises `EOFError` at the end."""
    size = int.from_bytes(stream.read(_LENGTH_BYTES), "big")
    body = stream.read(size)
    if not body or len(body) < size:
        raise EOFError
    return _decode(body.decode("ascii"))


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a blocking descriptor."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
