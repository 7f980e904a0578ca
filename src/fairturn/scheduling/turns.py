"""The order of service: which waiting document is claimed next. Pure.

Each flow has a virtual time and each level a clock; the active flow with the lowest virtual time
has the next turn. A store passes a `FlowSource` and the events since the last claim, and writes
back the flows that `Turns` has touched. The simulator does the same on a simulated clock.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from fairturn.priority import LEVELS
from fairturn.scheduling.flows import (
    COST_ONE,
    PATIENCE_US,
    ArrivalEvent,
    CancelEvent,
    CompletionEvent,
    Costs,
    CustomerState,
    EndEvent,
    Event,
    EventBatch,
    Flow,
    FlowMismatch,
    FlowSource,
    HeadEntry,
    Mode,
    Pick,
    PurgeEvent,
    RequeueEvent,
    RunningCountsEvent,
    RunningEvent,
    SettingsEvent,
    TurnEntry,
)

PATIENCE_EVERY = 10
COSTS_LEARNED_FROM = 20
_HEAP_SLACK = 1_024
_ENDLESS = 1 << 63  # above every order
# Creates a named tuple in a third of the time of its constructor.
_new_pick: Callable[[type[Pick], tuple[int | None, ...]], Pick] = tuple.__new__

Entry = TypeVar("Entry", bound=tuple[int, ...])


class _Stream(Generic[Entry]):
    """Stored entries in ascending order, read lazily."""

    __slots__ = ("_entries", "_first", "_read", "ended")

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries
        self._first: Entry | None = None
        self._read = False
        self.ended = False

    def first_unless(
        self, loaded: Callable[[Entry], bool], up_to: tuple[int, ...] | None
    ) -> Entry | None:
        """Return the first entry that is not loaded. The search stops at an entry after `up_to`,
        which may be loaded."""
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
    """The scheduler: folds events, then picks documents one by one.

    It has more than 15 attributes and 20 methods because folds and picks change the same flows,
    clocks and heaps, on the hottest path of the package."""

    def __init__(
        self,
        source: FlowSource,
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
        self.clocks = list(clocks)  # by level
        self.weights = list(weights)  # by level, the sum over active flows
        self.customers: dict[int, CustomerState] = {}  # loaded customers
        self.touched: set[Flow] = set()  # flows that changed
        self.adjusted: set[int] = set()  # customers whose settings or costs changed
        # Of the present fold: lowest requeued order of each flow; arrived orders of each flow, a
        # heap, if a document was cancelled; cancelled orders.
        self._requeued: dict[Flow, int] = {}
        self._arrived: dict[Flow, list[int]] | None = None
        self._cancelled: set[int] = set()
        self._source = source
        self._turn_heap: list[TurnEntry] = []
        self._head_heap: list[HeadEntry] = []
        self._stored_turns = _Stream(source.turns())
        self._stored_heads = _Stream(source.heads())

    # ── Fold ─────────────────────────────────────────────────────────────────────────────────────

    def fold(
        self,
        now: int,
        *,
        expired: Iterable[Event] = (),
        events: Iterable[EventBatch] = (),
        due: Iterable[tuple[int, ArrivalEvent]] = (),
    ) -> None:
        """Fold the events since the last claim, in the same order in every store: expired
        leases, events, documents that became due."""
        for event in expired:
            self.apply(event, now)
            if type(event) is RequeueEvent:
                flow = self.customers[event.customer].flows[event.level]
                self._requeued[flow] = min(event.order, self._requeued.get(flow, event.order))
        batches = list(events)
        if any(type(event) is CancelEvent for batch in batches for event in batch.events):
            self._arrived = {}
        for batch in batches:
            for event in batch.events:
                self.apply(event, batch.at)
        self._requeued.clear()
        self._arrived = None
        self._cancelled.clear()
        for at, arrival in due:
            self.apply(arrival, at)

    def apply(self, event: Event, at: int) -> None:
        """Fold one event."""
        state = self.customers.get(event.customer) or self._load(event.customer)
        was_held = state.held
        if type(event) is ArrivalEvent:
            flow = self._arrive(state, event.level, event.order, event.n)
            if self._arrived is not None:
                heappush(self._arrived.setdefault(flow, []), event.order)
            if flow.active and flow.head_order != event.order:
                self.touched.add(flow)
                return  # the common case: the head of an active flow stays
            head = state.head_order
            if head is not None and head < event.order:  # the customer's head stays
                if not was_held:
                    if not flow.active:
                        self._activate(flow, state.weight)
                    self._push_turn(flow)
                state.rest = min(state.rest, event.order)
                self.touched.add(flow)
                return
        elif type(event) is EndEvent:
            flow = self._flow(state, event.level)
            flow.running -= event.n
            state.running -= event.n
            if state.limit is None:
                self.touched.add(flow)
                return
        else:
            self._apply(state, event)
        if (
            isinstance(event, SettingsEvent | PurgeEvent | RunningCountsEvent)
            or state.held is not was_held
        ):
            self.touched.update(state.flows.values())
            self.adjusted.add(event.customer)
        else:
            self.touched.add(state.flows[event.level])
        self._settle(state, at)

    def _apply(self, state: CustomerState, event: Event) -> None:
        if isinstance(event, SettingsEvent | PurgeEvent | RunningCountsEvent):
            self._load_rest(state)
        match event:
            case CancelEvent():
                self._cancel(self._flow(state, event.level), event)
            case RunningEvent():
                flow = self._flow(state, event.level)
                flow.running += event.n
                state.running += event.n
            case CompletionEvent():
                self._complete_document(state, event)
            case RequeueEvent():
                flow = self._flow(state, event.level)
                flow.running -= 1
                state.running -= 1
                flow.virtual_time -= event.refund
                self._arrive(state, event.level, event.order, 1)
            case RunningCountsEvent():
                for level in event.running:
                    self._flow(state, level)
                for flow in state.flows.values():
                    flow.running = event.running.get(flow.level, 0)
                state.running = sum(event.running.values())
            case SettingsEvent():
                self._change(state, event)
            case PurgeEvent():
                for flow in state.flows.values():
                    flow.waiting = flow.running = 0
                    flow.head_order = None
                state.running = 0

    def _arrive(self, state: CustomerState, level: int, order: int, n: int) -> Flow:
        flow = self._flow(state, level)
        flow.waiting += n
        if flow.head_order is None or order < flow.head_order:
            flow.head_order = order
        return flow

    def _cancel(self, flow: Flow, event: CancelEvent) -> None:
        flow.waiting -= 1
        arrived: list[int] = []
        if self._arrived is not None:
            self._cancelled.add(event.order)
            arrived = self._arrived.get(flow, [])
            while arrived and arrived[0] in self._cancelled:
                heappop(arrived)
        if flow.head_order == event.order:
            # The cancelling transaction did not see documents that this fold requeued, nor
            # concurrent submissions.
            following = (event.next_order, self._requeued.get(flow), *arrived[:1])
            flow.head_order = min((o for o in following if o is not None), default=None)

    def _complete_document(self, state: CustomerState, event: CompletionEvent) -> None:
        flow = self._flow(state, event.level)
        flow.running -= 1
        state.running -= 1
        state.recent_costs = (*state.recent_costs, event.real_cost)[-COSTS_LEARNED_FROM:]
        self.adjusted.add(state.customer)
        if event.cost is None or event.weight is None:
            return
        # Correct the clock too. With costs below the estimate it would otherwise run ahead of the
        # work, and new customers, which start at the clock, would starve.
        difference = event.real_cost - event.cost
        flow.virtual_time += difference * 1000 // event.weight
        if self.weights[event.level] > 0:
            self.clocks[event.level] += difference * 1000 // self.weights[event.level]

    def _change(self, state: CustomerState, event: SettingsEvent) -> None:
        for flow in state.flows.values():
            if flow.active:
                self.weights[flow.level] += event.weight - state.weight
        state.weight = event.weight
        state.limit = event.limit
        state.paused = event.paused

    def _settle(self, state: CustomerState, at: int) -> None:
        """Update activity, heap entries and the head after a change."""
        held = state.held
        for flow in state.flows.values():
            if flow.waiting > 0 and not held:
                if not flow.active:
                    self._activate(flow, state.weight)
                self._push_turn(flow)
            elif flow.active:
                self._deactivate(flow, state.weight)
        self._move_head(state, at)

    def _move_head(self, state: CustomerState, at: int) -> None:
        """Find the customer's head; a new one is the head since `at`."""
        first: Flow | None = None
        head: int | None = None
        elsewhere = state.elsewhere
        rest = _ENDLESS if elsewhere is None else elsewhere
        for flow in state.flows.values():
            order = flow.head_order
            if order is not None:
                if head is None or order < head:
                    rest = rest if head is None else min(rest, head)
                    first, head = flow, order
                else:
                    rest = min(rest, order)
                if order == state.head_order:
                    self.touched.add(flow)  # it may be the head no longer
        if elsewhere is not None and (head is None or elsewhere < head):
            self._load_rest(state)
            self._move_head(state, at)
            return
        state.rest = rest
        if head != state.head_order:
            state.head_order = head
            state.head_since = at
            if first is not None:
                self.touched.add(first)
        self._push_head(state)

    def _deactivate(self, flow: Flow, weight: int) -> None:
        flow.active = False
        flow.entry = None
        self.weights[flow.level] -= weight

    def _activate(self, flow: Flow, weight: int) -> None:
        flow.active = True
        self.weights[flow.level] += weight
        if self.mode is not Mode.LEVELS:
            # No credit for idle time; service received beyond the clock still counts.
            flow.virtual_time = max(flow.virtual_time, self.clocks[flow.level])
            self.tick += 1
            flow.tick = self.tick

    # ── Pick ─────────────────────────────────────────────────────────────────────────────────────

    def pick(self, now: int) -> Pick | None:
        """Return the next claim; None if no customer that is not held has a waiting document."""
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
        state = self.customers[customer]
        if order is None or self.weights[level] < state.weight:
            raise FlowMismatch(customer)

        cost: int | None = None
        weight: int | None = None
        charge = 0
        if turns and patient is None:
            weight = state.weight
            cost = COST_ONE if self.costs is Costs.EQUAL else self._cost(state, flow)
            charge = cost * 1000 // weight or 1
            begun = flow.virtual_time
            worked = self.clocks[level] + cost * 1000 // self.weights[level]
            self.clocks[level] = worked if worked > begun else begun
            flow.virtual_time = begun + charge

        flow.waiting = left = flow.waiting - 1
        flow.running += 1
        state.running += 1
        flow.head_order = following = self._source.order_after(flow, order)
        if left == 0 or state.limit is not None:
            if state.held:
                self.touched.update(state.flows.values())
            self._settle(state, now)
        else:  # the common case: only the flow's turn and the customer's head can change
            self._push_turn(flow)
            if order == state.head_order:
                if following is None or following >= state.rest:
                    self._move_head(state, now)
                else:  # the new head is in the same flow: no need to compare the others
                    state.head_order, state.head_since = following, now
                    self._push_head(state)
        return _new_pick(Pick, (customer, level, order, cost, weight, charge))

    def _cost(self, state: CustomerState, flow: Flow) -> int:
        if self.costs is Costs.KNOWN:
            cost = self._source.cost(flow)
            return COST_ONE if cost is None else cost
        if self.costs is Costs.LEARNED and state.recent_costs:
            return sum(state.recent_costs) // len(state.recent_costs)
        return COST_ONE

    def _next_turn(self) -> Flow | None:
        """Return the active flow with the smallest (level, virtual_time, tick)."""
        first = self._first_loaded_turn()
        if first is not None and self._stored_turns.ended:
            return first
        up_to = None if first is None else self._turn_heap[0]
        stored = self._stored_turns.first_unless(self._has_flow, up_to)
        if stored is None or (first is not None and self._turn_heap[0] < stored):
            return first
        level, _, _, customer = stored
        state = self.customers.get(customer) or self._load(customer)
        if level not in state.flows:
            self._load_rest(state)
        return state.flows[level]

    def _has_flow(self, place: TurnEntry) -> bool:
        state = self.customers.get(place[3])
        return state is not None and (state.whole or place[0] in state.flows)

    def _has_customer(self, head: HeadEntry) -> bool:
        return head[2] in self.customers

    def _first_loaded_turn(self) -> Flow | None:
        heap, customers = self._turn_heap, self.customers
        while heap:
            entry = heap[0]
            flow = customers[entry[3]].flows[entry[0]]
            if flow.entry is entry:
                return flow
            heappop(heap)
        return None

    def _longest_waiting(self, now: int) -> Flow | None:
        """Return the flow with the oldest head of all customers that are not held, if it has been
        the head for longer than the patience."""
        before = now - self.patience_us
        while True:
            first = self._first_head(before)
            stored = self._stored_heads.first_unless(self._has_customer, first or (before,))
            if stored is None or stored[0] >= before or (first is not None and first < stored):
                break
            self._load(stored[2])
        if first is None:
            return None
        flows = self.customers[first[2]].flows.values()
        return next(flow for flow in flows if flow.head_order == first[1])

    # ── Heaps of turns and heads; stale entries are dropped when they come up ────────────────────

    def _load(self, customer: int) -> CustomerState:
        state = self.customers[customer] = self._source.customer_state(customer)
        for flow in state.flows.values():
            if flow.active:
                self._push_turn(flow)
        self._push_head(state)
        return state

    def _load_rest(self, state: CustomerState) -> None:
        """Load the flows of a customer that is not `whole`."""
        if state.whole:
            return
        state.rest = 0
        state.whole, state.elsewhere = True, None
        for flow in self._source.flows(state.customer):
            if flow.level not in state.flows:
                state.flows[flow.level] = flow
                state.running += flow.running
                if flow.active:
                    self._push_turn(flow)

    def _flow(self, state: CustomerState, level: int) -> Flow:
        flow = state.flows.get(level)
        if flow is None:
            self._load_rest(state)
            flow = state.flows.get(level)
        if flow is None:
            flow = state.flows[level] = self._source.flow(state.customer, level)
        return flow

    def _push_turn(self, flow: Flow) -> None:
        """Push the turn of an active flow, unless its entry is current."""
        key = flow.head_order if self.mode is Mode.LEVELS else flow.virtual_time
        if key is None:
            raise FlowMismatch(flow.customer)
        old, heap = flow.entry, self._turn_heap
        if old is not None and old[1] == key and old[2] == flow.tick:
            return
        entry = flow.entry = (flow.level, key, flow.tick, flow.customer)
        if heap and heap[0] is old:
            heapreplace(heap, entry)
            return
        heappush(heap, entry)
        if len(heap) > 2 * LEVELS * len(self.customers) + _HEAP_SLACK:
            self._drop_stale()

    def _push_head(self, state: CustomerState) -> None:
        """Push the head of a customer that is not held, unless an entry at or before it exists.

        Heads usually move later, so an old entry is a lower bound. `_first_head` corrects it when
        it comes up, which is cheaper than a push for each document."""
        head, since, entry = state.head_order, state.head_since, state.entry
        if head is None:
            return
        if entry is not None and (entry[0] < since or (entry[0] == since and entry[1] <= head)):
            return
        if self.mode is Mode.LEVELS or state.held:
            return
        state.entry = (since, head, state.customer)
        heappush(self._head_heap, state.entry)
        if len(self._head_heap) > 2 * len(self.customers) + _HEAP_SLACK:
            self._drop_stale()

    def _first_head(self, before: int) -> HeadEntry | None:
        """Return the oldest head of loaded customers that are not held, if older than `before`."""
        heads = self._head_heap
        while heads and heads[0][0] < before:
            entry = heads[0]
            state = self.customers[entry[2]]
            head = state.head_order
            if state.entry is not entry:
                heappop(heads)
            elif head is None or state.held:
                state.entry = None
                heappop(heads)
            elif (entry[0], entry[1]) == (state.head_since, head):
                return entry
            else:
                state.entry = (state.head_since, head, state.customer)
                heapreplace(heads, state.entry)
        return None

    def forgettable(self, flow: Flow) -> bool:
        """Whether dropping the flow changes nothing: it is idle and not ahead of its level's clock.
        Never while costs are learned, because corrections turn the clock back."""
        return (
            flow.waiting == 0
            and flow.running == 0
            and self.costs is not Costs.LEARNED
            and (self.mode is Mode.LEVELS or flow.virtual_time <= self.clocks[flow.level])
        )

    def forget(self) -> None:
        """Drop forgettable flows, and customers without flows or settings, from memory. For
        long-lived engines whose owner writes nothing back."""
        for state in list(self.customers.values()):
            for flow in list(state.flows.values()):
                if self.forgettable(flow):
                    flow.entry = None
                    del state.flows[flow.level]
            plain = CustomerState(state.customer)
            if not state.flows and (
                (state.weight, state.limit, state.paused, state.recent_costs)
                == (plain.weight, plain.limit, plain.paused, plain.recent_costs)
            ):
                state.entry = None
                del self.customers[state.customer]
        self.touched.clear()
        self.adjusted.clear()
        self._drop_stale()

    def _drop_stale(self) -> None:
        states = self.customers.values()
        flows = (flow for state in states for flow in state.flows.values())
        self._turn_heap = [flow.entry for flow in flows if flow.entry is not None]
        heapify(self._turn_heap)
        self._head_heap = [state.entry for state in states if state.entry is not None]
        heapify(self._head_heap)
