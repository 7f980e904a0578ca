"""Why a document has its priority, what is before it and when it will start. Pure, on a snapshot.

An explanation is a value: reasons with stable codes and parameters. `sentences.py` makes text of
them. What is not meant for a customer is left out of it here, so that it cannot come out elsewhere.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import nsmallest

from fairturn.clock import SECOND_US
from fairturn.flows import Mode
from fairturn.forecast import CONFIDENCE, Forecast, alive, forecast
from fairturn.model import State
from fairturn.position import Position, position
from fairturn.priority import Reset
from fairturn.situation import Situation

LARGEST = 5  # customers who are named to an operator


class Audience(StrEnum):
    """Who reads an explanation."""

    CUSTOMER = "customer"  # is told of other customers only how many they are
    OPERATOR = "operator"


class Code(StrEnum):
    """What a reason says. Codes are stable: programs may rely on them. `PARAMETERS` has the names
    of what comes with each; moments end in `_at`, durations in `_us`."""

    # The priority.
    PRIORITY_FIRST = "priority_first"
    PRIORITY_COUNTED = "priority_counted"
    PRIORITY_OF_PARENT = "priority_of_parent"
    COUNT_RESETS = "count_resets"
    COUNT_IS_RESET = "count_is_reset"
    MODE_LEVELS = "mode_levels"
    MODE_EQUAL = "mode_equal"
    # Why it cannot start now.
    NOT_DUE = "not_due"
    RETRIED_LATER = "retried_later"
    CUSTOMER_PAUSED = "customer_paused"
    LIMIT_REACHED = "limit_reached"
    LIMIT_AHEAD = "limit_ahead"
    NO_WORKER = "no_worker"
    LEASE_RAN_OUT = "lease_ran_out"
    # The position.
    NEXT = "next"
    POSITION = "position"
    POSITION_BETWEEN = "position_between"
    BEFORE_BETTER_LEVELS = "before_better_levels"
    BEFORE_OTHER_CUSTOMERS = "before_other_customers"
    BEFORE_LONGEST_WAITING = "before_longest_waiting"
    BEFORE_OWN = "before_own"
    BETWEEN_LIMITS = "between_limits"
    BETWEEN_COSTS = "between_costs"
    BETWEEN_MANY_TURNS = "between_many_turns"
    BETWEEN_MANY_DOCUMENTS = "between_many_documents"
    BETWEEN_UNFOLDED = "between_unfolded"
    WEIGHT = "weight"
    PATIENCE_OVER = "patience_over"
    # The start.
    STARTS_NOW = "starts_now"
    STARTS_BETWEEN = "starts_between"
    STARTS_WITHIN = "starts_within"
    STARTS_AFTER = "starts_after"
    START_UNKNOWN = "start_unknown"
    WORKERS = "workers"
    # What happened.
    RUNNING = "running"
    STOPPING = "stopping"
    COMPLETED = "completed"
    DEAD = "dead"
    CANCELLED = "cancelled"
    ATTEMPTS = "attempts"
    WAITED = "waited"
    SERVED_MEANWHILE = "served_meanwhile"
    SERVED_AT_LEAST = "served_at_least"


Value = int | float | str | None | tuple[tuple[str, int], ...]

PARAMETERS: Mapping[Code, tuple[str, ...]] = {
    Code.PRIORITY_FIRST: ("priority",),
    Code.PRIORITY_COUNTED: ("priority", "count", "document"),
    Code.PRIORITY_OF_PARENT: ("priority", "parent"),
    Code.COUNT_RESETS: ("count", "resets_at", "resets_in_us", "reset"),
    Code.COUNT_IS_RESET: (),
    Code.MODE_LEVELS: (),
    Code.MODE_EQUAL: (),
    Code.NOT_DUE: ("due_at", "due_in_us"),
    Code.RETRIED_LATER: ("due_at", "due_in_us", "attempts"),
    Code.CUSTOMER_PAUSED: (),
    Code.LIMIT_REACHED: ("limit",),
    Code.LIMIT_AHEAD: ("limit",),
    Code.NO_WORKER: ("seen_at", "seen_us"),
    Code.LEASE_RAN_OUT: ("attempts",),
    Code.NEXT: (),
    Code.POSITION: ("documents",),
    Code.POSITION_BETWEEN: ("least", "most"),
    Code.BEFORE_BETTER_LEVELS: ("documents",),
    Code.BEFORE_OTHER_CUSTOMERS: ("documents", "customers", "largest"),
    Code.BEFORE_LONGEST_WAITING: ("documents",),
    Code.BEFORE_OWN: ("documents",),
    Code.BETWEEN_LIMITS: (),
    Code.BETWEEN_COSTS: (),
    Code.BETWEEN_MANY_TURNS: (),
    Code.BETWEEN_MANY_DOCUMENTS: (),
    Code.BETWEEN_UNFOLDED: (),
    Code.WEIGHT: ("weight",),
    Code.PATIENCE_OVER: ("since_at", "since_us", "customers"),
    Code.STARTS_NOW: (),
    Code.STARTS_BETWEEN: ("earliest_at", "earliest_us", "latest_at", "latest_us", "confidence"),
    Code.STARTS_WITHIN: ("latest_at", "latest_us", "confidence"),
    Code.STARTS_AFTER: ("earliest_at", "earliest_us", "confidence"),
    Code.START_UNKNOWN: (),
    Code.WORKERS: ("workers", "running"),
    Code.RUNNING: ("claimed_at", "running_us", "worker"),
    Code.STOPPING: (),
    Code.COMPLETED: ("ended_at", "took_us"),
    Code.DEAD: ("ended_at", "error"),
    Code.CANCELLED: ("ended_at", "ended_us"),
    Code.ATTEMPTS: ("attempts", "attempts_max"),
    Code.WAITED: ("waited_us", "attempts"),
    Code.SERVED_MEANWHILE: ("documents", "customers", "largest"),
    Code.SERVED_AT_LEAST: ("documents", "customers", "largest"),
}


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is so, as a code and what belongs to it."""

    code: Code
    parameters: Mapping[str, Value]


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
    if audience is Audience.CUSTOMER:
        reasons = [_for_customer(reason) for reason in reasons]
        found = found and replace(found, turns={})
    document = situation.document
    return Explanation(
        id=document.id,
        at=situation.at,
        state=document.state,
        priority=document.priority,
        count=document.count,
        position=found,
        forecast=starts,
        reasons=tuple(reasons),
    )


