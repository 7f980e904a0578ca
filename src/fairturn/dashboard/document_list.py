"""The list of documents: filters in the URL, bulk actions, export."""

import csv
import json
import re
from collections.abc import Iterator
from io import StringIO
from itertools import islice
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Form, Query, Request
from pydantic import Field, create_model
from starlette.responses import Response, StreamingResponse

from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.search import SCANNED_MAX
from fairturn.dashboard.visitors import Operator, Overseer, Visitor
from fairturn.model import State
from fairturn.priority import LEVELS
from fairturn.service import shapes
from fairturn.service.administration import BulkAction, change_in_bulk
from fairturn.service.options import BULK_MAX
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import ATTACHED
from fairturn.service.scan import scan_names
from fairturn.service.submissions import timestamp_of
from fairturn.validation.filters import (
    FILTERS,
    FilterDefinition,
    Filters,
    FilterType,
    to_filter,
)
from fairturn.wire import DOCUMENT, to_json

SIZE = 50
EXPORT_MAX = 1_000_000
# Where a spreadsheet would begin a formula: at the start of a cell, and, because some spreadsheets
# separate cells by semicolons or tabs, after these and line breaks too.
_FORMULA = re.compile(r"\A[\t\r\n]|(?:\A|(?<=[;\t\r\n]))[^\S\t\r\n]*[=+\-@＝＋－＠]")
COLUMNS = tuple(field.name for field in DOCUMENT if field.in_csv)

router = APIRouter(route_class=PageRoute, include_in_schema=False)


PAGE_FILTERS = tuple(each for each in FILTERS if each.on_page)
_FILTER_TYPES = {FilterType.STATE: State, FilterType.PRIORITY: int}


def _filter_fields() -> Any:
    """Return a model with a field for each filter of the page. A form sends empty fields too."""
    members: dict[str, Any] = {}
    for each in PAGE_FILTERS:
        value: Any = _FILTER_TYPES.get(each.type, str)
        if each.several:
            members[each.on_page] = (list[value | Literal[""]], Field(default_factory=list))
        else:
            longest = each.bytes_max if each.type is FilterType.TEXT else None
            members[each.on_page] = (str, Field("", max_length=longest))
    return create_model("PageFilterFields", __base__=shapes.RequestFields, **members)


class DocumentListQuery(_filter_fields()):  # type: ignore[misc]  # a model made from a list
    """The filters in the URL. An empty field matches every document."""

    def query(self) -> dict[str, Any]:
        """Return the query parameters: texts, and lists without empty and impossible values."""
        return {each.on_page: self._given(each) for each in PAGE_FILTERS}

    def _given(self, each: FilterDefinition) -> Any:
        value = getattr(self, each.on_page)
        if each.type is FilterType.PRIORITY:
            return [n for n in value if n in range(1, LEVELS + 1)]
        return [item for item in value if item] if each.several else value

    def filters(self) -> Filters:
        """Return the filters of `Queue.list`."""
        filters: dict[str, Any] = {}
        for each in PAGE_FILTERS:
            value = self._given(each)
            if value:
                filters[each.name] = (
                    _timestamp(value) if each.type is FilterType.TIMESTAMP else value
                )
        return cast(Filters, filters)


def _timestamp(text: str) -> int:
    """Parse a timestamp; without a time zone it is UTC, as the label of the field states."""
    has_zone = text[-1] in "Zz" or "+" in text or text.isdecimal()
    return timestamp_of(text if has_zone else f"{text}Z")


class DocumentListPageQuery(DocumentListQuery):
    after: str = ""
    scanned: Annotated[int, Field(ge=0, le=SCANNED_MAX)] = 0
    # Documents changed by a bulk action.
    did_cancel: Annotated[int | None, Field(ge=0, le=BULK_MAX)] = None
    did_retry: Annotated[int | None, Field(ge=0, le=BULK_MAX)] = None


@router.get("/documents")
def show_documents(
    request: Request, visitor: Overseer, asked: Annotated[DocumentListPageQuery, Query()]
) -> Response:
    with refusing_misuse():
        filter = to_filter(asked.filters())
    found = scan_names(
        visitor.service.queue.queries,
        filter,
        after=asked.after or None,
        size=SIZE,
        scanned=asked.scanned,
    )
    return render(
        request,
        visitor,
        "documents.html",
        asked=asked,
        query=asked.query(),
        filters=PAGE_FILTERS,
        documents=found.documents,
        further=found,
        full=len(found.documents) >= SIZE,
        states=list(State),
        kinds=[kind.name for kind in visitor.page.trail.lately().kinds],
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
    action: BulkAction


@router.get("/documents-bulk")
def ask_before_bulk(
    request: Request, visitor: Operator, asked: Annotated[BulkConfirmation, Query()]
) -> Response:
    """Show the number of matching documents, and ask for confirmation."""
    found = change_in_bulk(visitor.service, asked.action, asked.filters(), dry_run=True)
    return render(request, visitor, "bulk.html", asked=asked, query=asked.query(), found=found)


@router.post("/documents-bulk")
def act_in_bulk(
    request: Request, visitor: Operator, asked: Annotated[BulkConfirmation, Form()]
) -> Response:
    found = change_in_bulk(visitor.service, asked.action, asked.filters(), dry_run=False)
    visitor.page.directory.changed()
    return see_other(
        request, "/documents", **asked.query(), **{f"did_{asked.action}": found.changed}
    )
