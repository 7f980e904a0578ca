"""Submitting one document: a raw body, a form or a JSON payload."""

import json
import re
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import Field, ValidationError, create_model

from fairturn import wire
from fairturn.clock import from_datetime
from fairturn.errors import StoreError
from fairturn.model import (
    COST_MAX,
    KEY_BYTES_MAX,
    SECONDS_MAX,
    TRACEPARENT,
    BodyType,
    ContentRef,
    Receipt,
    Submission,
)
from fairturn.service import shapes
from fairturn.service.batcher import SubmissionBatcher, submit_documents
from fairturn.service.callers import Caller, customer_for, document_of, submitter_of
from fairturn.service.concurrency import release
from fairturn.service.forms import receive_form
from fairturn.service.problems import Problem, ProblemCode, invalid
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of
from fairturn.service.telemetry import carrying, submitting
from fairturn.service.uploads import (
    Received,
    check_checksum,
    is_small,
    receive,
    receive_in_memory,
    receive_small,
    upload_limit,
)
from fairturn.wire import (
    BINARY,
    IDEMPOTENCY_KEY,
    JSON,
    JSON_BYTES_MAX,
    LINES,
    RECEIPT,
    REPLAYED,
    to_json,
)

_MICROSECONDS = re.compile(r"-?\d{1,19}", re.ASCII)
FORM = "multipart/form-data"
CONTENT_DIGEST = "Content-Digest"

router = APIRouter(tags=["documents"])


_SCHEMAS = {  # others are texts
    wire.COST: Annotated[float, Field(ge=0, le=COST_MAX)],
    wire.SECONDS: Annotated[float, Field(gt=0, le=SECONDS_MAX)],
}
_NOTES = {
    wire.JSON_OBJECT: "A JSON object.",
    wire.JSON_ARRAY: "A JSON array of texts.",
    wire.TIMESTAMP: "ISO 8601 with a time zone, or microseconds since 1970.",
    wire.SECONDS: "In seconds.",
}
_EXAMPLES = {wire.JSON_OBJECT: ['{"pages": 3}'], wire.JSON_ARRAY: ['["urgent"]']}


def _described_fields() -> Any:
    """Return a model with a field for each of `wire.SUBMISSION`."""
    members: dict[str, Any] = {}
    for each in wire.SUBMISSION:
        schema: Any = _SCHEMAS.get(each.type, str)
        field: Any = Field(
            None,
            max_length=each.bytes_max,
            description=f"{each.description}. {_NOTES.get(each.type, '')}".strip(),
            examples=_EXAMPLES.get(each.type),
        )
        members[each.name] = (schema | None, field)
    return create_model("DescribedFields", __base__=shapes.RequestFields, **members)


class SubmissionQuery(_described_fields()):  # type: ignore[misc]  # a model made from a list
    """The properties of a document other than its body."""

    customer: Annotated[
        shapes.CustomerName | None, Field(description="Required with an operator's key.")
    ] = None
    sha256: Annotated[
        str | None,
        Field(
            pattern="^[0-9a-f]{64}$",
            description="The SHA-256 of the body, which is rejected if it differs.",
        ),
    ] = None
    body_type: Annotated[
        BodyType | None, Field(description="How to store a JSON body; `payload` by default.")
    ] = None


_NO_PROPERTIES = SubmissionQuery()
_BODY = {
    "required": True,
    "content": {
        BINARY: {"schema": {"type": "string", "format": "binary"}},
        JSON: {"schema": {}},
        FORM: {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "key": {"type": "string", "minLength": 1, "maxLength": KEY_BYTES_MAX},
                },
            }
        },
    },
}


_LINKS = {
    operation: {"operationId": operation, "parameters": {"id": "$response.body#/id"}}
    for operation in ("get_document", "get_content", "get_result", "cancel_document")
}


def _parameters() -> list[dict[str, Any]]:
    """Return the parameters for the OpenAPI description. The route parses them itself, because
    FastAPI would take longer for that than the store for the document."""

    def parameter(place: str, name: str, schema: Any, about: str) -> dict[str, Any]:
        plain = {"name": name, "in": place, "required": False, "schema": schema}
        return {**plain, "description": about}

    parameters = []
    described = SubmissionQuery.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, schema in described["properties"].items():
        (plain,) = [each for each in schema["anyOf"] if each.get("type") != "null"]
        parameters.append(parameter("query", name, plain, schema["description"]))
    key = {"type": "string", "minLength": 1, "maxLength": KEY_BYTES_MAX}
    about_key = "Within 24 hours, the same key returns the first receipt."
    about_digest = "The SHA-256 of the body (RFC 9530), which is rejected if it differs."
    return [
        *parameters,
        parameter("header", IDEMPOTENCY_KEY, key, about_key),
        parameter("header", CONTENT_DIGEST, {"type": "string"}, about_digest),
    ]


