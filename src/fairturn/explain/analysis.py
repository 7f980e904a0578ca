"""Why a document has its priority, what is before it and when it will start. Pure, on a snapshot.

An explanation is a value: reasons with stable codes and parameters. `sentences.py` makes text of
them. What is not meant for a customer is left out of it here, so that it cannot come out elsewhere.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import nsmallest

from fairturn.clock import SECOND_US
from fairturn.explain.reasons import Code, Reason, Value, reason
from fairturn.explain.snapshot import Situation, waiting_since
from fairturn.model import State
from fairturn.priority import Reset
from fairturn.scheduling.flows import Mode
from fairturn.scheduling.forecast import CONFIDENCE, Forecast, alive, forecast
from fairturn.scheduling.position import Position, position

LARGEST = 5  # customers who are named to an operator


class Audience(StrEnum):
    """Who reads an explanation."""

    CUSTOMER = "customer"  # is told of other customers only how many they are
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything that can be said about why a document is where it is.

    `position` and `forecast` are None for a document that does not wait, and where nobody can say.
    """

    id: str
    at: int
    state: State
    priority: int
    count: int
    position: Position | None
    forecast: Forecast | None
    reasons: tuple[Reason, ...]


def explain(situation: Situation, audience: Audience | str = Audience.OPERATOR) -> Explanation:
    """The explanation of a document."""
    audience = Audience(audience)
    found = _position(situation)
    starts = _forecast(situation, found)
    reasons = [
        *_priority(situation),
        *_obstacles(situation, found),
        *_place(situation, found),
        *_start(situation, found, starts),
        *_history(situation),
    ]
    document = situation.document
    explanation = Explanation(
        id=document.id,
        at=situation.at,
        state=document.state,
        priority=document.priority,
        count=document.count,
        position=found,
        forecast=starts,
        reasons=tuple(reasons),
    )
    return for_customer(explanation) if audience is Audience.CUSTOMER else explanation


def for_customer(explanation: Explanation) -> Explanation:
    """The same without the names of others: for readers who are told only how many they are."""
    found = explanation.position
    return replace(
        explanation,
        position=None if found is None else replace(found, turns={}),
        reasons=tuple(_for_customer(each) for each in explanation.reasons),
    )


_OF_POSITION = {
    Code.NEXT,
    Code.POSITION,
    Code.POSITION_BETWEEN,
    Code.BEFORE_BETTER_LEVELS,
    Code.BEFORE_OTHER_CUSTOMERS,
    Code.BEFORE_LONGEST_WAITING,
    Code.BEFORE_OWN,
    Code.BETWEEN_LIMITS,
    Code.BETWEEN_COSTS,
    Code.BETWEEN_MANY_TURNS,
    Code.BETWEEN_MANY_DOCUMENTS,
    Code.BETWEEN_UNFOLDED,
    Code.PATIENCE_OVER,
    Code.SERVED_MEANWHILE,
    Code.SERVED_AT_LEAST,
}


def without_position(explanation: Explanation) -> Explanation:
    """The same for readers who are not to know how many others there are."""
    reasons = tuple(each for each in explanation.reasons if each.code not in _OF_POSITION)
    return replace(explanation, position=None, reasons=reasons)


def _for_customer(full: Reason) -> Reason:
    """A reason without the names of others."""
    hidden: dict[str, Value] = {"largest": (), "worker": None}
    shown = {name: hidden.get(name, value) for name, value in full.parameters.items()}
    return Reason(full.code, shown)


# ── The priority ─────────────────────────────────────────────────────────────────────────────────