def _for_customer(reason: Reason) -> Reason:
    """A reason without the names of others."""
    hidden: dict[str, Value] = {"largest": (), "worker": None}
    shown = {name: hidden.get(name, value) for name, value in reason.parameters.items()}
    return Reason(reason.code, shown)


def _reason(code: Code, **parameters: Value) -> Reason:
    assert tuple(parameters) == PARAMETERS[code], code
    return Reason(code, parameters)


# ── The priority ─────────────────────────────────────────────────────────────────────────────────


def _priority(situation: Situation) -> Iterator[Reason]:
    document = situation.document
    if document.parent is not None and situation.parent_count == document.count:
        yield _reason(Code.PRIORITY_OF_PARENT, priority=document.priority, parent=document.parent)
    elif document.count == 0:
        yield _reason(Code.PRIORITY_FIRST, priority=document.priority)
    else:
        yield _reason(
            Code.PRIORITY_COUNTED,
            priority=document.priority,
            count=document.count,
            document=1 - document.count,
        )
    rule, last = situation.settings.rule, situation.count
    shown = rule.shown(last, situation.at)
    if last is None or situation.at > rule.resets_at(last):
        yield _reason(Code.COUNT_IS_RESET)
    else:
        resets_at = rule.resets_at(last)
        yield _reason(
            Code.COUNT_RESETS,
            count=shown,
            resets_at=resets_at,
            resets_in_us=resets_at - situation.at,
            reset=Reset(rule.reset).value,
        )
    if document.state in (State.WAITING, State.DELAYED):
        if situation.settings.mode is Mode.EQUAL:
            yield _reason(Code.MODE_EQUAL)
        elif situation.settings.mode is Mode.LEVELS:
            yield _reason(Code.MODE_LEVELS)


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
            yield _reason(
                Code.RETRIED_LATER,
                due_at=due_at,
                due_in_us=due_at - at,
                attempts=document.attempts,
            )
        else:
            yield _reason(Code.NOT_DUE, due_at=due_at, due_in_us=due_at - at)
    if document.ended:
        return
    if document.state is State.RUNNING:
        if situation.lineup is not None:
            yield _reason(Code.LEASE_RAN_OUT, attempts=document.attempts)
        else:
            return
    settings = situation.customer_settings
    if settings.paused:
        yield _reason(Code.CUSTOMER_PAUSED)
    if settings.limit is not None and situation.running >= settings.limit:
        yield _reason(Code.LIMIT_REACHED, limit=settings.limit)
    elif settings.limit is not None and found is not None and not found.reached:
        yield _reason(Code.LIMIT_AHEAD, limit=settings.limit)
    if not alive(situation.service, at):
        seen_at = max((seen.seen_at for seen in situation.service.workers), default=None)
        ago = None if seen_at is None else max(0, at - seen_at)
        yield _reason(Code.NO_WORKER, seen_at=seen_at, seen_us=ago)


