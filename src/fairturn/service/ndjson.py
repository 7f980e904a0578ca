"""Handing in thousands of documents at once: a line of JSON for each, all of them or none."""

import base64
import json
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Request, Response
from pydantic import Field

from fairturn.model import SUBMIT_DOCUMENTS_MAX, TRACEPARENT, Submission
from fairturn.service import shapes
from fairturn.service.callers import Caller, Submitter, customer_for
from fairturn.service.problems import Code, Problem, refusing_misuse, refusing_parents
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of
from fairturn.service.submissions import (
    media_type_of,
    moment_of,
    own_parent,
    parsed,
)
from fairturn.service.uploads import (
    one_of_its_uploads,
    receive_to_disk,
    refusing_without_a_place,
)
from fairturn.telemetry import carrying, submitting
from fairturn.wire import BATCH_BYTES_MAX, JSON, LINES

# The service reads no files of its own machine, whatever a line says.
_FIELDS = (
    "customer",
    "payload",
    "content",
    "name",
    "metadata",
    "key",
    "cost",
    "due_at",
    "parent",
)

router = APIRouter(tags=["documents"])


class LineReceipt(shapes.Receipt):
    """What a line of many is answered with."""

    repeated: Annotated[bool, Field(description="The idempotency key was known already.")]


class Receipts(shapes.Shape):
    """In the order of the lines."""

    receipts: list[LineReceipt]


@router.post(
    "/v1/documents/batch",
    status_code=201,
    response_model=Receipts,
    responses=problems(400, 408, 413, 415, 429, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {LINES: {"schema": {"type": "string"}}},
        }
    },
)
async def submit_batch(request: Request, caller: Submitter) -> Response:
    """Submit many documents at once: all of them, or none.

    Each line is a JSON object with the fields payload, or content in Base64, name, metadata, key,
    cost, due_at and parent; from an operator also customer. At most 10,000 lines.
    """
    service = service_of(request)
    if media_type_of(request) != LINES:
        raise Problem(Code.MEDIA_TYPE_UNKNOWN, f"lines have the type {LINES}")
    with one_of_its_uploads(service, caller.key):
        # To disk first: whoever sends slowly must not keep others from their turn in memory.
        file = await receive_to_disk(request, service, BATCH_BYTES_MAX)
        with file, submitting(request.headers.get(TRACEPARENT)) as trace:
            async with service.batches:
                content = await service.run(_submit_lines, service, caller, file, trace)
    return Response(content, 201, media_type=JSON)


def _submit_lines(service: Service, caller: Caller, file: BinaryIO, trace: str | None) -> bytes:
    file.seek(0)
    body = file.read()
    submissions = list(_submissions(service, caller, body, trace))
    if not submissions:
        raise Problem(Code.INVALID, "there is no line with a document")
    with refusing_misuse(), refusing_parents(), refusing_without_a_place():
        receipts = service.queue.submit_many(submissions)
    answered = [{**shapes.receipt_of(each), "repeated": each.repeated} for each in receipts]
    return json.dumps({"receipts": answered}).encode()


def _submissions(
    service: Service, caller: Caller, body: bytes, trace: str | None
) -> Iterator[Submission]:
    found = 0
    for number, line in enumerate(body.split(b"\n"), 1):
        if not line.strip():
            continue
        found += 1
        if found > SUBMIT_DOCUMENTS_MAX:
            raise Problem(Code.INVALID, f"at most {SUBMIT_DOCUMENTS_MAX:,} lines are accepted")
        try:
            value = parsed(line)
            _refuse_too_large(value, len(line), service.plan.size_bytes_max)
            yield _submission(service, caller, value, trace)
        except Problem as problem:
            said = f"line {number}" + (f": {problem.detail}" if problem.detail else "")
            raise Problem(problem.code, said) from None
        except (ValueError, TypeError) as error:
            raise Problem(Code.INVALID, f"line {number}: {error}") from None


def _refuse_too_large(value: Any, line_bytes: int, maximum: int) -> None:
    """Refuse a document that is larger than one that is submitted alone may be."""
    if line_bytes <= maximum or not isinstance(value, dict):
        return
    content = value.get("content")
    size_bytes = (
        len(json.dumps(value.get("payload"))) if content is None else len(_from_base64(content))
    )
    if size_bytes > maximum:
        raise Problem(Code.TOO_LARGE, f"at most {maximum:,} bytes are accepted")


def _submission(service: Service, caller: Caller, value: Any, trace: str | None) -> Submission:
    if not isinstance(value, dict):
        raise ValueError('it is not an object, such as {"payload": 1}')
    unknown = sorted(value.keys() - set(_FIELDS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a field; they are: {', '.join(_FIELDS)}")
    if isinstance(value.get("due_at"), str):
        value["due_at"] = moment_of(value["due_at"])
    if value.get("content") is not None:
        value["content"] = _from_base64(value["content"])
    metadata = value.get("metadata")
    if metadata is None or isinstance(metadata, dict):  # another type is refused by the queue
        value["metadata"] = carrying(metadata, trace)
    value["customer"] = customer_for(caller, value.get("customer"))
    value["parent"] = own_parent(service, caller, value.get("parent"))
    return Submission(**value)


def _from_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise ValueError("content is not Base64 (RFC 4648)") from None
