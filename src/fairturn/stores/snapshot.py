"""Document snapshots and the next documents of each level, read from one snapshot of a database."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple, Protocol

from fairturn.explain.snapshot import (
    ALIVE_US,
    ARRIVALS_MAX,
    ATTEMPTS_MAX,
    NEIGHBOURS_MAX,
    Arrival,
    AttemptSample,
    DocumentSnapshot,
    QueueActivity,
    RunningDocument,
    ServedCounts,
    WaitingLine,
    WorkerHeartbeat,
    lines_of,
    waiting_since,
)
from fairturn.model import (
    CustomerSettings,
    Document,
    KindSettings,
    ServiceOutage,
    Settings,
    State,
    level_of,
)
from fairturn.priority import LEVELS, Count
from fairturn.scheduling.flows import (
    COST_ONE,
    DEFAULT_KIND,
    WEIGHT_ONE,
    Band,
    Costs,
    CustomerState,
    Mode,
    band_of,
    kind_of,
)
from fairturn.scheduling.turns import Turns
from fairturn.stores.positions import (
    Ahead,
    Charges,
    FlowKey,
    Place,
    QueueReader,
    look_ahead,
    queue_view,
    to_line,
)
from fairturn.stores.values import Row

# Flows of a level, and documents of a flow, that are sampled: those that were served last.
FLOWS_SAMPLED, DOCUMENTS_SAMPLED = 16, 8


class SnapshotReader(QueueReader, Protocol):
    """Queries for the snapshot of one document."""

    def document(self, number: int) -> Row:
        """Return customer, kind, order_number, and the count of the parent."""
        ...

    def kind_settings(self, kind: int) -> KindSettings: ...

    def customer(self, number: int) -> Row:
        """Return count, count_updated_at, delayed, weight, running_max and paused."""
        ...

    def names_of(self, customers: Collection[int]) -> Iterable[tuple[int, str]]: ...

    def workers(self) -> list[WorkerHeartbeat]: ...

    def outages(self) -> list[ServiceOutage]: ...

    def arrivals(self, kind: int, most: int) -> list[Row]:
        """Return submitted_at, customer and priority of the documents of a kind among the newest
        of all kinds."""
        ...

    # Ended attempts: claimed_at, number, step, customer and duration. The first two return those of
    # a kind among the documents of all kinds that were submitted last: the last attempts of
    # documents in this kind, unless they ended a step, and those that ended a step of this kind.
    def last_submitted(self, kind: int, most: int) -> list[Row]: ...
    def last_steps(self, kind: int, most: int) -> list[Row]: ...
    def last_of_flow(self, flow: FlowKey) -> list[Row]: ...
    def last_of_band(self, band: int) -> list[Row]: ...

    def served(self, numbers: tuple[int, int], since: int, until: int) -> dict[int, int]:
        """Return how many documents with these numbers were claimed between two timestamps, by
        customer."""
        ...

    def may_be_more(self, numbers: tuple[int, int], number: int, claimed_at: int) -> bool:
        """Return whether documents outside these numbers, or documents that were claimed again
        later, may also have been claimed before that time."""
        ...


def read_snapshot(reader: SnapshotReader, document: Document, number: int) -> DocumentSnapshot:
    """Return the snapshot of a document."""
    customer, kind, order, parent_count = reader.document(number)
    band = band_of(level_of(document.priority, reader.settings.mode), kind)
    count, updated_at, delayed, weight, limit, paused = reader.customer(customer)
    ahead = look_ahead(reader)
    place = ahead.joining.get(number)
    has_expired = document.expiry is not None and document.expiry <= reader.now
    if document.state is State.WAITING and not has_expired:
        place = Place(customer, band, order)
    line = None if place is None else queue_view(reader, ahead, place)
    served = _served(reader, document, number)
    names = reader.source.names  # of the customers that were read
    if served is not None:
        names.update(reader.names_of(served.by_customer))
    return DocumentSnapshot(
        at=reader.now,
        settings=reader.settings,
        document=document,
        parent_count=parent_count,
        customer=customer,
        customer_settings=CustomerSettings(
            weight=weight / WEIGHT_ONE, limit=limit, paused=bool(paused)
        ),
        count=None if count is None else Count(count, updated_at),
        waiting=sum(reader.waiting_of([customer]).values()),
        running=sum(row[2] == customer for row in ahead.running),
        delayed=delayed,
        leased=document.state is State.RUNNING and number not in ahead.expired,
        queue_view=line,
        service=_service(reader, ahead, (customer, band), document.kind),
        served=served,
        names=names,
        kind_settings=reader.kind_settings(kind),
        kind_running=sum(kind_of(row[3]) == kind for row in ahead.running),
        outages=tuple(each for each in reader.outages() if document.kind in each.kinds),
    )


def _service(reader: SnapshotReader, ahead: Ahead, flow: FlowKey, kind_name: str) -> QueueActivity:
    """Return the activity of the queue, without workers that do not serve the kind. No index orders
    ended attempts by time, so they are sampled from the documents that were submitted last and from
    the flows that were served last."""
    kind = kind_of(flow[1])
    workers = reader.workers()
    others = {seen.worker for seen in workers if not seen.serves(kind_name)}
    over = reader.last_submitted(kind, ARRIVALS_MAX)
    over += reader.last_steps(kind, ARRIVALS_MAX)
    over += reader.last_of_flow(flow)
    for level in range(1, LEVELS + 1):
        over += reader.last_of_band(band_of(level, kind))
    latest = sorted(set(over), key=lambda row: row[:3])[-ATTEMPTS_MAX:]
    running = (
        RunningDocument(worker, claimed_at, customer, number not in ahead.expired)
        for _, number, customer, _, _, _, _, worker, claimed_at, _ in ahead.running
        if worker not in others
    )
    return QueueActivity(
        running=tuple(sorted(running)),
        workers=tuple(seen for seen in workers if seen.worker not in others),
        attempts=tuple(
            AttemptSample(customer, None if duration is None else max(0, duration))
            for *_, customer, duration in latest
        ),
        arrivals=tuple(
            Arrival(at, customer, level_of(priority, reader.settings.mode))
            for at, customer, priority in reader.arrivals(kind, ARRIVALS_MAX)
        ),
        other_workers=sum(
            seen.worker in others and abs(reader.now - seen.seen_at) <= ALIVE_US for seen in workers
        ),
    )


def _served(reader: SnapshotReader, document: Document, number: int) -> ServedCounts | None:
    """Count the documents with near numbers that were claimed while this one waited."""
    if document.claimed_at_us is None:
        return None
    near = (number - NEIGHBOURS_MAX, number + NEIGHBOURS_MAX)
    served = reader.served(near, waiting_since(document), document.claimed_at_us)
    return ServedCounts(served, not reader.may_be_more(near, number, document.claimed_at_us))


class Next(NamedTuple):
    """A waiting document of a flow."""

    order: int
    number: int
    cost: int | None


# Called with a band and a maximum: band, place, tick, customer and waiting documents of the first
# flows of the band as of the last claim, without customers that the engine has loaded.
FirstLines = Callable[[int, int], Iterable[Row]]
# Called with a flow, an order and a maximum: order, number and cost of the flow's next documents.
# If the flow is not stored yet, they come after that order.
NextIn = Callable[[FlowKey, int, int], Iterable[Row]]


def next_numbers(
    reader: QueueReader,
    size: int,
    kinds: Mapping[int, str],
    first_lines: FirstLines,
    next_in: NextIn,
) -> Iterator[int]:
    """Yield the numbers of the next documents of each level, of these kinds: names by number."""
    settings, turns = reader.settings, reader.turns
    lapsed = {each.number: (each.customer, each.band) for each in look_ahead(reader).lapsed}
    n_lapsed = Counter(lapsed.values())
    only = next(iter(kinds)) if len(kinds) == 1 else None
    changed = [turns.customer(customer, only) for customer in list(turns.customers)]
    changed_lines = {kind: list(lines_in_turn(changed, settings, kind)) for kind in kinds}
    charges = Charges(reader)

    def next_of(kind: int, level: int, most: int) -> list[Next]:
        band = band_of(level, kind)
        lines = [line for line in changed_lines[kind] if line.level == level]
        for row in first_lines(band, most):
            lines.append(charges.charge(to_line((*row, 0, None)), kind))

        def waiting(line: WaitingLine, most: int) -> list[Next]:
            flow = (line.customer, band)
            rows = next_in(flow, _before_head(turns, *flow), most + n_lapsed[flow])
            found = (each for each in map(Next._make, rows) if each.number not in lapsed)
            return sorted(found)[:most]

        return take_turns(lines, most, settings, waiting)

    for level, most in levels_of(settings, size):
        documents = {kind: next_of(kind, level, most) for kind in kinds}
        bands = {kind: turns.bands[band_of(level, kind)] for kind in kinds}
        for found in take_turns_of_kinds(documents, bands, kinds, most, settings):
            yield found.number


def _before_head(turns: Turns, customer: int, band: int) -> int:
    """Return an order below all waiting documents of a flow that may not be stored yet."""
    state = turns.customers.get(customer)
    head = state.flows[band].head_order if state is not None else None
    return 0 if head is None else head - 1


def lines_in_turn(
    states: Iterable[CustomerState], settings: Settings, kind: int = DEFAULT_KIND
) -> Iterator[WaitingLine]:
    """Yield the lines in one kind of customers that are not held. In mode `levels` their place is
    their lowest order, as in a database."""
    for state in states:
        if state.held:
            continue
        for line in lines_of(state, settings, kind):
            head = state.flows[band_of(line.level, kind)].head_order
            if settings.mode is Mode.LEVELS and head is not None:
                yield line._replace(virtual_time=head)
            else:
                yield line


def take_turns(
    lines: Iterable[WaitingLine],
    size: int,
    settings: Settings,
    waiting: Callable[[WaitingLine, int], Sequence[Next]],
) -> list[Next]:
    """Return the next `size` documents of one level of one kind. `waiting` is called for at most
    `size` lines, with at most `size` documents each."""
    first = sorted(lines, key=lambda line: (line.virtual_time, line.tick, line.customer))[:size]
    if settings.mode is Mode.LEVELS:
        found = sorted(each for line in first for each in waiting(line, size))
        return found[:size]
    known = settings.costs is Costs.KNOWN
    heap = [(line.virtual_time, line.tick, line.customer, line.charge) for line in first]
    by_customer = {line.customer: line for line in first}
    left: dict[int, list[Next]] = {}
    heapify(heap)
    taken: list[Next] = []
    while heap and len(taken) < size:
        at, tick, customer, charge = heap[0]
        if customer not in left:
            left[customer] = list(waiting(by_customer[customer], size))[::-1]
        if not left[customer]:
            heappop(heap)
            continue
        following = left[customer].pop()
        taken.append(following)
        if known and following.cost is not None:
            charge = max(1, charge * following.cost // COST_ONE)
        heapreplace(heap, (at + charge, tick, customer, by_customer[customer].charge))
    return taken


def take_turns_of_kinds(
    documents: Mapping[int, Sequence[Next]],
    bands: Mapping[int, Band],
    names: Mapping[int, str],
    size: int,
    settings: Settings,
) -> list[Next]:
    """Return the next `size` documents of one level over several kinds, from those of each kind in
    turn. It counts every document as cost 1 and the customers of a kind as they are now."""
    if len(documents) == 1 or settings.mode is Mode.LEVELS:
        merged = [each for found in documents.values() for each in found]
        return (sorted(merged) if len(documents) > 1 else merged)[:size]
    left = {kind: list(found)[::-1] for kind, found in documents.items() if found}
    heap = [(bands[kind].kind_time, bands[kind].last_claim, names[kind], kind) for kind in left]
    heapify(heap)
    taken: list[Next] = []
    while heap and len(taken) < size:
        time, _, name, kind = heap[0]
        taken.append(left[kind].pop())
        if left[kind]:
            progress = COST_ONE * 1000 // max(1, bands[kind].weight)
            last_claim = max(band.last_claim for band in bands.values()) + len(taken)
            heapreplace(heap, (time + progress, last_claim, name, kind))
        else:
            heappop(heap)
    return taken


def levels_of(settings: Settings, size: int) -> list[tuple[int, int]]:
    """Return the levels and the number of documents of each. In mode `equal` one level has all
    priorities."""
    if settings.mode is Mode.EQUAL:
        return [(1, size * LEVELS)]
    return [(level, size) for level in range(1, LEVELS + 1)]


def by_lane(
    documents: Iterable[Document], ids: Sequence[str], size: int
) -> tuple[tuple[Document, ...], ...]:
    """Return the documents in the order of the ids, in a lane for each priority."""
    found = {document.id: document for document in documents}
    lanes: list[list[Document]] = [[] for _ in range(LEVELS)]
    for id in ids:
        document = found.get(id)
        if document is not None and len(lanes[document.priority - 1]) < size:
            lanes[document.priority - 1].append(document)
    return tuple(map(tuple, lanes))
