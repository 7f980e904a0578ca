"""The queue position of a waiting document, read from one snapshot of a database.

An engine of `turns.py` folds the events that the next claim would fold, and is discarded. The
time does not depend on the number of waiting documents: flows are read instead, and documents are
counted only up to `COUNTED_MAX`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from operator import itemgetter
from typing import NamedTuple, Protocol

from fairturn.explain.snapshot import (
    NO_OTHER_LINES,
    CountRange,
    LineSummary,
    OverdueHead,
    QueueView,
    WaitingLine,
    charge_of,
    levels_by_line,
    lines_of,
    overdue_heads,
)
from fairturn.model import Settings, State
from fairturn.scheduling.flows import (
    WEIGHT_ONE,
    ArrivalEvent,
    CustomerState,
    Event,
    EventBatch,
    Mode,
    SettingsEvent,
)
from fairturn.scheduling.turns import Turns
from fairturn.stores.transitions import Attempt, end_of_lease, has_ended
from fairturn.stores.values import Row, with_counts

# Documents that one count reads: a million take about 100 ms.
COUNTED_MAX = 1_000_000
# Lines, and overdue heads, that are read one by one. If there are more, the database sums them in
# one scan of the flows (`LineSummary`), and the position is a range.
LINES_MAX = 10_000
LARGEST = 5  # customers that a `LineSummary` lists
_LINE, _NAME = itemgetter(slice(7)), itemgetter(3, 7)

FlowKey = tuple[int, int]  # customer, level


class Place(NamedTuple):
    """The flow and the order of a waiting document."""

    customer: int
    level: int
    order: int


class NamedFlows(Protocol):
    """A `FlowSource` that collects the names of the customers it has read."""

    names: dict[int, str]

    def customer_state(self, customer: int) -> CustomerState: ...


class QueueReader(Protocol):
    """Queries on one snapshot. It has more than 20 methods because each is one SQL statement."""

    settings: Settings
    now: int
    turns: Turns  # as of the last claim
    leases_end_at: int | None  # leases up to this time have expired; None: all, by a reboot
    following: int  # the next order to be assigned

    @property
    def source(self) -> NamedFlows:
        """The `FlowSource` of `turns`."""
        ...

    @property
    def waiting(self) -> Sequence[int]:
        """The numbers of waiting documents of priorities 1 to 9."""
        ...

    def running(self) -> list[Row]:
        """Return lease_until, number, customer, level, order_number, attempts, cancel_requested,
        worker and claimed_at of running documents."""
        ...

    def due(self) -> list[Row]:
        """Return number, customer, level, order_number and due_at of due documents, in order."""
        ...

    def events(self) -> list[EventBatch] | None:
        """Return the events since the last claim; None if they are too many."""
        ...

    def expect(self, customers: Collection[int]) -> None:
        """Prefetch the customers that the engine will read."""
        ...

    def held(self) -> list[int]:
        """Return the customers that have a limit or are paused."""
        ...

    def charged(self) -> Iterable[tuple[int, int, Sequence[int]]]:
        """Return customer, weight and recent costs of customers that differ from the default."""
        ...

    def overdue(self, before: int, most: int) -> list[Row]:
        """Return the columns of `OverdueHead`, for up to `most` flows that have had their
        customer's head since earlier than `before`."""
        ...

    def lines(self, charge: int, levels: Collection[int], most: int) -> list[Row]:
        """Return the columns of `WaitingLine`, with this charge, and the customer's name, for up to
        `most` flows of these levels."""
        ...

    def other_lines(self, level: int, place: int, tick: int, without: Collection[int]) -> Row:
        """Return, for all flows of a level except those of the customers in `without`: the number
        of flows, of their documents, of documents with a turn before (place, tick), and of flows
        with such documents. The charge of a turn follows from the customer's weight."""
        ...

    def largest(
        self, level: int, place: int, tick: int, without: Collection[int], most: int
    ) -> list[Row]:
        """Return customer, number of documents with a turn before (place, tick), and name, for the
        `most` customers with the highest numbers."""
        ...

    def count_overdue(
        self, before: int, own: tuple[int, int], without: Collection[int]
    ) -> tuple[int, int]:
        """Return two counts: the flows that `overdue` would return, excluding customers in
        `without`; and how many of those have a lower (head_since, head_order) than `own`."""
        ...

    def lower(self, level: int, order: int, customers: Collection[int]) -> list[Row]:
        """Return the columns of `lines` for the flows of a level with waiting documents, and those
        of `customers`. `waiting` counts only documents of a lower order."""
        ...

    def waiting_of(self, customers: Collection[int]) -> dict[int, int]:
        """Return the number of waiting documents of these customers, by level."""
        ...

    def is_paused(self, customer: int) -> bool: ...

    def claimed_to(self, flow: FlowKey) -> int | None:
        """Return the order up to which only returned documents wait; None: only those wait."""
        ...

    def waiting_in(self, flow: FlowKey) -> int: ...

    def returned(self, flow: FlowKey, before: int | None) -> int:
        """Return the number of returned documents of a flow with orders below `before`."""
        ...

    def between(self, flow: FlowKey, after: int, before: int, most: int) -> int:
        """Return the number of documents between two orders, not returned ones, up to `most`."""
        ...

    def not_before(self, flow: FlowKey, order: int, most: int) -> int:
        """Return the number of documents from an order on, not returned ones, up to `most`."""
        ...