@router.post(
    "/v1/documents",
    status_code=201,
    response_model=shapes.ReceiptJson,
    responses={
        201: {"links": _LINKS},
        200: {
            "model": shapes.ReceiptJson,
            "description": "The first receipt, replayed for a known idempotency key.",
        },
        **problems(400, 408, 409, 413, 415, 429, 507),
    },
    openapi_extra={"requestBody": _BODY, "parameters": _parameters(), "security": [{"key": []}]},
)
async def submit(request: Request) -> Response:
    """Submit a document.

    The body is the content, or with `Content-Type: application/json` the payload. Browsers can send
    `multipart/form-data`, with the query parameters as fields. Status 201 means that the document
    is durable. Within 24 hours, the same `Idempotency-Key` returns the first receipt.
    """
    service = service_of(request)
    media_type = media_type_of(request)
    with submitting(request.headers.get(TRACEPARENT)) as trace:
        if media_type not in (FORM, LINES) and is_small(request, service):
            receipt = await _submit_small(request, service, media_type, trace)
        else:
            caller = await service.run(submitter_of, request)
            receipt = await submit_for(caller, request, trace)
    headers = {"Location": f"/v1/documents/{receipt.id}"}
    if receipt.replayed:
        headers[REPLAYED] = "true"
    content = json.dumps(to_json(RECEIPT, receipt))
    return Response(content, 200 if receipt.replayed else 201, headers, media_type=JSON)


def media_type_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _submit_small(
    request: Request, service: Service, media_type: str, trace: str | None
) -> Receipt:
    """Submit a body that fits into a row, in one hop to a thread. The body is read before the
    caller is authenticated; it is no larger than the server's buffer of each connection."""
    body = await receive_small(request, service)

    def prepare() -> Submission:
        caller = submitter_of(request)
        about = _about(request)
        payload, received = None, None
        if media_type == JSON and about.body_type is not BodyType.CONTENT:
            payload = parsed(body)
        else:
            received = body
        key, digest = _key_in(request), request.headers.get(CONTENT_DIGEST)
        submission = _ReceivedSubmission(about, received, payload, key, digest, trace)
        return _checked(service, caller, submission)

    collector: SubmissionBatcher = request.app.state.collector
    return await collector.submit(prepare)


async def submit_for(caller: Caller, request: Request, trace: str | None = None) -> Receipt:
    """Submit a body of any size for an authenticated caller, streaming it to the contents."""
    service, media_type = service_of(request), media_type_of(request)
    about, key = _about(request), _key_in(request)
    if media_type == LINES:
        raise Problem(
            ProblemCode.MEDIA_TYPE_UNKNOWN, f"{LINES} is accepted by /v1/documents/batch only"
        )
    release(request.scope)  # an upload is not one of the other requests of the key
    with service.uploads.take(caller.key):
        payload: Any = None
        received: Received | None = None
        # A form may name the customer or the idempotency key in a later part.
        limit = await upload_limit(
            service,
            caller.customer or about.customer,
            has_key=key is not None or media_type == FORM,
        )
        if media_type == FORM:
            with limit.enforced():
                form = await receive_form(request, service, limit.size_bytes_max)
            received = form.content
            try:
                about, key = _merged(about, form.fields, key)
            except BaseException:
                await service.run(_discard, service, received)
                raise
            if about.name is None and form.file_name is not None:
                about = about.model_copy(update={"name": form.file_name})
        elif media_type == JSON and about.body_type is not BodyType.CONTENT:
            maximum = min(JSON_BYTES_MAX, service.plan.size_bytes_max)
            body = await receive_in_memory(request, service, maximum)
            payload = await service.run(parsed, body)
        else:
            with limit.enforced():
                received = await receive(request, service, limit.size_bytes_max)
        digest = request.headers.get(CONTENT_DIGEST)
        submission = _ReceivedSubmission(about, received, payload, key, digest, trace)
        # Not in a thread of the store: a large payload is stored as content.
        return await service.move(_submit, service, caller, submission)