def _priority(situation: Situation) -> Iterator[Reason]:
    document = situation.document
    # A parent that is no longer kept is taken for the reason too: only its 21st is checked itself.
    if document.parent is not None and situation.parent_count in (None, document.count):
        yield reason(
            Code.PRIORITY_OF_PARENT,
            priority=document.priority,
            count=document.count,
            parent=document.parent,
        )
    elif document.count == 0:
        yield reason(Code.PRIORITY_FIRST, priority=document.priority)
    else:
        yield reason(
            Code.PRIORITY_COUNTED,
            priority=document.priority,
            count=document.count,
            document=1 - document.count,
        )
    rule, last = situation.settings.rule, situation.count
    shown = rule.shown(last, situation.at)
    if last is None or situation.at > rule.resets_at(last):
        yield reason(Code.COUNT_IS_RESET)
    else:
        resets_at = rule.resets_at(last)
        yield reason(
            Code.COUNT_RESETS,
            count=shown,
            resets_at=resets_at,
            resets_in_us=resets_at - situation.at,
            reset=Reset(rule.reset).value,
        )
    if document.state in (State.WAITING, State.DELAYED):
        if situation.settings.mode is Mode.EQUAL:
            yield reason(Code.MODE_EQUAL)
        elif situation.settings.mode is Mode.LEVELS:
            yield reason(Code.MODE_LEVELS)


# ── Why it waits ─────────────────────────────────────────────────────────────────────────────────


def _position(situation: Situation) -> Position | None:
    settings = situation.settings
    if situation.lineup is None:
        return None
    return position(situation.lineup, mode=settings.mode, costs=settings.costs)


def _forecast(situation: Situation, found: Position | None) -> Forecast | None:
    if found is None or situation.lineup is None or not found.reached:
        return None
    return forecast(
        situation.lineup,
        found,
        situation.service,
        mode=situation.settings.mode,
        patience_us=situation.settings.patience_us,
        at=situation.at,
    )


def _obstacles(situation: Situation, found: Position | None) -> Iterator[Reason]:
    """What keeps the document from being claimed, whatever its turn."""
    document, at = situation.document, situation.at
    due_at = document.due_at
    if document.state is State.DELAYED and due_at is not None and due_at > at:
        if document.attempts:
            yield reason(
                Code.RETRIED_LATER,
                due_at=due_at,
                due_in_us=due_at - at,
                attempts=document.attempts,
            )
        else:
            yield reason(Code.NOT_DUE, due_at=due_at, due_in_us=due_at - at)
    if document.ended:
        return
    if document.state is State.RUNNING:
        if situation.leased:
            return
        if situation.lineup is None:
            yield reason(Code.LEASE_RAN_OUT_LAST, attempts=document.attempts)
            return
        yield reason(Code.LEASE_RAN_OUT, attempts=document.attempts)
    settings = situation.customer_settings
    if settings.paused:
        yield reason(Code.CUSTOMER_PAUSED)
    # What has lost its lease counts no more: the next claim takes it back first.
    working = situation.service.running
    running = sum(work.alive and work.customer == situation.customer for work in working)
    if settings.limit is not None and running >= settings.limit:
        yield reason(Code.LIMIT_REACHED, limit=settings.limit)
    elif settings.limit is not None and found is not None and not found.reached:
        yield reason(Code.LIMIT_AHEAD, limit=settings.limit)
    if not alive(situation.service, at):
        seen_at = max((seen.seen_at for seen in situation.service.workers), default=None)
        ago = None if seen_at is None else max(0, at - seen_at)
        yield reason(Code.NO_WORKER, seen_at=seen_at, seen_us=ago)


def _place(situation: Situation, found: Position | None) -> Iterator[Reason]:
    if found is None:
        return
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
        yield reason(
            Code.BEFORE_OTHER_CUSTOMERS,
            documents=before.other_turns,
            customers=_customers_before(situation, found),
            largest=_largest(situation, found.turns),
        )
    if before.longest_waiting:
        yield reason(Code.BEFORE_LONGEST_WAITING, documents=before.longest_waiting)
    if before.own:
        yield reason(Code.BEFORE_OWN, documents=before.own)
    for cause in found.causes:
        yield reason(Code(f"between_{cause}"))
    if situation.customer_settings.weight != 1 and situation.settings.mode is not Mode.LEVELS:
        yield reason(Code.WEIGHT, weight=situation.customer_settings.weight)
    yield from _patience(situation)


def _customers_before(situation: Situation, found: Position) -> int:
    """How many other customers have turns before it. Of a crowd only the largest are in `turns`."""
    assert situation.lineup is not None
    crowd = situation.lineup.crowd
    return len(found.turns) + (0 if crowd is None else crowd.customers - len(crowd.largest))


