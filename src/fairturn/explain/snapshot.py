"""The input of explanations: a document and the queue around it, from one snapshot.

A store fills in these values after it has folded, in memory, the events that the next claim would
fold. `position/`, `forecast.py` and `analysis.py` read nothing else. Customers are numbers here,
because the reader of an explanation may not be allowed to see their names.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from fairturn.model import CustomerSettings, Document, KindSettings, ServiceOutage, Settings
from fairturn.priority import Count
from fairturn.scheduling.flows import (
    COST_ONE,
    DEFAULT_KIND,
    Costs,
    CustomerState,
    Mode,
    kind_of,
    level_in,
)

# Samples for a forecast: enough for an estimate, few enough to read in milliseconds.
ATTEMPTS_MAX = 128
ARRIVALS_MAX = 512
WORKERS_MAX = 1_000
# Documents before and after a claimed one that are searched for those served while it waited.
NEIGHBOURS_MAX = 2_000
# The interval of a worker's heartbeats. A worker whose last one is older than ALIVE_US is gone.
SIGN_ON_EVERY_US = 5_000_000
ALIVE_US = 3 * SIGN_ON_EVERY_US
WORKERS_KEPT_US = 24 * 3_600 * 1_000_000
PLAIN_KIND = KindSettings()


class WaitingLine(NamedTuple):
    """The waiting documents of one customer in one level, and their next turn."""

    level: int
    virtual_time: int
    tick: int
    customer: int
    waiting: int  # in mode `levels`, in the document's own level: only those ahead
    charge: int  # for one turn; 0 in mode `levels`, where there are no turns
    capacity: int | None = None  # how many more of the customer may run; None: no limit


class OverdueHead(NamedTuple):
    """The head of a customer that has waited longer than the patience."""

    since: int
    order: int
    customer: int
    level: int


class CountRange(NamedTuple):
    """A number that is known exactly, or a range."""

    least: int
    most: int

    @property
    def exact(self) -> bool:
        return self.least == self.most


class LineSummary(NamedTuple):
    """The other lines of a level in sum, where they are too many to read one by one."""

    lines: int
    waiting: int  # documents in them
    before: Mapping[int, int]  # of these, ahead of a document, by its rank in its own line
    customers: int  # with documents ahead
    largest: Mapping[int, int]  # the largest numbers of documents ahead, by customer
    overdue: int  # customers with an overdue head, in every level
    overdue_ahead: int  # of these, with an older head than the document's own customer


NO_OTHER_LINES = LineSummary(0, 0, {}, 0, {}, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The waiting documents and turns that decide the position of a document."""

    customer: int
    level: int
    rank: CountRange  # documents of its own line that are ahead
    number: int  # of the last claim
    clock: int  # of its level: where new customers start
    lines: tuple[WaitingLine, ...]  # of its level, and of the levels of `levels_by_line`
    own: WaitingLine | None = field(init=False, compare=False)  # None while the customer is paused
    others_by_level: Mapping[int, int]  # in better levels: documents of all other lines
    overdue: tuple[OverdueHead, ...]  # in every level, in order, without those of `other_lines`
    stalled: tuple[OverdueHead, ...]  # the same of customers at their limit
    waiting: int  # documents in the queue, itself included, of customers that are not paused
    uncounted: int = 0  # more documents that may be ahead, where there are too many to count
    folded: bool = True  # whether all events since the last claim could be folded
    other_lines: LineSummary = NO_OTHER_LINES  # the lines of its level that are not in `lines`

    def __post_init__(self) -> None:
        place = (self.customer, self.level)
        own = next((line for line in self.lines if (line[3], line[0]) == place), None)
        object.__setattr__(self, "own", own)

    @property
    def lines_in_level(self) -> int:
        """The number of customers with documents in its level."""
        return sum(line.level == self.level for line in self.lines) + self.other_lines.lines

    @property
    def beyond_patience(self) -> int:
        """The number of customers with an overdue head."""
        return len(self.overdue) + self.other_lines.overdue


class RunningDocument(NamedTuple):
    """A running document; `alive` is False if its lease has expired."""

    worker: str
    claimed_at: int
    customer: int
    alive: bool


class WorkerHeartbeat(NamedTuple):
    """A worker's last heartbeat."""

    worker: str
    seen_at: int
    slots: int
    kinds: tuple[str, ...] | None = None  # that it serves; None: every kind

    def serves(self, kind: str) -> bool:
        return self.kinds is None or kind in self.kinds


class Arrival(NamedTuple):
    """A recently submitted document."""

    at: int
    customer: int
    level: int


