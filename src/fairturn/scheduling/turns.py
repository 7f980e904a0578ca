"""The order of service: which waiting document a free worker gets. Pure.

A flow is one customer in one level (in mode `equal`: one customer). Flows carry virtual time, and
each level a clock; the flow that is furthest behind has the next turn. Nothing here reads a
database or the time: a store hands in a `Shelf` to read from and the events since the last claim,
and writes back what `Turns` has touched. The simulator does the same on a simulated clock.

All virtual quantities are integers: a document of cost 1 is 1,000,000, a weight of 1 is 1000.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from fairturn.priority import LEVELS
from fairturn.scheduling.flows import (
    COST_ONE,
    PATIENCE_US,
    Arrived,
    Changed,
    Costs,
    Counted,
    Ended,
    Event,
    Finished,
    Flow,
    FlowMismatch,
    Head,
    Left,
    Mode,
    Pick,
    Place,
    Purged,
    Recorded,
    Resumed,
    Returned,
    Shelf,
    Standing,
)

PATIENCE_EVERY = 10
COSTS_LEARNED_FROM = 20
_HEAP_SLACK = 1_024
_ENDLESS = 1 << 63  # after every order
# It makes a named tuple in a third of the time that its own constructor takes.
_new_pick: Callable[[type[Pick], tuple[int | None, ...]], Pick] = tuple.__new__

Entry = TypeVar("Entry", bound=tuple[int, ...])


class _Stream(Generic[Entry]):
    """Stored entries in order, read only when and as far as they are needed."""

    __slots__ = ("_entries", "_first", "_read", "ended")

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries
        self._first: Entry | None = None
        self._read = False
        self.ended = False  # nothing is left

    def first_unless(
        self, loaded: Callable[[Entry], bool], up_to: tuple[int, ...] | None
    ) -> Entry | None:
        """The first entry that stands for something that is not loaded yet; or one after `up_to`,
        beyond which nobody wants to know."""
        if not self._read:
            self._read = True
            self._first = next(self._entries, None)
        while (
            self._first is not None
            and (up_to is None or self._first <= up_to)
            and loaded(self._first)
        ):
            self._first = next(self._entries, None)
        self.ended = self._first is None
        return self._first


class Turns:
    """The engine: events are folded in, then documents are picked one after the other."""

    def __init__(
        self,
        shelf: Shelf,
        *,
        mode: Mode = Mode.FAIR,
        costs: Costs = Costs.EQUAL,
        patience_us: int = PATIENCE_US,
        number: int = 0,
        tick: int = 0,
        clocks: Iterable[int] = (0,) * (LEVELS + 1),
        weights: Iterable[int] = (0,) * (LEVELS + 1),
    ) -> None:
        self.mode = mode
        self.costs = costs
        self.patience_us = patience_us
        self.number = number  # of the last claim
        self.tick = tick  # of the last activation
        self.clocks = list(clocks)  # of each level
        self.weights = list(weights)  # the sum over each level's active flows
        self.standings: dict[int, Standing] = {}  # what was loaded
        self.touched: set[Flow] = set()  # the flows that changed
        self.adjusted: set[int] = set()  # the customers whose settings or costs changed
        self._taken_back: dict[Flow, int] = {}  # in this fold: the lowest order of each flow
        self._came: dict[Flow, list[int]] | None = None  # a heap of each, if anything was cancelled
        self._left: set[int] = set()  # orders that were cancelled, in this fold
        self._shelf = shelf
        self._places: list[Place] = []
        self._heads: list[Head] = []
        self._stored_places = _Stream(shelf.turns())
        self._stored_heads = _Stream(shelf.heads())

    # ── Folding in ───────────────────────────────────────────────────────────────────────────────

    def fold(
        self,
        now: int,
        *,
        expired: Iterable[Event] = (),
        recorded: Iterable[Recorded] = (),
        due: Iterable[tuple[int, Arrived]] = (),
    ) -> None:
        """Fold in what happened since the last claim, in the order that every store keeps:
        leases that ran out, what was recorded, documents that became due."""
        for event in expired:
            self.apply(event, now)
            if type(event) is Returned:
                flow = self.standings[event.customer].flows[event.level]
                self._taken_back[flow] = min(event.order, self._taken_back.get(flow, event.order))
        told = list(recorded)
        if any(type(event) is Left for _, events in told for event in events):
            self._came = {}
        for at, events in told:
            for event in events:
                self.apply(event, at)
        self._taken_back.clear()
        self._came = None
        self._left.clear()
        for at, arrived in due:
            self.apply(arrived, at)

    def apply(self, event: Event, at: int) -> None:
        """Fold in one event."""
        standing = self.standings.get(event.customer) or self._load(event.customer)
        was_held = standing.held
        if type(event) is Arrived:
            flow = self._arrive(standing, event.level, event.order, event.n)
            if self._came is not None:
                heappush(self._came.setdefault(flow, []), event.order)
            if flow.active and flow.head_order != event.order:
                self.touched.add(flow)
                return  # the usual case: one more at the end of a line
            head = standing.head_order
            if head is not None and head < event.order:  # which stays the customer's head
                if not was_held:
                    if not flow.active:
                        self._activate(flow, standing.weight)
                    self._place(flow)
                standing.rest = min(standing.rest, event.order)
                self.touched.add(flow)
                return
        elif type(event) is Ended:
            flow = self._flow(standing, event.level)
            flow.running -= event.n
            standing.running -= event.n
            if standing.limit is None:
                self.touched.add(flow)
                return
        else:
            self._apply(standing, event)
        if isinstance(event, Changed | Purged | Counted) or standing.held is not was_held:
            self.touched.update(standing.flows.values())
            self.adjusted.add(event.customer)
        else:
            self.touched.add(standing.flows[event.level])
        self._settle(standing, at)

    def _apply(self, standing: Standing, event: Event) -> None:
        if isinstance(event, Changed | Purged | Counted):
            self._complete(standing)
        match event:
            case Left():
                self._leave(self._flow(standing, event.level), event)
            case Resumed():
                flow = self._flow(standing, event.level)
                flow.running += event.n
                standing.running += event.n
            case Finished():
                self._finish(standing, event)
            case Returned():
                flow = self._flow(standing, event.level)
                flow.running -= 1
                standing.running -= 1
                flow.virtual_time -= event.refund
                self._arrive(standing, event.level, event.order, 1)
            case Counted():
                for level in event.running:
                    self._flow(standing, level)
                for flow in standing.flows.values():
                    flow.running = event.running.get(flow.level, 0)
                standing.running = sum(event.running.values())
            case Changed():
                self._change(standing, event)
            case Purged():
                for flow in standing.flows.values():
                    flow.waiting = flow.running = 0
                    flow.head_order = None
                standing.running = 0

    def _arrive(self, standing: Standing, level: int, order: int, n: int) -> Flow:
        flow = self._flow(standing, level)
        flow.waiting += n
        if flow.head_order is None or order < flow.head_order:
            flow.head_order = order
        return flow

    def _leave(self, flow: Flow, event: Left) -> None:
        flow.waiting -= 1
        came: list[int] = []
        if self._came is not None:
            self._left.add(event.order)
            came = self._came.get(flow, [])
            while came and came[0] in self._left:
                heappop(came)
        if flow.head_order == event.order:
            # Whoever cancelled could not know what this very fold has taken back, nor what was
            # submitted while it looked.
            following = (event.next_order, self._taken_back.get(flow), *came[:1])
            flow.head_order = min((o for o in following if o is not None), default=None)

    def _finish(self, standing: Standing, event: Finished) -> None:
        flow = self._flow(standing, event.level)
        flow.running -= 1
        standing.running -= 1
        standing.recent_costs = (*standing.recent_costs, event.real_cost)[-COSTS_LEARNED_FROM:]
        self.adjusted.add(standing.customer)
        if event.cost is None or event.weight is None:
            return
        # The clock is corrected with the flow: with costs below the estimate it would otherwise
        # run ahead of the work, and newcomers, who start at the clock, would starve.
        difference = event.real_cost - event.cost
        flow.virtual_time += difference * 1000 // event.weight
        if self.weights[event.level] > 0:
            self.clocks[event.level] += difference * 1000 // self.weights[event.level]

    def _change(self, standing: Standing, event: Changed) -> None:
        for flow in standing.flows.values():
            if flow.active:
                self.weights[flow.level] += event.weight - standing.weight
        standing.weight = event.weight
        standing.limit = event.limit
        standing.paused = event.paused

    def _settle(self, standing: Standing, at: int) -> None:
        """Bring activity, places and the head up to date after a change."""
        held = standing.held
        for flow in standing.flows.values():
            if flow.waiting > 0 and not held:
                if not flow.active:
                    self._activate(flow, standing.weight)
                self._place(flow)
            elif flow.active:
                self._deactivate(flow, standing.weight)
        self._move_head(standing, at)

    def _move_head(self, standing: Standing, at: int) -> None:
        """Find the customer's lowest waiting document; if it is another one, that is since now."""
        first: Flow | None = None
        head: int | None = None
        elsewhere = standing.elsewhere
        rest = _ENDLESS if elsewhere is None else elsewhere
        for flow in standing.flows.values():
            order = flow.head_order
            if order is not None:
                if head is None or order < head:
                    rest = rest if head is None else min(rest, head)
                    first, head = flow, order
                else:
                    rest = min(rest, order)
                if order == standing.head_order:
                    self.touched.add(flow)  # it may be the head no longer
        if elsewhere is not None and (head is None or elsewhere < head):
            self._complete(standing)
            self._move_head(standing, at)
            return
        standing.rest = rest
        if head != standing.head_order:
            standing.head_order = head
            standing.head_since = at
            if first is not None:
                self.touched.add(first)
        self._seat(standing)

    def _deactivate(self, flow: Flow, weight: int) -> None:
        flow.active = False
        flow.entry = None
        self.weights[flow.level] -= weight

    def _activate(self, flow: Flow, weight: int) -> None:
        flow.active = True
        self.weights[flow.level] += weight
        if self.mode is not Mode.LEVELS:
            # No credit from absence; work received beyond the clock still counts.
            flow.virtual_time = max(flow.virtual_time, self.clocks[flow.level])
            self.tick += 1
            flow.tick = self.tick

    # ── Picking ──────────────────────────────────────────────────────────────────────────────────

    def pick(self, now: int) -> Pick | None:
        """The next claim, or None if every waiting document is held."""
        number = self.number + 1
        turns = self.mode is not Mode.LEVELS
        patient = None
        if turns and number % PATIENCE_EVERY == 0:
            patient = self._longest_waiting(now)
        flow = patient or self._next_turn()
        if flow is None:
            return None
        self.number = number
        self.touched.add(flow)
        customer, level, order = flow.customer, flow.level, flow.head_order
        standing = self.standings[customer]
        if order is None or self.weights[level] < standing.weight:
            raise FlowMismatch(customer)

        cost: int | None = None
        weight: int | None = None
        charge = 0
        if turns and patient is None:
            weight = standing.weight
            cost = COST_ONE if self.costs is Costs.EQUAL else self._cost(standing, flow)
            charge = cost * 1000 // weight or 1
            begun = flow.virtual_time
            worked = self.clocks[level] + cost * 1000 // self.weights[level]
            self.clocks[level] = worked if worked > begun else begun
            flow.virtual_time = begun + charge

        flow.waiting = left = flow.waiting - 1
        flow.running += 1
        standing.running += 1
        flow.head_order = following = self._shelf.order_after(flow, order)
        if left == 0 or standing.limit is not None:
            if standing.held:
                self.touched.update(standing.flows.values())
            self._settle(standing, now)
        else:  # the usual case: nothing but the flow's place and the customer's head can change
            self._place(flow)
            if order == standing.head_order:
                if following is None or following >= standing.rest:
                    self._move_head(standing, now)
                else:  # the same, without a look at the other flows
                    standing.head_order, standing.head_since = following, now
                    self._seat(standing)
        return _new_pick(Pick, (customer, level, order, cost, weight, charge))

    def _cost(self, standing: Standing, flow: Flow) -> int:
        if self.costs is Costs.KNOWN:
            cost = self._shelf.cost(flow)
            return COST_ONE if cost is None else cost
        if self.costs is Costs.LEARNED and standing.recent_costs:
            return sum(standing.recent_costs) // len(standing.recent_costs)
        return COST_ONE

    def _next_turn(self) -> Flow | None:
        """The active flow with the smallest (level, virtual_time, tick)."""
        first = self._first_place()
        if first is not None and self._stored_places.ended:
            return first
        up_to = None if first is None else self._places[0]
        stored = self._stored_places.first_unless(self._has_flow, up_to)
        if stored is None or (first is not None and self._places[0] < stored):
            return first
        level, _, _, customer = stored
        standing = self.standings.get(customer) or self._load(customer)
        if level not in standing.flows:
            self._complete(standing)
        return standing.flows[level]

    def _has_flow(self, place: Place) -> bool:
        standing = self.standings.get(place[3])
        return standing is not None and (standing.whole or place[0] in standing.flows)

    def _has_customer(self, head: Head) -> bool:
        return head[2] in self.standings

    def _first_place(self) -> Flow | None:
        places, standings = self._places, self.standings
        while places:
            entry = places[0]
            flow = standings[entry[3]].flows[entry[0]]
            if flow.entry is entry:
                return flow
            heappop(places)
        return None

    def _longest_waiting(self, now: int) -> Flow | None:
        """The flow with the first document of the customer, not held, that waits longest: if that
        document has been its customer's oldest for more than the patience."""
        before = now - self.patience_us
        while True:
            first = self._first_head(before)
            stored = self._stored_heads.first_unless(self._has_customer, first or (before,))
            if stored is None or stored[0] >= before or (first is not None and first < stored):
                break
            self._load(stored[2])
        if first is None:
            return None
        flows = self.standings[first[2]].flows.values()
        return next(flow for flow in flows if flow.head_order == first[1])

    def front(self) -> Place | None:
        """Where the first turn is, among those that are loaded, or a place before it."""
        return self._places[0] if self._places else None

    def follow(self, customer: int) -> None:
        """Take a customer as it is now: somebody else has claimed, and left its flows like this.
        The number of the last claim, the tick, clocks and weights are handed over, too."""
        standing = self.standings.get(customer)
        if standing is None:
            self._load(customer)
            return
        standing.rest = 0
        for flow in standing.flows.values():
            if flow.active:
                self._place(flow)
            else:
                flow.entry = None
        self._seat(standing)

    # ── Places and heads: heaps whose outdated entries are dropped when they come up ─────────────

    def _load(self, customer: int) -> Standing:
        standing = self.standings[customer] = self._shelf.standing(customer)
        for flow in standing.flows.values():
            if flow.active:
                self._place(flow)
        self._seat(standing)
        return standing

    def _complete(self, standing: Standing) -> None:
        """Load the flows that were left out."""
        if standing.whole:
            return
        standing.rest = 0
        standing.whole, standing.elsewhere = True, None
        for flow in self._shelf.flows(standing.customer):
            if flow.level not in standing.flows:
                standing.flows[flow.level] = flow
                standing.running += flow.running
                if flow.active:
                    self._place(flow)

    def _flow(self, standing: Standing, level: int) -> Flow:
        flow = standing.flows.get(level)
        if flow is None:
            self._complete(standing)
            flow = standing.flows.get(level)
        if flow is None:
            flow = standing.flows[level] = self._shelf.flow(standing.customer, level)
        return flow

    def _place(self, flow: Flow) -> None:
        """Enter an active flow at its present place."""
        key = flow.head_order if self.mode is Mode.LEVELS else flow.virtual_time
        if key is None:
            raise FlowMismatch(flow.customer)
        old, places = flow.entry, self._places
        if old is not None and old[1] == key and old[2] == flow.tick:
            return
        entry = flow.entry = (flow.level, key, flow.tick, flow.customer)
        if places and places[0] is old:
            heapreplace(places, entry)
            return
        heappush(places, entry)
        if len(places) > 2 * LEVELS * len(self.standings) + _HEAP_SLACK:
            self._drop_outdated()

    def _seat(self, standing: Standing) -> None:
        """See that a customer with a head, not held, is among the heads.

        A head only moves on, as a rule, so that an older entry comes before the true one: it is
        put right when it comes up, and not with each of the customer's documents."""
        head, since, entry = standing.head_order, standing.head_since, standing.entry
        if head is None:
            return
        if entry is not None and (entry[0] < since or (entry[0] == since and entry[1] <= head)):
            return
        if self.mode is Mode.LEVELS or standing.held:
            return
        standing.entry = (since, head, standing.customer)
        heappush(self._heads, standing.entry)
        if len(self._heads) > 2 * len(self.standings) + _HEAP_SLACK:
            self._drop_outdated()

    def _first_head(self, before: int) -> Head | None:
        """The customer, not held, whose head comes first, if it is that since before a moment."""
        heads = self._heads
        while heads and heads[0][0] < before:
            entry = heads[0]
            standing = self.standings[entry[2]]
            head = standing.head_order
            if standing.entry is not entry:
                heappop(heads)
            elif head is None or standing.held:
                standing.entry = None
                heappop(heads)
            elif (entry[0], entry[1]) == (standing.head_since, head):
                return entry
            else:
                standing.entry = (standing.head_since, head, standing.customer)
                heapreplace(heads, standing.entry)
        return None

    def forgettable(self, flow: Flow) -> bool:
        """Whether dropping the flow changes nothing: idle, and not ahead of its level's clock.
        Where costs are learned nothing is, because corrections turn the clock back."""
        return (
            flow.waiting == 0
            and flow.running == 0
            and self.costs is not Costs.LEARNED
            and (self.mode is Mode.LEVELS or flow.virtual_time <= self.clocks[flow.level])
        )

    def forget(self) -> None:
        """Drop from memory what can be forgotten: for engines that live long, and whose owner
        writes nothing back."""
        for standing in list(self.standings.values()):
            for flow in list(standing.flows.values()):
                if self.forgettable(flow):
                    flow.entry = None
                    del standing.flows[flow.level]
            plain = Standing(standing.customer)
            if not standing.flows and (
                (standing.weight, standing.limit, standing.paused, standing.recent_costs)
                == (plain.weight, plain.limit, plain.paused, plain.recent_costs)
            ):
                standing.entry = None
                del self.standings[standing.customer]
        self.touched.clear()
        self.adjusted.clear()
        self._drop_outdated()

    def _drop_outdated(self) -> None:
        standings = self.standings.values()
        flows = (flow for standing in standings for flow in standing.flows.values())
        self._places = [flow.entry for flow in flows if flow.entry is not None]
        heapify(self._places)
        self._heads = [standing.entry for standing in standings if standing.entry is not None]
        heapify(self._heads)
