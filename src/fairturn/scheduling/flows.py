"""The data of the scheduler: bands, flows, customer states, and the events that change them. Pure
values.

A band is one level of one kind of work. A flow is one customer in one band. In mode `equal` every
kind has only level 1. All virtual quantities are integers: a document of cost 1 is 1,000,000, a
weight of 1 is 1000.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from fairturn.priority import LEVELS

COST_ONE = 1_000_000
DEFAULT_KIND = 0  # kinds are numbered; the store knows their names
BANDS_PER_KIND = 10
WEIGHT_ONE = 1_000
WEIGHT_MIN, WEIGHT_MAX = 10, 100_000
PATIENCE_US = 120_000_000


class Mode(StrEnum):
    """The order of service."""

    LEVELS = "levels"  # priority, then order of submission
    FAIR = "fair"  # priority; inside a level customers take turns
    EQUAL = "equal"  # all customers take turns in one level


class Costs(StrEnum):
    """The cost that a document is charged when customers take turns."""

    EQUAL = "equal"  # 1
    KNOWN = "known"  # the submitted cost, 1 by default
    LEARNED = "learned"  # the mean of the customer's last of the kind, corrected on completion


def band_of(level: int, kind: int = DEFAULT_KIND) -> int:
    """Return the number of a band. Bands of one kind are ordered by level; in the default kind, the
    band is the level."""
    return kind * BANDS_PER_KIND + level


def kind_of(band: int) -> int:
    return band // BANDS_PER_KIND


def level_in(band: int) -> int:
    return band % BANDS_PER_KIND


class FlowMismatch(Exception):
    """A stored flow does not agree with the documents. The store repairs it and claims again."""

    def __init__(self, customer: int) -> None:
        super().__init__(f"the flows of customer number {customer} do not agree with its documents")
        self.customer = customer


# ── Events since the last claim ──────────────────────────────────────────────────────────────────


class ArrivalEvent(NamedTuple):
    """`n` documents began to wait in one flow; the lowest of their orders is `order`."""

    customer: int
    band: int
    order: int
    n: int


class CancelEvent(NamedTuple):
    """A waiting document was cancelled; `next_order` was the lowest order of its flow then."""

    customer: int
    band: int
    order: int
    next_order: int | None


class EndEvent(NamedTuple):
    """`n` running documents of one flow ended."""

    customer: int
    band: int
    n: int


class CompletionEvent(NamedTuple):
    """A document completed while costs are learned. A turn for the longest waiting has no cost."""

    customer: int
    band: int
    cost: int | None
    weight: int | None
    real_cost: int


class RequeueEvent(NamedTuple):
    """A running document waits again: its lease expired (no refund) or it was released."""

    customer: int
    band: int
    order: int
    refund: int


class SettingsEvent(NamedTuple):
    """A customer's settings changed."""

    customer: int
    weight: int
    limit: int | None
    paused: bool


class PurgeEvent(NamedTuple):
    """All documents of a customer were deleted."""

    customer: int


class RunningEvent(NamedTuple):
    """`n` documents of one flow are already running; for flows that are rebuilt."""

    customer: int
    band: int
    n: int


class RunningCountsEvent(NamedTuple):
    """The running documents of a customer by band. A store that counts them only for customers
    with a limit records this event before it sets the first limit."""

    customer: int
    running: Mapping[int, int]


Event = (
    ArrivalEvent
    | CancelEvent
    | EndEvent
    | CompletionEvent
    | RequeueEvent
    | SettingsEvent
    | PurgeEvent
    | RunningEvent
    | RunningCountsEvent
)


class EventBatch(NamedTuple):
    """Events of one transaction."""

    at: int
    events: tuple[Event, ...]


# ── The state ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class Flow:
    """One customer in one band, as of the last fold or pick."""

    customer: int
    band: int
    virtual_time: int = 0
    tick: int = 0
    waiting: int = 0
    running: int = 0
    head_order: int | None = None
    active: bool = False
    entry: "TurnEntry | None" = None  # its current entry in the heap of turns


@dataclass(slots=True, eq=False)
class Head:
    """A customer's oldest waiting document of one kind. It has been the head since `since`."""

    order: int | None = None
    since: int = 0
    recent_costs: tuple[int, ...] = ()  # of the customer's last documents of this kind
    entry: "HeadEntry | None" = None  # its current entry in the heap of heads
    elsewhere: int | None = None  # the lowest order in flows that are not loaded
    rest: int = 0  # lower bound of the orders in all flows but that of the head


