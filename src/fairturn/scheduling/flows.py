"""What the order of service works on: flows, standings, and what happens to them. Pure values.

A flow is one customer in one level (in mode `equal`: one customer). All virtual quantities are
integers: a document of cost 1 is 1,000,000, a weight of 1 is 1000. `turns.py` decides over them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

COST_ONE = 1_000_000
WEIGHT_ONE = 1_000
WEIGHT_MIN, WEIGHT_MAX = 10, 100_000
PATIENCE_US = 120_000_000


class Mode(StrEnum):
    """What decides the order."""

    LEVELS = "levels"  # priority, then order of submission, and nothing else
    FAIR = "fair"  # levels first; inside a level customers take turns
    EQUAL = "equal"  # everybody in one level


class Costs(StrEnum):
    """What a document counts for when turns are divided."""

    EQUAL = "equal"  # every document costs 1
    KNOWN = "known"  # what the submitter said, 1 if nothing
    LEARNED = "learned"  # the mean of the customer's last finished documents, corrected at the end


class FlowMismatch(Exception):
    """A stored flow does not agree with the documents: the store repairs it, and claims again."""

    def __init__(self, customer: int) -> None:
        super().__init__(f"the flows of customer number {customer} do not agree with its documents")
        self.customer = customer


# ── What happened since the last claim, as values ────────────────────────────────────────────────


class Arrived(NamedTuple):
    """`n` documents began to wait in one flow; the lowest of their orders is `order`."""

    customer: int
    level: int
    order: int
    n: int


class Left(NamedTuple):
    """A waiting document was cancelled; `next_order` is what was the flow's lowest after that."""

    customer: int
    level: int
    order: int
    next_order: int | None


class Ended(NamedTuple):
    """`n` running documents of one flow are no longer running."""

    customer: int
    level: int
    n: int


class Finished(NamedTuple):
    """One finished where costs are learned. Without a cost, it had a turn as longest waiting."""

    customer: int
    level: int
    cost: int | None
    weight: int | None
    real_cost: int


class Returned(NamedTuple):
    """A running document waits again: its lease ran out (no refund) or it was released."""

    customer: int
    level: int
    order: int
    refund: int


class Changed(NamedTuple):
    """A customer's settings changed."""

    customer: int
    weight: int
    limit: int | None
    paused: bool


class Purged(NamedTuple):
    """Everything of a customer is gone."""

    customer: int


class Resumed(NamedTuple):
    """`n` documents of one flow are running already: for flows that are built anew."""

    customer: int
    level: int
    n: int


class Counted(NamedTuple):
    """How many documents of a customer run in each level: for stores that keep this number only
    for customers with a limit, before a customer gets one."""

    customer: int
    running: Mapping[int, int]


Event = Arrived | Left | Ended | Finished | Returned | Changed | Purged | Resumed | Counted


class Recorded(NamedTuple):
    """Events that were recorded together, at one moment."""

    at: int
    events: tuple[Event, ...]


# ── The state ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class Flow:
    """One customer in one level, as the claims have seen it so far."""

    customer: int
    level: int
    virtual_time: int = 0
    tick: int = 0
    waiting: int = 0
    running: int = 0
    head_order: int | None = None
    active: bool = False
    entry: "Place | None" = None  # what stands for it among the places


@dataclass(slots=True, eq=False)
class Standing:
    """A customer with its flows. `head_since`: when its lowest waiting document became that.

    One without a limit and not paused may be loaded with the flow that has its turn alone, if its
    head is there. Then it is not `whole`, and `elsewhere` is the lowest order in its other flows.
    """

    customer: int
    weight: int = WEIGHT_ONE
    limit: int | None = None
    paused: bool = False
    flows: dict[int, Flow] = field(default_factory=dict)
    head_order: int | None = None
    head_since: int = 0
    recent_costs: tuple[int, ...] = ()
    running: int = 0
    entry: "Head | None" = None  # what stands for it among the heads
    whole: bool = True
    elsewhere: int | None = None
    rest: int = 0  # no flow but that of the head has a document before this order

    @property
    def held(self) -> bool:
        """Paused, or at its limit of running documents."""
        return self.paused or (self.limit is not None and self.running >= self.limit)


