"""Why a document has its priority, what is ahead of it and when it will start. Pure.

An explanation is a value: reasons with stable codes and parameters, which `sentences.py` turns into
text. Data that a customer must not see is removed here, so that no other module can reveal it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from heapq import nsmallest

from fairturn.clock import SECOND_US, to_datetime
from fairturn.explain.reasons import Code, Reason, Value, reason
from fairturn.explain.snapshot import DocumentSnapshot, QueueView, waiting_since
from fairturn.model import Document, State
from fairturn.priority import Reset
from fairturn.scheduling.flows import Mode
from fairturn.scheduling.forecast import CONFIDENCE, Forecast, alive, forecast
from fairturn.scheduling.outages import service_of_kind
from fairturn.scheduling.position import Position, position

LARGEST = 5  # the most customers that an explanation names


class Audience(StrEnum):
    """The reader of an explanation."""

    CUSTOMER = "customer"  # no names of other customers, workers or services, only numbers
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The priority, position, expected start and history of a document, with reasons.

    `position` and `forecast` are None if the document does not wait or neither can be computed.
    """

    id: str
    at_us: int
    state: State
    priority: int
    count: int
    position: Position | None
    forecast: Forecast | None
    reasons: tuple[Reason, ...]

    @property
    def at(self) -> datetime:
        return to_datetime(self.at_us)


def explain(
    snapshot: DocumentSnapshot, audience: Audience | str = Audience.OPERATOR
) -> Explanation:
    """Explain the state of a document to this audience."""
    audience = Audience(audience)
    document, view, settings = snapshot.document, snapshot.queue_view, snapshot.settings
    found, starts = None, None
    if view is not None:
        found = position(view, mode=settings.mode, costs=settings.costs)
    if view is not None and found is not None and found.reached and not snapshot.kind_is_held:
        starts = forecast(
            view,
            found,
            snapshot.service,
            mode=settings.mode,
            patience_us=settings.patience_us,
            at=snapshot.at,
            kind_limit=snapshot.kind_settings.limit,
            kind_running=snapshot.kind_running,
        )
    reasons = [*_priority(snapshot), *_obstacles(snapshot, found)]
    if view is not None and found is not None:
        reasons += [*_place(snapshot, view, found), *_start(snapshot, found, starts)]
    reasons += [*_expiry(snapshot), *_history(snapshot)]
    explanation = Explanation(
        id=document.id,
        at_us=snapshot.at,
        state=document.state,
        priority=document.priority,
        count=document.count,
        position=found,
        forecast=starts,
        reasons=tuple(reasons),
    )
    return for_customer(explanation) if audience is Audience.CUSTOMER else explanation


def for_customer(explanation: Explanation) -> Explanation:
    """Return the explanation without the names of other customers, workers and services."""
    found = explanation.position
    hidden: dict[str, Value] = {"largest": (), "worker": None, "service": None}
    reasons = (
        Reason(
            full.code, {name: hidden.get(name, value) for name, value in full.parameters.items()}
        )
        for full in explanation.reasons
    )
    return replace(
        explanation,
        position=None if found is None else replace(found, turns={}),
        reasons=tuple(reasons),
    )


_OF_POSITION = {Code.NEXT, Code.PATIENCE_OVER} | {
    code for code in Code if code.startswith(("position", "before_", "between_", "served_"))
}


def without_position(explanation: Explanation) -> Explanation:
    """Return the explanation without the position, which reveals the load of the queue."""
    reasons = tuple(each for each in explanation.reasons if each.code not in _OF_POSITION)
    return replace(explanation, position=None, reasons=reasons)


# ── The priority ─────────────────────────────────────────────────────────────────────────────────


def _priority(snapshot: DocumentSnapshot) -> Iterator[Reason]:
    document, mode = snapshot.document, snapshot.settings.mode
    given = {"priority": document.priority, "count": document.count}
    # A deleted parent is assumed to be the reason: only from its 21st child on is a child counted.
    if document.parent is not None and snapshot.parent_count in (None, document.count):
        yield reason(Code.PRIORITY_OF_PARENT, **given, parent=document.parent)
    elif document.count == 0:
        yield reason(Code.PRIORITY_FIRST, priority=document.priority)
    else:
        yield reason(Code.PRIORITY_COUNTED, **given, document=1 - document.count)
    rule, last = snapshot.settings.rule, snapshot.count
    resets_at = 0 if last is None else rule.resets_at(last)
    if last is None or snapshot.at > resets_at:
        yield reason(Code.COUNT_IS_RESET)
    else:
        yield reason(
            Code.COUNT_RESETS,
            count=rule.shown(last, snapshot.at),
            resets_at=resets_at,
            resets_in_us=resets_at - snapshot.at,
            reset=Reset(rule.reset).value,
        )
    if document.state in (State.WAITING, State.DELAYED) and mode is not Mode.FAIR:
        yield reason(Code(f"mode_{mode}"))


