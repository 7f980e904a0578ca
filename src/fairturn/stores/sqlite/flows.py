"""The scheduler state in the file: the flows and documents that `turns.py` reads, and how changed
flows, customer states and clocks are written.

A `SqliteFlows` is valid until another process claims: all other changes of what it has read arrive
as events, which every claim folds.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import apsw

from fairturn.scheduling.flows import (
    DEFAULT_KIND,
    Band,
    CancelEvent,
    CustomerState,
    Flow,
    FlowMismatch,
    Head,
    HeadEntry,
    Mode,
    TurnEntry,
)
from fairturn.scheduling.turns import PATIENCE_EVERY, Turns, copies
from fairturn.stores.sqlite.finish import LOWEST_RETURNED
from fairturn.stores.sqlite.rows import QueueRow, fetch
from fairturn.stores.values import CLAIM_COLUMNS, COST, ORDER, Row

PAGE_MIN = 16
_PREFETCH_MAX = 32  # documents of one flow
_PREFETCH_TOTAL_MAX = 8_000  # of all flows; beyond it, two documents of a flow are read at a time
_LOWEST_INT = -(1 << 63)
_CLOCKS = "SELECT level, clock, weight FROM levels"

# By flows_turn, in its order.
_PAGE_OF_TURNS = """
    FROM flows INDEXED BY flows_turn
    WHERE folded > 0 AND held = 0 AND (level, place, tick) > (?1, ?2, ?3)
    ORDER BY level, place, tick LIMIT ?4"""
_SETTINGS_COLUMNS = "s.weight, s.running_max, s.paused, s.recent_costs"
_FLOW_COLUMNS = """
    f.level, f.place, f.tick, f.customer, f.claimed_to, f.folded, f.running, f.head_order,
    f.head_since, f.head_bound, f.held"""
# Each turn with the columns that load its customer, the lowest order in its other flows, the order
# of the flow's second document, and its first document unless it was returned. By documents_flow
# and the primary keys.
_TURNS = f"""
    SELECT {_FLOW_COLUMNS}, c.name, {_SETTINGS_COLUMNS}, (
            SELECT min(o.head_order) FROM flows o
            WHERE o.customer = f.customer AND o.level <> f.level), (
            SELECT min(n.order_number) FROM documents n INDEXED BY documents_flow
            WHERE n.customer = f.customer AND n.level = f.level AND n.order_number > f.head_order),
        {CLAIM_COLUMNS}
    FROM (SELECT * {_PAGE_OF_TURNS}) f
        LEFT JOIN customers c ON c.number = f.customer
        LEFT JOIN customer_states s ON s.customer = f.customer
        LEFT JOIN documents d INDEXED BY documents_flow
            ON d.customer = f.customer AND d.level = f.level AND d.order_number = f.head_order
            AND f.head_order > f.claimed_to
    ORDER BY f.level, f.place, f.tick"""
# The columns of such a row.
_TURN, _CUSTOMER, _SINCE, _FLOW = slice(4), 3, 8, slice(11)
_NAME_AND_SETTINGS, _NAME, _WEIGHT, _ELSEWHERE, _FOLLOWING = slice(11, 16), 11, 12, 16, 17
_FIRST, _FIRST_ORDER = slice(18, None), 18 + ORDER
_BY_CUSTOMER = itemgetter(_CUSTOMER)
# By the primary key. The second is for all customers on a page of `_TURNS`.
_FLOWS = f"SELECT {_FLOW_COLUMNS} FROM flows f WHERE f.customer = ?"
_FLOWS_OF_PAGE = f"""
    SELECT {_FLOW_COLUMNS} FROM flows f WHERE f.customer IN (SELECT customer {_PAGE_OF_TURNS})
    ORDER BY f.customer"""
_FLOW_OF_LEVEL = f"{_FLOWS} AND f.level = ?"
# The customer may have been purged: its flows exist until the next claim folds the event.
_SETTINGS = f"""
    SELECT (SELECT name FROM customers WHERE number = ?1), {_SETTINGS_COLUMNS}
    FROM queue LEFT JOIN customer_states s ON s.customer = ?1"""
# By flows_head, in its order.
_HEADS = """
    SELECT head_bound, 0, customer FROM flows INDEXED BY flows_head
    WHERE head_bound IS NOT NULL AND held = 0 AND (head_bound, customer) > (?, ?)
    ORDER BY head_bound, customer LIMIT ?"""

# By documents_flow, after claimed_to: all documents there wait.
_NEXT = f"""
    SELECT {CLAIM_COLUMNS} FROM documents d INDEXED BY documents_flow
    WHERE d.customer = ? AND d.level = ? AND d.order_number > ?
    ORDER BY d.order_number LIMIT ?"""
# By documents_returned.
_RETURNED = f"""
    SELECT {CLAIM_COLUMNS} FROM documents d INDEXED BY documents_returned
    WHERE d.returned = 1 AND d.customer = ? AND d.level = ? AND d.order_number = ?"""


# Most claims change neither head_bound nor held. An UPDATE without them does not write flows_head.
_MOVE_FLOW = """
    UPDATE flows SET waiting = waiting + ?, claimed_to = ?, place = ?, tick = ?, folded = ?,
        running = ?, head_order = ?, head_since = ?"""
_SAVE_FLOW = f"{_MOVE_FLOW} WHERE customer = ? AND level = ?"
_SAVE_FLOW_AND_HEAD = f"{_MOVE_FLOW}, head_bound = ?, held = ? WHERE customer = ? AND level = ?"
_ADD_FLOW = """
    INSERT OR IGNORE INTO flows (waiting, claimed_to, place, tick, folded, running, head_order,
        head_since, head_bound, held, customer, level)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_DELETE_FLOWS = (
    "DELETE FROM flows WHERE customer = ?",
    "DELETE FROM customer_states WHERE customer = ?",
)
_SAVE_CUSTOMER_STATE = """
    INSERT OR REPLACE INTO customer_states (customer, weight, running_max, paused, recent_costs)
    VALUES (?, ?, ?, ?, ?)"""