def _patience(situation: Situation) -> Iterator[Reason]:
    lineup = situation.lineup
    assert lineup is not None
    for place, front in enumerate(lineup.fronts):
        if (front.customer, front.level) == (lineup.customer, lineup.level):
            if lineup.rank.most == 0:
                yield reason(
                    Code.PATIENCE_OVER,
                    since_at=front.since,
                    since_us=situation.at - front.since,
                    customers=place + (0 if lineup.crowd is None else lineup.crowd.fronts_ahead),
                )
            return


def _start(
    situation: Situation, found: Position | None, starts: Forecast | None
) -> Iterator[Reason]:
    if situation.lineup is None or found is None:
        return
    workers, at = alive(situation.service, situation.at), situation.at
    running = sum(working.alive for working in situation.service.running)
    if workers:
        yield reason(Code.WORKERS, workers=len(workers), running=running)
    if starts is None:
        if workers and found.reached:
            yield reason(Code.START_UNKNOWN)
        return
    earliest, latest = starts.earliest_at, starts.latest_at
    if latest is None:
        yield reason(
            Code.STARTS_AFTER,
            earliest_at=earliest,
            earliest_us=earliest - at,
            confidence=CONFIDENCE,
        )
    elif latest - at <= 2 * SECOND_US:
        yield reason(Code.STARTS_NOW)
    elif earliest - at < SECOND_US:
        yield reason(
            Code.STARTS_WITHIN, latest_at=latest, latest_us=latest - at, confidence=CONFIDENCE
        )
    else:
        yield reason(
            Code.STARTS_BETWEEN,
            earliest_at=earliest,
            earliest_us=earliest - at,
            latest_at=latest,
            latest_us=latest - at,
            confidence=CONFIDENCE,
        )


# ── What happened ────────────────────────────────────────────────────────────────────────────────


def _history(situation: Situation) -> Iterator[Reason]:
    document = situation.document
    yield from _last_event(situation)
    began = document.ended or (document.state is State.RUNNING and situation.leased)
    if document.attempts > began:
        yield reason(
            Code.ATTEMPTS,
            attempts=document.attempts,
            attempts_max=situation.settings.attempts_max,
        )
    if document.error is not None and not document.ended:
        yield reason(Code.LAST_ERROR, error=document.error)
    if document.claimed_at is None or not began:
        return
    waited = max(0, document.claimed_at - waiting_since(document))
    yield reason(Code.WAITED, waited_us=waited, attempts=document.attempts)
    served = situation.served
    if served is not None and served.by_customer:
        yield reason(
            Code.SERVED_MEANWHILE if served.complete else Code.SERVED_AT_LEAST,
            documents=sum(served.by_customer.values()),
            customers=len(served.by_customer),
            largest=_largest(situation, served.by_customer),
        )


def _last_event(situation: Situation) -> Iterator[Reason]:
    """Since when it runs, or how it ended."""
    document, at = situation.document, situation.at
    claimed_at, ended_at = document.claimed_at, document.ended_at
    if document.state is State.RUNNING and claimed_at is not None:
        if situation.leased:
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
    ago = max(0, at - ended_at)
    if document.state is State.COMPLETED:
        yield reason(
            Code.COMPLETED,
            claimed_at=claimed_at,
            ended_at=ended_at,
            ended_us=ago,
            took_us=max(0, ended_at - (ended_at if claimed_at is None else claimed_at)),
            worker=document.worker,
        )
    elif document.state is State.DEAD:
        yield reason(
            Code.DEAD,
            claimed_at=claimed_at,
            ended_at=ended_at,
            ended_us=ago,
            error=document.error,
            worker=document.worker,
        )
    elif document.state is State.CANCELLED:
        yield reason(Code.CANCELLED, ended_at=ended_at, ended_us=ago)


def _largest(situation: Situation, documents: Mapping[int, int]) -> tuple[tuple[str, int], ...]:
    """The customers with most documents, by name."""
    most = nsmallest(LARGEST, ((-n, customer) for customer, n in documents.items()))
    names = situation.names
    return tuple((names[customer], -n) for n, customer in most if customer in names)
