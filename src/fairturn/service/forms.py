"""Bodies of the type multipart/form-data, as browsers send them: read as they come."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from fairturn.model import METADATA_BYTES_MAX
from fairturn.service.options import PARTS_MAX
from fairturn.service.problems import Code, Problem
from fairturn.service.service import Service
from fairturn.service.uploads import Body, Received, pieces_of

# What is wrong with a form is told to its sender; a line in the log for each would be noise.
_SILENT = logging.Logger(__name__, logging.CRITICAL)
FILE = "file"
_FIELD_BYTES_MAX = METADATA_BYTES_MAX
_AROUND_BYTES = 1_048_576  # boundaries, headers and fields, beside the file itself


class Form(NamedTuple):
    """A form with one file in it."""

    content: Received
    file_name: str | None
    fields: dict[str, str]


class _Part(NamedTuple):
    field: str
    file_name: str | None


async def receive_form(request: Request, service: Service) -> Form:
    """The file of a form, and the fields beside it. Files are not kept in memory."""
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if not boundary:
        raise Problem(Code.MALFORMED, "the form has no boundary")
    body = Body(service, service.plan.size_bytes_max)
    reading = _Reading()
    try:
        parser = MultipartParser(boundary, reading.callbacks())
        parser.logger = _SILENT
        async for chunk in pieces_of(request, service, service.plan.size_bytes_max + _AROUND_BYTES):
            parser.write(chunk)
            for piece in reading.take():
                await body.add(piece)
        parser.finalize()
        if not reading.ended or FILE not in reading.seen:
            raise Problem(Code.MALFORMED, "the form is not complete, or has no file")
        return Form(await body.whole(), reading.file_name, reading.texts())
    except (MultipartParseError, UnicodeDecodeError) as error:
        raise Problem(Code.MALFORMED, f"the form cannot be read: {error}") from None
    finally:
        await body.abandon()


class _Reading:
    """What the parser has found so far. It is called for every piece, and only notes it."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.file_name: str | None = None
        self.ended = False
        self._fields: dict[str, bytearray] = {}
        self._pieces: list[bytes] = []  # of the file, not taken yet
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._part: _Part | None = None
        self._parts = 0

    def callbacks(self) -> Any:
        names: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._add,
            "on_end": self._end,
        }
        return names

    def take(self) -> list[bytes]:
        """The pieces of the file since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def texts(self) -> dict[str, str]:
        """The fields that are not the file."""
        return {name: bytes(value).decode() for name, value in self._fields.items()}

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise Problem(Code.MALFORMED, f"a form has at most {PARTS_MAX} parts")
        self._disposition, self._part = b"", None

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _open(self) -> None:
        _, options = parse_options_header(self._disposition)
        field = options.get(b"name", b"").decode()
        if not field or field in self.seen:
            raise Problem(Code.MALFORMED, "a part of the form has no name, or one that was there")
        self.seen.add(field)
        file_name = options.get(b"filename")
        self._part = _Part(field, None if file_name is None else file_name.decode())
        if field == FILE:
            self.file_name = self._part.file_name or None
        else:
            self._fields[field] = bytearray()

    def _add(self, data: bytes, start: int, end: int) -> None:
        assert self._part is not None
        if self._part.field == FILE:
            self._pieces.append(data[start:end])
            return
        value = self._fields[self._part.field]
        value += data[start:end]
        if len(value) > _FIELD_BYTES_MAX:
            raise Problem(Code.TOO_LARGE, f"a field has at most {_FIELD_BYTES_MAX:,} bytes")

    def _end(self) -> None:
        self.ended = True