_DROP_CUSTOMER_STATE = "DELETE FROM customer_states WHERE customer = ?"
_SAVE_CLOCK = "UPDATE levels SET clock = ?, weight = ? WHERE level = ?"
# Only differences within a level matter, so all of it can be shifted to 0.
_RESET_CLOCKS = """
    UPDATE flows SET place = place - (SELECT clock FROM levels l WHERE l.level = flows.level);
    UPDATE levels SET clock = 0"""


@dataclass(slots=True, eq=False)
class StoredFlow(Flow):
    """A flow with the other columns of its row, and prefetched documents."""

    claimed_to: int = 0
    bound: int | None = None  # head_bound and held in the file
    held: int = 0
    upcoming: list[Row] | None = None  # prefetched documents, the next one last
    following: int | None = None  # the order after the prefetched documents, if known
    ahead: int = 1  # the size of the last prefetch


def _is_enough(turn: Row) -> bool:
    """Return whether the customer can be loaded with this flow alone: it contains the head, and the
    customer has no settings that apply to all its flows."""
    return turn[_SINCE] is not None and turn[_WEIGHT] is None and turn[_NAME] is not None


class SqliteFlows:
    """The `FlowSource` of a file, with prefetched pages of turns and documents."""

    def __init__(self, mode: Mode) -> None:
        self.connection: apsw.Connection  # of the open transaction
        self.given = 0  # the highest order before this claim
        self.page = PAGE_MIN
        self.picked: list[Row] = []  # rows of picked documents, in order
        self._prefetched = 0  # rows that were read and not picked yet
        self.names: dict[int, str] = {}  # of loaded customers
        self.bands: dict[int, Band] = {}  # as they are in the file: only changed ones are written
        self._mode = mode
        self._turn: Row | None = None  # the last one read: its customer is usually loaded next
        self._flows: dict[int, list[Row]] = {}  # of customers on the page, if any needs them

    # ── Flows ────────────────────────────────────────────────────────────────────────────────────

    def customer_state(self, customer: int) -> CustomerState:
        turn = self._turn
        if turn is None or turn[_CUSTOMER] != customer:
            state = self._whole_customer(customer)
            self._set(state, self._settings(customer))
            return state
        self._turn = None
        if _is_enough(turn):
            return self._with_this_flow(turn)
        state = self._whole_customer(customer)
        flow = state.flows[turn[0]]
        assert isinstance(flow, StoredFlow)
        self._expect(flow, turn)
        self._set(state, turn[_NAME_AND_SETTINGS])
        return state

    def _with_this_flow(self, turn: Row) -> CustomerState:
        flow = self._to_flow(turn)
        self._expect(flow, turn)
        customer = flow.customer
        self.names[customer] = turn[_NAME]
        return CustomerState(
            customer,
            flows={flow.band: flow},
            heads={DEFAULT_KIND: Head(flow.head_order, turn[_SINCE], elsewhere=turn[_ELSEWHERE])},
            running=flow.running,
            whole=False,
        )

    def _expect(self, flow: StoredFlow, turn: Row) -> None:
        if turn[_FIRST_ORDER] is not None:
            flow.upcoming, flow.following = [turn[_FIRST]], turn[_FOLLOWING]
            self._prefetched += 1

    def _whole_customer(self, customer: int) -> CustomerState:
        state = CustomerState(customer)
        for row in self._rows(customer):
            flow = state.flows[row[0]] = self._to_flow(row)
            state.running += flow.running
            if row[_SINCE] is not None:
                state.heads[DEFAULT_KIND] = Head(flow.head_order, row[_SINCE])
        return state

    def _rows(self, customer: int) -> list[Row]:
        rows = self._flows.pop(customer, None)
        return fetch(self.connection, _FLOWS, (customer,)) if rows is None else rows

    def _to_flow(self, row: Row) -> StoredFlow:
        level, place, tick, customer, claimed_to, folded, running, order, _, bound, held = row[
            _FLOW
        ]
        return StoredFlow(
            customer,
            level,
            0 if self._mode is Mode.LEVELS else place,
            tick,
            folded,
            running,
            order,
            folded > 0 and not held,
            None,
            claimed_to,
            bound,
            held,
        )

    def flows(self, customer: int) -> list[tuple[StoredFlow, int | None]]:
        return [(self._to_flow(row), row[_SINCE]) for row in self._rows(customer)]

    def _settings(self, customer: int) -> Row:
        (settings,) = fetch(self.connection, _SETTINGS, (customer,))
        return settings

    def _set(self, state: CustomerState, settings: Row) -> None:
        name, weight, limit, paused, costs = settings
        if name is not None:
            self.names[state.customer] = name
        if weight is not None:
            state.weight, state.limit, state.paused = weight, limit, bool(paused)
            state.head().recent_costs = tuple(json.loads(costs))

    def flow(self, customer: int, band: int) -> StoredFlow:
        """Return a flow that may have been inserted after its customer was loaded. If it has no
        row, only returned documents wait in it up to the orders assigned so far."""
        found = fetch(self.connection, _FLOW_OF_LEVEL, (customer, band))
        if found:
            return self._to_flow(found[0])
        return StoredFlow(customer, band, claimed_to=self.given)

    # A customer that is not loaded does not change: every event loads its customer. The generators
    # below therefore continue from claim to claim and never restart.

    def turns(self, kind: int) -> Iterator[TurnEntry]:
        assert kind == DEFAULT_KIND
        last = (0, 0, 0)
        while True:
            after = (*last, self.page)
            page: list[Any] = fetch(self.connection, _TURNS, after)
            self._flows = self._flows_of(page, after)
            for row in page:
                self._turn = row
                yield row[_TURN]
            if len(page) < after[-1]:
                return
            last = page[-1][:3]

    def _flows_of(self, page: list[Row], after: Row) -> dict[int, list[Row]]:
        """Return all flows of the customers on the page, unless each turn is enough."""
        if all(map(_is_enough, page)):
            return {}
        rows = fetch(self.connection, _FLOWS_OF_PAGE, after)
        return {customer: list(flows) for customer, flows in groupby(rows, _BY_CUSTOMER)}

    def heads(self, kind: int) -> Iterator[HeadEntry]:
        assert kind == DEFAULT_KIND
        last = (_LOWEST_INT, 0)
        while True:
            size = self.page
            page: list[Any] = fetch(self.connection, _HEADS, (*last, size))
            yield from page
            if len(page) < size:
                return
            last = (page[-1][0], page[-1][2])

    # ── Documents ────────────────────────────────────────────────────────────────────────────────

    def order_after(self, flow: Flow, order: int) -> int | None:
        assert isinstance(flow, StoredFlow)
        if order <= flow.claimed_to:
            self.picked.append(self._returned(flow, order))
            lowest = (flow.customer, flow.band, order)
            following: int | None = self.connection.execute(LOWEST_RETURNED, lowest).get
            if following is not None:
                return following
        else:
            row = (flow.upcoming or self._prefetch(flow)).pop()
            if row[ORDER] != order:
                raise FlowMismatch(flow.customer)
            self.picked.append(row)
            self._prefetched -= 1
            flow.claimed_to = order
        if flow.waiting == 0:
            return None
        if not flow.upcoming and flow.following is not None:
            return flow.following
        return (flow.upcoming or self._prefetch(flow))[-1][ORDER]  # type: ignore[no-any-return]

    def cost(self, flow: Flow) -> int | None:
        assert isinstance(flow, StoredFlow)
        assert flow.head_order is not None
        if flow.head_order <= flow.claimed_to:
            row = self._returned(flow, flow.head_order)
        else:
            row = (flow.upcoming or self._prefetch(flow))[-1]
        return row[COST]  # type: ignore[no-any-return]

    def cancelled(self, state: CustomerState | None, left: CancelEvent) -> None:
        """Discard a cancelled document if it was prefetched."""
        if self._turn is not None and self._turn[_CUSTOMER] == left.customer:
            self._turn = None
        flow = state.flows.get(left.band) if state else None
        if isinstance(flow, StoredFlow) and flow.upcoming is not None:
            kept = [row for row in flow.upcoming if row[ORDER] != left.order]
            self._prefetched -= len(flow.upcoming) - len(kept)
            flow.upcoming, flow.following = kept, None

    def _returned(self, flow: StoredFlow, order: int) -> Row:
        rows = fetch(self.connection, _RETURNED, (flow.customer, flow.band, order))
        if not rows:
            raise FlowMismatch(flow.customer)
        return rows[0]

    def _prefetch(self, flow: StoredFlow) -> list[Row]:
        most = _PREFETCH_MAX if self._prefetched < _PREFETCH_TOTAL_MAX else 2
        flow.ahead = size = min(most, 2 * flow.ahead)
        flow.following = None
        rows = fetch(self.connection, _NEXT, (flow.customer, flow.band, flow.claimed_to, size))
        if not rows:
            raise FlowMismatch(flow.customer)
        self._prefetched += len(rows)
        rows.reverse()
        flow.upcoming = rows
        return rows