@dataclass(slots=True, eq=False)
class CustomerState:
    """A customer with its flows.

    Of a customer that is neither limited nor paused, flows are loaded kind by kind. Those of a kind
    may be only the flow of its next turn there, if that contains the head of the kind.
    """

    customer: int
    weight: int = WEIGHT_ONE
    limit: int | None = None
    paused: bool = False
    flows: dict[int, Flow] = field(default_factory=dict)  # by band
    heads: dict[int, Head] = field(default_factory=dict)  # by kind
    running: int = 0  # in the flows that are loaded
    whole: bool = True  # whether all flows are loaded
    kinds: tuple[int, ...] = ()  # otherwise, of which kinds all are

    def flows_of(self, kind: int) -> list[Flow]:
        """Return the loaded flows of a kind. The time does not grow with those of other kinds."""
        flows, first = self.flows, kind * BANDS_PER_KIND
        if len(flows) < LEVELS:
            return [flow for flow in flows.values() if 0 < flow.band - first <= LEVELS]
        return [flows[band] for band in range(first + 1, first + 1 + LEVELS) if band in flows]

    def is_whole(self, kind: int) -> bool:
        """Whether all flows of a kind are loaded."""
        return self.whole or kind in self.kinds

    def has_head(self, kind: int) -> bool:
        """Whether the head of a kind is loaded, if the customer has one."""
        head = self.heads.get(kind)
        return self.is_whole(kind) or (head is not None and head.order is not None)

    @property
    def held(self) -> bool:
        """Whether the customer is paused or at its limit of running documents."""
        return self.paused or (self.limit is not None and self.running >= self.limit)

    @property
    def is_plain(self) -> bool:
        """Whether the customer has the default settings and has learned no costs."""
        return (
            self.weight == WEIGHT_ONE
            and self.limit is None
            and not self.paused
            and not any(head.recent_costs for head in self.heads.values())
        )

    def head(self, kind: int = DEFAULT_KIND) -> Head:
        """Return the customer's head of a kind; an empty one if it has never had any."""
        head = self.heads.get(kind)
        if head is None:
            head = self.heads[kind] = Head()
        return head


@dataclass(slots=True)
class Band:
    """The clock of a band, and when its kind had its last turn among the kinds of its level."""

    clock: int = 0
    weight: int = 0  # the sum over its active flows
    kind_time: int = 0
    last_claim: int = 0  # the number of the last claim that was this kind's turn


# Entries contain the numbers of customers, not references: without reference cycles, a dropped
# engine of up to 100,000 objects is freed without a garbage collection.

# (band, virtual time or lowest order, tick, customer).
TurnEntry = tuple[int, int, int, int]
# (head_since, head_order, customer), or a lower bound of it.
HeadEntry = tuple[int, int, int]


class Pick(NamedTuple):
    """One claim: the head of a flow, and what the flow was charged.

    A turn for the longest waiting is not charged; its cost and weight are None."""

    customer: int
    band: int
    order: int
    cost: int | None
    weight: int | None
    charge: int


class FlowSource(Protocol):
    """Stored flows and documents, as `Turns` reads them. A source without stored state yields no
    turns and no heads: events load every customer."""

    def customer_state(self, customer: int) -> CustomerState:
        """Return the customer as of the last claim, with all its flows or not `whole`."""
        ...

    def flows(self, customer: int, kind: int | None) -> Iterable[tuple[Flow, int | None]]:
        """Return the flows of a kind, as of the last claim, of a customer that is not loaded
        `whole`; all its flows if `kind` is None. Each comes with the time since which its head has
        been the customer's head of the kind, or None."""
        ...

    def flow(self, customer: int, band: int) -> Flow:
        """Return a flow that was not among those of the customer."""
        ...

    def turns(self, kind: int) -> Iterator[TurnEntry]:
        """Yield the entries of the stored active flows of a kind in ascending order.

        The iterator is consumed lazily, while loaded flows change; other flows must not."""
        ...

    def heads(self, kind: int) -> Iterator[HeadEntry]:
        """Yield the heads of a kind of the stored customers that are not held, in ascending
        order."""
        ...

    def order_after(self, flow: Flow, order: int) -> int | None:
        """Return the lowest order above `order` that waits in the flow."""
        ...

    def cost(self, flow: Flow) -> int | None:
        """Return the submitted cost of the flow's head, if any."""
        ...


class Backlog:
    """A `FlowSource` in memory: waiting orders of each flow, and their costs."""

    def __init__(self) -> None:
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._costs: dict[int, int] = {}
        self._cancelled: set[int] = set()  # orders that are still inside a heap

    def add(self, customer: int, band: int, order: int, cost: int | None = None) -> None:
        if order in self._cancelled:  # it is still inside the heap of this flow
            self._cancelled.remove(order)
        else:
            heappush(self._orders.setdefault((customer, band), []), order)
        if cost is not None:
            self._costs[order] = cost

    def discard(self, customer: int, band: int, order: int) -> int | None:
        """Remove a cancelled document and return the lowest order left in its flow."""
        self._cancelled.add(order)
        return self._lowest(self._orders[customer, band])

    def clear(self) -> None:
        self._orders.clear()
        self._costs.clear()
        self._cancelled.clear()

    def _lowest(self, orders: list[int]) -> int | None:
        while orders and orders[0] in self._cancelled:
            self._cancelled.remove(orders[0])
            self._costs.pop(heappop(orders), None)
        return orders[0] if orders else None

    def customer_state(self, customer: int) -> CustomerState:
        return CustomerState(customer)

    def flows(self, customer: int, kind: int | None) -> Iterable[tuple[Flow, int | None]]:
        return ()

    def flow(self, customer: int, band: int) -> Flow:
        return Flow(customer, band)

    def turns(self, kind: int) -> Iterator[TurnEntry]:
        return iter(())

    def heads(self, kind: int) -> Iterator[HeadEntry]:
        return iter(())

    def order_after(self, flow: Flow, order: int) -> int | None:
        orders = self._orders[flow.customer, flow.band]
        while orders and orders[0] <= order:
            self._costs.pop(heappop(orders), None)
        return self._lowest(orders)

    def cost(self, flow: Flow) -> int | None:
        assert flow.head_order is not None
        return self._costs.get(flow.head_order)
