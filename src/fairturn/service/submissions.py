"""Handing in a document: a raw body, a form, or a payload."""

import json
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import Field, ValidationError

from fairturn.clock import from_datetime
from fairturn.errors import StoreError
from fairturn.model import (
    COST_MAX,
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    TRACEPARENT,
    ContentRef,
    Kind,
    Receipt,
    Submission,
)
from fairturn.service import shapes
from fairturn.service.batcher import Collector
from fairturn.service.callers import Caller, customer_for, submitter_of
from fairturn.service.forms import receive_form
from fairturn.service.problems import Code, Problem, invalid, refusing_misuse, refusing_parents
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of
from fairturn.service.uploads import (
    Received,
    check_checksum,
    is_small,
    one_of_its_uploads,
    receive,
    receive_in_memory,
    receive_small,
    refusing_without_a_place,
)
from fairturn.telemetry import carrying, submitting
from fairturn.wire import BINARY, IDEMPOTENCY_KEY, JSON, JSON_BYTES_MAX, LINES, REPEATED

FORM = "multipart/form-data"
CONTENT_DIGEST = "Content-Digest"

router = APIRouter(tags=["documents"])


class About(shapes.Asked):
    """What is said about a document beside its bytes."""

    customer: Annotated[
        shapes.CustomerName | None, Field(description="Whose it is; only an operator says so.")
    ] = None
    name: Annotated[
        str | None, Field(max_length=NAME_BYTES_MAX, description="For people; never a path.")
    ] = None
    metadata: Annotated[
        str | None, Field(description="A JSON object.", examples=['{"pages": 3}'])
    ] = None
    cost: Annotated[float | None, Field(ge=0, le=COST_MAX)] = None
    due_at: Annotated[
        str | None,
        Field(description="Not to be started before: ISO 8601 with a zone, or microseconds."),
    ] = None
    parent: Annotated[str | None, Field(description="The document that it was made from.")] = None
    sha256: Annotated[
        str | None, Field(pattern="^[0-9a-f]{64}$", description="Refused if the bytes differ.")
    ] = None
    kind: Annotated[
        Kind | None, Field(description="How to take a JSON body; as a payload by default.")
    ] = None


_NOTHING_SAID = About()
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


# What can be done with a document that was submitted.
_LINKS = {
    operation: {"operationId": operation, "parameters": {"id": "$response.body#/id"}}
    for operation in ("get_document", "get_content", "get_result", "cancel_document")
}


def _parameters() -> list[dict[str, Any]]:
    """What the operation reads from query and headers, for its description. It reads them itself,
    because the framework would take longer for that than the store for the document."""
    described = About.model_json_schema(ref_template="#/components/schemas/{model}")["properties"]
    asked: list[dict[str, Any]] = []
    for name, schema in described.items():
        (plain,) = [each for each in schema["anyOf"] if each.get("type") != "null"]
        asked.append({"name": name, "in": "query", "required": False, "schema": plain})
        if "description" in schema:
            asked[-1]["description"] = schema["description"]
    for name, about, schema in (
        (
            IDEMPOTENCY_KEY,
            "The same within 24 hours is the same document.",
            {"type": "string", "minLength": 1, "maxLength": KEY_BYTES_MAX},
        ),
        (CONTENT_DIGEST, "RFC 9530, SHA-256: refused if the bytes differ.", {"type": "string"}),
    ):
        asked.append(
            {
                "name": name,
                "in": "header",
                "required": False,
                "schema": schema,
                "description": about,
            }
        )
    return asked


@router.post(
    "/v1/documents",
    status_code=201,
    response_model=shapes.Receipt,
    responses={
        201: {"links": _LINKS},
        200: {
            "model": shapes.Receipt,
            "description": "The idempotency key was known: the first receipt again.",
        },
        **problems(400, 408, 409, 413, 415, 429, 507),
    },
    openapi_extra={
        "requestBody": _BODY,
        "parameters": _parameters(),
        "security": [{"key": []}],
    },
)
async def submit(request: Request) -> Response:
    """Submit one document.

    The body is the document: its bytes as they are, or with `Content-Type: application/json` a
    payload; `multipart/form-data` is for browsers, with the same fields as the query. 201 means
    that it is on stable storage. The same `Idempotency-Key` within 24 hours gives the first receipt
    again.
    """
    service = service_of(request)
    media_type = media_type_of(request)
    with submitting(request.headers.get(TRACEPARENT)) as trace:
        if media_type not in (FORM, LINES) and _goes_into_the_row(request, service):
            receipt = await _submit_small(request, service, media_type, trace)
        else:
            caller = await service.run(submitter_of, request)
            receipt = await submit_for(caller, request, trace)
    headers = {"Location": f"/v1/documents/{receipt.id}"}
    if receipt.repeated:
        headers[REPEATED] = "true"
    content = json.dumps(shapes.receipt_of(receipt))
    return Response(content, 200 if receipt.repeated else 201, headers, media_type=JSON)


def media_type_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _goes_into_the_row(request: Request, service: Service) -> bool:
    """Whether the declared size fits into a row and is allowed; `submit_for` refuses the rest."""
    return is_small(request) and (
        int(request.headers["content-length"]) <= service.plan.size_bytes_max
    )


async def _submit_small(
    request: Request, service: Service, media_type: str, trace: str | None
) -> Receipt:
    """A body that goes into the row. It is read before it is known who asks: not more than the
    server has in memory of every connection anyway. The rest happens at once, in one thread."""
    body = await receive_small(request, service)

    def prepare() -> Submission:
        caller = submitter_of(request)
        about = _about(request)
        payload, received = None, None
        if media_type == JSON and about.kind is not Kind.CONTENT:
            payload = parsed(body)
        else:
            received = body
        key, digest = _key_in(request), request.headers.get(CONTENT_DIGEST)
        handed_in = _HandedIn(about, received, payload, key, digest, trace)
        return _checked(service, caller, handed_in)

    collector: Collector = request.app.state.collector
    return await collector.submit(prepare)


