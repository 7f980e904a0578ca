"""Submitting a batch of documents as lines of JSON, in one transaction."""

import base64
import json
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Request, Response
from pydantic import Field

from fairturn.model import SUBMIT_DOCUMENTS_MAX, TRACEPARENT, Submission, SubmissionFields
from fairturn.service import shapes
from fairturn.service.batcher import submit_documents
from fairturn.service.callers import Caller, Submitter, customer_for
from fairturn.service.concurrency import release
from fairturn.service.options import VALUES_MAX
from fairturn.service.problems import Problem, ProblemCode
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of
from fairturn.service.submissions import media_type_of, own_parent, parsed, timestamp_of
from fairturn.service.telemetry import carrying, submitting
from fairturn.service.uploads import receive_to_disk
from fairturn.validation.submission import JSON_DEPTH_MAX
from fairturn.wire import (
    BATCH_BYTES_MAX,
    JSON,
    LINES,
    RECEIPT,
    SUBMISSION,
    TIMESTAMP,
    to_json,
)

_ABOUT = f"""Submit a batch of up to 10,000 documents, all or none.

Each line is a JSON object with `payload`, or `content` in Base64, and optionally
{", ".join(f"`{field.name}`" for field in SUBMISSION)} and `key`. `customer` is required with an
operator's key.
"""

_ESCAPED_BYTES = 6  # JSON may write one byte as six: \u0061
_LINE_OVERHEAD_BYTES = 1_048_576  # the other fields of a line
_DEPTH_MAX = JSON_DEPTH_MAX + 1  # of a line, with the object of its fields
_PIECE_BYTES = 65_536  # of a line, while it is checked
_OPENING = ord("(")
_ROUND = bytes.maketrans(b"[]{}", b"()()")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))

# The service reads no files of its own machine, whatever a line says.
_FIELDS = ("customer", *(name for name in SubmissionFields.__annotations__ if name != "file"))
_TIMESTAMPS = tuple(field.name for field in SUBMISSION if field.type is TIMESTAMP)

router = APIRouter(tags=["documents"])


class LineReceiptJson(shapes.ReceiptJson):  # type: ignore[misc]  # a model made from a list
    """The receipt of one line."""

    replayed: Annotated[
        bool, Field(description="Whether the receipt was replayed for a known idempotency key.")
    ]


class LineReceiptsJson(shapes.ResponseJson):
    """Receipts in the order of the lines."""

    receipts: list[LineReceiptJson]


@router.post(
    "/v1/documents/batch",
    status_code=201,
    response_model=LineReceiptsJson,
    description=_ABOUT,
    responses=problems(400, 408, 413, 415, 429, 507),
    openapi_extra={
        "requestBody": {"required": True, "content": {LINES: {"schema": {"type": "string"}}}}
    },
)
async def submit_batch(request: Request, caller: Submitter) -> Response:
    service = service_of(request)
    if media_type_of(request) != LINES:
        raise Problem(ProblemCode.MEDIA_TYPE_UNKNOWN, f"a batch must have the type {LINES}")
    release(request.scope)  # an upload is not one of the other requests of the key
    with service.uploads.take(caller.key):
        # To disk first: a slow client must not hold one of the few slots for batches in memory.
        file = await receive_to_disk(request, service, BATCH_BYTES_MAX)
        with file, submitting(request.headers.get(TRACEPARENT)) as trace:
            work = partial(_submit_lines, service, caller, file, trace)
            content = await service.batches.run(caller.key, work)
    return Response(content, 201, media_type=JSON)


def _submit_lines(service: Service, caller: Caller, file: BinaryIO, trace: str | None) -> bytes:
    file.seek(0)
    # Encoded one by one: the parsed values of only one line are in memory at a time.
    receipts = submit_documents(service, _submissions(service, caller, file, trace))
    if not receipts:
        raise Problem(ProblemCode.INVALID, "the batch has no documents")
    answered = [{**to_json(RECEIPT, each), "replayed": each.replayed} for each in receipts]
    return json.dumps({"receipts": answered}).encode()


