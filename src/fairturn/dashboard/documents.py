"""The page of a document: timeline, explanation, attempts, result, actions."""

import json
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from fairturn.dashboard.renderer import PageRoute, plain, render, see_other
from fairturn.dashboard.visitors import Changer, Known, Visitor
from fairturn.explain.analysis import Audience, Explanation, without_position
from fairturn.explain.reasons import Code as ReasonCode
from fairturn.explain.reasons import Reason
from fairturn.explain.sentences import tell
from fairturn.explain.snapshot import waiting_since
from fairturn.model import SECONDS_MAX, Document, State, Stored
from fairturn.service import documents as operations
from fairturn.service.callers import Caller, stored_for

RESULT_CHARACTERS_MAX = 20_000
HOUR_S = 3_600
_PRIORITY = (ReasonCode.PRIORITY_FIRST, ReasonCode.PRIORITY_COUNTED, ReasonCode.PRIORITY_OF_PARENT)
_OVERTAKEN = (ReasonCode.SERVED_MEANWHILE, ReasonCode.SERVED_AT_LEAST)

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class TimelineEvent(NamedTuple):
    key: str  # of a text
    at: int | None
    values: dict[str, object]
    kind: str = ""


class DocumentPosition(NamedTuple):
    """The queue position of a waiting document. `split.html` uses the names of the fields."""

    position: int
    most: int
    better: int
    turns: int
    longest: int
    own: int
    starts_at: int | None
    latest_at: int | None


def caller_of(visitor: Visitor) -> Caller:
    """Return the caller of a page that requires a key."""
    assert visitor.caller is not None
    return visitor.caller


@router.get("/documents/{id}")
def show_document(request: Request, visitor: Known, id: str, done: str | None = None) -> Response:
    service, caller = visitor.service, caller_of(visitor)
    stored = stored_for(service, caller, id)
    document = stored.document
    explained = explained_to(visitor, document.id)
    return render(
        request,
        visitor,
        "document.html",
        document=document,
        whole=caller.sees_all,
        timeline=timeline(document, explained, whole=caller.sees_all),
        attempts=operations.attempts_for(service, caller, id),
        sentences=tell(explained, visitor.tongue.name),
        place=place_of(explained),
        result=_result(stored),
        result_file=stored.result_content,
        metadata=_shown(document.metadata) if document.metadata else None,
        done=done if done in ("cancelled", "retried") else None,
    )


def explained_to(visitor: Visitor, id: str) -> Explanation:
    """Return the explanation, limited to what the visitor may see."""
    audience = Audience.OPERATOR if visitor.oversees else Audience.CUSTOMER
    explained = visitor.service.queue.explain(id, audience)
    if not visitor.oversees and not visitor.service.plan.show_positions:
        return without_position(explained)
    return explained


def place_of(explained: Explanation) -> DocumentPosition | None:
    """Return the position; None if the document does not wait or has no position."""
    position, starts = explained.position, explained.forecast
    if position is None:
        return None
    before = position.before
    return DocumentPosition(
        position=position.bounds.least + 1,
        most=position.bounds.most + 1,
        better=before.better_levels,
        turns=before.other_turns,
        longest=before.longest_waiting,
        own=before.own,
        starts_at=None if starts is None else starts.earliest_at_us,
        latest_at=None if starts is None else starts.latest_at_us,
    )


def timeline(document: Document, explained: Explanation, *, whole: bool) -> list[TimelineEvent]:
    """Return the events of a document in chronological order."""
    events = [TimelineEvent("event_submitted", document.submitted_at_us, {})]
    events += (
        _priority(r, document.submitted_at_us) for r in explained.reasons if r.code in _PRIORITY
    )
    if document.due_at_us is not None and document.attempts == 0:
        events.append(TimelineEvent("event_due", document.due_at_us, {}))
    events += (_overtaken(r) for r in explained.reasons if r.code in _OVERTAKEN)
    # An attempt that was given back, or that ended a step, is not one of the present step.
    if document.claimed_at_us is not None and document.attempts:
        waited = max(0, document.claimed_at_us - waiting_since(document))
        values: dict[str, object] = {"n": document.attempts, "waited": waited}
        key = "event_claimed"
        if whole and document.worker is not None:
            key, values["worker"] = "event_claimed_by", document.worker
        events.append(TimelineEvent(key, document.claimed_at_us, values))
    if document.state is State.RUNNING:
        events.append(TimelineEvent("event_running", None, {}, "running"))
    if document.cancel_requested and not document.ended:
        events.append(TimelineEvent("event_stopping", None, {}, "late"))
    if document.error is not None:
        events.append(TimelineEvent("event_failed", None, {"error": document.error}, "failed"))
    if document.ended_at_us is not None:
        ending = document.state.value
        events.append(TimelineEvent(f"event_{ending}", document.ended_at_us, {}, ending))
    return events


def _priority(reason: Reason, at: int) -> TimelineEvent:
    given = reason.parameters
    if reason.code is ReasonCode.PRIORITY_OF_PARENT:
        return TimelineEvent(
            "event_inherited", at, {"priority": given["priority"], "parent": given["parent"]}
        )
    return TimelineEvent(
        "event_level", at, {"priority": given["priority"], "count": given.get("count", 0)}
    )


def _overtaken(reason: Reason) -> TimelineEvent:
    """Return how many documents were served first, for operators with the largest customers."""
    served = reason.parameters
    largest, values = served.get("largest"), {"n": served["documents"]}
    if not isinstance(largest, tuple) or not largest:
        return TimelineEvent("event_overtaken", None, {**values})
    names = [f"{plain(name)} ({n})" for name, n in largest]
    if served["customers"] != len(names):
        names.append("…")
    return TimelineEvent("event_overtaken_by", None, {**values, "names": ", ".join(names)})


def _result(stored: Stored) -> str | None:
    if stored.document.state is not State.COMPLETED or stored.result is None:
        return None
    return _shown(json.loads(stored.result))


def _shown(value: object) -> str:
    """Return indented JSON, truncated."""
    text = json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
    return text if len(text) <= RESULT_CHARACTERS_MAX else text[:RESULT_CHARACTERS_MAX] + " …"


@router.get("/documents/{id}/content")
async def get_content(request: Request, visitor: Known, id: str) -> Response:
    return await operations.get_content(request, caller_of(visitor), id)


@router.get("/documents/{id}/result")
async def get_result_file(request: Request, visitor: Known, id: str) -> Response:
    return await operations.get_result_file(request, caller_of(visitor), id)


@router.post("/documents/{id}/cancel")
def cancel(request: Request, visitor: Changer, id: str) -> Response:
    operations.cancel_document(request, caller_of(visitor), id)
    return see_other(request, f"/documents/{id}", done="cancelled")


@router.post("/documents/{id}/retry")
def retry(
    request: Request,
    visitor: Changer,
    id: str,
    hours: Annotated[float | None, Form(gt=0, le=SECONDS_MAX / HOUR_S)] = None,
) -> Response:
    """Retry a dead document, or with `hours` until its new expiry an expired one."""
    expiry = None if hours is None else operations.ExpiryJson(expires_in_s=hours * HOUR_S)
    operations.retry_document(request, caller_of(visitor), id, expiry)
    return see_other(request, f"/documents/{id}", done="retried")
