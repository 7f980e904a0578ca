"""What an explanation is made from: a document and what stands around it, from one snapshot.

A store fills these values in, with everything folded in that the next claim would fold in first;
`position/`, `forecast.py` and `analysis.py` read nothing else. Customers are numbers here, because
whoever reads an explanation may not be meant to know their names.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from fairturn.model import CustomerSettings, Document, Settings
from fairturn.priority import Count
from fairturn.scheduling.flows import COST_ONE, Costs, Mode, Standing

# So many of each are enough for a forecast, and few enough to be read in a moment.
ATTEMPTS_MAX = 128
ARRIVALS_MAX = 512
WORKERS_MAX = 1_000
# How far around a document that was claimed the others are looked for that were served meanwhile.
NEIGHBOURS_MAX = 2_000
# The interval of a worker's heartbeats. A worker whose last one is older than ALIVE_US is gone.
SIGN_ON_EVERY_US = 5_000_000
ALIVE_US = 3 * SIGN_ON_EVERY_US
WORKERS_KEPT_US = 24 * 3_600 * 1_000_000


class Line(NamedTuple):
    """Documents of one customer that wait in one level, and the turn that they have."""

    level: int
    virtual_time: int
    tick: int
    customer: int
    waiting: int  # in mode `levels`, in the document's own level: only those before it
    charge: int  # what one turn costs; 0 in mode `levels`, where there are no turns
    room: int | None = None  # how many more of the customer may run; None: no limit


class Front(NamedTuple):
    """The oldest document of a customer whose patience has run out."""

    since: int
    order: int
    customer: int
    level: int


class Between(NamedTuple):
    """A number that is known exactly, or only between two bounds."""

    least: int
    most: int

    @property
    def exact(self) -> bool:
        return self.least == self.most


class Crowd(NamedTuple):
    """The other lines of a level together, where they are too many to read one by one."""

    lines: int
    waiting: int  # documents in them
    before: Mapping[int, int]  # of these, before a document with that rank in its own line
    customers: int  # with any before the document
    largest: Mapping[int, int]  # those with most of them, by customer
    fronts: int  # customers beyond their patience, in every level
    fronts_ahead: int  # of these, with an older document than the document's own customer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineup:
    """All that decides when a waiting document has its turn."""

    customer: int
    level: int
    rank: Between  # documents of its own line that come before it
    number: int  # of the last claim
    clock: int  # of its level: where newcomers start
    lines: tuple[Line, ...]  # of its level, and of those better levels where it matters whose
    own: Line | None = field(init=False, compare=False)  # its own; None while it is paused
    crowds: Mapping[int, int]  # in better levels: documents of all other lines
    fronts: tuple[Front, ...]  # in every level, in their order, but for those of the crowd
    stalled: tuple[Front, ...]  # the same of customers at their limit: until something ends
    waiting: int  # documents in the whole queue, itself included, of customers who are not paused
    uncounted: int = 0  # more documents that may be before it; where there were too many to count
    folded: bool = True  # whether all that was recorded could be folded in
    crowd: Crowd | None = None  # the lines of its level that are not among `lines`

    def __post_init__(self) -> None:
        place = (self.customer, self.level)
        own = next((line for line in self.lines if (line[3], line[0]) == place), None)
        object.__setattr__(self, "own", own)

    @property
    def lines_in_level(self) -> int:
        """How many customers have documents in its level."""
        known = sum(line.level == self.level for line in self.lines)
        return known + (0 if self.crowd is None else self.crowd.lines)

    @property
    def beyond_patience(self) -> int:
        """How many customers wait for a turn for the longest waiting."""
        return len(self.fronts) + (0 if self.crowd is None else self.crowd.fronts)


class Working(NamedTuple):
    """A document that runs: by whom, since when, whose, and whether its lease still holds."""

    worker: str
    claimed_at: int
    customer: int
    alive: bool


class Seen(NamedTuple):
    """A worker, its last heartbeat, and how many documents it runs at the same time."""

    worker: str
    seen_at: int
    slots: int


class Arrival(NamedTuple):
    """A document that was submitted lately."""

    at: int
    customer: int
    level: int


class Attempt(NamedTuple):
    """An attempt that ended lately: whose document it was, and how long it took. Of an attempt
    that is to be repeated that is not kept."""

    customer: int
    duration: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """How the queue is served: what runs, who works, how long it takes, how much comes in."""

    running: tuple[Working, ...]
    workers: tuple[Seen, ...]
    attempts: tuple[Attempt, ...]  # some that ended lately
    arrivals: tuple[Arrival, ...]  # the newest first


class Served(NamedTuple):
    """Documents claimed while another one waited, by customer. There may have been more, unless
    `complete`: only those submitted shortly before or after it are looked at, and of each of them
    only the last claim is known."""

    by_customer: Mapping[int, int]
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A document, its customer, and what stands around them, at one moment."""

    at: int
    settings: Settings
    document: Document
    parent_count: int | None  # of the document that made it, if that is kept
    customer: int
    customer_settings: CustomerSettings
    count: Count | None  # of the customer, as it is kept
    waiting: int  # documents of the customer
    running: int
    delayed: int
    leased: bool  # it runs, and its lease has not run out
    lineup: Lineup | None  # None: the next claim will not find it waiting
    service: Service
    served: Served | None  # only for a document that was claimed
    names: Mapping[int, str]  # of customers, as far as the answer may need them


