"""The list of documents: filters in the URL, bulk actions, export."""

import csv
import json
import re
from collections.abc import Iterator
from io import StringIO
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, Request
from pydantic import Field, ValidationError
from starlette.responses import Response, StreamingResponse

from fairturn.dashboard.documents import caller_of
from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.search import LOOKED_MAX, look
from fairturn.dashboard.visitors import Operator, Overseer, Visitor
from fairturn.model import NAME_BYTES_MAX, State
from fairturn.priority import LEVELS
from fairturn.service import administration, shapes
from fairturn.service.administration import BulkActionJson, BulkFilterJson
from fairturn.service.options import BULK_MAX
from fairturn.service.problems import invalid, refusing_misuse
from fairturn.service.responses import ATTACHED
from fairturn.service.submissions import moment_of
from fairturn.validation.filters import Filters, to_filter
from fairturn.wire import DOCUMENT, to_json

SIZE = 50
EXPORT_MAX = 1_000_000
# Where a spreadsheet would begin a formula: at the start of a cell, and, because some spreadsheets
# separate cells by semicolons or tabs, after these and line breaks too.
_FORMULA = re.compile(r"\A[\t\r\n]|(?:\A|(?<=[;\t\r\n]))[^\S\t\r\n]*[=+\-@＝＋－＠]")
COLUMNS = tuple(field.name for field in DOCUMENT if field.in_csv)

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class DocumentListQuery(shapes.RequestFields):
    """The filters in the URL. An empty field matches every document."""

    customer: str = ""
    state: Annotated[list[State | Literal[""]], Field(default_factory=list)]
    priority: Annotated[list[int | Literal[""]], Field(default_factory=list)]
    name: Annotated[str, Field(max_length=NAME_BYTES_MAX)] = ""
    tag: Annotated[list[str], Field(default_factory=list)]
    submitted_from: str = ""
    submitted_before: str = ""

    @property
    def states(self) -> list[State]:
        return [state for state in self.state if isinstance(state, State)]

    @property
    def priorities(self) -> list[int]:
        return [n for n in self.priority if isinstance(n, int) and 1 <= n <= LEVELS]

    @property
    def tags(self) -> list[str]:
        return [tag for tag in self.tag if tag]

    def query(self) -> dict[str, Any]:
        """Return the query parameters."""
        return {
            "customer": self.customer,
            "state": [state.value for state in self.states],
            "priority": self.priorities,
            "name": self.name,
            "tag": self.tags,
            "submitted_from": self.submitted_from,
            "submitted_before": self.submitted_before,
        }

    def filters(self) -> Filters:
        """Return the filters of `Queue.list`."""
        since, before = _moment(self.submitted_from), _moment(self.submitted_before)
        return Filters(
            customer=self.customer or None,
            states=self.states or None,
            priorities=self.priorities or None,
            name_part=self.name or None,
            tags=self.tags or None,
            submitted_from=None if since is None else moment_of(since),
            submitted_before=None if before is None else moment_of(before),
        )


def _moment(text: str) -> str | None:
    """Add UTC, as the label of the field states, to a moment without a time zone."""
    if not text:
        return None
    return text if text[-1] in "Zz" or "+" in text or text.isdecimal() else f"{text}Z"


class DocumentListPageQuery(DocumentListQuery):
    after: str = ""
    looked: Annotated[int, Field(ge=0, le=LOOKED_MAX)] = 0
    # Documents changed by a bulk action.
    did_cancel: Annotated[int | None, Field(ge=0, le=BULK_MAX)] = None
    did_retry: Annotated[int | None, Field(ge=0, le=BULK_MAX)] = None


@router.get("/documents")
def show_documents(
    request: Request, visitor: Overseer, asked: Annotated[DocumentListPageQuery, Query()]
) -> Response:
    with refusing_misuse():
        filter = to_filter(asked.filters())
    found = look(
        visitor.service.queue.queries,
        filter,
        after=asked.after or None,
        size=SIZE,
        looked=asked.looked,
    )
    return render(
        request,
        visitor,
        "documents.html",
        asked=asked,
        query=asked.query(),
        documents=found.documents,
        further=found,
        full=len(found.documents) >= SIZE,
        states=list(State),
    )


@router.get("/documents.csv")
def export_csv(visitor: Overseer, asked: Annotated[DocumentListQuery, Query()]) -> Response:
    return _export(_csv(_found(visitor, asked)), "text/csv; charset=utf-8", "documents.csv")


@router.get("/documents.json")
def export_json(visitor: Overseer, asked: Annotated[DocumentListQuery, Query()]) -> Response:
    return _export(_json(_found(visitor, asked)), "application/json", "documents.json")


def _found(visitor: Visitor, asked: DocumentListQuery) -> Iterator[dict[str, Any]]:
    filters = asked.filters()
    with refusing_misuse():
        to_filter(filters)  # before the response begins; `iterate` checks at its first document
    found = visitor.service.queue.iterate(**filters)
    return (to_json(DOCUMENT, each) for each in islice(found, EXPORT_MAX))


def _export(lines: Iterator[str], media_type: str, name: str) -> Response:
    headers = {**ATTACHED, "Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(lines, media_type=media_type, headers=headers)


def _csv(documents: Iterator[dict[str, Any]]) -> Iterator[str]:
    yield ",".join(COLUMNS) + "\r\n"
    for document in documents:
        out = StringIO()
        csv.writer(out).writerow([_cell(document[name]) for name in COLUMNS])
        yield out.getvalue()


def _cell(value: Any) -> Any:
    """Quote text that a spreadsheet would evaluate as a formula; write lists as JSON."""
    if isinstance(value, list):
        value = json.dumps(value, ensure_ascii=False) if value else ""
    return _FORMULA.sub(r"'\g<0>", value) if isinstance(value, str) else value


def _json(documents: Iterator[dict[str, Any]]) -> Iterator[str]:
    between = "[\n"
    for document in documents:
        yield between + json.dumps(document, ensure_ascii=False)
        between = ",\n"
    yield "[]\n" if between == "[\n" else "\n]\n"


class BulkConfirmation(DocumentListQuery):
    action: Literal["cancel", "retry"]


@router.get("/documents-bulk")
def ask_before_bulk(
    request: Request, visitor: Operator, asked: Annotated[BulkConfirmation, Query()]
) -> Response:
    """Show the number of matching documents, and ask for confirmation."""
    found = administration.act_in_bulk(request, caller_of(visitor), _bulk(asked, dry_run=True))
    return render(request, visitor, "bulk.html", asked=asked, query=asked.query(), found=found)


@router.post("/documents-bulk")
def act_in_bulk(
    request: Request, visitor: Operator, asked: Annotated[BulkConfirmation, Form()]
) -> Response:
    found = administration.act_in_bulk(request, caller_of(visitor), _bulk(asked, dry_run=False))
    visitor.page.directory.changed()
    return see_other(
        request, "/documents", **asked.query(), **{f"did_{asked.action}": found.changed}
    )


def _bulk(asked: BulkConfirmation, *, dry_run: bool) -> BulkActionJson:
    since, before = _moment(asked.submitted_from), _moment(asked.submitted_before)
    try:
        filter = BulkFilterJson(
            id=[],
            customer=asked.customer or None,
            state=asked.states,
            priority=asked.priorities,
            name_part=asked.name or None,
            tag=asked.tags,
            submitted_from=since,
            submitted_before=before,
        )
    except ValidationError as error:
        raise invalid(error.errors()) from None
    return BulkActionJson(action=asked.action, filter=filter, dry_run=dry_run)
