"""Routes that read, await, download, cancel and retry documents, one or a list of ids;
`administration.py` changes those that match a filter."""

import json
from functools import partial
from io import BytesIO
from typing import Annotated, Any, cast

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, create_model

from fairturn.contents import local
from fairturn.contents.local import Verify
from fairturn.explain.analysis import Audience, Explanation, without_position
from fairturn.model import (
    ENDED,
    PAGE_MAX,
    SECONDS_MAX,
    AttemptRecord,
    BodyType,
    Filter,
    Page,
    State,
    Stored,
)
from fairturn.queue import not_completed
from fairturn.service import shapes
from fairturn.service.callers import (
    Anybody,
    Caller,
    Submitter,
    document_for,
    refuse_foreign_cursor,
    scope_of,
    stored_for,
)
from fairturn.service.concurrency import hold
from fairturn.service.downloads import open_download
from fairturn.service.languages import preferred_of
from fairturn.service.polls import poll
from fairturn.service.problems import Problem, ProblemCode, refusing_misuse
from fairturn.service.responses import ATTACHED, BYTES, attachment, problems, returns
from fairturn.service.scan import scan_names
from fairturn.service.service import Service, service_of
from fairturn.service.submissions import timestamp_of
from fairturn.validation.filters import FILTERS, Filters, FilterType, to_filter
from fairturn.wire import ATTEMPT, BINARY, DOCUMENT, JSON, WAIT_S_MAX, to_json

router = APIRouter(tags=["documents"])

TIMESTAMP_FORMAT = "ISO 8601 with a time zone, or microseconds since 1970-01-01 UTC."


_FILTER_TYPES = {
    FilterType.CUSTOMER: shapes.CustomerName,
    FilterType.STATE: State,
    FilterType.PRIORITY: shapes.Priority,
}
_FILTER_NOTES = {
    FilterType.CUSTOMER: "Accepted from operators and readers only.",
    FilterType.TIMESTAMP: TIMESTAMP_FORMAT,
}


def _filter_fields() -> Any:
    """Return a model with a field for each of `FILTERS`."""
    members: dict[str, Any] = {}
    for each in FILTERS:
        value: Any = _FILTER_TYPES.get(each.type, str)
        if each.several:
            about = f"{each.description}; of several, {each.several} must match."
            default: Any = Field(default_factory=list, max_length=each.values_max)
            members[each.parameter] = (Annotated[list[value], Field(description=about)], default)
        else:
            about = f"{each.description}. {_FILTER_NOTES.get(each.type, '')}".strip()
            default = Field(None, max_length=each.bytes_max)
            members[each.parameter] = (Annotated[value | None, Field(description=about)], default)
    return create_model("FilterFields", __base__=shapes.RequestFields, **members)


class DocumentFilterQuery(_filter_fields()):  # type: ignore[misc]  # a model made from a list
    """Selects documents. An omitted field matches every document."""

    def filters(self, caller: Caller) -> Filters:
        """Return the filters of `Queue.list`, limited to what the caller may see."""
        filters: dict[str, Any] = {}
        for each in FILTERS:
            value = getattr(self, each.parameter)
            if value is not None and value != []:
                filters[each.name] = (
                    timestamp_of(value) if each.type is FilterType.TIMESTAMP else value
                )
        filters["customer"] = scope_of(caller, filters.get("customer"))
        return cast(Filters, filters)


class DocumentPageQuery(DocumentFilterQuery):
    after: Annotated[str | None, Field(description="The `next` of the previous page.")] = None
    size: shapes.PageSize = 100


class DocumentQuery(shapes.RequestFields):
    explain: Annotated[bool, Field(description="Include the explanation.")] = True
    wait_s: Annotated[
        float, Field(ge=0, le=WAIT_S_MAX, description="Seconds to wait for the document to end.")
    ] = 0.0


@router.get("/v1/documents", response_model=shapes.DocumentsJson, responses=problems())
async def list_documents(
    request: Request, caller: Anybody, query: Annotated[DocumentPageQuery, Query()]
) -> Any:
    """List documents, newest first.

    With `name_part`, a request scans for a limited time: a page can have fewer documents than
    `size`, or none, although `next` is not null.
    """
    service = service_of(request)
    work = partial(_listed, service, caller, query)
    if query.name_part is None:
        return await service.run(work)
    return await service.cores.run(caller.key, work)


def _listed(service: Service, caller: Caller, query: DocumentPageQuery) -> shapes.DocumentsJson:
    filters = query.filters(caller)
    with refusing_misuse():
        refuse_foreign_cursor(service, caller, query.after)
        if query.name_part is None:
            page = service.queue.list(after=query.after, size=query.size, **filters)
        else:
            scan = scan_names(
                service.queue.queries,
                to_filter(filters),
                after=query.after,
                size=query.size,
                own=not caller.sees_all,
            )
            page = Page(scan.documents, scan.next)
    documents = [
        to_json(DOCUMENT, each, for_customer=not caller.sees_all) for each in page.documents
    ]
    return shapes.DocumentsJson(documents=documents, next=page.next)


