"""The order of service: which waiting document is claimed next. Pure.

Each flow has a virtual time and each band a clock; the active flow with the lowest virtual time
has the next turn. Inside a level, kinds take turns in the same way. A store passes a `FlowSource`
and the events since the last claim, and writes back the flows that `Turns` has touched. The
simulator does the same on a simulated clock.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from fairturn.priority import LEVELS
from fairturn.scheduling.flows import (
    BANDS_PER_KIND,
    COST_ONE,
    DEFAULT_KIND,
    PATIENCE_US,
    ArrivalEvent,
    Band,
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
    Head,
    HeadEntry,
    Mode,
    Pick,
    PurgeEvent,
    RequeueEvent,
    RunningCountsEvent,
    RunningEvent,
    SettingsEvent,
    TurnEntry,
    kind_of,
    level_in,
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


def copies(bands: Mapping[int, Band]) -> dict[int, Band]:
    return {number: replace(band) for number, band in bands.items()}


class _KindTurns:
    """The turns and heads of one kind: a heap of loaded entries beside the stored ones, for both.

    Stale entries of the heaps are dropped when they come up."""

    __slots__ = (
        "_by_order",
        "_customers",
        "_heads",
        "_stored_heads",
        "_stored_turns",
        "_turns",
        "kind",
    )

    def __init__(
        self, kind: int, source: FlowSource, customers: dict[int, CustomerState], mode: Mode
    ) -> None:
        self.kind = kind
        self._customers = customers
        self._by_order = mode is Mode.LEVELS
        self._turns: list[TurnEntry] = []
        self._heads: list[HeadEntry] = []
        self._stored_turns = _Stream(source.turns(kind))
        self._stored_heads = _Stream(source.heads(kind))

    def push_turn(self, flow: Flow) -> None:
        """Push the turn of an active flow, unless its entry is current."""
        key = flow.head_order if self._by_order else flow.virtual_time
        if key is None:
            raise FlowMismatch(flow.customer)
        old, heap = flow.entry, self._turns
        if old is not None and old[1] == key and old[2] == flow.tick:
            return
        entry = flow.entry = (flow.band, key, flow.tick, flow.customer)
        if heap and heap[0] is old:
            heapreplace(heap, entry)
            return
        heappush(heap, entry)
        if len(heap) > 2 * LEVELS * len(self._customers) + _HEAP_SLACK:
            self.drop_stale()

    def push_head(self, state: CustomerState, head: Head) -> None:
        """Push the head of a customer that is not held, unless an entry at or before it exists.

        Heads usually move later, so an old entry is a lower bound. `first_head` corrects it when
        it comes up, which is cheaper than a push for each document."""
        order, since, entry = head.order, head.since, head.entry
        if order is None:
            return
        if entry is not None and (entry[0] < since or (entry[0] == since and entry[1] <= order)):
            return
        if self._by_order or state.held:
            return
        head.entry = (since, order, state.customer)
        heappush(self._heads, head.entry)
        if len(self._heads) > 2 * len(self._customers) + _HEAP_SLACK:
            self.drop_stale()

    def first_turn(self) -> TurnEntry | None:
        """Return the first turn; its flow may not be loaded."""
        heap, customers = self._turns, self._customers
        while heap and customers[heap[0][3]].flows[heap[0][0]].entry is not heap[0]:
            heappop(heap)
        first = heap[0] if heap else None
        if first is not None and self._stored_turns.ended:
            return first
        stored = self._stored_turns.first_unless(self._has_flow, first)
        return first if stored is None or (first is not None and first < stored) else stored

    def first_head(self, before: int) -> HeadEntry | None:
        """Return the oldest head of the customers that are not held, if it is older than `before`;
        it may not be loaded."""
        first = self._first_loaded_head(before)
        stored = self._stored_heads.first_unless(self._has_head, first or (before,))
        if stored is None or stored[0] >= before or (first is not None and first < stored):
            return first
        return stored

    def _first_loaded_head(self, before: int) -> HeadEntry | None:
        heads = self._heads
        while heads and heads[0][0] < before:
            entry = heads[0]
            state = self._customers[entry[2]]
            head = state.heads[self.kind]
            if head.entry is not entry:
                heappop(heads)
            elif head.order is None or state.held:
                head.entry = None
                heappop(heads)
            elif (entry[0], entry[1]) == (head.since, head.order):
                return entry
            else:
                head.entry = (head.since, head.order, state.customer)
                heapreplace(heads, head.entry)
        return None

    def _has_flow(self, turn: TurnEntry) -> bool:
        state = self._customers.get(turn[3])
        return state is not None and (turn[0] in state.flows or state.is_whole(self.kind))

    def _has_head(self, head: HeadEntry) -> bool:
        state = self._customers.get(head[2])
        return state is not None and state.has_head(self.kind)

    def drop_stale(self) -> None:
        kind, states = self.kind, self._customers.values()
        flows = (f for s in states for f in s.flows.values() if kind_of(f.band) == kind)
        self._turns = [flow.entry for flow in flows if flow.entry is not None]
        heapify(self._turns)
        heads = (s.heads[kind] for s in states if kind in s.heads)
        self._heads = [head.entry for head in heads if head.entry is not None]
        heapify(self._heads)


class _Kinds(dict[int, _KindTurns]):
    """The turns of each kind, made when they are first used."""

    def __init__(self, make: Callable[[int], _KindTurns]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, kind: int) -> _KindTurns:
        turns = self[kind] = self._make(kind)
        return turns


class _Bands(dict[int, Band]):
    """The bands that were used, read when they are first used."""

    def __init__(self, bands: Mapping[int, Band], read: Callable[[int], Band]) -> None:
        super().__init__(bands)
        self._read = read

    def __missing__(self, number: int) -> Band:
        band = self[number] = self._read(number)
        return band


def _new_band(number: int) -> Band:
    return Band()


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
        bands: Mapping[int, Band] | None = None,
        read_band: Callable[[int], Band] = _new_band,  # for those that are not in `bands`
        level_times: Mapping[int, int] | None = None,
        since_patience: Mapping[int, int] | None = None,
        kind_names: Mapping[int, str] | None = None,
    ) -> None:
        self.mode = mode
        self.costs = costs
        self.patience_us = patience_us
        self.number = number  # of the last claim
        self.tick = tick  # of the last activation
        self.bands = _Bands(copies(bands or {}), read_band)
        self.level_times: defaultdict[int, int] = defaultdict(int, level_times or {})
        # By kind, the claims that it was served since its last patience claim.
        self.since_patience: defaultdict[int, int] = defaultdict(int, since_patience or {})
        self.customers: dict[int, CustomerState] = {}  # loaded customers
        self.touched: set[Flow] = set()  # flows that changed
        self.adjusted: set[int] = set()  # customers whose settings or costs changed
        # Of the present fold: lowest requeued order of each flow; arrived orders of each flow, a
        # heap, if a document was cancelled; cancelled orders.
        self._requeued: dict[Flow, int] = {}
        self._arrived: dict[Flow, list[int]] | None = None
        self._cancelled: set[int] = set()
        self._source = source
        self._kind_names = kind_names or {}
        # Without a reference to this engine, for the same reason as the entries of the heaps.
        customers = self.customers
        self._kinds = _Kinds(lambda kind: _KindTurns(kind, source, customers, mode))

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
                flow = self.customers[event.customer].flows[event.band]
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
            flow = self._arrive(state, event.band, event.order, event.n)
            if self._arrived is not None:
                heappush(self._arrived.setdefault(flow, []), event.order)
                self._cancelled.discard(event.order)  # an expired document was retried
            if flow.active and flow.head_order != event.order:
                self.touched.add(flow)
                return  # the common case: the head of an active flow stays
            kind = event.band // BANDS_PER_KIND
            head = state.heads.get(kind) or state.head(kind)
            if head.order is not None and head.order < event.order:  # the customer's head stays
                if not was_held:
                    if not flow.active:
                        self._activate(flow, state.weight)
                    self._kinds[kind].push_turn(flow)
                head.rest = min(head.rest, event.order)
                self.touched.add(flow)
                return
        elif type(event) is EndEvent:
            flow = self._flow(state, event.band)
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
            self.adjusted.add(event.customer)
            self._settle(state, at)
        else:
            self._settle_flow(state, state.flows[event.band], was_held, at)

    def _apply(self, state: CustomerState, event: Event) -> None:
        if isinstance(event, SettingsEvent | PurgeEvent | RunningCountsEvent):
            self._load_rest(state)
        match event:
            case CancelEvent():
                self._cancel(self._flow(state, event.band), event)
            case RunningEvent():
                flow = self._flow(state, event.band)
                flow.running += event.n
                state.running += event.n
            case CompletionEvent():
                self._complete_document(state, event)
            case RequeueEvent():
                flow = self._flow(state, event.band)
                flow.running -= 1
                state.running -= 1
                flow.virtual_time -= event.refund
                self._arrive(state, event.band, event.order, 1)
            case RunningCountsEvent():
                for band in event.running:
                    self._flow(state, band)
                for flow in state.flows.values():
                    flow.running = event.running.get(flow.band, 0)
                state.running = sum(event.running.values())
            case SettingsEvent():
                self._change(state, event)
            case PurgeEvent():
                for flow in state.flows.values():
                    flow.waiting = flow.running = 0
                    flow.head_order = None
                state.running = 0

    def _arrive(self, state: CustomerState, band: int, order: int, n: int) -> Flow:
        flow = self._flow(state, band)
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
        flow = self._flow(state, event.band)
        flow.running -= 1
        state.running -= 1
        head = state.head(kind_of(event.band))
        head.recent_costs = (*head.recent_costs, event.real_cost)[-COSTS_LEARNED_FROM:]
        self.adjusted.add(state.customer)
        if event.cost is None or event.weight is None:
            return
        # Correct the clock too. With costs below the estimate it would otherwise run ahead of the
        # work, and new customers, which start at the clock, would starve.
        difference = event.real_cost - event.cost
        flow.virtual_time += difference * 1000 // event.weight
        band = self.bands[event.band]
        if band.weight > 0:
            band.clock += difference * 1000 // band.weight

    def _change(self, state: CustomerState, event: SettingsEvent) -> None:
        for flow in state.flows.values():
            if flow.active:
                self.bands[flow.band].weight += event.weight - state.weight
        state.weight = event.weight
        state.limit = event.limit
        state.paused = event.paused

    def _settle(self, state: CustomerState, at: int) -> None:
        """Update activity, heap entries and heads of all flows, after a change of the customer."""
        held = state.held
        for flow in state.flows.values():
            self._settle_flow(state, flow, held, at)

    def _settle_flow(self, state: CustomerState, flow: Flow, held: bool, at: int) -> None:
        """Update activity, heap entry and head after a change of one flow."""
        self.touched.add(flow)
        turns = self._kinds[flow.band // BANDS_PER_KIND]
        if flow.waiting > 0 and not held:
            if not flow.active:
                self._activate(flow, state.weight)
            turns.push_turn(flow)
        elif flow.active:
            self._deactivate(flow, state.weight)
        self._move_head(state, turns, at)

    def _move_head(self, state: CustomerState, turns: _KindTurns, at: int) -> None:
        """Find the customer's head of a kind; a new one is the head since `at`."""
        kind = turns.kind
        head = state.heads.get(kind) or state.head(kind)
        first: Flow | None = None
        lowest: int | None = None
        rest = _ENDLESS if head.elsewhere is None else head.elsewhere
        for flow in state.flows_of(kind):
            order = flow.head_order
            if order is not None:
                if lowest is None or order < lowest:
                    rest = rest if lowest is None else min(rest, lowest)
                    first, lowest = flow, order
                else:
                    rest = min(rest, order)
                if order == head.order:
                    self.touched.add(flow)  # it may be the head no longer
        if head.elsewhere is not None and (lowest is None or head.elsewhere < lowest):
            self._load_rest(state, kind)
            self._move_head(state, turns, at)
            return
        head.rest = rest
        if lowest != head.order:
            head.order = lowest
            head.since = at
            if first is not None:
                self.touched.add(first)
        turns.push_head(state, head)

    def _deactivate(self, flow: Flow, weight: int) -> None:
        flow.active = False
        flow.entry = None
        self.bands[flow.band].weight -= weight

    def _activate(self, flow: Flow, weight: int) -> None:
        flow.active = True
        band = self.bands[flow.band]
        if self.mode is not Mode.LEVELS:
            if band.weight == 0:  # the kind becomes active in this level
                band.kind_time = max(band.kind_time, self.level_times[level_in(flow.band)])
            # No credit for idle time; service received beyond the clock still counts.
            flow.virtual_time = max(flow.virtual_time, band.clock)
            self.tick += 1
            flow.tick = self.tick
        band.weight += weight

    # ── Pick ─────────────────────────────────────────────────────────────────────────────────────

    def pick(self, now: int, kinds: Sequence[int] = (DEFAULT_KIND,)) -> Pick | None:
        """Return the next claim for a worker that serves these kinds; None if no customer that is
        not held has a waiting document of them."""
        served = [self._kinds[kind] for kind in kinds]
        is_patience_claim = False
        for turns in served:
            if self.since_patience[turns.kind] >= PATIENCE_EVERY - 1 and turns.first_turn():
                is_patience_claim = True
        by_turns = self.mode is not Mode.LEVELS
        patient = self._longest_waiting(served, now) if is_patience_claim and by_turns else None
        flow = patient or self._next_turn(served)
        if flow is None:
            return None
        order, band = flow.head_order, self.bands[flow.band]
        state = self.customers[flow.customer]
        if order is None or band.weight < state.weight:
            raise FlowMismatch(flow.customer)
        self.number += 1
        turns = self._kinds[flow.band // BANDS_PER_KIND]
        self.since_patience[turns.kind] += 1
        if is_patience_claim:
            self.since_patience.update(dict.fromkeys(kinds, 0))
        if by_turns and patient is None:
            cost = COST_ONE if self.costs is Costs.EQUAL else self._cost(flow, state)
            charge = self._charge(cost, state.weight, flow, band)
            pick = _new_pick(Pick, (flow.customer, flow.band, order, cost, state.weight, charge))
        else:
            pick = Pick(flow.customer, flow.band, order, cost=None, weight=None, charge=0)
        self._take_head(state, flow, turns, order, now)
        return pick

    def _charge(self, cost: int, weight: int, flow: Flow, band: Band) -> int:
        """Advance the times of the flow, the band and the kind; return the charge."""
        charge = cost * 1000 // weight or 1
        progress = cost * 1000 // band.weight
        begun = flow.virtual_time
        worked = band.clock + progress
        band.clock = worked if worked > begun else begun
        flow.virtual_time = begun + charge
        level = flow.band % BANDS_PER_KIND
        self.level_times[level] = max(self.level_times[level], band.kind_time)
        band.kind_time += progress
        band.last_claim = self.number
        return charge

    def _take_head(
        self, state: CustomerState, flow: Flow, turns: _KindTurns, order: int, now: int
    ) -> None:
        """Move the head of the flow, which has this order, to the running documents."""
        self.touched.add(flow)
        flow.waiting -= 1
        flow.running += 1
        state.running += 1
        flow.head_order = following = self._source.order_after(flow, order)
        if flow.waiting == 0 or state.limit is not None:
            if state.held:
                self._settle(state, now)
            else:
                self._settle_flow(state, flow, False, now)
            return
        # The common case: only the flow's turn and the customer's head can change.
        turns.push_turn(flow)
        head = state.heads.get(turns.kind)
        if head is None or head.order is None:
            raise FlowMismatch(flow.customer)
        if order == head.order:
            if following is None or following >= head.rest:
                self._move_head(state, turns, now)
            else:  # the new head is in the same flow: no need to compare the others
                head.order, head.since = following, now
                turns.push_head(state, head)

    def _cost(self, flow: Flow, state: CustomerState) -> int:
        if self.costs is Costs.KNOWN:
            cost = self._source.cost(flow)
            return COST_ONE if cost is None else cost
        recent = state.head(kind_of(flow.band)).recent_costs
        if self.costs is Costs.LEARNED and recent:
            return sum(recent) // len(recent)
        return COST_ONE

    def _next_turn(self, served: Sequence[_KindTurns]) -> Flow | None:
        """Return the active flow whose turn is next among those of the served kinds."""
        best: TurnEntry | None = None
        for turns in served:
            entry = turns.first_turn()
            if entry is not None and (best is None or self._rank(entry) < self._rank(best)):
                best = entry
        if best is None:
            return None
        band, _, _, customer = best
        state = self.customers.get(customer) or self._load(customer)
        if band not in state.flows:
            self._load_rest(state, kind_of(band))
        return state.flows[band]

    def _rank(self, turn: TurnEntry) -> tuple[int, int, int, str]:
        """Return the sort key of a kind's first turn among those of the served kinds."""
        number, order, *_ = turn
        if self.mode is Mode.LEVELS:
            return level_in(number), order, 0, ""
        band = self.bands[number]
        name = self._kind_names.get(kind_of(number), "")
        return level_in(number), band.kind_time, band.last_claim, name

    def _longest_waiting(self, served: Sequence[_KindTurns], now: int) -> Flow | None:
        """Return the flow with the oldest head of all customers that are not held, if it has been
        the head for longer than the patience."""
        before = now - self.patience_us
        while True:
            heads = [(head, t.kind) for t in served if (head := t.first_head(before)) is not None]
            if not heads:
                return None
            (_, order, customer), kind = min(heads)
            state = self.customers.get(customer)
            if state is not None and state.has_head(kind):
                return next(flow for flow in state.flows_of(kind) if flow.head_order == order)
            if state is None:
                self._load(customer)
            else:
                self._load_rest(state, kind)

    # ── Loading ──────────────────────────────────────────────────────────────────────────────────

    def _load(self, customer: int) -> CustomerState:
        state = self.customers[customer] = self._source.customer_state(customer)
        for flow in state.flows.values():
            if flow.active:
                self._kinds[kind_of(flow.band)].push_turn(flow)
        for kind, head in state.heads.items():
            self._kinds[kind].push_head(state, head)
        return state

    def _load_rest(self, state: CustomerState, kind: int | None = None) -> None:
        """Load the flows and heads of a customer that are not loaded, of one kind or of all."""
        if state.whole if kind is None else state.is_whole(kind):
            return
        state.whole = kind is None
        if kind is not None:
            state.kinds += (kind,)
        for number, head in state.heads.items():
            if kind is None or kind == number:
                head.rest, head.elsewhere = 0, None
        found = self._source.flows(state.customer, kind)
        added = [(flow, since) for flow, since in found if flow.band not in state.flows]
        for flow, _ in added:
            state.flows[flow.band] = flow
            state.running += flow.running
        for flow, since in added:
            turns = self._kinds[kind_of(flow.band)]
            if flow.active:
                turns.push_turn(flow)
            if since is not None:
                head = state.head(turns.kind)
                head.order, head.since = flow.head_order, since
                turns.push_head(state, head)

    def customer(self, number: int, kind: int | None) -> CustomerState:
        """Return a customer with all its flows of a kind, or of all if `kind` is None. For
        explanations, which describe flows that do not agree with the documents as they are."""
        with suppress(FlowMismatch):
            self._load_rest(self.customers.get(number) or self._load(number), kind)
        return self.customers[number]

    def _flow(self, state: CustomerState, band: int) -> Flow:
        flow = state.flows.get(band)
        if flow is None:
            self._load_rest(state, kind_of(band))
            flow = state.flows.get(band)
        if flow is None:
            flow = state.flows[band] = self._source.flow(state.customer, band)
        return flow

    def forgettable(self, flow: Flow) -> bool:
        """Whether dropping the flow changes nothing: it is idle and not ahead of its band's clock.
        Never while costs are learned, because corrections turn the clock back."""
        return (
            flow.waiting == 0
            and flow.running == 0
            and self.costs is not Costs.LEARNED
            and (self.mode is Mode.LEVELS or flow.virtual_time <= self.bands[flow.band].clock)
        )

    def forget(self) -> None:
        """Drop forgettable flows, and customers without flows or settings, from memory. For
        long-lived engines whose owner writes nothing back."""
        for state in list(self.customers.values()):
            for flow in list(state.flows.values()):
                if self.forgettable(flow):
                    flow.entry = None
                    del state.flows[flow.band]
            if not state.flows and state.is_plain:
                del self.customers[state.customer]
        self.touched.clear()
        self.adjusted.clear()
        for turns in self._kinds.values():
            turns.drop_stale()


class ClaimAllowance:
    """How many documents of each kind one claim of up to `n` may still take."""

    def __init__(self, n: int, free: Mapping[int, int], held: Mapping[int, Iterable[str]]) -> None:
        """`held` has the services that hold a kind, which the claim may probe."""
        self.kinds = tuple(free)
        self.probed: set[str] = set()
        self._left = {kind: most for kind, most in free.items() if most < n}
        self._held = {kind: frozenset(services) for kind, services in held.items() if services}
        self.is_limited = bool(self._left or self._held)  # otherwise `take` has no effect

    def take(self, kind: int) -> None:
        """Count a claimed document. If it is a probe, the claim may take no other document that
        needs one of its services."""
        closed = set()
        if kind in self._left:
            self._left[kind] -= 1
            closed = set() if self._left[kind] else {kind}
        if kind in self._held:
            services = self._held[kind]
            self.probed |= services
            closed |= {k for k, held in self._held.items() if not services.isdisjoint(held)}
        if closed:
            self.kinds = tuple(each for each in self.kinds if each not in closed)
