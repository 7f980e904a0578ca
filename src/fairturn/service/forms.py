"""Streaming parser for multipart/form-data bodies."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from fairturn.model import METADATA_BYTES_MAX
from fairturn.service.options import PARTS_MAX
from fairturn.service.problems import Problem, ProblemCode
from fairturn.service.service import Service
from fairturn.service.uploads import Received, UploadBody, pieces_of

# Parse errors go to the client; the parser would also log each of them.
_SILENT = logging.Logger(__name__, logging.CRITICAL)
FILE = "file"
_FIELD_BYTES_MAX = METADATA_BYTES_MAX
_OVERHEAD_BYTES = 1_048_576  # boundaries, headers and fields, in addition to the file


class UploadForm(NamedTuple):
    content: Received
    file_name: str | None
    fields: dict[str, str]


async def receive_form(request: Request, service: Service, size_bytes_max: int) -> UploadForm:
    """Return the file of a form and the other fields. The file is written to the contents as it
    arrives. Raises `Problem`."""
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if not boundary:
        raise Problem(ProblemCode.MALFORMED, "the form has no boundary")
    body = UploadBody(service, size_bytes_max)
    form = _FormParser()
    try:
        parser = MultipartParser(boundary, form.callbacks())
        parser.logger = _SILENT
        maximum = size_bytes_max + _OVERHEAD_BYTES
        async for chunk in pieces_of(request, service, maximum):
            parser.write(chunk)
            for piece in form.take():
                await body.add(piece)
        parser.finalize()
        if not form.ended or FILE not in form.seen:
            raise Problem(ProblemCode.MALFORMED, f"the form is incomplete or has no part {FILE!r}")
        return UploadForm(await body.whole(), form.file_name, form.texts())
    except (FormParserError, UnicodeDecodeError) as error:
        raise Problem(ProblemCode.MALFORMED, f"the form cannot be parsed: {error}") from None
    finally:
        await body.abandon()


class _FormParser:
    """Callbacks of `MultipartParser`, which collect fields and pieces of the file."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.file_name: str | None = None
        self.ended = False
        self._fields: dict[str, bytearray] = {}
        self._pieces: list[bytes] = []  # of the file, since the last `take`
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._field: str | None = None  # of the current part, after its headers
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
        """Return the pieces of the file since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def texts(self) -> dict[str, str]:
        """Return the fields other than the file."""
        return {name: bytes(value).decode() for name, value in self._fields.items()}

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise Problem(
                ProblemCode.MALFORMED,
                f"the form has too many parts; at most {PARTS_MAX} are allowed",
            )
        self._disposition, self._field = b"", None

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
            raise Problem(ProblemCode.MALFORMED, "a part of the form has no name or a repeated one")
        self.seen.add(field)
        self._field = field
        file_name = options.get(b"filename", b"").decode()
        if field == FILE:
            self.file_name = file_name or None
        else:
            self._fields[field] = bytearray()

    def _add(self, data: bytes, start: int, end: int) -> None:
        assert self._field is not None
        if self._field == FILE:
            self._pieces.append(data[start:end])
            return
        value = self._fields[self._field]
        value += data[start:end]
        if len(value) > _FIELD_BYTES_MAX:
            raise Problem(
                ProblemCode.TOO_LARGE,
                f"{self._field!r} has over {_FIELD_BYTES_MAX:,} bytes, the limit of a field",
            )

    def _end(self) -> None:
        self.ended = True