async def submit_for(caller: Caller, request: Request, trace: str | None = None) -> Receipt:
    """Submit a body of any size for somebody who is known: it is read piece by piece."""
    service, media_type = service_of(request), media_type_of(request)
    about, key = _about(request), _key_in(request)
    if media_type == LINES:
        raise Problem(Code.MEDIA_TYPE_UNKNOWN, "lines go to /v1/documents/batch")
    with one_of_its_uploads(service, caller.key):
        payload: Any = None
        received: Received | None = None
        if media_type == FORM:
            form = await receive_form(request, service)
            received = form.content
            try:
                about, key = _merged(about, form.fields, key)
            except BaseException:
                await service.run(_discard, service, received)
                raise
            if about.name is None and form.file_name is not None:
                about = about.model_copy(update={"name": form.file_name})
        elif media_type == JSON and about.kind is not Kind.CONTENT:
            most = min(JSON_BYTES_MAX, service.plan.size_bytes_max)
            body = await receive_in_memory(request, service, most)
            payload = await service.run(parsed, body)
        else:
            received = await receive(request, service)
        digest = request.headers.get(CONTENT_DIGEST)
        handed_in = _HandedIn(about, received, payload, key, digest, trace)
        return await service.move(_submit, service, caller, handed_in)  # a payload may be large


class _HandedIn(NamedTuple):
    """A document as it came in."""

    about: About
    received: Received | None
    payload: Any
    key: str | None
    digest: str | None
    trace: str | None  # that it belongs to


def _submit(service: Service, caller: Caller, handed_in: _HandedIn) -> Receipt:
    """In a thread: check, store. Delete a received content if it was not stored."""
    try:
        submission = _checked(service, caller, handed_in)
        with refusing_misuse(), refusing_parents(), refusing_without_a_place():
            (receipt,) = service.queue.submit_many([submission])
        return receipt
    except StoreError:
        raise  # the document may have been stored, or be stored yet: the sweep decides
    except BaseException:
        _discard(service, handed_in.received)
        raise


def _checked(service: Service, caller: Caller, handed_in: _HandedIn) -> Submission:
    """What is to be stored, in the words of the queue."""
    about, received, payload, key, digest, trace = handed_in
    if received is not None:
        check_checksum(received, about.sha256, digest)
    metadata = None if about.metadata is None else _metadata(about.metadata)
    return Submission(
        customer=customer_for(caller, about.customer),
        payload=payload,
        content=received if isinstance(received, bytes) else None,
        written=received if isinstance(received, ContentRef) else None,
        name=about.name,
        metadata=carrying(metadata, trace),
        key=key,
        cost=about.cost,
        due_at=None if about.due_at is None else moment_of(about.due_at),
        parent=own_parent(service, caller, about.parent),
    )


def _discard(service: Service, received: Received | None) -> None:
    if isinstance(received, ContentRef):
        service.queue.discard([received.name])


def own_parent(service: Service, caller: Caller, parent: Any) -> str | None:
    """A parent gives its priority on, so it must be the caller's own."""
    if parent is not None and not isinstance(parent, str):
        raise Problem(Code.INVALID, "parent is not the id of a document")
    if parent is None or caller.sees_all:
        return parent
    stored = service.queue.store.read(parent)
    if stored is None or stored.document.customer != caller.customer:
        raise Problem(Code.PARENT_UNKNOWN)
    return stored.document.id


def moment_of(text: str) -> int:
    """A moment in ISO 8601 with a zone, or in microseconds since 1970."""
    if text.lstrip("-").isdecimal() and text.isascii() and len(text) < 20:
        return int(text)
    try:
        return from_datetime(datetime.fromisoformat(text))
    except (ValueError, TypeError, OverflowError):
        raise Problem(
            Code.INVALID, f"{text[:40]!r} is not a moment with a zone, such as 2030-01-31T08:00Z"
        ) from None


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError:
        raise Problem(Code.MALFORMED, "too many lists and objects are in each other") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise Problem(Code.MALFORMED, f"it is not JSON: {error}") from None


def _metadata(text: str) -> dict[str, Any]:
    value = parsed(text.encode("utf-8", "surrogatepass"))
    if not isinstance(value, dict):
        raise Problem(Code.INVALID, "metadata is not a JSON object")
    return value


def _merged(about: About, fields: dict[str, str], key: str | None) -> tuple[About, str | None]:
    """What the form says beside what the query says; not both about the same."""
    given = {name: value for name, value in about.model_dump().items() if value is not None}
    twice = sorted(given.keys() & fields.keys())
    if twice or (key is not None and "key" in fields):
        raise Problem(Code.INVALID, f"{(twice or ['key'])[0]} is said twice")
    fields = dict(fields)
    key = fields.pop("key", key)
    return _valid({**given, **fields}, "body"), key


def _about(request: Request) -> About:
    query = request.query_params
    return _valid(dict(query), "query") if query else _NOTHING_SAID


def _valid(fields: dict[str, Any], where: str) -> About:
    try:
        return About.model_validate(fields)
    except ValidationError as error:
        raise invalid(error.errors(), where) from None


def _key_in(request: Request) -> str | None:
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not 1 <= len(key) <= KEY_BYTES_MAX:
        raise Problem(Code.INVALID, f"{IDEMPOTENCY_KEY} has from 1 to {KEY_BYTES_MAX} characters")
    return key
