"""The situation of a document, for stores that have all of it at hand; and, for every store, an
engine in which what the next claim would fold in can be folded in without changing anything."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from fairturn.explain.snapshot import (
    ARRIVALS_MAX,
    ATTEMPTS_MAX,
    NEIGHBOURS_MAX,
    Arrival,
    Attempt,
    Between,
    Lineup,
    Seen,
    Served,
    Service,
    Situation,
    Working,
    fronts_of,
    lines_of,
    waiting_since,
)
from fairturn.model import CustomerSettings, Document, Settings, State, level_of
from fairturn.priority import Count
from fairturn.scheduling.flows import Arrived, Event, Flow, Mode, Recorded, Standing
from fairturn.scheduling.turns import Turns
from fairturn.stores.transitions import Ending


class Copies:
    """A `Shelf` of what another engine has loaded, as copies: that one stays as it is."""

    def __init__(self, turns: Turns) -> None:
        self._standings = turns.standings

    def standing(self, customer: int) -> Standing:
        known = self._standings.get(customer)
        if known is None:
            return Standing(customer)
        flows = {level: replace(flow, entry=None) for level, flow in known.flows.items()}
        return replace(known, flows=flows, entry=None)

    def flows(self, customer: int) -> Iterable[Flow]:
        return ()  # where all is in memory, every customer is whole

    def flow(self, customer: int, level: int) -> Flow:
        return Flow(customer, level)

    def turns(self) -> Iterator[tuple[int, int, int, int]]:
        return iter(())

    def heads(self) -> Iterator[tuple[int, int, int]]:
        return iter(())

    def order_after(self, flow: Flow, order: int) -> int | None:
        raise AssertionError("nothing is picked from a copy")

    def cost(self, flow: Flow) -> int | None:
        raise AssertionError("nothing is picked from a copy")


class Kept(NamedTuple):
    """A document, as a store keeps it. `leased`: it runs, and its lease has not run out."""

    number: int
    customer: int
    priority: int
    level: int
    order: int | None
    state: State
    submitted_at: int
    due_at: int | None
    claimed_at: int | None
    attempts: int
    ended_at: int | None
    lease_until: int
    leased: bool
    lost: Ending | None  # what the end of its lease makes of it, if that ran out
    worker: str | None


class KeptCustomer(NamedTuple):
    """A customer, as a store keeps it."""

    number: int
    name: str
    settings: CustomerSettings
    count: Count | None  # type: ignore[assignment]  # the rule's word


class Foreseen(NamedTuple):
    """The queue as the next claim will find it, when it has folded in what happened."""

    standings: dict[int, Standing]
    number: int
    clocks: list[int]
    orders: dict[int, int]  # of each waiting document, by its number


def foresee(
    turns: Turns,
    documents: Iterable[Kept],
    recorded: Sequence[Recorded],
    now: int,
    next_order: int,
) -> Foreseen:
    """Fold what happened since the last claim into copies of what the engine has loaded."""
    documents = list(documents)
    orders = {d.number: d.order for d in documents if d.state is State.WAITING if d.order}
    expired: list[Event] = []
    for d in sorted(documents, key=lambda d: (d.lease_until, d.number)):
        if d.lost is not None:
            assert d.order is not None
            expired.append(d.lost.event)
            if d.lost.state is State.WAITING:
                orders[d.number] = d.order
    due: list[tuple[int, Arrived]] = []
    delayed = [(d.due_at, d) for d in documents if d.state is State.DELAYED and d.due_at]
    for due_at, d in sorted(delayed):
        if due_at <= now:
            order = next_order if d.order is None else d.order
            next_order += d.order is None
            orders[d.number] = order
            due.append((due_at, Arrived(d.customer, d.level, order, 1)))
    ahead = Turns(
        Copies(turns),
        mode=turns.mode,
        costs=turns.costs,
        patience_us=turns.patience_us,
        number=turns.number,
        tick=turns.tick,
        clocks=turns.clocks,
        weights=turns.weights,
    )
    ahead.fold(now, expired=expired, recorded=recorded, due=due)
    standings = {**turns.standings, **ahead.standings}
    return Foreseen(standings, ahead.number, ahead.clocks, orders)


def situation(
    *,
    document: Document,
    parent_count: int | None,
    number: int,
    now: int,
    settings: Settings,
    documents: Sequence[Kept],
    customers: Sequence[KeptCustomer],
    foreseen: Foreseen,
    workers: Iterable[Seen],
) -> Situation:
    """The situation of one of the documents."""
    kept = next(d for d in documents if d.number == number)
    customer = next(c for c in customers if c.number == kept.customer)
    states = Counter(d.state for d in documents if d.customer == customer.number)
    return Situation(
        at=now,
        settings=settings,
        document=document,
        parent_count=parent_count,
        customer=customer.number,
        customer_settings=customer.settings,
        count=customer.count,
        waiting=states[State.WAITING],
        running=states[State.RUNNING],
        delayed=states[State.DELAYED],
        leased=kept.state is State.RUNNING and kept.leased,
        lineup=_lineup(kept, documents, foreseen, settings, now),
        service=Service(
            running=_running(documents),
            workers=tuple(sorted(workers)),
            attempts=_attempts(documents),
            arrivals=_arrivals(documents, settings.mode),
        ),
        served=_served(kept, waiting_since(document), documents),
        names={c.number: c.name for c in customers},
    )


def _lineup(
    kept: Kept, documents: Sequence[Kept], foreseen: Foreseen, settings: Settings, now: int
) -> Lineup | None:
    order = foreseen.orders.get(kept.number)
    if order is None:
        return None
    level = kept.level
    before: Counter[int] = Counter()  # in its level, by customer
    for d in documents:
        if d.level == level and foreseen.orders.get(d.number, order) < order:
            before[d.customer] += 1
    standings = foreseen.standings.values()
    lines = [line for s in standings for line in lines_of(s, settings) if line.level <= level]
    fronts, stalled = fronts_of(standings, settings, now)
    if settings.mode is Mode.LEVELS:
        lines = [
            line
            if line.level < level or line.customer == kept.customer
            else line._replace(waiting=before[line.customer])
            for line in lines
        ]
    return Lineup(
        customer=kept.customer,
        level=level,
        rank=Between(before[kept.customer], before[kept.customer]),
        number=foreseen.number,
        clock=foreseen.clocks[level],
        lines=tuple(lines),
        crowds={},
        fronts=tuple(fronts),
        stalled=tuple(stalled),
        waiting=sum(f.waiting for s in standings if not s.paused for f in s.flows.values()),
    )


def _running(documents: Iterable[Kept]) -> tuple[Working, ...]:
    running = (
        Working(d.worker or "", d.claimed_at or 0, d.customer, d.leased)
        for d in documents
        if d.state is State.RUNNING
    )
    return tuple(sorted(running))


def _attempts(documents: Iterable[Kept]) -> tuple[Attempt, ...]:
    """The last attempt at each document that was claimed last, if it is over."""
    claimed = [(d.claimed_at, d) for d in documents if d.claimed_at is not None]
    over = [
        Attempt(d.customer, None if d.ended_at is None else max(0, d.ended_at - claimed_at))
        for claimed_at, d in sorted(claimed)
        if d.state not in (State.RUNNING, State.CANCELLED)
    ]
    return tuple(over[-ATTEMPTS_MAX:])


def _arrivals(documents: Iterable[Kept], mode: Mode) -> tuple[Arrival, ...]:
    newest = sorted(documents, key=lambda d: -d.number)[:ARRIVALS_MAX]
    return tuple(Arrival(d.submitted_at, d.customer, level_of(d.priority, mode)) for d in newest)


def _served(kept: Kept, since: int, documents: Iterable[Kept]) -> Served | None:
    if kept.claimed_at is None:
        return None
    served: Counter[int] = Counter()
    complete = True
    for d in documents:
        if abs(d.number - kept.number) > NEIGHBOURS_MAX:
            complete = False
        elif d.claimed_at is None or d.number == kept.number:
            continue
        elif since <= d.claimed_at < kept.claimed_at:
            served[d.customer] += 1
        elif d.attempts > 1 and d.submitted_at < kept.claimed_at <= d.claimed_at:
            complete = False  # it may have been claimed meanwhile too
    return Served(served, complete)
