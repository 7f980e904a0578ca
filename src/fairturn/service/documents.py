"""Documents: looking at them, waiting for them, fetching what they carry, changing their course."""

import json
from io import BytesIO
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import Field

from fairturn.contents import local
from fairturn.explain.analysis import Audience, Explanation, without_position
from fairturn.model import ENDED, NAME_BYTES_MAX, Document, Filter, Kind, State, Stored
from fairturn.queue import not_completed
from fairturn.service import shapes
from fairturn.service.callers import Anybody, Caller, Submitter, scope_of, stored_for
from fairturn.service.languages import preferred_of
from fairturn.service.problems import Code, Problem, refusing_misuse
from fairturn.service.responses import ATTACHED, attachment, problems
from fairturn.service.service import Service, service_of
from fairturn.service.submissions import moment_of
from fairturn.validation.filters import Filters
from fairturn.wire import BINARY, IDS_MAX, JSON, WAIT_S_MAX

router = APIRouter(tags=["documents"])

_BINARY: dict[str, Any] = {"content": {BINARY: {"schema": {"type": "string", "format": "binary"}}}}


class Wanted(shapes.Asked):
    """Which documents are meant; what is left out does not matter."""

    customer: Annotated[
        shapes.CustomerName | None, Field(description="Whose; only operators and readers say so.")
    ] = None
    state: Annotated[list[State], Field(default_factory=list)]
    priority: Annotated[list[shapes.Priority], Field(default_factory=list)]
    name: Annotated[str | None, Field(max_length=NAME_BYTES_MAX)] = None
    name_part: Annotated[
        str | None, Field(max_length=NAME_BYTES_MAX, description="Somewhere in the name.")
    ] = None
    submitted_from: Annotated[str | None, Field(description="ISO 8601, or microseconds.")] = None
    submitted_before: Annotated[str | None, Field(description="ISO 8601, or microseconds.")] = None
    id: Annotated[
        list[str], Field(default_factory=list, max_length=IDS_MAX, description="Only of these.")
    ]

    def filters(self, caller: Caller) -> Filters:
        """The same in the words of the queue, within what the caller may see."""
        since, before = self.submitted_from, self.submitted_before
        return Filters(
            customer=scope_of(caller, self.customer),
            states=self.state or None,
            priorities=self.priority or None,
            name=self.name,
            name_part=self.name_part,
            submitted_from=None if since is None else moment_of(since),
            submitted_before=None if before is None else moment_of(before),
            ids=self.id or None,
        )


class WantedPage(Wanted):
    after: Annotated[str | None, Field(description="The `next` of the page before.")] = None
    size: shapes.PageSize = 100


class Look(shapes.Asked):
    explain: Annotated[bool, Field(description="With the explanation.")] = True
    wait_s: Annotated[
        float, Field(ge=0, le=WAIT_S_MAX, description="Wait so long for it to end.")
    ] = 0.0


@router.get("/v1/documents", response_model=shapes.Documents, responses=problems())
def list_documents(
    request: Request, caller: Anybody, wanted: Annotated[WantedPage, Query()]
) -> Any:
    """List documents, the newest first."""
    service, filters = service_of(request), wanted.filters(caller)
    with refusing_misuse():
        _refuse_foreign(service, caller, wanted.after)
        page = service.queue.list(after=wanted.after, size=wanted.size, **filters)
    documents = [shapes.Document.of(each, whole=caller.sees_all) for each in page.documents]
    return shapes.Documents(documents=documents, next=page.next)


def _refuse_foreign(service: Service, caller: Caller, after: str | None) -> None:
    """A page after somebody else's document would tell that it exists, and when it came."""
    if after is None or caller.customer is None:
        return
    own = Filter(customer=caller.customer, ids=(after,))
    if not service.queue.store.find(own, size=1).documents:
        raise Problem(Code.INVALID, "after is not the `next` of a page, or that page is gone")


@router.get("/v1/documents/{id}", response_model=shapes.ExplainedDocument, responses=problems(404))
async def get_document(
    request: Request,
    response: Response,
    *,
    caller: Anybody,
    id: shapes.DocumentId,
    look: Annotated[Look, Query()],
    accept_language: Annotated[str | None, Header()] = None,
) -> Any:
    """Get one document, with the explanation of where it is in the caller's language.

    With `wait_s` the answer comes when the document has ended, or when the time is over.
    """
    service = service_of(request)
    language = preferred_of(accept_language)
    stored = await service.run(stored_for, service, caller, id)
    if look.wait_s and stored.document.state not in ENDED:
        await service.watch.ended(stored.document.id, look.wait_s)
    response.headers["Content-Language"] = language
    response.headers["Vary"] = "Accept-Language"
    return await service.run(_shown, service, caller, id, look.explain, language)


