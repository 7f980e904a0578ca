"""The queue position of a waiting document, read from one snapshot of a database.

An engine of `turns.py` folds the events that the next claim would fold, and is discarded. The
time does not depend on the number of waiting documents: flows are read instead, and documents are
counted only up to `COUNTED_MAX`.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
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
    CancelEvent,
    CustomerState,
    Event,
    EventBatch,
    Mode,
    SettingsEvent,
    band_of,
    kind_of,
    level_in,
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
# Documents that have expired and are left out one by one: these are read within 100 ms. More are
# there only if neither a worker nor the service runs.
LAPSED_MAX = 10_000
_LINE, _NAME = itemgetter(slice(7)), itemgetter(3, 7)

FlowKey = tuple[int, int]  # customer, band


class Place(NamedTuple):
    """The flow and the order of a waiting document."""

    customer: int
    band: int
    order: int

    @property
    def level(self) -> int:
        return level_in(self.band)

    @property
    def kind(self) -> int:
        return kind_of(self.band)


class Lapsed(NamedTuple):
    """A document that has expired, which the next claim records before all else."""

    number: int
    customer: int
    band: int
    order: int | None
    waits: int  # otherwise it is delayed


class NamedFlows(Protocol):
    """A `FlowSource` that collects the names of the customers it has read."""

    names: dict[int, str]


class QueueReader(Protocol):
    """Queries on one snapshot. It has more than 20 methods because each is one SQL statement.

    In its rows, `level` is a band."""

    settings: Settings
    now: int
    turns: Turns  # as of the last claim
    leases_end_at: int | None  # leases up to this time have expired; None: all, by a reboot
    following: int  # the next order to be assigned

    @property
    def source(self) -> NamedFlows:
        """The `FlowSource` of `turns`."""
        ...

    def waiting(self, kind: int) -> Sequence[int]:
        """Return the numbers of waiting documents of a kind, of priorities 1 to 9."""
        ...

    def running(self) -> list[Row]:
        """Return lease_until, number, customer, level, order_number, attempts, cancel_requested,
        worker, claimed_at, and the attempts_max of their kinds, of running documents."""
        ...

    def due(self) -> list[Row]:
        """Return number, customer, level, order_number and due_at of due documents, in order."""
        ...

    def lapsed(self, most: int) -> list[Row]:
        """Return the columns of `Lapsed`, for up to `most` documents, the earliest first."""
        ...

    def lowest(self, flow: FlowKey, without: Collection[int]) -> int | None:
        """Return the lowest order that waits in a flow, without these orders."""
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

    def charged(self) -> Iterable[tuple[int, int, Mapping[int, Sequence[int]]]]:
        """Return customer, weight and recent costs by kind of customers that differ from the
        default."""
        ...

    def overdue(self, kind: int, before: int, most: int) -> list[Row]:
        """Return the columns of `OverdueHead`, for up to `most` flows that have had their
        customer's head of a kind since earlier than `before`."""
        ...

    def lines(self, bands: Collection[int], most: int) -> list[Row]:
        """Return the columns of `WaitingLine`, with a charge of 0, and the customer's name, for up
        to `most` flows of these bands."""
        ...

    def other_lines(self, band: int, place: int, tick: int, without: Collection[int]) -> Row:
        """Return, for all flows of a band except those of the customers in `without`: the number
        of flows, of their documents, of documents with a turn before (place, tick), and of flows
        with such documents. The charge of a turn follows from the customer's weight."""
        ...

    def largest(
        self, band: int, place: int, tick: int, without: Collection[int], most: int
    ) -> list[Row]:
        """Return customer, number of documents with a turn before (place, tick), and name, for the
        `most` customers with the highest numbers."""
        ...

    def count_overdue(
        self, kind: int, before: int, own: tuple[int, int], without: Collection[int]
    ) -> tuple[int, int]:
        """Return two counts: the flows that `overdue` would return, excluding customers in
        `without`; and how many of those have a lower (head_since, head_order) than `own`."""
        ...

    def lower(self, band: int, order: int, customers: Collection[int]) -> list[Row]:
        """Return the columns of `lines` for the flows of a band with waiting documents, and those
        of `customers`. `waiting` counts only documents of a lower order."""
        ...

    def waiting_of(self, customers: Collection[int]) -> dict[int, int]:
        """Return the number of waiting documents of these customers, by band."""
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
    lapsed: list[Lapsed]
    folded: bool  # False: there are too many events, or documents that have expired

    def lapsed_before(self, customer: int, band: int, order: int) -> int:
        """Return the number of documents with a lower order that wait in a flow and have
        expired."""
        flow = (customer, band)
        return sum(
            each.order < order
            for each in self.lapsed
            if each.waits and each.order is not None and each[1:3] == flow
        )