# Entries name flows and customers and do not hold them: an engine that is dropped is gone at once,
# without a search for cycles among what may be 100,000 objects.

# (level, virtual time or lowest order, tick, customer).
Place = tuple[int, int, int, int]
# (head_since, head_order, customer), or something that comes before that.
Head = tuple[int, int, int]


class Pick(NamedTuple):
    """One claim: the flow's lowest document, and what it was charged.

    A turn for the longest waiting charges nothing, so that its cost and weight are None."""

    customer: int
    level: int
    order: int
    cost: int | None
    weight: int | None
    charge: int


class Shelf(Protocol):
    """What `Turns` reads while it works. A store that keeps all in memory yields no turns or heads
    of its own: there every customer is loaded already."""

    def standing(self, customer: int) -> Standing:
        """The customer as the last claim left it, with all its flows or not `whole`."""
        ...

    def flows(self, customer: int) -> Iterable[Flow]:
        """All flows of a customer that was not loaded as a whole, as the last claim left them."""
        ...

    def flow(self, customer: int, level: int) -> Flow:
        """A flow that the customer did not have when it was read."""
        ...

    def turns(self) -> Iterator[tuple[int, int, int, int]]:
        """(level, place, tick, customer) of the stored active flows, in that order.

        It is read on and on, while what was loaded changes; whoever is not loaded stays."""
        ...

    def heads(self) -> Iterator[tuple[int, int, int]]:
        """(head_since, head_order, customer) of the stored customers not held, in that order; or
        something before that, as long as it is in order too."""
        ...

    def order_after(self, flow: Flow, order: int) -> int | None:
        """The lowest order above `order` that waits in the flow."""
        ...

    def cost(self, flow: Flow) -> int | None:
        """What the submitter said that the flow's first document costs."""
        ...


class Backlog:
    """A `Shelf` that keeps everything in memory: waiting orders and their costs, per flow."""

    def __init__(self) -> None:
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._costs: dict[int, int] = {}
        self._gone: set[int] = set()  # cancelled, and still somewhere inside a heap

    def add(self, customer: int, level: int, order: int, cost: int | None = None) -> None:
        """A document waits."""
        heappush(self._orders.setdefault((customer, level), []), order)
        if cost is not None:
            self._costs[order] = cost

    def discard(self, customer: int, level: int, order: int) -> int | None:
        """A document was cancelled for good. Answers with the lowest order that is left."""
        self._gone.add(order)
        return self._lowest(self._orders[customer, level])

    def clear(self) -> None:
        """Nothing waits any more."""
        self._orders.clear()
        self._costs.clear()
        self._gone.clear()

    def _lowest(self, orders: list[int]) -> int | None:
        while orders and orders[0] in self._gone:
            self._gone.remove(orders[0])
            self._costs.pop(heappop(orders), None)
        return orders[0] if orders else None

    def standing(self, customer: int) -> Standing:
        return Standing(customer)

    def flows(self, customer: int) -> Iterable[Flow]:
        return ()

    def flow(self, customer: int, level: int) -> Flow:
        return Flow(customer, level)

    def turns(self) -> Iterator[tuple[int, int, int, int]]:
        return iter(())

    def heads(self) -> Iterator[tuple[int, int, int]]:
        return iter(())

    def order_after(self, flow: Flow, order: int) -> int | None:
        orders = self._orders[flow.customer, flow.level]
        while orders and orders[0] <= order:
            self._costs.pop(heappop(orders), None)
        return self._lowest(orders)

    def cost(self, flow: Flow) -> int | None:
        assert flow.head_order is not None
        return self._costs.get(flow.head_order)