# ── Why it waits ─────────────────────────────────────────────────────────────────────────────────


def _obstacles(snapshot: DocumentSnapshot, found: Position | None) -> Iterator[Reason]:
    """Yield what prevents a claim of the document, regardless of its turn."""
    document, at = snapshot.document, snapshot.at
    attempts, expires_at = document.attempts, document.expiry
    if expires_at is not None and expires_at <= at:
        yield reason(Code.EXPIRY_PASSED, expires_at=expires_at, expired_us=at - expires_at)
        return
    yield from _delay(document, at)
    if document.ended:
        return
    if document.state is State.RUNNING:
        if snapshot.leased:
            return
        if snapshot.queue_view is None:
            yield reason(Code.LEASE_EXPIRED_LAST, attempts=attempts)
            return
        yield reason(Code.LEASE_EXPIRED, attempts=attempts)
    yield from _obstacles_of_kind(snapshot)
    settings = snapshot.customer_settings
    if settings.paused:
        yield reason(Code.CUSTOMER_PAUSED)
    # Documents with an expired lease do not count: the next claim requeues them first.
    working = snapshot.service.running
    running = sum(work.alive and work.customer == snapshot.customer for work in working)
    if settings.limit is not None and running >= settings.limit:
        yield reason(Code.LIMIT_REACHED, limit=settings.limit)
    elif settings.limit is not None and found is not None and not found.reached:
        yield reason(Code.LIMIT_AHEAD, limit=settings.limit)
    if alive(snapshot.service, at):
        return
    if snapshot.service.other_workers:
        yield reason(Code.KIND_UNSERVED, kind=document.kind)
    else:
        seen_at = max((seen.seen_at for seen in snapshot.service.workers), default=None)
        ago = None if seen_at is None else max(0, at - seen_at)
        yield reason(Code.NO_WORKER, seen_at=seen_at, seen_us=ago)


def _delay(document: Document, at: int) -> Iterator[Reason]:
    """Yield why a document is delayed: by its submitter, its handler, an outage or a failure."""
    due_at = document.due_at_us
    if document.state is not State.DELAYED or due_at is None or due_at <= at:
        return
    due = {"due_at": due_at, "due_in_us": due_at - at}
    if document.claimed_at_us is None:
        yield reason(Code.NOT_DUE, **due)
    elif document.error is None:
        yield reason(Code.SNOOZED, **due)
    elif document.attempts:
        yield reason(Code.RETRIED_LATER, **due, attempts=document.attempts)
    else:
        yield reason(Code.RETURNED, **due)


def _obstacles_of_kind(snapshot: DocumentSnapshot) -> Iterator[Reason]:
    settings, kind, at = snapshot.kind_settings, snapshot.document.kind, snapshot.at
    if settings.paused:
        yield reason(Code.KIND_PAUSED, kind=kind)
    elif settings.limit is not None and snapshot.kind_running >= settings.limit:
        yield reason(Code.KIND_LIMIT_REACHED, kind=kind, limit=settings.limit)
    for outage in snapshot.outages:
        name = None if outage.service == service_of_kind(kind) else outage.service
        if outage.resumed_at_us is not None:
            yield reason(Code.OUTAGE_OVER, service=name, kind=kind)
            continue
        yield reason(
            Code.OUTAGE,
            service=name,
            kind=kind,
            began_at=outage.began_at_us,
            began_us=max(0, at - outage.began_at_us),
            probe_at=outage.probe_at_us,
            probe_in_us=max(0, outage.probe_at_us - at),
        )


def _expiry(snapshot: DocumentSnapshot) -> Iterator[Reason]:
    expires_at, at = snapshot.document.expiry, snapshot.at
    if expires_at is not None and expires_at > at:
        yield reason(Code.EXPIRES, expires_at=expires_at, expires_in_us=expires_at - at)


def _place(snapshot: DocumentSnapshot, view: QueueView, found: Position) -> Iterator[Reason]:
    least, most = found.bounds
    if least != most:
        yield reason(Code.POSITION_BETWEEN, least=least, most=most)
    elif most == 0:
        yield reason(Code.NEXT)
    else:
        yield reason(Code.POSITION, documents=most)
    before = found.before
    if before.better_levels:
        yield reason(Code.BEFORE_BETTER_LEVELS, documents=before.better_levels)
    if before.other_turns:
        # `turns` has only the largest of the customers in `other_lines`.
        unnamed = view.other_lines.customers - len(view.other_lines.largest)
        yield reason(
            Code.BEFORE_OTHER_CUSTOMERS,
            documents=before.other_turns,
            customers=len(found.turns) + unnamed,
            largest=_largest(snapshot, found.turns),
        )
    if before.longest_waiting:
        yield reason(Code.BEFORE_LONGEST_WAITING, documents=before.longest_waiting)
    if before.own:
        yield reason(Code.BEFORE_OWN, documents=before.own)
    for cause in found.causes:
        yield reason(Code(f"between_{cause}"))
    if snapshot.customer_settings.weight != 1 and snapshot.settings.mode is not Mode.LEVELS:
        yield reason(Code.WEIGHT, weight=snapshot.customer_settings.weight)
    own = (view.customer, view.level)
    for place, head in enumerate(view.overdue):
        if (head.customer, head.level) == own and view.rank.most == 0:
            yield reason(
                Code.PATIENCE_OVER,
                since_at=head.since,
                since_us=snapshot.at - head.since,
                customers=place + view.other_lines.overdue_ahead,
            )