class Ahead(NamedTuple):
    """The queue as the next claim will see it, with all events folded."""

    joining: dict[int, Place]  # documents that begin to wait in that claim, by number
    running: list[Row]
    expired: set[int]  # the numbers of running documents whose leases have expired
    folded: bool  # False: there are too many events


def look_ahead(reader: QueueReader) -> Ahead:
    """Fold the events since the last claim in `reader.turns`, which is not saved."""
    ahead = Ahead({}, sorted(reader.running()), set(), folded=True)
    expired = _expired(reader, ahead)
    due = _due(reader, ahead)
    batches = reader.events()
    if batches is None:
        return ahead._replace(folded=False)
    limited = {e.customer for _, es in batches for e in es if type(e) is SettingsEvent and e.limit}
    leased = [row for row in ahead.running if row[1] not in ahead.expired]
    counts = {c: dict(Counter(row[3] for row in leased if row[2] == c)) for c in limited}
    changed = {event.customer for _, events in batches for event in events}
    changed |= {event.customer for event in expired} | {event.customer for _, event in due}
    reader.expect(changed)
    batches = with_counts(batches, counts)
    reader.turns.fold(reader.now, expired=expired, events=batches, due=due)
    return ahead


def _expired(reader: QueueReader, ahead: Ahead) -> list[Event]:
    """Return the events of expired leases, oldest first; after a reboot, of all leases."""
    events: list[Event] = []
    for until, number, *rest in ahead.running:
        if not has_ended(until, reader.leases_end_at):
            continue
        ahead.expired.add(number)
        attempt = Attempt(*rest[:5])
        ending = end_of_lease(attempt, reader.settings)
        events.append(ending.event)
        if ending.state is State.WAITING:
            ahead.joining[number] = Place(attempt.customer, attempt.band, attempt.order)
    return events


def _due(reader: QueueReader, ahead: Ahead) -> list[tuple[int, ArrivalEvent]]:
    """Return the arrivals of due documents. A document without an order gets the next one."""
    due: list[tuple[int, ArrivalEvent]] = []
    following = reader.following
    for number, customer, level, given, due_at in reader.due():
        order = following if given is None else given
        following += given is None
        ahead.joining[number] = Place(customer, level, order)
        due.append((due_at, ArrivalEvent(customer, level, order, 1)))
    return due


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────