class _ReceivedSubmission(NamedTuple):
    about: SubmissionQuery
    received: Received | None
    payload: Any
    key: str | None
    digest: str | None
    trace: str | None  # traceparent


def _submit(service: Service, caller: Caller, submission: _ReceivedSubmission) -> Receipt:
    """Validate and store. Delete the received content if the document is rejected."""
    try:
        checked = _checked(service, caller, submission)
        (receipt,) = submit_documents(service, [checked])
        return receipt
    except StoreError:
        raise  # the document may have been stored: `prune` deletes the content if it was not
    except BaseException:
        _discard(service, submission.received)
        raise


def _checked(service: Service, caller: Caller, submission: _ReceivedSubmission) -> Submission:
    about, received, payload, key, digest, trace = submission
    if received is not None:
        check_checksum(received, about.sha256, digest)
    described = {each.name: _value(each, getattr(about, each.name)) for each in wire.SUBMISSION}
    described["metadata"] = carrying(described["metadata"], trace)
    described["parent"] = own_parent(service, caller, described["parent"])
    return Submission(
        customer=customer_for(caller, about.customer),
        payload=payload,
        content=received if isinstance(received, bytes) else None,
        written=received if isinstance(received, ContentRef) else None,
        key=key,
        **described,
    )


def _value(field: wire.SubmissionField, value: Any) -> Any:
    """Convert the value of a parameter to that of `Submission`."""
    if value is None:
        return None
    if field.type in (wire.JSON_OBJECT, wire.JSON_ARRAY):
        return _json(value, field.name, field.type.schema)
    return timestamp_of(value) if field.type is wire.TIMESTAMP else value


def _discard(service: Service, received: Received | None) -> None:
    if isinstance(received, ContentRef):
        service.queue.discard([received.name])


def own_parent(service: Service, caller: Caller, parent: Any) -> str | None:
    """Check that a parent, whose priority is inherited, belongs to the caller."""
    if parent is not None and not isinstance(parent, str):
        raise Problem(ProblemCode.INVALID, f"parent is {parent!r}; it must be a document id")
    if parent is None or caller.sees_all:
        return parent
    document = document_of(service, caller, parent)
    if document is None:
        raise Problem(ProblemCode.PARENT_UNKNOWN)
    return document.id


def timestamp_of(text: str) -> int:
    """Parse ISO 8601 with a time zone, or microseconds since 1970. Raises `Problem`."""
    if _MICROSECONDS.fullmatch(text):
        return int(text)
    try:
        return from_datetime(datetime.fromisoformat(text))
    except (ValueError, TypeError, OverflowError):
        raise Problem(
            ProblemCode.INVALID,
            f"{text[:40]!r} is not a timestamp with a time zone, such as 2030-01-31T08:00Z",
        ) from None


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError:
        raise Problem(ProblemCode.MALFORMED, "the JSON is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise Problem(ProblemCode.MALFORMED, f"invalid JSON: {error}") from None


def _json(text: str, name: str, kind: type[Any]) -> Any:
    value = parsed(text.encode("utf-8", "surrogatepass"))
    if not isinstance(value, kind):
        what = "object" if kind is dict else "array"
        raise Problem(ProblemCode.INVALID, f"{name} is not a JSON {what}")
    return value


def _merged(
    about: SubmissionQuery, fields: dict[str, str], key: str | None
) -> tuple[SubmissionQuery, str | None]:
    """Merge the fields of a form into those of the query. Raises `Problem` for duplicates."""
    given = {name: value for name, value in about.model_dump().items() if value is not None}
    twice = sorted(given.keys() & fields.keys())
    if twice or (key is not None and "key" in fields):
        raise Problem(ProblemCode.INVALID, f"{(twice or ['key'])[0]} is given twice")
    fields = dict(fields)
    key = fields.pop("key", key)
    return _valid({**given, **fields}, "body"), key


def _about(request: Request) -> SubmissionQuery:
    query = request.query_params
    return _valid(dict(query), "query") if query else _NO_PROPERTIES


def _valid(fields: dict[str, Any], where: str) -> SubmissionQuery:
    try:
        return SubmissionQuery(**fields)
    except ValidationError as error:
        raise invalid(error.errors(), where) from None


def _key_in(request: Request) -> str | None:
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not 1 <= len(key) <= KEY_BYTES_MAX:
        raise Problem(
            ProblemCode.INVALID,
            f"{IDEMPOTENCY_KEY} has {len(key)} characters; it must have 1 to {KEY_BYTES_MAX}",
        )
    return key