@router.get(
    "/v1/documents/{id}", response_model=shapes.ExplainedDocumentJson, responses=problems(404)
)
async def get_document(
    request: Request,
    response: Response,
    *,
    caller: Anybody,
    id: shapes.DocumentId,
    query: Annotated[DocumentQuery, Query()],
    accept_language: Annotated[str | None, Header()] = None,
) -> Any:
    """Retrieve a document, with an explanation in the language of `Accept-Language`.

    With `wait_s`, the response is delayed until the document has ended, for at most that time.
    """
    service = service_of(request)
    language = preferred_of(accept_language)
    document = await service.run(document_for, service, caller, id)
    if query.wait_s and document.state not in ENDED:
        await _ended(request, caller, document.id, query.wait_s)
    response.headers["Content-Language"] = language
    response.headers["Vary"] = "Accept-Language"
    return await service.run(_shown, service, caller, id, query.explain, language)


async def _ended(request: Request, caller: Caller, id: str, wait_s: float) -> None:
    """Wait until a document has ended or was deleted, for at most `wait_s`."""
    service = service_of(request)
    with service.watch.watched(id) as ended:
        # Again: it may have ended before it was watched.
        stored = await service.run(stored_for, service, caller, id)
        if stored.document.state in ENDED:
            return
        await poll(request, caller, lambda: service.watch.wait(ended, wait_s))
    hold(request.scope, await service.requests.wait(caller.key))


def _shown(
    service: Service, caller: Caller, id: str, explain: bool, language: str
) -> shapes.ExplainedDocumentJson:
    document, _, _, file = stored_for(service, caller, id)
    explained = _explained(service, caller, id) if explain else None
    return shapes.ExplainedDocumentJson(
        **to_json(DOCUMENT, document, for_customer=not caller.sees_all),
        result_file_bytes=None if file is None else file.size_bytes,
        explanation=None if explained is None else shapes.ExplanationJson.of(explained, language),
    )


def _explained(service: Service, caller: Caller, id: str) -> Explanation:
    audience = Audience.OPERATOR if caller.sees_all else Audience.CUSTOMER
    explained = service.queue.explain(id, audience)
    if not caller.sees_all and not service.plan.show_positions:
        return without_position(explained)
    return explained


class AttemptsQuery(shapes.RequestFields):
    values: Annotated[
        bool, Field(description="Include the values of steps; for operators and readers only.")
    ] = False


@router.get(
    "/v1/documents/{id}/attempts", response_model=shapes.AttemptsJson, responses=problems(404)
)
async def list_attempts(
    request: Request,
    caller: Anybody,
    id: shapes.DocumentId,
    query: Annotated[AttemptsQuery, Query()],
) -> Any:
    """List the attempts of a document that failed, lost their lease or ended a step, oldest first.

    The attempt that completed a document is in the document itself.
    """
    service = service_of(request)
    work = partial(_attempts, service, caller, id, values=query.values)
    if not query.values:
        return await service.run(work)
    if not caller.sees_all:
        raise Problem(ProblemCode.NOT_ALLOWED)
    return await service.cores.run(caller.key, work)  # the values may have many megabytes


def _attempts(service: Service, caller: Caller, id: str, *, values: bool) -> Response:
    found = attempts_for(service, caller, id, values=values)
    rows = [to_json(ATTEMPT, each, for_customer=not caller.sees_all) for each in found]
    return JSONResponse({"attempts": rows})


def attempts_for(
    service: Service, caller: Caller, id: str, *, values: bool = False
) -> list[AttemptRecord]:
    """Return the attempts of a document that the caller may see. Raises `Problem`."""
    if not caller.sees_all:
        document_for(service, caller, id)
    return service.queue.attempts(id, values=values)


@router.get(
    "/v1/documents/{id}/content",
    response_class=Response,
    responses=returns("The content, or the payload as JSON.", BINARY, BYTES, 404),
)
async def get_content(request: Request, caller: Anybody, id: shapes.DocumentId) -> Response:
    """Download the submitted content or payload. It is verified before the first byte is sent."""
    service = service_of(request)
    document, body, *_ = await service.run(stored_for, service, caller, id)
    contents = service.queue.contents
    if document.body_type is BodyType.PAYLOAD:

        def encode(verify: Verify) -> bytes:
            return json.dumps(local.payload_of(document, body, contents, verify)).encode()

        payload = await open_download(request, caller, encode)
        name = document.name or f"{document.id}.json"
        return attachment(BytesIO(payload), len(payload), name, None)
    file = await open_download(
        request, caller, partial(local.open_content, document, body, contents)
    )
    return attachment(file, document.size_bytes, document.name or document.id, document.sha256)


@router.get(
    "/v1/documents/{id}/result",
    response_class=Response,
    responses=returns("The result as JSON.", JSON, {}, 404, 409),
)
def get_result(request: Request, caller: Anybody, id: shapes.DocumentId) -> Response:
    """Retrieve the value that the handler of a completed document returned."""
    stored = _completed(service_of(request), caller, id)
    text = "null" if stored.result is None else stored.result
    return Response(text, media_type=JSON, headers=ATTACHED)