def queue_view(reader: QueueReader, ahead: Ahead, place: Place) -> QueueView:
    """Return what decides when the document at this place has its turn."""
    rank = _rank(reader, ahead, place)
    if not ahead.folded:
        return _unfolded(reader, ahead, place, rank)
    settings, turns = reader.settings, reader.turns
    individual = _individual(reader, place)
    overdue, stalled = overdue_heads(individual.values(), settings, reader.now)
    lines = [line for s in individual.values() for line in lines_of(s, settings)]
    lines = [line for line in lines if line.level <= place.level]
    levels_read: Set[int] = {place.level}
    uncounted, other_lines = 0, NO_OTHER_LINES
    if settings.mode is Mode.LEVELS:
        uncounted = _add_lower(reader, ahead, individual, lines, place)
    else:
        read = _read_lines(reader, individual, place, overdue, lines)
        if read is None:
            other_lines = _sum_lines(
                reader, individual, place, overdue=overdue, lines=lines, rank=rank
            )
        else:
            levels_read, overdue, lines = read
    better = [level for level in range(1, place.level) if level not in levels_read]
    return QueueView(
        customer=place.customer,
        level=place.level,
        rank=rank,
        number=turns.number,
        clock=turns.bands[place.level].clock,
        lines=tuple(lines),
        others_by_level=_count_others(reader, individual, better),
        overdue=tuple(overdue),
        stalled=tuple(stalled),
        waiting=_waiting(reader, ahead, individual),
        uncounted=uncounted,
        other_lines=other_lines,
    )


def _read_lines(
    reader: QueueReader,
    individual: dict[int, CustomerState],
    place: Place,
    overdue: list[OverdueHead],
    lines: list[WaitingLine],
) -> tuple[Set[int], list[OverdueHead], list[WaitingLine]] | None:
    """Return the levels whose lines are read one by one, all overdue heads, and the lines of these
    levels; None if there are more than `LINES_MAX`. `overdue` and `lines` have those of the
    individual customers."""
    rows = reader.overdue(reader.now - reader.settings.patience_us, LINES_MAX + 1)
    if len(rows) > LINES_MAX:
        return None
    overdue = overdue + [
        head for head in map(OverdueHead._make, rows) if head.customer not in individual
    ]
    levels = levels_by_line(overdue, lines, place.customer, place.level)
    rows = reader.lines(charge_of(reader.settings, WEIGHT_ONE, ()), levels, LINES_MAX + 1)
    if len(rows) > LINES_MAX:
        return None
    reader.source.names.update(map(_NAME, rows))
    charges = charges_of(reader)
    lines += [
        line if line.customer not in charges else line._replace(charge=charges[line.customer])
        for line in map(WaitingLine._make, map(_LINE, rows))
        if line.customer not in individual
    ]
    return levels, sorted(overdue), lines


def _sum_lines(
    reader: QueueReader,
    individual: dict[int, CustomerState],
    place: Place,
    *,
    overdue: list[OverdueHead],
    lines: list[WaitingLine],
    rank: CountRange,
) -> LineSummary:
    """Return the sum of all other lines of the level.

    `position` needs it for the lowest and the highest rank, and for one below the lowest if the
    oldest document may have a turn as longest waiting.
    """
    own = next((ln for ln in lines if (ln.customer, ln.level) == place[:2]), None)
    head = next((head for head in overdue if head.customer == place.customer), None)
    patient = reader.now - reader.settings.patience_us
    mine = (0, 0) if head is None else head[:2]
    overdue_others, ahead = reader.count_overdue(patient, mine, individual)
    if own is None:  # a paused customer has no position
        return NO_OTHER_LINES._replace(overdue=overdue_others, overdue_ahead=ahead)

    def turn(rank: int) -> tuple[int, int]:
        return own.virtual_time + rank * own.charge, own.tick

    number, waiting, before, customers = reader.other_lines(
        place.level, *turn(rank.least), individual
    )
    earlier = {max(0, rank.least - 1)} if head is not None else set()
    before_by_rank = {rank.least: before or 0}
    for other in {rank.most, *earlier} - {rank.least}:
        before_by_rank[other] = reader.other_lines(place.level, *turn(other), individual)[2] or 0
    largest = reader.largest(place.level, *turn(rank.least), individual, LARGEST)
    reader.source.names.update((customer, name) for customer, _, name in largest)
    return LineSummary(
        lines=number,
        waiting=waiting or 0,
        before=before_by_rank,
        customers=customers,
        largest={customer: n for customer, n, _ in largest if n},
        overdue=overdue_others,
        overdue_ahead=ahead,
    )


