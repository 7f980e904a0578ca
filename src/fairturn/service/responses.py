"""What an operation can answer, for its description, and files as attachments."""

from collections.abc import Iterator
from typing import Any, BinaryIO
from urllib.parse import quote

from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from fairturn.contents.local import chunks_of
from fairturn.wire import BINARY, PROBLEM

# What every operation with a key can answer.
_ALWAYS = (400, 401, 403, 405, 408, 413, 422, 429, 500, 503)
_MEANINGS = {
    400: "The request cannot be read.",
    401: "No access key, or one that is not known.",
    403: "The access key is not meant for this.",
    404: "There is no such thing, or it is somebody else's.",
    405: "Not at this address.",
    408: "The body came too slowly.",
    409: "Not possible in the present state.",
    413: "The body is too large.",
    415: "A body of this type is not accepted.",
    422: "Something is not as it must be.",
    429: "Too many requests, or too many documents waiting.",
    500: "Something went wrong.",
    503: "Not now; try again later.",
    507: "No storage space is left.",
}
# Content from outside is never shown by a browser as if it were a page of ours.
ATTACHED = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, no-store",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problems that an operation can answer with."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {
            "description": _MEANINGS[status],
            "content": {PROBLEM: {"schema": schema}},
        }
        for status in sorted({*_ALWAYS, *statuses})
    }


def attachment(
    file: BinaryIO, size_bytes: int, name: str, sha256: bytes | None
) -> StreamingResponse:
    """Bytes to save, under a name that is only a proposal."""
    headers = {
        **ATTACHED,
        "Content-Disposition": disposition(name),
        "Content-Length": str(size_bytes),
    }
    if sha256 is not None:
        headers["ETag"] = f'"{sha256.hex()}"'
    return StreamingResponse(
        _closing(file),
        headers=headers,
        media_type=BINARY,
        background=BackgroundTask(file.close),
    )


def disposition(name: str) -> str:
    """RFC 6266: a name in ASCII for old programs, and the whole one."""
    last = name.replace("\\", "/").rpartition("/")[2].strip(". ") or "document"
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._- ") else "_" for c in last)
    whole = quote(last.encode("utf-8", "replace"), safe="")
    return f"attachment; filename=\"{plain[:150]}\"; filename*=UTF-8''{whole}"


def _closing(file: BinaryIO) -> Iterator[bytes]:
    with file:
        yield from chunks_of(file)