def look_ahead(reader: QueueReader) -> Ahead:
    """Fold the events since the last claim in `reader.turns`, which is not saved."""
    lapsed = [Lapsed._make(row) for row in reader.lapsed(LAPSED_MAX + 1)]
    ahead = Ahead({}, sorted(reader.running()), set(), lapsed, folded=True)
    expired = _expired(reader, ahead)
    due = _due(reader, ahead)
    batches = reader.events()
    if batches is None or len(lapsed) > LAPSED_MAX:
        return ahead._replace(folded=False)
    batches.append(EventBatch(reader.now, tuple(_lapses(reader, lapsed))))
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
        attempt = Attempt(*rest[:5])._replace(attempts_max=rest[-1])
        ending = end_of_lease(attempt, reader.settings)
        events.append(ending.event)
        if ending.state is State.WAITING:
            ahead.joining[number] = Place(attempt.customer, attempt.band, attempt.order)
    return events


def _lapses(reader: QueueReader, lapsed: Iterable[Lapsed]) -> Iterator[CancelEvent]:
    """Yield the events of documents that wait and have expired. As in a claim, the next order of a
    flow may be that of a document whose event follows."""
    by_flow: defaultdict[FlowKey, list[int]] = defaultdict(list)
    for each in lapsed:
        if each.waits and each.order is not None:
            by_flow[each.customer, each.band].append(each.order)
    for flow, orders in by_flow.items():
        orders.sort()
        lowest = reader.lowest(flow, orders)
        for order, following in zip(orders, [*orders[1:], None], strict=True):
            left = [each for each in (following, lowest) if each is not None]
            yield CancelEvent(*flow, order, min(left, default=None))


def _due(reader: QueueReader, ahead: Ahead) -> list[tuple[int, ArrivalEvent]]:
    """Return the arrivals of due documents. A document without an order gets the next one."""
    due: list[tuple[int, ArrivalEvent]] = []
    following = reader.following
    lapsed = {each.number for each in ahead.lapsed}
    for number, customer, band, given, due_at in reader.due():
        if number in lapsed:
            continue
        order = following if given is None else given
        following += given is None
        ahead.joining[number] = Place(customer, band, order)
        due.append((due_at, ArrivalEvent(customer, band, order, 1)))
    return due


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────