# ── Scheduler state ──────────────────────────────────────────────────────────────────────────────


def load_turns(connection: apsw.Connection, queue: QueueRow) -> tuple[SqliteFlows, Turns]:
    """Return the scheduler state as of the last claim, and its flow source."""
    settings = queue.settings
    source = SqliteFlows(settings.mode)
    source.connection = connection
    for level, clock, weight in connection.execute(_CLOCKS):
        source.bands[level] = Band(clock, weight)
    turns = Turns(
        source,
        mode=settings.mode,
        costs=settings.costs,
        patience_us=settings.patience_us,
        number=queue.claims,
        tick=queue.tick,
        bands=source.bands,
        since_patience={DEFAULT_KIND: queue.claims % PATIENCE_EVERY},
    )
    return source, turns


def save_customer_states(connection: apsw.Connection, turns: Turns) -> None:
    """Write the customers whose settings or recent costs have changed."""
    for customer in turns.adjusted:
        state = turns.customers[customer]
        if state.is_plain:
            connection.execute(_DROP_CUSTOMER_STATE, (customer,))
        else:
            costs = json.dumps(state.head().recent_costs)
            row = (customer, state.weight, state.limit, int(state.paused), costs)
            connection.execute(_SAVE_CUSTOMER_STATE, row)
    turns.adjusted.clear()