def _start(
    snapshot: DocumentSnapshot, found: Position, starts: Forecast | None
) -> Iterator[Reason]:
    workers, at = alive(snapshot.service, snapshot.at), snapshot.at
    running = sum(working.alive for working in snapshot.service.running)
    if workers:
        yield reason(Code.WORKERS, workers=len(workers), running=running)
    if starts is None:
        if workers and found.reached and not snapshot.kind_is_held:
            yield reason(Code.START_UNKNOWN)
        return
    earliest, latest = starts.earliest_at_us, starts.latest_at_us
    early = {"earliest_at": earliest, "earliest_us": earliest - at}
    if latest is None:
        yield reason(Code.STARTS_AFTER, **early, confidence=CONFIDENCE)
        return
    late = {"latest_at": latest, "latest_us": latest - at}
    if latest - at <= 2 * SECOND_US:
        yield reason(Code.STARTS_NOW)
    elif earliest - at < SECOND_US:
        yield reason(Code.STARTS_WITHIN, **late, confidence=CONFIDENCE)
    else:
        yield reason(Code.STARTS_BETWEEN, **early, **late, confidence=CONFIDENCE)


# ── What happened ────────────────────────────────────────────────────────────────────────────────


def _history(snapshot: DocumentSnapshot) -> Iterator[Reason]:
    document = snapshot.document
    if document.step:
        yield reason(Code.STEP, step=document.step, kind=document.kind)
    yield from _last_event(snapshot)
    began = document.ended or (document.state is State.RUNNING and snapshot.leased)
    if document.attempts > began:
        yield reason(
            Code.ATTEMPTS,
            attempts=document.attempts,
            attempts_max=snapshot.kind_settings.attempts_max or snapshot.settings.attempts_max,
        )
    if document.error is not None and not document.ended:
        yield reason(Code.LAST_ERROR, error=document.error)
    if document.claimed_at_us is None or not began:
        return
    waited = max(0, document.claimed_at_us - waiting_since(document))
    counted = {"attempts": document.attempts, "step": document.step}
    yield reason(Code.WAITED, waited_us=waited, **counted)
    served = snapshot.served
    if served is not None and served.by_customer:
        yield reason(
            Code.SERVED_MEANWHILE if served.complete else Code.SERVED_AT_LEAST,
            documents=sum(served.by_customer.values()),
            customers=len(served.by_customer),
            largest=_largest(snapshot, served.by_customer),
        )


def _last_event(snapshot: DocumentSnapshot) -> Iterator[Reason]:
    """Yield since when the document has been running, or how it ended."""
    document, at = snapshot.document, snapshot.at
    claimed_at, ended_at = document.claimed_at_us, document.ended_at_us
    if document.state is State.RUNNING and claimed_at is not None:
        if snapshot.leased:
            yield reason(
                Code.RUNNING,
                claimed_at=claimed_at,
                running_us=max(0, at - claimed_at),
                worker=document.worker,
            )
        if document.cancel_requested:
            yield reason(Code.STOPPING)
    if ended_at is None:
        return
    ended: dict[str, Value] = {"ended_at": ended_at, "ended_us": max(0, at - ended_at)}
    if document.state is State.COMPLETED:
        took_us = 0 if claimed_at is None else max(0, ended_at - claimed_at)
        how: dict[str, Value] = {"took_us": took_us, "worker": document.worker}
        yield reason(Code.COMPLETED, claimed_at=claimed_at, **ended, **how)
    elif document.state is State.DEAD:
        how = {"error": document.error, "worker": document.worker}
        yield reason(Code.DEAD, claimed_at=claimed_at, **ended, **how)
    elif document.state is State.EXPIRED:
        yield reason(Code.EXPIRED, expires_at=document.expires_at_us, **ended)
    else:
        yield reason(Code(document.state), **ended)


def _largest(
    snapshot: DocumentSnapshot, documents: Mapping[int, int]
) -> tuple[tuple[str, int], ...]:
    """Return the names of the customers with the most documents, and the numbers."""
    most = nsmallest(LARGEST, ((-n, customer) for customer, n in documents.items()))
    names = snapshot.names
    return tuple((names[customer], -n) for n, customer in most if customer in names)
