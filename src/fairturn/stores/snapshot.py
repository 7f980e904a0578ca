"""The situation of a document, read from one snapshot of a database. Nothing is written."""

from collections.abc import Collection, Iterable
from typing import Protocol

from fairturn.explain.snapshot import (
    ARRIVALS_MAX,
    ATTEMPTS_MAX,
    NEIGHBOURS_MAX,
    WORKERS_MAX,
    Arrival,
    Attempt,
    Seen,
    Served,
    Service,
    Situation,
    Working,
    waiting_since,
)
from fairturn.model import CustomerSettings, Document, State, level_of
from fairturn.priority import LEVELS, Count
from fairturn.scheduling.flows import WEIGHT_ONE
from fairturn.stores.positions import Ahead, FlowKey, Place, Sight, lineup, look_ahead
from fairturn.stores.values import Row

# Of each level, and of each flow: those that were served last.
FLOWS_SAMPLED, DOCUMENTS_SAMPLED = 16, 8


class WideSight(Sight, Protocol):
    """A snapshot, with what stands around a document."""

    def document(self, number: int) -> Row:
        """customer, level, order_number, and the count of its parent."""
        ...

    def customer(self, number: int) -> Row:
        """count, count_updated_at, delayed, weight, running_max, paused."""
        ...

    def names_of(self, customers: Collection[int]) -> Iterable[tuple[int, str]]: ...

    def workers(self, most: int) -> list[Row]:
        """The columns of `Seen`."""
        ...

    def arrivals(self, most: int) -> list[Row]:
        """submitted_at, customer and priority of the newest."""
        ...

    # Attempts that are over: claimed_at, number, customer, and how long it took.
    def last_submitted(self, most: int) -> list[Row]: ...
    def last_of_flow(self, flow: FlowKey) -> list[Row]: ...
    def last_of_level(self, level: int) -> list[Row]: ...

    def served(self, numbers: tuple[int, int], since: int, until: int) -> dict[int, int]:
        """How many documents with these numbers each customer had claimed between two moments."""
        ...

    def may_be_more(self, numbers: tuple[int, int], number: int, claimed_at: int) -> bool:
        """Whether others further away, or near ones that were claimed again later, may have been
        served before that moment: of these only that is known."""
        ...


def situation(sight: WideSight, document: Document, number: int) -> Situation:
    """The situation of a document."""
    customer, level, order, parent_count = sight.document(number)
    count, updated_at, delayed, weight, limit, paused = sight.customer(customer)
    ahead = look_ahead(sight)
    place = ahead.joining.get(number)
    if document.state is State.WAITING:
        place = Place(customer, level, order)
    line = None if place is None else lineup(sight, ahead, place)
    served = _served(sight, document, number)
    names = sight.shelf.names  # of those in the lineup
    if served is not None:
        names.update(sight.names_of(served.by_customer))
    return Situation(
        at=sight.now,
        settings=sight.settings,
        document=document,
        parent_count=parent_count,
        customer=customer,
        customer_settings=CustomerSettings(
            weight=weight / WEIGHT_ONE, limit=limit, paused=bool(paused)
        ),
        count=None if count is None else Count(count, updated_at),
        waiting=sum(sight.waiting_of([customer]).values()),
        running=sum(row[2] == customer for row in ahead.running),
        delayed=delayed,
        leased=document.state is State.RUNNING and number not in ahead.expired,
        lineup=line,
        service=_service(sight, ahead, (customer, level)),
        served=served,
        names=names,
    )


def _service(sight: WideSight, ahead: Ahead, flow: FlowKey) -> Service:
    """How the queue is served. Of attempts that are over there is no index by time: some are
    looked up where the last ones are."""
    over = sight.last_submitted(ARRIVALS_MAX)
    over += sight.last_of_flow(flow)
    for level in range(1, LEVELS + 1):
        over += sight.last_of_level(level)
    latest = sorted(set(over), key=lambda row: row[:2])[-ATTEMPTS_MAX:]
    running = (
        Working(worker, claimed_at, customer, number not in ahead.expired)
        for _, number, customer, _, _, _, _, worker, claimed_at in ahead.running
    )
    return Service(
        running=tuple(sorted(running)),
        workers=tuple(map(Seen._make, sight.workers(WORKERS_MAX))),
        attempts=tuple(
            Attempt(customer, None if duration is None else max(0, duration))
            for _, _, customer, duration in latest
        ),
        arrivals=tuple(
            Arrival(at, customer, level_of(priority, sight.settings.mode))
            for at, customer, priority in sight.arrivals(ARRIVALS_MAX)
        ),
    )


def _served(sight: WideSight, document: Document, number: int) -> Served | None:
    """Who was served while the document waited, among those submitted shortly before or after."""
    if document.claimed_at is None:
        return None
    near = (number - NEIGHBOURS_MAX, number + NEIGHBOURS_MAX)
    served = sight.served(near, waiting_since(document), document.claimed_at)
    return Served(served, not sight.may_be_more(near, number, document.claimed_at))