def waiting_since(document: Document) -> int:
    """When a document that was claimed began to wait: it was submitted, or became due. Of several
    attempts nobody knows more than when the first wait began."""
    if document.due_at is None or document.attempts > 1:
        return document.submitted_at
    return max(document.submitted_at, document.due_at)


# ── For stores ───────────────────────────────────────────────────────────────────────────────────


def charge_of(settings: Settings, weight: int, recent_costs: tuple[int, ...]) -> int:
    """What the next turn of a customer costs, as far as that is known before a document is read."""
    if settings.mode is Mode.LEVELS:
        return 0
    cost, costs = COST_ONE, settings.costs
    if costs is Costs.LEARNED and recent_costs:
        cost = sum(recent_costs) // len(recent_costs)
    return max(1, cost * 1000 // weight)


def room_of(standing: Standing) -> int | None:
    """How many more documents of the customer may run; None if there is no limit."""
    return None if standing.limit is None else max(0, standing.limit - standing.running)


def lines_of(standing: Standing, settings: Settings) -> Iterator[Line]:
    """The lines of one customer, unless it is paused."""
    if standing.paused:
        return
    charge = charge_of(settings, standing.weight, standing.recent_costs)
    room = room_of(standing)
    for flow in standing.flows.values():
        if flow.waiting > 0:
            yield Line(
                flow.level,
                flow.virtual_time,
                flow.tick,
                flow.customer,
                flow.waiting,
                charge,
                room,
            )


def front_of(standing: Standing, settings: Settings, now: int) -> Front | None:
    """The customer's oldest document, if its patience has run out and it is not paused."""
    since, order = standing.head_since, standing.head_order
    if settings.mode is Mode.LEVELS or standing.paused or order is None:
        return None
    if now - since <= settings.patience_us:
        return None
    level = next(flow.level for flow in standing.flows.values() if flow.head_order == order)
    return Front(since, order, standing.customer, level)


def fronts_of(
    standings: Iterable[Standing], settings: Settings, now: int
) -> tuple[list[Front], list[Front]]:
    """Those of them that may have the next turn for the longest waiting, in their order; and those
    whose customers are at their limit."""
    fronts: list[Front] = []
    stalled: list[Front] = []
    for standing in standings:
        front = front_of(standing, settings, now)
        if front is not None:
            (stalled if standing.held else fronts).append(front)
    return sorted(fronts), sorted(stalled)


def told_apart(
    fronts: Iterable[Front], lines: Iterable[Line], customer: int, level: int
) -> Set[int]:
    """The levels whose lines are to be told apart: the document's own, and better ones in which it
    matters who comes when. That is where some oldest document may have its turn as such; where a
    customer with a limit has documents, and its oldest one in another level; or where its own
    customer has some, and the oldest one in its own level, which may be the document itself.

    Given are the lines of its own customer and of those with a limit."""
    at_front = {front.customer: front.level for front in fronts}
    levels = {level, *at_front.values()}
    for line in lines:
        at = at_front.get(line.customer, line.level)
        if at != line.level and (
            line.room is not None or (line.customer == customer and at == level)
        ):
            levels.add(line.level)
    return {each for each in levels if each <= level}
