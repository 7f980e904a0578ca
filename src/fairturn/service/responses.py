"""Responses of routes in the OpenAPI description, and downloads."""

from collections.abc import Iterator
from typing import Any, BinaryIO
from urllib.parse import quote

from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from fairturn.contents.local import chunks_of
from fairturn.wire import BINARY, PROBLEM

_ALWAYS = (400, 401, 403, 405, 408, 413, 422, 429, 431, 500, 503)
_MEANINGS = {
    400: "The request is malformed.",
    401: "The access key is missing, unknown, expired or revoked.",
    403: "The access key does not permit this request.",
    404: "The resource does not exist, or belongs to another customer.",
    405: "The method is not allowed.",
    408: "The body arrived too slowly.",
    409: "The document or key is not in a state that permits this.",
    413: "The body is too large.",
    415: "The media type is not supported.",
    422: "A parameter is invalid.",
    429: "Too many requests, or too many waiting documents.",
    431: "The headers are too large.",
    500: "Internal error.",
    503: "The service is unavailable. Retry later.",
    507: "The storage is full.",
}
TEXT = {"type": "string"}
BYTES = {"type": "string", "format": "binary"}
# Browsers must not display submitted content as a page of this origin.
ATTACHED = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, no-store",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route, for the OpenAPI description."""
    schema = {"$ref": "#/components/schemas/ProblemJson"}
    return {
        status: {"description": _MEANINGS[status], "content": {PROBLEM: {"schema": schema}}}
        for status in sorted({*_ALWAYS, *statuses})
    }


def returns(
    description: str, media_type: str, schema: dict[str, str], *statuses: int
) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route whose body is no model: that of status 200, and problems."""
    content = {media_type: {"schema": schema}}
    return {200: {"description": description, "content": content}, **problems(*statuses)}


def attachment(
    file: BinaryIO, size_bytes: int, name: str, sha256: bytes | None
) -> StreamingResponse:
    """Return a download. It closes the file."""
    headers = {
        **ATTACHED,
        "Content-Disposition": disposition(name),
        "Content-Length": str(size_bytes),
    }
    if sha256 is not None:
        headers["ETag"] = f'"{sha256.hex()}"'
    return StreamingResponse(
        _closing(file), headers=headers, media_type=BINARY, background=BackgroundTask(file.close)
    )


def disposition(name: str) -> str:
    """Return a `Content-Disposition` (RFC 6266) with an ASCII name and the full one."""
    last = name.replace("\\", "/").rpartition("/")[2].strip(". ") or "document"
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._- ") else "_" for c in last)
    whole = quote(last.encode("utf-8", "replace"), safe="")
    return f"attachment; filename=\"{plain[:150]}\"; filename*=UTF-8''{whole}"


def _closing(file: BinaryIO) -> Iterator[bytes]:
    with file:
        yield from chunks_of(file)