def save_flows(
    connection: apsw.Connection, turns: Turns, moved: Mapping[tuple[int, int], int]
) -> None:
    """Write the changed flows. `moved` maps each flow to the change in its number of waiting
    documents in this transaction."""
    same_head: list[Row] = []
    new_head: list[Row] = []
    by_order = turns.mode is Mode.LEVELS
    slack = turns.patience_us // 2
    for flow in turns.touched:
        assert isinstance(flow, StoredFlow)
        customer, level, order = flow.customer, flow.band, flow.head_order
        state = turns.customers[customer]
        head = state.head()
        since = head.since if order is not None and order == head.order else None
        values = (
            moved.get((customer, level), 0),
            flow.claimed_to,
            (order or 0) if by_order else flow.virtual_time,
            flow.tick,
            flow.waiting,
            flow.running,
            order,
            since,
        )
        bound, held = flow.bound, int(state.held)
        if since is None or bound is None or not bound <= since <= bound + slack:
            bound = since
        if bound == flow.bound and held == flow.held:
            same_head.append((*values, customer, level))
        else:
            flow.bound, flow.held = bound, held
            new_head.append((*values, bound, held, customer, level))
    before = connection.total_changes()
    connection.executemany(_SAVE_FLOW, same_head)
    connection.executemany(_SAVE_FLOW_AND_HEAD, new_head)
    if connection.total_changes() - before < len(same_head) + len(new_head):
        # Some have no row yet. INSERT OR IGNORE does not change the others.
        connection.executemany(_ADD_FLOW, [(*row[:8], None, 0, *row[8:]) for row in same_head])
        connection.executemany(_ADD_FLOW, new_head)
    turns.touched.clear()


def delete_flows(connection: apsw.Connection, customers: Iterable[int]) -> None:
    """Delete the flows and states of purged customers."""
    for statement in _DELETE_FLOWS:
        connection.executemany(statement, [(customer,) for customer in customers])


def save_clocks(connection: apsw.Connection, turns: Turns, source: SqliteFlows) -> None:
    """Write changed clocks and weights of levels."""
    changed = {n: band for n, band in turns.bands.items() if band != source.bands.get(n)}
    rows = [(band.clock, band.weight, number) for number, band in changed.items()]
    connection.executemany(_SAVE_CLOCK, rows)
    source.bands.update(copies(changed))


def reset_clocks(connection: apsw.Connection) -> None:
    """Set all clocks to 0, and shift the flows by the same amount, before they overflow."""
    connection.execute(_RESET_CLOCKS)