class AttemptSample(NamedTuple):
    """An attempt that ended recently."""

    customer: int
    duration: int | None  # None if the attempt failed and the document was retried


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueActivity:
    """Running documents, workers, recent attempts and recent arrivals."""

    running: tuple[RunningDocument, ...]
    workers: tuple[WorkerHeartbeat, ...]
    attempts: tuple[AttemptSample, ...]
    arrivals: tuple[Arrival, ...]  # newest first
    other_workers: int = 0  # live workers that do not serve the kind


class ServedCounts(NamedTuple):
    """Documents claimed while another one waited, by customer.

    A lower bound unless `complete`: only `NEIGHBOURS_MAX` documents before and after it are read,
    and only the last claim of each is stored."""

    by_customer: Mapping[int, int]
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSnapshot:
    """A document, its customer and the queue around them, at one instant."""

    at: int
    settings: Settings
    document: Document
    parent_count: int | None  # of its parent document, if that is still stored
    customer: int
    customer_settings: CustomerSettings
    count: Count | None  # of the customer, as stored
    waiting: int  # documents of the customer
    running: int
    delayed: int
    leased: bool  # it is running, and its lease has not expired
    queue_view: QueueView | None  # None if it will not be waiting after the next fold
    service: QueueActivity
    served: ServedCounts | None  # None for a document that was never claimed
    names: Mapping[int, str]  # of the customers that the explanation may name
    kind_settings: KindSettings = PLAIN_KIND  # of the document's kind
    kind_running: int = 0  # running documents of that kind
    outages: tuple[ServiceOutage, ...] = ()  # of the services that the kind needs

    @property
    def kind_is_held(self) -> bool:
        """Whether the kind is paused, or held by an outage."""
        return self.kind_settings.paused or any(o.resumed_at_us is None for o in self.outages)


def waiting_since(document: Document) -> int:
    """Return when a claimed document began to wait: when it was submitted or became due. After
    several attempts or steps, only the start of the first wait is known."""
    if document.due_at_us is None or document.attempts > 1 or document.step:
        return document.submitted_at_us
    return max(document.submitted_at_us, document.due_at_us)


# ── For stores ───────────────────────────────────────────────────────────────────────────────────


def charge_of(settings: Settings, weight: int, recent_costs: tuple[int, ...]) -> int:
    """Return the expected charge for a customer's next turn, without reading a document."""
    if settings.mode is Mode.LEVELS:
        return 0
    cost = COST_ONE
    if settings.costs is Costs.LEARNED and recent_costs:
        cost = sum(recent_costs) // len(recent_costs)
    return max(1, cost * 1000 // weight)


def lines_of(
    state: CustomerState, settings: Settings, kind: int = DEFAULT_KIND
) -> Iterator[WaitingLine]:
    """Yield the lines of a customer in one kind, none if it is paused."""
    if state.paused:
        return
    charge = charge_of(settings, state.weight, state.head(kind).recent_costs)
    capacity = None if state.limit is None else max(0, state.limit - state.running)
    for flow in state.flows.values():
        if flow.waiting > 0 and kind_of(flow.band) == kind:
            turn = (level_in(flow.band), flow.virtual_time, flow.tick, flow.customer)
            yield WaitingLine(*turn, flow.waiting, charge, capacity)


def overdue_heads(
    states: Iterable[CustomerState], settings: Settings, now: int, kind: int = DEFAULT_KIND
) -> tuple[list[OverdueHead], list[OverdueHead]]:
    """Return the overdue heads in one kind of customers that are not paused, in the order of their
    turns: of customers that are not held, and of customers at their limit."""
    overdue: list[OverdueHead] = []
    stalled: list[OverdueHead] = []
    for state in () if settings.mode is Mode.LEVELS else states:
        since, order = state.head(kind).since, state.head(kind).order
        if state.paused or order is None or now - since <= settings.patience_us:
            continue
        band = next(flow.band for flow in state.flows.values() if flow.head_order == order)
        head = OverdueHead(since, order, state.customer, level_in(band))
        (stalled if state.held else overdue).append(head)
    return sorted(overdue), sorted(stalled)


def levels_by_line(
    overdue: Iterable[OverdueHead], lines: Iterable[WaitingLine], customer: int, level: int
) -> Set[int]:
    """Return the levels whose lines are needed one by one: the document's own, and better levels
    - with an overdue head;
    - with documents of a limited customer whose overdue head is in another level;
    - with documents of its own customer, if that has an overdue head in the document's level,
      which may be the document itself.

    `lines` are those of its own customer and of customers with a limit."""
    overdue_levels = {head.customer: head.level for head in overdue}
    levels = {level, *overdue_levels.values()}
    for line in lines:
        at = overdue_levels.get(line.customer, line.level)
        if at != line.level and (
            line.capacity is not None or (line.customer == customer and at == level)
        ):
            levels.add(line.level)
    return {each for each in levels if each <= level}