def _submissions(
    service: Service, caller: Caller, file: BinaryIO, trace: str | None
) -> Iterator[Submission]:
    size_bytes_max = service.plan.size_bytes_max
    line_bytes_max = _ESCAPED_BYTES * size_bytes_max + _LINE_OVERHEAD_BYTES
    found = 0
    for number in count(1):
        line = file.readline(line_bytes_max + 1)
        if not line:
            return
        if not line.strip():
            continue
        found += 1
        if found > SUBMIT_DOCUMENTS_MAX:
            raise Problem(
                ProblemCode.INVALID,
                f"the batch has over {SUBMIT_DOCUMENTS_MAX:,} documents; split it",
            )
        try:
            if len(line) > line_bytes_max:
                raise Problem(ProblemCode.TOO_LARGE, f"it has over {line_bytes_max:,} bytes")
            refuse_expensive(line)
            value = parsed(line)
            _refuse_too_large(value, len(line), size_bytes_max)
            yield _submission(service, caller, value, trace)
        except Problem as problem:
            detail = f"line {number}" + (f": {problem.detail}" if problem.detail else "")
            raise Problem(problem.code, detail) from None
        except (ValueError, TypeError) as error:
            raise Problem(ProblemCode.INVALID, f"line {number}: {error}") from None


def refuse_expensive(line: bytes) -> None:
    """Raise `Problem` for JSON that is nested too deeply or has too many values, without parsing
    it: the parsed values would take up to twenty times the memory of the text.

    It looks at one piece at a time, because each call of C code holds the GIL until it returns: for
    a whole line, the event loop would wait up to 0.2 s."""
    values = depth = 0
    in_string, escape = False, b""
    for start in range(0, len(line), _PIECE_BYTES):
        piece = escape + line[start : start + _PIECE_BYTES]
        piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        escape = piece[-1:] if piece.endswith(b"\\") else b""  # of the next piece's first byte
        # Without escapes, every second part between quotes is outside of the strings.
        parts = piece.split(b'"')
        structure = b"".join(parts[in_string::2]).translate(_ROUND, _NO_STRUCTURE)
        in_string ^= len(parts) % 2 == 0
        values += structure.count(b",") + structure.count(b"(")
        if values > VALUES_MAX:
            raise Problem(
                ProblemCode.TOO_LARGE, f"it has over {VALUES_MAX:,} values; submit it as content"
            )
        for bracket in structure.replace(b",", b""):
            depth += 1 if bracket == _OPENING else -1
            if not 0 <= depth <= _DEPTH_MAX:
                raise Problem(
                    ProblemCode.MALFORMED,
                    f"it is nested more than {JSON_DEPTH_MAX} levels deep, or a bracket is not "
                    "opened",
                )


def _refuse_too_large(value: Any, line_bytes: int, maximum: int) -> None:
    """Reject a document over the size limit of a single submission."""
    if line_bytes <= maximum or not isinstance(value, dict):
        return
    content = value.get("content")
    size_bytes = (
        len(json.dumps(value.get("payload"))) if content is None else len(_from_base64(content))
    )
    if size_bytes > maximum:
        raise Problem(
            ProblemCode.TOO_LARGE, f"it has {size_bytes:,} bytes; the limit is {maximum:,}"
        )


def _submission(service: Service, caller: Caller, value: Any, trace: str | None) -> Submission:
    if not isinstance(value, dict):
        raise ValueError('it is not a JSON object, such as {"payload": 1}')
    unknown = sorted(value.keys() - set(_FIELDS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a field; the fields are {', '.join(_FIELDS)}")
    for name in _TIMESTAMPS:
        if isinstance(value.get(name), str):
            value[name] = timestamp_of(value[name])
    if value.get("content") is not None:
        value["content"] = _from_base64(value["content"])
    metadata = value.get("metadata")
    if metadata is None or isinstance(metadata, dict):  # the queue rejects other types
        value["metadata"] = carrying(metadata, trace)
    value["customer"] = customer_for(caller, value.get("customer"))
    value["parent"] = own_parent(service, caller, value.get("parent"))
    return Submission(**value)


def _from_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise ValueError("content is not Base64 (RFC 4648)") from None