def _place(situation: Situation, found: Position | None) -> Iterator[Reason]:
    if found is None:
        return
    least, most = found.bounds
    if least != most:
        yield _reason(Code.POSITION_BETWEEN, least=least, most=most)
    elif most == 0:
        yield _reason(Code.NEXT)
    else:
        yield _reason(Code.POSITION, documents=most)
    before = found.before
    if before.better_levels:
        yield _reason(Code.BEFORE_BETTER_LEVELS, documents=before.better_levels)
    if before.other_turns:
        yield _reason(
            Code.BEFORE_OTHER_CUSTOMERS,
            documents=before.other_turns,
            customers=len(found.turns),
            largest=_largest(situation, found.turns),
        )
    if before.longest_waiting:
        yield _reason(Code.BEFORE_LONGEST_WAITING, documents=before.longest_waiting)
    if before.own:
        yield _reason(Code.BEFORE_OWN, documents=before.own)
    for cause in found.causes:
        yield _reason(Code(f"between_{cause}"))
    if situation.customer_settings.weight != 1 and situation.settings.mode is not Mode.LEVELS:
        yield _reason(Code.WEIGHT, weight=situation.customer_settings.weight)
    yield from _patience(situation)


def _patience(situation: Situation) -> Iterator[Reason]:
    lineup = situation.lineup
    assert lineup is not None
    for place, front in enumerate(lineup.fronts):
        if (front.customer, front.level) == (lineup.customer, lineup.level):
            if lineup.rank.most == 0:
                yield _reason(
                    Code.PATIENCE_OVER,
                    since_at=front.since,
                    since_us=situation.at - front.since,
                    customers=place,
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
        yield _reason(Code.WORKERS, workers=len(workers), running=running)
    if starts is None:
        if workers and found.reached:
            yield _reason(Code.START_UNKNOWN)
        return
    earliest, latest = starts.earliest_at, starts.latest_at
    if latest is None:
        yield _reason(
            Code.STARTS_AFTER,
            earliest_at=earliest,
            earliest_us=earliest - at,
            confidence=CONFIDENCE,
        )
    elif latest - at <= 2 * SECOND_US:
        yield _reason(Code.STARTS_NOW)
    elif earliest - at < SECOND_US:
        yield _reason(
            Code.STARTS_WITHIN, latest_at=latest, latest_us=latest - at, confidence=CONFIDENCE
        )
    else:
        yield _reason(
            Code.STARTS_BETWEEN,
            earliest_at=earliest,
            earliest_us=earliest - at,
            latest_at=latest,
            latest_us=latest - at,
            confidence=CONFIDENCE,
        )


# ── What happened ────────────────────────────────────────────────────────────────────────────────


def _history(situation: Situation) -> Iterator[Reason]:
    document, at = situation.document, situation.at
    claimed_at, ended_at = document.claimed_at, document.ended_at
    if document.state is State.RUNNING and claimed_at is not None:
        yield _reason(
            Code.RUNNING,
            claimed_at=claimed_at,
            running_us=max(0, at - claimed_at),
            worker=document.worker,
        )
        if document.cancel_requested:
            yield _reason(Code.STOPPING)
    elif document.state is State.COMPLETED and ended_at is not None:
        took = max(0, ended_at - (ended_at if claimed_at is None else claimed_at))
        yield _reason(Code.COMPLETED, ended_at=ended_at, took_us=took)
    elif document.state is State.DEAD:
        yield _reason(Code.DEAD, ended_at=ended_at, error=document.error)
    elif document.state is State.CANCELLED and ended_at is not None:
        yield _reason(Code.CANCELLED, ended_at=ended_at, ended_us=max(0, at - ended_at))
    if document.attempts > (document.state is State.RUNNING or document.ended):
        yield _reason(
            Code.ATTEMPTS,
            attempts=document.attempts,
            attempts_max=situation.settings.attempts_max,
        )
    if claimed_at is None or document.state in (State.WAITING, State.DELAYED):
        return
    waited = max(0, claimed_at - document.submitted_at)
    yield _reason(Code.WAITED, waited_us=waited, attempts=document.attempts)
    served = situation.served
    if served is not None and served.by_customer:
        yield _reason(
            Code.SERVED_MEANWHILE if served.complete else Code.SERVED_AT_LEAST,
            documents=sum(served.by_customer.values()),
            customers=len(served.by_customer),
            largest=_largest(situation, served.by_customer),
        )


def _largest(situation: Situation, documents: Mapping[int, int]) -> tuple[tuple[str, int], ...]:
    """The customers with most documents, by name."""
    most = nsmallest(LARGEST, ((-n, customer) for customer, n in documents.items()))
    names = situation.names
    return tuple((names[customer], -n) for n, customer in most if customer in names)