@router.get(
    "/v1/documents/{id}/result/file",
    response_class=Response,
    responses=returns("The file.", BINARY, BYTES, 404, 409),
)
async def get_result_file(request: Request, caller: Anybody, id: shapes.DocumentId) -> Response:
    """Download the file that the handler returned; 404 if it returned none."""
    service = service_of(request)
    document, _, _, ref = await service.run(_completed, service, caller, id)
    if ref is None:
        raise Problem(ProblemCode.NOT_FOUND)
    file = await open_download(request, caller, partial(service.queue.contents.open, ref))
    return attachment(file, ref.size_bytes, f"result-{document.name or document.id}", ref.sha256)


def _completed(service: Service, caller: Caller, id: str) -> Stored:
    stored = stored_for(service, caller, id)
    if stored.document.state is not State.COMPLETED:
        raise not_completed(stored.document)
    return stored


@router.post(
    "/v1/documents/{id}/cancel",
    response_model=shapes.DocumentStateJson,
    responses=problems(404, 409),
)
def cancel_document(request: Request, caller: Submitter, id: shapes.DocumentId) -> Any:
    """Cancel a document. A running document stays `running` until its handler stops."""
    service = service_of(request)
    document = document_for(service, caller, id)
    return shapes.DocumentStateJson(id=document.id, state=service.queue.cancel(document.id))


class ExpiryJson(shapes.RequestFields):
    """When documents expire unless they have started: a timestamp, or a time from now."""

    expires_at: Annotated[
        shapes.Whole | str | None, Field(union_mode="left_to_right", description=TIMESTAMP_FORMAT)
    ] = None
    expires_in_s: Annotated[shapes.Number | None, Field(gt=0, le=SECONDS_MAX)] = None

    def fields(self) -> dict[str, Any]:
        """Return the keywords of `Queue.retry`."""
        at = self.expires_at
        return {
            "expires_at": timestamp_of(at) if isinstance(at, str) else at,
            "expires_in_s": self.expires_in_s,
        }


@router.post(
    "/v1/documents/{id}/retry",
    response_model=shapes.DocumentStateJson,
    responses=problems(404, 409),
)
def retry_document(
    request: Request, caller: Submitter, id: shapes.DocumentId, expiry: ExpiryJson | None = None
) -> Any:
    """Retry a dead document at the step that failed, with its original priority and the full number
    of attempts; with an expiry, also an expired one.

    The request is idempotent: a document that waits and has used no attempts does not change.
    Without an expiry, the document does not expire again.
    """
    service = service_of(request)
    document = document_for(service, caller, id)
    with refusing_misuse():
        service.queue.retry(document.id, **(expiry or ExpiryJson()).fields())
    # A document that expired before it was due has no place in the order yet.
    state = State.WAITING if document.order is not None else State.DELAYED
    return shapes.DocumentStateJson(id=document.id, state=state)


class DocumentIdsJson(shapes.RequestFields):
    ids: Annotated[list[str], Field(min_length=1, max_length=PAGE_MAX)]


class DocumentStatesJson(shapes.ResponseJson):
    """The state of each document, in the order of `ids`; null for an unknown id."""

    states: list[State | None]


@router.post("/v1/documents/cancel", response_model=DocumentStatesJson, responses=problems())
def cancel_documents(request: Request, caller: Submitter, body: DocumentIdsJson) -> Any:
    """Cancel up to 1,000 documents by id.

    The response has the state of each document afterwards. A running document stays `running` until
    its handler stops. A document that has ended does not change.
    """
    service = service_of(request)
    own = _own(service, caller, body.ids)
    return _answered(body.ids, dict(zip(own, service.queue.cancel(own), strict=True)))


class RetriedIdsJson(DocumentIdsJson, ExpiryJson):
    pass


@router.post("/v1/documents/retry", response_model=DocumentStatesJson, responses=problems())
def retry_documents(request: Request, caller: Submitter, body: RetriedIdsJson) -> Any:
    """Retry up to 1,000 dead documents by id; with an expiry, also expired ones.

    The response has the state of each document before the request: those that were `dead`, and with
    an expiry `expired`, wait again, all others are unchanged.
    """
    service = service_of(request)
    own = _own(service, caller, body.ids)
    with refusing_misuse():
        states = service.queue.retry(own, **body.fields())
    return _answered(body.ids, dict(zip(own, states, strict=True)))


def _own(service: Service, caller: Caller, ids: list[str]) -> list[str]:
    """Return the ids that the caller may change, without duplicates."""
    unique = tuple(dict.fromkeys(ids))
    if caller.sees_all:
        return list(unique)
    found = service.queue.queries.find(Filter(customer=caller.customer, ids=unique), size=PAGE_MAX)
    return [document.id for document in found.documents]


def _answered(ids: list[str], states: dict[str, State | None]) -> DocumentStatesJson:
    return DocumentStatesJson(states=[states.get(id) for id in ids])