def queue_view(reader: QueueReader, ahead: Ahead, place: Place) -> QueueView:
    """Return what decides when the document at this place has its turn."""
    rank = _rank(reader, ahead, place)
    if len(ahead.lapsed) > LAPSED_MAX:
        rank = CountRange(0, rank.most)
    if not ahead.folded:
        return _unfolded(reader, ahead, place, rank)
    settings, turns, kind = reader.settings, reader.turns, place.kind
    individual = _individual(reader, place)
    overdue, stalled = overdue_heads(individual.values(), settings, reader.now, kind)
    lines = [line for s in individual.values() for line in lines_of(s, settings, kind)]
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
        number=turns.since_patience[kind],
        clock=turns.bands[place.band].clock,
        lines=tuple(lines),
        others_by_level=_count_others(reader, individual, kind, better),
        overdue=tuple(overdue),
        stalled=tuple(stalled),
        waiting=_waiting(reader, ahead, individual, kind),
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
    kind, before = place.kind, reader.now - reader.settings.patience_us
    rows = reader.overdue(kind, before, LINES_MAX + 1)
    if len(rows) > LINES_MAX:
        return None
    overdue = overdue + [
        head._replace(level=level_in(head.level))
        for head in map(OverdueHead._make, rows)
        if head.customer not in individual
    ]
    levels = levels_by_line(overdue, lines, place.customer, place.level)
    bands = [band_of(level, kind) for level in levels]
    rows = reader.lines(bands, LINES_MAX + 1)
    if len(rows) > LINES_MAX:
        return None
    reader.source.names.update(map(_NAME, rows))
    charges = Charges(reader)
    lines += [
        charges.charge(line, kind)
        for line in map(to_line, map(_LINE, rows))
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
    flow = (place.customer, place.level)
    own = next((line for line in lines if (line.customer, line.level) == flow), None)
    head = next((head for head in overdue if head.customer == place.customer), None)
    patient = reader.now - reader.settings.patience_us
    mine = (0, 0) if head is None else head[:2]
    overdue_others, ahead = reader.count_overdue(place.kind, patient, mine, individual)
    if own is None:  # a paused customer has no position
        return NO_OTHER_LINES._replace(overdue=overdue_others, overdue_ahead=ahead)

    def turn(rank: int) -> tuple[int, int]:
        return own.virtual_time + rank * own.charge, own.tick

    number, waiting, before, customers = reader.other_lines(
        place.band, *turn(rank.least), individual
    )
    earlier = {max(0, rank.least - 1)} if head is not None else set()
    before_by_rank = {rank.least: before or 0}
    for other in {rank.most, *earlier} - {rank.least}:
        before_by_rank[other] = reader.other_lines(place.band, *turn(other), individual)[2] or 0
    largest = reader.largest(place.band, *turn(rank.least), individual, LARGEST)
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
    customer, level = place.customer, place.level
    own = WaitingLine(level, 0, 0, customer, rank.most + 1, WEIGHT_ONE)
    return QueueView(
        customer=customer,
        level=level,
        rank=rank,
        number=reader.turns.since_patience[place.kind],
        clock=0,
        lines=() if reader.is_paused(customer) else (own,),
        others_by_level={},
        overdue=(),
        stalled=(),
        waiting=_waiting(reader, ahead, {}, place.kind),
        folded=False,
    )


def _waiting(
    reader: QueueReader, ahead: Ahead, individual: dict[int, CustomerState], kind: int
) -> int:
    """Return the number of waiting documents of a kind of customers that are not paused."""
    paused = (flow for s in individual.values() if s.paused for flow in s.flows.values())
    held = sum(flow.waiting for flow in paused if kind_of(flow.band) == kind)
    joining = sum(place.kind == kind for place in ahead.joining.values())
    lapsed = sum(each.waits and kind_of(each.band) == kind for each in ahead.lapsed)
    return sum(reader.waiting(kind)) + joining - lapsed - held


def _rank(reader: QueueReader, ahead: Ahead, place: Place) -> CountRange:
    """Return the number of documents of the flow with a lower order, counted from either end."""
    flow, order = place[:2], place.order
    others = reader.returned(flow, order) - ahead.lapsed_before(*place)
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
    customers = [*reader.turns.customers, place.customer, *reader.held()]
    return {customer: reader.turns.customer(customer, place.kind) for customer in customers}


def to_line(row: Row) -> WaitingLine:
    """Convert the columns of a `WaitingLine`; the level of the row is a band."""
    band, *others = row
    return WaitingLine(level_in(band), *others)


class Charges:
    """The charge of each customer's next turn, without reading documents."""

    def __init__(self, reader: QueueReader) -> None:
        self._settings = reader.settings
        self._plain = charge_of(reader.settings, WEIGHT_ONE, ())
        self._charged = {c: (weight, costs) for c, weight, costs in reader.charged()}

    def charge(self, line: WaitingLine, kind: int) -> WaitingLine:
        """Return the line with its charge in this kind."""
        found = self._charged.get(line.customer)
        if found is None:
            return line._replace(charge=self._plain)
        weight, costs = found
        return line._replace(charge=charge_of(self._settings, weight, tuple(costs.get(kind, ()))))


def _count_others(
    reader: QueueReader, individual: dict[int, CustomerState], kind: int, levels: list[int]
) -> dict[int, int]:
    """Return the number of waiting documents of all other customers, by level. These levels equal
    priorities: in mode `equal` there are none."""
    if not levels:
        return {}
    own, waiting = reader.waiting_of(individual), reader.waiting(kind)
    others_by_level = {
        level: waiting[level - 1] - own.get(band_of(level, kind), 0) for level in levels
    }
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
    own, band, order = place
    waiting = reader.waiting(place.kind)[place.level - 1]
    rows = reader.lower(band, order, individual) if waiting <= COUNTED_MAX else []
    reader.source.names.update(map(_NAME, rows))
    lower = Counter({row[3]: row[4] for row in rows})
    lower.update(c for c, n, o in ahead.joining.values() if n == band and o < order)
    lower.subtract(
        each.customer
        for each in ahead.lapsed
        if each.waits and each.band == band and each.order is not None and each.order < order
    )
    for n, line in enumerate(lines):
        if line.level == place.level and line.customer != own:
            lines[n] = line._replace(waiting=lower[line.customer])
    others = (row for row in rows if row[4] and row[3] not in individual)
    lines += map(to_line, map(_LINE, others))
    return 0 if waiting <= COUNTED_MAX else waiting
