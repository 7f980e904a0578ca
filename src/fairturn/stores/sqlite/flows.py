"""What `turns.py` reads of the file: flows in the order of their turns, documents in theirs.

A shelf lives as long as no other process has claimed in between: what it has read stays true, and
what happens in the meantime reaches it through the events that every claim folds in.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import apsw

from fairturn.priority import LEVELS
from fairturn.scheduling.flows import Flow, FlowMismatch, Left, Mode, Standing
from fairturn.stores.sqlite.finish import LOWEST_RETURNED
from fairturn.stores.sqlite.rows import fetch
from fairturn.stores.values import CLAIM_COLUMNS, COST, ORDER, Row

PAGE_MIN = 16
_AHEAD_MAX = 32  # rows of one flow
_ROWS_AHEAD_MAX = 8_000  # of all flows; beyond it, only what is needed next is read
_LOWEST_INT = -(1 << 63)

# By flows_turn, in its order.
_PAGE_OF_TURNS = """
    FROM flows INDEXED BY flows_turn
    WHERE folded > 0 AND held = 0 AND (level, place, tick) > (?1, ?2, ?3)
    ORDER BY level, place, tick LIMIT ?4"""
_SETTINGS_COLUMNS = "s.weight, s.running_max, s.paused, s.recent_costs"
_FLOW_COLUMNS = """
    f.level, f.place, f.tick, f.customer, f.claimed_to, f.folded, f.running, f.head_order,
    f.head_since, f.head_bound, f.held"""
# With each turn what its customer needs to be loaded, the lowest order in its other flows, the
# flow's first document if that was not returned, and the order of the second. By documents_flow and
# the primary keys.
_TURNS = f"""
    SELECT {_FLOW_COLUMNS}, c.name, {_SETTINGS_COLUMNS}, (
            SELECT min(o.head_order) FROM flows o
            WHERE o.customer = f.customer AND o.level <> f.level), (
            SELECT min(n.order_number) FROM documents n INDEXED BY documents_flow
            WHERE n.customer = f.customer AND n.level = f.level AND n.order_number > f.head_order),
        {CLAIM_COLUMNS}
    FROM (SELECT * {_PAGE_OF_TURNS}) f
        LEFT JOIN customers c ON c.number = f.customer
        LEFT JOIN standings s ON s.customer = f.customer
        LEFT JOIN documents d INDEXED BY documents_flow
            ON d.customer = f.customer AND d.level = f.level AND d.order_number = f.head_order
            AND f.head_order > f.claimed_to
    ORDER BY f.level, f.place, f.tick"""
# Where what stands in such a row.
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
# The customer itself may be gone: then its flows are about to go, with the weight that they have.
_SETTINGS = f"""
    SELECT (SELECT name FROM customers WHERE number = ?1), {_SETTINGS_COLUMNS}
    FROM queue LEFT JOIN standings s ON s.customer = ?1"""
# By flows_head, in its order.
_HEADS = """
    SELECT head_bound, 0, customer FROM flows INDEXED BY flows_head
    WHERE head_bound IS NOT NULL AND held = 0 AND (head_bound, customer) > (?, ?)
    ORDER BY head_bound, customer LIMIT ?"""

# By documents_flow, from claimed_to on: there everything waits.
_NEXT = f"""
    SELECT {CLAIM_COLUMNS} FROM documents d INDEXED BY documents_flow
    WHERE d.customer = ? AND d.level = ? AND d.order_number > ?
    ORDER BY d.order_number LIMIT ?"""
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


def _is_enough(turn: Row) -> bool:
    """Whether its customer can be loaded with this flow alone: its head is here, and it has no
    settings that hold all of its flows together."""
    return turn[_SINCE] is not None and turn[_WEIGHT] is None and turn[_NAME] is not None


class SqliteShelf:
    """The file as the last claim left it, read ahead a little."""

    def __init__(self, mode: Mode) -> None:
        self.connection: apsw.Connection  # that of the transaction under way
        self.given = 0  # the highest order before this claim
        self.page = PAGE_MIN
        self.picked: list[Row] = []  # the rows of what was picked, in order
        self._ahead = 0  # how many rows were read and not used yet
        self.names: dict[int, str] = {}  # of the customers that were loaded
        # What is in the file, so that only what has changed is written back.
        self.clocks = [0] * (LEVELS + 1)
        self.weights = [0] * (LEVELS + 1)
        self._mode = mode
        self._turn: Row | None = None  # whose customer will be loaded next, as a rule
        self._flows: dict[int, list[Row]] = {}  # of customers on the page that have several

    # ── Flows ────────────────────────────────────────────────────────────────────────────────────

    def standing(self, customer: int) -> Standing:
        turn = self._turn
        if turn is None or turn[_CUSTOMER] != customer:
            standing = self._standing(customer)
            self._set(standing, self._settings(customer))
            return standing
        self._turn = None
        if _is_enough(turn):
            return self._with_this_flow(turn)
        standing = self._standing(customer)
        flow = standing.flows[turn[0]]
        assert isinstance(flow, StoredFlow)
        self._expect(flow, turn)
        self._set(standing, turn[_NAME_AND_SETTINGS])
        return standing

    def _with_this_flow(self, turn: Row) -> Standing:
        flow = self._to_flow(turn)
        self._expect(flow, turn)
        customer = flow.customer
        self.names[customer] = turn[_NAME]
        return Standing(
            customer,
            flows={flow.level: flow},
            head_order=flow.head_order,
            head_since=turn[_SINCE],
            running=flow.running,
            whole=False,
            elsewhere=turn[_ELSEWHERE],
        )

    def _expect(self, flow: StoredFlow, turn: Row) -> None:
        if turn[_FIRST_ORDER] is not None:
            flow.upcoming, flow.following = [turn[_FIRST]], turn[_FOLLOWING]
            self._ahead += 1

    def _standing(self, customer: int) -> Standing:
        standing = Standing(customer)
        for row in self._rows(customer):
            flow = standing.flows[row[0]] = self._to_flow(row)
            standing.running += flow.running
            if row[_SINCE] is not None:
                standing.head_order, standing.head_since = flow.head_order, row[_SINCE]
        return standing

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

    def flows(self, customer: int) -> list[StoredFlow]:
        return list(map(self._to_flow, self._rows(customer)))

    def _settings(self, customer: int) -> Row:
        (settings,) = fetch(self.connection, _SETTINGS, (customer,))
        return settings

    def _set(self, standing: Standing, settings: Row) -> None:
        name, weight, limit, paused, costs = settings
        if name is not None:
            self.names[standing.customer] = name
        if weight is not None:
            standing.weight, standing.limit, standing.paused = weight, limit, bool(paused)
            standing.recent_costs = tuple(json.loads(costs))

    def flow(self, customer: int, level: int) -> StoredFlow:
        """It may be in the file, since its customer was read. If it is not, nothing waits in it up
        to the orders that were given, but what was returned."""
        found = fetch(self.connection, _FLOW_OF_LEVEL, (customer, level))
        if found:
            return self._to_flow(found[0])
        return StoredFlow(customer, level, claimed_to=self.given)

    # Whoever is not loaded stays where it is in the file: what changes it loads it. So a stream
    # goes on from claim to claim, and never begins again.

    def turns(self) -> Iterator[tuple[int, int, int, int]]:
        last = (0, 0, 0)
        while True:
            from_here = (*last, self.page)
            page: list[Any] = fetch(self.connection, _TURNS, from_here)
            self._flows = self._flows_of(page, from_here)
            for row in page:
                self._turn = row
                yield row[_TURN]
            if len(page) < from_here[-1]:
                return
            last = page[-1][:3]

    def _flows_of(self, page: list[Row], from_here: Row) -> dict[int, list[Row]]:
        """All flows of the customers on the page, if there is one of whom they are needed."""
        if all(map(_is_enough, page)):
            return {}
        rows = fetch(self.connection, _FLOWS_OF_PAGE, from_here)
        return {customer: list(flows) for customer, flows in groupby(rows, _BY_CUSTOMER)}

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
            row = (flow.upcoming or self._read_ahead(flow)).pop()
            if row[ORDER] != order:
                raise FlowMismatch(flow.customer)
            self.picked.append(row)
            self._ahead -= 1
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
        if self._turn is not None and self._turn[_CUSTOMER] == left.customer:
            self._turn = None
        flow = standing.flows.get(left.level) if standing else None
        if isinstance(flow, StoredFlow) and flow.upcoming is not None:
            kept = [row for row in flow.upcoming if row[ORDER] != left.order]
            self._ahead -= len(flow.upcoming) - len(kept)
            flow.upcoming, flow.following = kept, None

    def _returned(self, flow: StoredFlow, order: int) -> Row:
        rows = fetch(self.connection, _RETURNED, (flow.customer, flow.level, order))
        if not rows:
            raise FlowMismatch(flow.customer)
        return rows[0]

    def _read_ahead(self, flow: StoredFlow) -> list[Row]:
        most = _AHEAD_MAX if self._ahead < _ROWS_AHEAD_MAX else 2
        flow.ahead = size = min(most, 2 * flow.ahead)
        flow.following = None
        rows = fetch(self.connection, _NEXT, (flow.customer, flow.level, flow.claimed_to, size))
        if not rows:
            raise FlowMismatch(flow.customer)
        self._ahead += len(rows)
        rows.reverse()
        flow.upcoming = rows
        return rows
