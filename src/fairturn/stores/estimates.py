"""Document snapshots for a store that has everything in memory."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fairturn.explain.snapshot import (
    ALIVE_US,
    ARRIVALS_MAX,
    ATTEMPTS_MAX,
    NEIGHBOURS_MAX,
    Arrival,
    AttemptSample,
    CountRange,
    DocumentSnapshot,
    QueueActivity,
    QueueView,
    RunningDocument,
    ServedCounts,
    WorkerHeartbeat,
    lines_of,
    overdue_heads,
    waiting_since,
)
from fairturn.model import (
    TRANSITIONS,
    CustomerSettings,
    Document,
    FinishedStep,
    KindSettings,
    ServiceOutage,
    Settings,
    State,
    level_of,
)
from fairturn.priority import Count
from fairturn.scheduling.flows import (
    ArrivalEvent,
    Backlog,
    Band,
    CancelEvent,
    CustomerState,
    Event,
    EventBatch,
    Flow,
    Mode,
    kind_of,
    level_in,
)
from fairturn.scheduling.turns import Turns
from fairturn.stores.transitions import Ending


class Copies(Backlog):
    """A `FlowSource` of copies of the flows that another engine has loaded; nothing is picked."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._customer_states = turns.customers

    def customer_state(self, customer: int) -> CustomerState:
        known = self._customer_states.get(customer)
        if known is None:
            return CustomerState(customer)
        flows = {band: replace(flow, entry=None) for band, flow in known.flows.items()}
        heads = {kind: replace(head, entry=None) for kind, head in known.heads.items()}
        return replace(known, flows=flows, heads=heads)

    def order_after(self, flow: Flow, order: int) -> int | None:
        raise AssertionError("nothing is picked from a copy")

    def cost(self, flow: Flow) -> int | None:
        raise AssertionError("nothing is picked from a copy")


class Kept(NamedTuple):
    """A stored document."""

    number: int
    customer: int
    priority: int
    band: int
    order: int | None
    state: State
    submitted_at: int
    due_at: int | None
    claimed_at: int | None
    attempts: int
    ended_at: int | None
    lease_until: int
    leased: bool  # the lease has not expired
    lost: Ending | None  # if it is running and the lease has expired
    worker: str | None
    step: int
    steps: tuple[FinishedStep, ...]
    has_expired: bool  # it waits or is delayed, and the next claim records that it has expired

    @property
    def kind(self) -> int:
        return kind_of(self.band)

    @property
    def waits(self) -> bool:
        """Whether it waits and has not expired."""
        return self.state is State.WAITING and not self.has_expired


class Foreseen(NamedTuple):
    """The queue as the next claim will see it, with all events folded."""

    customers: dict[int, CustomerState]
    since_patience: Mapping[int, int]  # by kind
    bands: dict[int, Band]
    orders: dict[int, int]  # of waiting documents, by document number


def foresee(
    turns: Turns,
    documents: Iterable[Kept],
    batches: Sequence[EventBatch],
    now: int,
    next_order: int,
) -> Foreseen:
    """Return the queue as the next claim will see it. `turns` is not changed."""
    documents = list(documents)
    orders = {d.number: d.order for d in documents if d.waits if d.order}
    expired: list[Event] = []
    for d in sorted(documents, key=lambda d: (d.lease_until, d.number)):
        if d.lost is not None:
            assert d.order is not None
            expired.append(d.lost.event)
            if d.lost.state is State.WAITING:
                orders[d.number] = d.order
    due: list[tuple[int, ArrivalEvent]] = []
    pending = (d for d in documents if d.state is State.DELAYED and not d.has_expired)
    delayed = [(d.due_at, d) for d in pending if d.due_at]
    for due_at, d in sorted(delayed):
        if due_at <= now:
            order = next_order if d.order is None else d.order
            next_order += d.order is None
            orders[d.number] = order
            due.append((due_at, ArrivalEvent(d.customer, d.band, order, 1)))
    ahead = Turns(
        Copies(turns),
        mode=turns.mode,
        costs=turns.costs,
        patience_us=turns.patience_us,
        number=turns.number,
        tick=turns.tick,
        bands=turns.bands,
        level_times=turns.level_times,
        since_patience=turns.since_patience,
    )
    expiries = EventBatch(now, tuple(_expiries(documents)))
    ahead.fold(now, expired=expired, events=[*batches, expiries], due=due)
    customer_states = {**turns.customers, **ahead.customers}
    return Foreseen(customer_states, ahead.since_patience, ahead.bands, orders)


def _expiries(documents: Iterable[Kept]) -> Iterator[CancelEvent]:
    """Yield the events of documents that wait and have expired. As in a claim, the next order of a
    flow may be that of a document whose event follows."""
    waiting: dict[tuple[int, int], list[int]] = {}
    expired: list[tuple[tuple[int, int], int]] = []
    for d in documents:
        if d.state is State.WAITING and d.order is not None:
            flow = (d.customer, d.band)
            waiting.setdefault(flow, []).append(d.order)
            if d.has_expired:
                expired.append((flow, d.order))
    for flow, order in expired:
        waiting[flow].remove(order)
        yield CancelEvent(*flow, order, min(waiting[flow], default=None))


