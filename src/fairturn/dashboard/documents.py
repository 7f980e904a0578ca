"""A document: what happened to it, why it is where it is, and what can be done."""

import json
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from fairturn.dashboard.avatars import plain
from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.visitors import Changer, Known, Visitor
from fairturn.explain.analysis import Audience, Explanation, without_position
from fairturn.explain.reasons import Code as Said
from fairturn.explain.reasons import Reason
from fairturn.explain.sentences import tell
from fairturn.explain.snapshot import waiting_since
from fairturn.model import Document, State, Stored
from fairturn.service import documents as operations
from fairturn.service.callers import Caller, stored_for

RESULT_CHARACTERS_MAX = 20_000
_PRIORITY = (Said.PRIORITY_FIRST, Said.PRIORITY_COUNTED, Said.PRIORITY_OF_PARENT)
_OVERTAKEN = (Said.SERVED_MEANWHILE, Said.SERVED_AT_LEAST)
_ENDINGS = {State.COMPLETED: "completed", State.DEAD: "dead", State.CANCELLED: "cancelled"}

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class Event(NamedTuple):
    """One point of the timeline: a text by its key with values, and when."""

    key: str
    at: int | None
    values: dict[str, object]
    kind: str = ""


class Place(NamedTuple):
    """Where a waiting document stands; the names of the fields are those of `split.html`."""

    position: int
    most: int
    better: int
    turns: int
    longest: int
    own: int
    starts_at: int | None
    latest_at: int | None


def caller_of(visitor: Visitor) -> Caller:
    """Who asks; a page that takes a key has one."""
    assert visitor.caller is not None
    return visitor.caller


@router.get("/documents/{id}")
def show_document(request: Request, visitor: Known, id: str, done: str | None = None) -> Response:
    """One document."""
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
        sentences=tell(explained, visitor.tongue.told_in),
        place=place_of(explained),
        result=_result(stored),
        result_file=stored.result_content,
        metadata=_shown(document.metadata) if document.metadata else None,
        done=done if done in ("cancelled", "retried") else None,
    )


def explained_to(visitor: Visitor, id: str) -> Explanation:
    """The explanation that the visitor may see."""
    audience = Audience.OPERATOR if visitor.oversees else Audience.CUSTOMER
    explained = visitor.service.queue.explain(id, audience)
    if not visitor.oversees and not visitor.service.plan.show_positions:
        return without_position(explained)
    return explained


def place_of(explained: Explanation) -> Place | None:
    """The position with its split; None for what does not wait, and where nobody can say."""
    position, starts = explained.position, explained.forecast
    if position is None:
        return None
    before = position.before
    return Place(
        position=position.bounds.least + 1,
        most=position.bounds.most + 1,
        better=before.better_levels,
        turns=before.other_turns,
        longest=before.longest_waiting,
        own=before.own,
        starts_at=None if starts is None else starts.earliest_at,
        latest_at=None if starts is None else starts.latest_at,
    )


def timeline(document: Document, explained: Explanation, *, whole: bool) -> list[Event]:
    """What happened, in the order in which it did."""
    events = [Event("event_submitted", document.submitted_at, {})]
    events += (
        _priority(r, document.submitted_at) for r in explained.reasons if r.code in _PRIORITY
    )
    if document.due_at is not None and document.attempts == 0:
        events.append(Event("event_due", document.due_at, {}))
    events += (_overtaken(r) for r in explained.reasons if r.code in _OVERTAKEN)
    if document.claimed_at is not None:
        waited = max(0, document.claimed_at - waiting_since(document))
        values: dict[str, object] = {"n": document.attempts, "waited": waited}
        if whole and document.worker is not None:
            events.append(
                Event(
                    "event_claimed_by", document.claimed_at, {**values, "worker": document.worker}
                )
            )
        else:
            events.append(Event("event_claimed", document.claimed_at, values))
    if document.state is State.RUNNING:
        events.append(Event("event_running", None, {}, "running"))
    if document.cancel_requested and not document.ended:
        events.append(Event("event_stopping", None, {}, "late"))
    if document.error is not None:
        events.append(Event("event_failed", None, {"error": document.error}, "failed"))
    if document.ended_at is not None:
        ending = _ENDINGS[document.state]
        events.append(Event(f"event_{ending}", document.ended_at, {}, ending))
    return events


def _priority(reason: Reason, at: int) -> Event:
    """The priority, and where it is from: the count that the document found, or its parent."""
    given = reason.parameters
    if reason.code is Said.PRIORITY_OF_PARENT:
        return Event(
            "event_inherited", at, {"priority": given["priority"], "parent": given["parent"]}
        )
    return Event("event_level", at, {"priority": given["priority"], "count": given.get("count", 0)})


def _overtaken(reason: Reason) -> Event:
    """By how many, and for those who may know it, of whom most of them are."""
    served = reason.parameters
    largest, values = served.get("largest"), {"n": served["documents"]}
    if not isinstance(largest, tuple) or not largest:
        return Event("event_overtaken", None, {**values})
    names = [f"{plain(name)} ({n})" for name, n in largest]
    if served["customers"] != len(names):
        names.append("…")
    return Event("event_overtaken_by", None, {**values, "names": ", ".join(names)})


def _result(stored: Stored) -> str | None:
    if stored.document.state is not State.COMPLETED or stored.result is None:
        return None
    return _shown(json.loads(stored.result))


def _shown(value: object) -> str:
    """JSON for people, up to a bound."""
    text = json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
    return text if len(text) <= RESULT_CHARACTERS_MAX else text[:RESULT_CHARACTERS_MAX] + " …"


@router.get("/documents/{id}/content")
async def get_content(request: Request, visitor: Known, id: str) -> Response:
    """Download what was submitted."""
    return await operations.get_content(request, caller_of(visitor), id)


@router.get("/documents/{id}/result")
async def get_result_file(request: Request, visitor: Known, id: str) -> Response:
    """Download the file that the handler gave back."""
    return await operations.get_result_file(request, caller_of(visitor), id)


@router.post("/documents/{id}/cancel")
def cancel(request: Request, visitor: Changer, id: str) -> Response:
    """Cancel it."""
    operations.cancel_document(request, caller_of(visitor), id)
    return see_other(request, f"/documents/{id}", done="cancelled")


@router.post("/documents/{id}/retry")
def retry(request: Request, visitor: Changer, id: str) -> Response:
    """Try it again."""
    operations.retry_document(request, caller_of(visitor), id)
    return see_other(request, f"/documents/{id}", done="retried")