def _shown(
    service: Service, caller: Caller, id: str, explain: bool, language: str
) -> shapes.ExplainedDocument:
    document, _, _, file = stored_for(service, caller, id)
    explained = _explained(service, caller, id) if explain else None
    return shapes.ExplainedDocument(
        **shapes.fields_of(document, whole=caller.sees_all),
        result_file_bytes=None if file is None else file.size_bytes,
        explanation=None if explained is None else shapes.Explanation.of(explained, language),
    )


def _explained(service: Service, caller: Caller, id: str) -> Explanation:
    audience = Audience.OPERATOR if caller.sees_all else Audience.CUSTOMER
    explained = service.queue.explain(id, audience)
    if not caller.sees_all and not service.plan.show_positions:
        return without_position(explained)
    return explained


@router.get(
    "/v1/documents/{id}/content",
    response_class=Response,
    responses={
        200: {"description": "The bytes, or the payload as JSON.", **_BINARY},
        **problems(404),
    },
)
async def get_content(request: Request, caller: Anybody, id: shapes.DocumentId) -> Response:
    """Download what was submitted. The bytes are checked before the first is sent."""
    service = service_of(request)
    document, body, *_ = await service.run(stored_for, service, caller, id)
    contents = service.queue.contents
    if document.kind is Kind.PAYLOAD:
        value = await service.move(local.payload_of, document, body, contents)
        payload = json.dumps(value).encode()
        name = document.name or f"{document.id}.json"
        return attachment(BytesIO(payload), len(payload), name, None)
    file = await service.move(local.open_content, document, body, contents)
    return attachment(file, document.size_bytes, document.name or document.id, document.sha256)


@router.get(
    "/v1/documents/{id}/result",
    response_class=Response,
    responses={
        200: {"description": "The value.", "content": {JSON: {"schema": {}}}},
        **problems(404, 409),
    },
)
def get_result(request: Request, caller: Anybody, id: shapes.DocumentId) -> Response:
    """The JSON value that the handler gave back for a completed document."""
    stored = _completed(service_of(request), caller, id)
    text = "null" if stored.result is None else stored.result
    return Response(text, media_type=JSON, headers=ATTACHED)


@router.get(
    "/v1/documents/{id}/result/file",
    response_class=Response,
    responses={200: {"description": "The file.", **_BINARY}, **problems(404, 409)},
)
async def get_result_file(request: Request, caller: Anybody, id: shapes.DocumentId) -> Response:
    """Download the file that the handler gave back. 404 if it gave none."""
    service = service_of(request)
    document, _, _, ref = await service.run(_completed, service, caller, id)
    if ref is None:
        raise Problem(Code.NOT_FOUND)
    file = await service.move(service.queue.contents.open, ref)
    return attachment(file, ref.size_bytes, f"result-{document.name or document.id}", ref.sha256)


def _completed(service: Service, caller: Caller, id: str) -> Stored:
    stored = stored_for(service, caller, id)
    if stored.document.state is not State.COMPLETED:
        raise not_completed(stored.document)
    return stored


@router.post(
    "/v1/documents/{id}/cancel", response_model=shapes.Changed, responses=problems(404, 409)
)
def cancel_document(request: Request, caller: Submitter, id: shapes.DocumentId) -> Any:
    """Cancel a document. One that runs is asked to stop, and stays `running` until it has."""
    service = service_of(request)
    document = _own(service, caller, id)
    return shapes.Changed(id=document.id, state=service.queue.cancel(document.id))


@router.post(
    "/v1/documents/{id}/retry", response_model=shapes.Changed, responses=problems(404, 409)
)
def retry_document(request: Request, caller: Submitter, id: shapes.DocumentId) -> Any:
    """Try a dead document again, with its old priority and all its attempts.

    Asked twice, it does the same: a document that waits and has used no attempts stays as it is.
    """
    service = service_of(request)
    document = _own(service, caller, id)
    service.queue.retry(document.id)
    return shapes.Changed(id=document.id, state=State.WAITING)


def _own(service: Service, caller: Caller, id: str) -> Document:
    return stored_for(service, caller, id).document