def _unfolded(reader: QueueReader, ahead: Ahead, place: Place, rank: CountRange) -> QueueView:
    """Return a view without lines, for a queue with too many events to fold."""
    customer, level, _ = place
    own = WaitingLine(level, 0, 0, customer, rank.most + 1, WEIGHT_ONE)
    return QueueView(
        customer=customer,
        level=level,
        rank=rank,
        number=reader.turns.number,
        clock=0,
        lines=() if reader.is_paused(customer) else (own,),
        others_by_level={},
        overdue=(),
        stalled=(),
        waiting=_waiting(reader, ahead, {}),
        folded=False,
    )


def _waiting(reader: QueueReader, ahead: Ahead, individual: dict[int, CustomerState]) -> int:
    """Return the number of waiting documents of customers that are not paused."""
    held = (flow.waiting for s in individual.values() if s.paused for flow in s.flows.values())
    return sum(reader.waiting) + len(ahead.joining) - sum(held)


def _rank(reader: QueueReader, ahead: Ahead, place: Place) -> CountRange:
    """Return the number of documents of the flow with a lower order, counted from either end."""
    flow, order = place[:2], place.order
    others = reader.returned(flow, order)
    others += sum(joined[:2] == flow and joined.order < order for joined in ahead.joining.values())
    claimed_to = reader.claimed_to(flow)
    if claimed_to is None:
        return CountRange(others, others)
    lower = reader.between(flow, claimed_to, order, COUNTED_MAX)
    if lower < COUNTED_MAX:
        return CountRange(lower + others, lower + others)
    higher = reader.not_before(flow, order, COUNTED_MAX)
    in_line = reader.waiting_in(flow) - reader.returned(flow, None)
    if higher < COUNTED_MAX:
        return CountRange(in_line - higher + others, in_line - higher + others)
    # Orders are integers, which limits how many lie between two of them.
    most = min(in_line - higher, order - claimed_to - 1)
    return CountRange(lower + others, most + others)


def _individual(reader: QueueReader, place: Place) -> dict[int, CustomerState]:
    """Return the customers whose lines are read one by one in every level: the document's own, and
    those with events since the last claim, a limit or a pause."""
    individual = dict(reader.turns.customers)
    for customer in [place.customer, *reader.held()]:
        if customer not in individual:
            individual[customer] = reader.source.customer_state(customer)
    return individual


def charges_of(reader: QueueReader) -> dict[int, int]:
    """Return the charge of a turn for the customers that differ from the default."""
    return {
        customer: charge_of(reader.settings, weight, tuple(costs))
        for customer, weight, costs in reader.charged()
    }


def _count_others(
    reader: QueueReader, individual: dict[int, CustomerState], levels: list[int]
) -> dict[int, int]:
    """Return the number of waiting documents of all other customers, by level. These levels equal
    priorities: in mode `equal` there are none."""
    if not levels:
        return {}
    own = reader.waiting_of(individual)
    others_by_level = {level: reader.waiting[level - 1] - own.get(level, 0) for level in levels}
    return {level: n for level, n in others_by_level.items() if n}


def _add_lower(
    reader: QueueReader,
    ahead: Ahead,
    individual: dict[int, CustomerState],
    lines: list[WaitingLine],
    place: Place,
) -> int:
    """In mode `levels`, reduce the lines of the level to the documents before this one, and append
    those of all other customers. Return the number of further documents that may be before it if
    there were too many to count."""
    own, level, order = place
    waiting = reader.waiting[level - 1]
    rows = reader.lower(level, order, individual) if waiting <= COUNTED_MAX else []
    reader.source.names.update(map(_NAME, rows))
    lower = Counter({row[3]: row[4] for row in rows})
    lower.update(c for c, n, o in ahead.joining.values() if n == level and o < order)
    for n, line in enumerate(lines):
        if line.level == level and line.customer != own:
            lines[n] = line._replace(waiting=lower[line.customer])
    others = (row for row in rows if row[4] and row[3] not in individual)
    lines += map(WaitingLine._make, map(_LINE, others))
    return 0 if waiting <= COUNTED_MAX else waiting