def make_snapshot(
    *,
    document: Document,
    parent_count: int | None,
    number: int,
    now: int,
    settings: Settings,
    documents: Sequence[Kept],
    customer_settings: CustomerSettings,
    count: Count | None,
    names: Mapping[int, str],
    foreseen: Foreseen,
    workers: Sequence[WorkerHeartbeat],
    kind_settings: KindSettings,
    outages: Sequence[ServiceOutage],
) -> DocumentSnapshot:
    """Return the snapshot of document `number`."""
    kept = next(d for d in documents if d.number == number)
    states = Counter(d.state for d in documents if d.customer == kept.customer)
    same_kind = [d for d in documents if d.kind == kept.kind]
    others = {seen.worker for seen in workers if not seen.serves(document.kind)}
    return DocumentSnapshot(
        at=now,
        settings=settings,
        document=document,
        parent_count=parent_count,
        customer=kept.customer,
        customer_settings=customer_settings,
        count=count,
        waiting=states[State.WAITING],
        running=states[State.RUNNING],
        delayed=states[State.DELAYED],
        leased=kept.state is State.RUNNING and kept.leased,
        queue_view=_queue_view(kept, documents, foreseen, settings, now),
        service=QueueActivity(
            running=_running(d for d in documents if d.worker not in others),
            workers=tuple(seen for seen in workers if seen.worker not in others),
            attempts=_attempts(documents, kept.kind, document.kind),
            arrivals=_arrivals(documents, kept.kind, settings.mode),
            other_workers=sum(
                seen.worker in others and abs(now - seen.seen_at) <= ALIVE_US for seen in workers
            ),
        ),
        served=_served(kept, waiting_since(document), documents),
        names=names,
        kind_settings=kind_settings,
        kind_running=sum(d.state is State.RUNNING for d in same_kind),
        outages=tuple(outages),
    )


def _queue_view(
    kept: Kept, documents: Sequence[Kept], foreseen: Foreseen, settings: Settings, now: int
) -> QueueView | None:
    order = foreseen.orders.get(kept.number)
    if order is None:
        return None
    level, kind = level_in(kept.band), kept.kind
    before: Counter[int] = Counter()  # lower orders in the same band, by customer
    for d in documents:
        if d.band == kept.band and foreseen.orders.get(d.number, order) < order:
            before[d.customer] += 1
    customer_states = foreseen.customers.values()
    own_kind = (line for s in customer_states for line in lines_of(s, settings, kind))
    lines = [line for line in own_kind if line.level <= level]
    overdue, stalled = overdue_heads(customer_states, settings, now, kind)
    if settings.mode is Mode.LEVELS:
        lines = [
            line
            if line.level < level or line.customer == kept.customer
            else line._replace(waiting=before[line.customer])
            for line in lines
        ]
    return QueueView(
        customer=kept.customer,
        level=level,
        rank=CountRange(before[kept.customer], before[kept.customer]),
        number=foreseen.since_patience.get(kind, 0),
        clock=foreseen.bands[kept.band].clock if kept.band in foreseen.bands else 0,
        lines=tuple(lines),
        others_by_level={},
        overdue=tuple(overdue),
        stalled=tuple(stalled),
        waiting=sum(
            flow.waiting
            for state in customer_states
            if not state.paused
            for flow in state.flows.values()
            if kind_of(flow.band) == kind
        ),
    )


def _running(documents: Iterable[Kept]) -> tuple[RunningDocument, ...]:
    running = (
        RunningDocument(d.worker or "", d.claimed_at or 0, d.customer, d.leased)
        for d in documents
        if d.state is State.RUNNING
    )
    return tuple(sorted(running))


def _attempts(documents: Iterable[Kept], kind: int, kind_name: str) -> tuple[AttemptSample, ...]:
    """Return the latest ended attempts of a kind, in the order of their claims: the last one of
    each document, and those that ended a step."""
    found: list[tuple[int, int, int, AttemptSample]] = []
    for d in documents:
        for step in d.steps:
            if step.kind == kind_name:
                duration = max(0, step.ended_at_us - step.claimed_at_us)
                sample = AttemptSample(d.customer, duration)
                found.append((step.claimed_at_us, d.number, step.step, sample))
        if d.kind != kind or d.claimed_at is None or d.state in TRANSITIONS[State.WAITING]:
            continue
        if d.step and not d.attempts:
            continue  # its last attempt was one of the step before
        took = None if d.ended_at is None else max(0, d.ended_at - d.claimed_at)
        found.append((d.claimed_at, d.number, d.step, AttemptSample(d.customer, took)))
    return tuple(sample for *_, sample in sorted(found)[-ATTEMPTS_MAX:])


def _arrivals(documents: Iterable[Kept], kind: int, mode: Mode) -> tuple[Arrival, ...]:
    """Return the documents of a kind among the newest of all kinds."""
    newest = sorted(documents, key=lambda d: -d.number)[:ARRIVALS_MAX]
    return tuple(
        Arrival(d.submitted_at, d.customer, level_of(d.priority, mode))
        for d in newest
        if d.kind == kind
    )


def _served(kept: Kept, since: int, documents: Iterable[Kept]) -> ServedCounts | None:
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
            complete = False  # an earlier attempt may have started in this time too
    return ServedCounts(served, complete)
