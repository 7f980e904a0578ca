"""What `turns.py` reads of the file: flows in the order of their turns, documents in theirs.

A shelf lives as long as no other process has claimed in between: what it has read stays true, and
what happens in the meantime reaches it through the events that every claim folds in.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import apsw

from fairturn.flows import Flow, Left, Mode, Standing
from fairturn.priority import LEVELS
from fairturn.stores.sqlite.outcomes import LOWEST_RETURNED
from fairturn.stores.sqlite.rows import CLAIM_COLUMNS, COST, ORDER, Row, fetch

_PAGE_MIN = 16
_AHEAD_MAX = 32
_LOWEST_INT = -(1 << 63)

# By flows_turn, in its order.
_PAGE_OF_TURNS = """
    FROM flows INDEXED BY flows_turn
    WHERE folded > 0 AND held = 0 AND (level, place, tick) > (?, ?, ?)
    ORDER BY level, place, tick LIMIT ?"""
_TURNS = f"SELECT level, place, tick, customer {_PAGE_OF_TURNS}"
# By flows_head, in its order.
_HEADS = """
    SELECT head_bound, 0, customer FROM flows INDEXED BY flows_head
    WHERE head_bound IS NOT NULL AND held = 0 AND (head_bound, customer) > (?, ?)
    ORDER BY head_bound, customer LIMIT ?"""
# By the primary keys of flows, customers and standings.
_FLOWS = """
    SELECT f.customer, f.level, f.claimed_to, f.place, f.tick, f.folded, f.running, f.head_order,
        f.head_since, f.head_bound, f.held, c.name, s.weight, s.running_max, s.paused,
        s.recent_costs
    FROM flows f LEFT JOIN customers c ON c.number = f.customer
        LEFT JOIN standings s ON s.customer = f.customer"""
_STANDING = f"{_FLOWS} WHERE f.customer = ?"
# The same for all customers on a page of `_TURNS`.
_STANDINGS = f"{_FLOWS} WHERE f.customer IN (SELECT customer {_PAGE_OF_TURNS})"
_SETTINGS_FROM = 12  # where weight stands in these rows; the name is before it
_CLAIMED_TO = "SELECT claimed_to FROM flows WHERE customer = ? AND level = ?"
_SETTINGS = "SELECT weight, running_max, paused, recent_costs FROM standings WHERE customer = ?"
_NAME = "SELECT name FROM customers WHERE number = ?"

# By documents_flow, from claimed_to on: there everything waits.
_NEXT = f"""
    SELECT {CLAIM_COLUMNS} FROM documents d INDEXED BY documents_flow
    WHERE d.customer = ? AND d.level = ? AND d.order_number > ?
    ORDER BY d.order_number LIMIT ?"""
# The first document of each flow on a page of `_TURNS`, and the order of its second.
_FIRSTS = f"""
    SELECT {CLAIM_COLUMNS}, f.customer, f.level, (
            SELECT min(n.order_number) FROM documents n INDEXED BY documents_flow
            WHERE n.customer = f.customer AND n.level = f.level AND n.order_number > f.head_order)
    FROM (SELECT customer, level, head_order, claimed_to {_PAGE_OF_TURNS}) f
        CROSS JOIN documents d INDEXED BY documents_flow
        ON d.customer = f.customer AND d.level = f.level AND d.order_number = f.head_order
    WHERE f.head_order > f.claimed_to"""
_CUSTOMER, _PLACE = -3, slice(-3, -1)  # where they stand in these rows
# By documents_returned.
_RETURNED = f"""
    SELECT {CLAIM_COLUMNS} FROM documents d INDEXED BY documents_returned
    WHERE d.returned = 1 AND d.customer = ? AND d.level = ? AND d.order_number = ?"""


@dataclass(slots=True, eq=False)
class StoredFlow(Flow):
    """A flow, and what else its row says; and its next documents, as far as they were read."""

    claimed_to: int = 0
    bound: int | None = None  # head_bound and held, as they are in the file
    held: int = 0
    upcoming: list[Row] | None = None  # the next one last
    following: int | None = None  # the order after the last of them, if it is known
    ahead: int = 1  # how many were read the last time


class SqliteShelf:
    """The file as the last claim left it, read ahead a little."""

    def __init__(self, mode: Mode) -> None:
        self.connection: apsw.Connection  # that of the transaction under way
        self.given = 0  # the highest order before this claim
        self.page = _PAGE_MIN
        self.picked: list[Row] = []  # the rows of what was picked, in order
        self.ahead = 0  # how many rows were read and not used yet
        # What is in the file, so that only what has changed is written back.
        self.clocks = [0] * (LEVELS + 1)
        self.weights = [0] * (LEVELS + 1)
        self._mode = mode
        self._loaded: set[int] = set()  # customers
        self._names: dict[int, str] = {}
        self._rows: dict[int, list[Row]] = {}  # of customers that will be loaded soon
        self._firsts: dict[tuple[int, int], Row] = {}  # of their flows

    # ── Flows ────────────────────────────────────────────────────────────────────────────────────

    def standing(self, customer: int) -> Standing:
        rows = self._rows.pop(customer, None)
        if rows is None:
            rows = fetch(self.connection, _STANDING, (customer,))
        self._loaded.add(customer)
        standing = Standing(customer)
        if not rows:
            settings = fetch(self.connection, _SETTINGS, (customer,))
        else:
            settings = [rows[0][_SETTINGS_FROM:]]
            self._names[customer] = rows[0][_SETTINGS_FROM - 1]
            self._add_flows(standing, rows)
        if settings and settings[0][0] is not None:
            standing.weight, standing.limit, paused, costs = settings[0]
            standing.paused = bool(paused)
            standing.recent_costs = tuple(json.loads(costs))
        return standing

    def _add_flows(self, standing: Standing, rows: list[Row]) -> None:
        by_order = self._mode is Mode.LEVELS
        firsts, customer = self._firsts, standing.customer
        for (
            _,
            level,
            claimed_to,
            place,
            tick,
            folded,
            running,
            order,
            since,
            bound,
            held,
            *_,
        ) in rows:
            active = folded > 0 and not held
            flow = standing.flows[level] = StoredFlow(
                customer,
                level,
                0 if by_order else place,
                tick,
                folded,
                running,
                order,
                active,
                None,
                claimed_to,
                bound,
                held,
            )
            standing.running += running
            if since is not None:
                standing.head_order, standing.head_since = order, since
            first = firsts.pop((customer, level), None)
            if first is not None:
                flow.upcoming, flow.following = [first[:_CUSTOMER]], first[-1]
                self.ahead += 1

    def flow(self, customer: int, level: int) -> StoredFlow:
        """It may be in the file, since its customer was read. If it is not, nothing waits in it up
        to the orders that were given, but what was returned."""
        found = fetch(self.connection, _CLAIMED_TO, (customer, level))
        return StoredFlow(customer, level, claimed_to=found[0][0] if found else self.given)

    def name(self, customer: int) -> str:
        """The name of a customer that has documents."""
        name = self._names.get(customer)
        if name is None:
            name = self._names[customer] = self.connection.execute(_NAME, (customer,)).get
        return name

    # Whoever is not loaded stays where it is in the file: what changes it loads it. So a stream
    # goes on from claim to claim, and never begins again.

    def turns(self) -> Iterator[tuple[int, int, int, int]]:
        last = (0, 0, 0)
        while True:
            from_here = (*last, self.page)
            page: list[Any] = fetch(self.connection, _TURNS, from_here)
            if any(entry[-1] not in self._loaded for entry in page):
                self._prefetch(from_here)
            yield from page
            if len(page) < from_here[-1]:
                return
            last = page[-1][:3]

    def _prefetch(self, page: tuple[int, int, int, int]) -> None:
        """Read together what a claim would otherwise read one by one: the customers on a page of
        turns, and the first document of each flow there."""
        loaded = self._loaded
        self._rows = {}
        for row in fetch(self.connection, _STANDINGS, page):
            if row[0] not in loaded:
                self._rows.setdefault(row[0], []).append(row)
        firsts = fetch(self.connection, _FIRSTS, page)
        self._firsts = {row[_PLACE]: row for row in firsts if row[_CUSTOMER] not in loaded}

    def heads(self) -> Iterator[tuple[int, int, int]]:
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
            lowest = (flow.customer, flow.level, order)
            following: int | None = self.connection.execute(LOWEST_RETURNED, lowest).get
            if following is not None:
                return following
        else:
            self.picked.append((flow.upcoming or self._read_ahead(flow)).pop())
            self.ahead -= 1
            flow.claimed_to = order
        if flow.waiting == 0:
            return None
        if not flow.upcoming and flow.following is not None:
            return flow.following
        return (flow.upcoming or self._read_ahead(flow))[-1][ORDER]  # type: ignore[no-any-return]

    def cost(self, flow: Flow) -> int | None:
        assert isinstance(flow, StoredFlow)
        assert flow.head_order is not None
        if flow.head_order <= flow.claimed_to:
            row = self._returned(flow, flow.head_order)
        else:
            row = (flow.upcoming or self._read_ahead(flow))[-1]
        return row[COST]  # type: ignore[no-any-return]

    def cancelled(self, standing: Standing | None, left: Left) -> None:
        """A waiting document was cancelled, which may have been read ahead."""
        self._firsts.pop((left.customer, left.level), None)
        flow = standing.flows.get(left.level) if standing else None
        if isinstance(flow, StoredFlow) and flow.upcoming is not None:
            kept = [row for row in flow.upcoming if row[ORDER] != left.order]
            self.ahead -= len(flow.upcoming) - len(kept)
            flow.upcoming, flow.following = kept, None

    def _returned(self, flow: StoredFlow, order: int) -> Row:
        (row,) = fetch(self.connection, _RETURNED, (flow.customer, flow.level, order))
        return row

    def _read_ahead(self, flow: StoredFlow) -> list[Row]:
        flow.ahead = size = min(_AHEAD_MAX, 2 * flow.ahead)
        flow.following = None
        rows = fetch(self.connection, _NEXT, (flow.customer, flow.level, flow.claimed_to, size))
        self.ahead += len(rows)
        rows.reverse()
        flow.upcoming = rows
        return rows
