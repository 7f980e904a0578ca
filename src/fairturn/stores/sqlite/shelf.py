"""What `turns.py` reads of the file: flows in the order of their turns, documents in theirs.

A shelf lives as long as no other process has claimed in between: what it has read stays true, and
what happens in the meantime reaches it through the events that every claim folds in.
"""

import json
from collections.abc import Iterator
from typing import Any

import apsw

from fairturn.flows import Flow, Mode, Standing
from fairturn.priority import LEVELS
from fairturn.stores.sqlite.outcomes import LOWEST_RETURNED
from fairturn.stores.sqlite.rows import DOCUMENT_COLUMNS, Row, fetch

_PAGE_MIN = 16
_AHEAD_MAX = 32
_LOWEST_INT = -(1 << 63)

# By flows_turn, in its order.
_TURNS = """
    SELECT level, place, tick, customer FROM flows INDEXED BY flows_turn
    WHERE folded > 0 AND held = 0 AND (level, place, tick) > (?, ?, ?)
    ORDER BY level, place, tick LIMIT ?"""
# By flows_head, in its order.
_HEADS = """
    SELECT head_since, head_order, customer FROM flows INDEXED BY flows_head
    WHERE head_since IS NOT NULL AND held = 0 AND (head_since, head_order) > (?, ?)
    ORDER BY head_since, head_order LIMIT ?"""
# By the primary keys of flows and standings.
_FLOW_COLUMNS = """
    f.customer, f.level, f.claimed_to, f.place, f.tick, f.folded, f.running, f.head_order,
    f.head_since, f.held, s.weight, s.running_max, s.paused, s.recent_costs"""
_STANDING = f"""
    SELECT {_FLOW_COLUMNS}
    FROM flows f LEFT JOIN standings s ON s.customer = f.customer WHERE f.customer = ?"""
# The same for all customers on a page of `_TURNS`.
_STANDINGS = f"""
    SELECT {_FLOW_COLUMNS}
    FROM flows f LEFT JOIN standings s ON s.customer = f.customer
    WHERE f.customer IN (
        SELECT customer FROM flows INDEXED BY flows_turn
        WHERE folded > 0 AND held = 0 AND (level, place, tick) > (?, ?, ?)
        ORDER BY level, place, tick LIMIT ?)"""
_CLAIMED_TO = "SELECT claimed_to FROM flows WHERE customer = ? AND level = ?"
_SETTINGS = "SELECT weight, running_max, paused, recent_costs FROM standings WHERE customer = ?"

_ROW = f"d.order_number, d.attempts, d.body, {DOCUMENT_COLUMNS}"
# By documents_flow, from claimed_to on: there everything waits.
_NEXT = f"""
    SELECT {_ROW}
    FROM documents d INDEXED BY documents_flow CROSS JOIN customers c ON c.number = d.customer
    WHERE d.customer = ? AND d.level = ? AND d.order_number > ?
    ORDER BY d.order_number LIMIT ?"""
# By documents_returned.
_RETURNED = f"""
    SELECT {_ROW}
    FROM documents d INDEXED BY documents_returned CROSS JOIN customers c ON c.number = d.customer
    WHERE d.returned = 1 AND d.customer = ? AND d.level = ? AND d.order_number = ?"""
_COST = 3 + 14  # where the cost stands in these rows


class SqliteShelf:
    """The file as the last claim left it, read ahead a little."""

    def __init__(self, mode: Mode) -> None:
        self.connection: apsw.Connection  # that of the transaction under way
        self.page = _PAGE_MIN
        self.picked: list[Row] = []  # the rows of what was picked, in order
        self.claimed_to: dict[tuple[int, int], int] = {}
        self.ahead = 0  # how many rows were read and not used yet
        self.loaded: set[int] = set()  # customers
        # What is in the file, so that only what has changed is written back.
        self.clocks = [0] * (LEVELS + 1)
        self.weights = [0] * (LEVELS + 1)
        self._mode = mode
        self._upcoming: dict[tuple[int, int], list[Row]] = {}  # the next one last
        self._size: dict[tuple[int, int], int] = {}  # of the last reading ahead
        self._prefetched: dict[int, list[Row]] = {}
        self._all_turns_read = False
        self._all_heads_read = False

    # ── Flows ────────────────────────────────────────────────────────────────────────────────────

    def standing(self, customer: int) -> Standing:
        rows = self._prefetched.pop(customer, None)
        if rows is None:
            rows = fetch(self.connection, _STANDING, (customer,))
        standing = Standing(customer)
        by_order = self._mode is Mode.LEVELS
        settings: Row | None
        for row in rows:
            _, level, claimed_to, place, tick, folded, running, head_order, head_since, held = row[
                :10
            ]
            active = folded > 0 and not held
            standing.flows[level] = Flow(
                customer, level, 0 if by_order else place, tick, folded, running, head_order, active
            )
            standing.running += running
            if head_since is not None:
                standing.head_order, standing.head_since = head_order, head_since
            self.claimed_to[customer, level] = claimed_to
        if rows:
            settings = rows[0][10:] if rows[0][10] is not None else None
        else:
            found = fetch(self.connection, _SETTINGS, (customer,))
            settings = found[0] if found else None
        if settings is not None:
            standing.weight, standing.limit, paused, costs = settings
            standing.paused = bool(paused)
            standing.recent_costs = json.loads(costs)
        self.loaded.add(customer)
        return standing

    def turns(self) -> Iterator[tuple[int, int, int, int]]:
        last = (0, 0, 0)
        while not self._all_turns_read:
            page: list[Any] = fetch(self.connection, _TURNS, (*last, self.page))
            if any(entry[-1] not in self.loaded for entry in page):
                self._prefetch(last)
            yield from page
            self._all_turns_read = len(page) < self.page
            if page:
                last = page[-1][:3]

    def _prefetch(self, last: tuple[int, int, int]) -> None:
        self._prefetched = {}
        for row in fetch(self.connection, _STANDINGS, (*last, self.page)):
            if row[0] not in self.loaded:
                self._prefetched.setdefault(row[0], []).append(row)

    def heads(self) -> Iterator[tuple[int, int, int]]:
        last = (_LOWEST_INT, 0)
        size = 1 + self.page // 8
        while not self._all_heads_read:
            page: list[Any] = fetch(self.connection, _HEADS, (*last, size))
            yield from page
            self._all_heads_read = len(page) < size
            if page:
                last = page[-1][:2]

    # ── Documents ────────────────────────────────────────────────────────────────────────────────

    def order_after(self, flow: Flow, order: int) -> int | None:
        place = (flow.customer, flow.level)
        if order <= self.claimed_to[place]:
            self.picked.append(self._returned(place, order))
            following: int | None = self.connection.execute(LOWEST_RETURNED, (*place, order)).get
            if following is not None:
                return following
        else:
            upcoming = self._upcoming.get(place) or self._read_ahead(place)
            self.picked.append(upcoming.pop())
            self.ahead -= 1
            self.claimed_to[place] = order
        if flow.waiting == 0:
            return None
        upcoming = self._upcoming.get(place) or self._read_ahead(place)
        return upcoming[-1][0]  # type: ignore[no-any-return]

    def cost(self, flow: Flow) -> int | None:
        place = (flow.customer, flow.level)
        assert flow.head_order is not None
        if flow.head_order <= self.claimed_to[place]:
            row = self._returned(place, flow.head_order)
        else:
            row = (self._upcoming.get(place) or self._read_ahead(place))[-1]
        return row[_COST]  # type: ignore[no-any-return]

    def know(self, place: tuple[int, int], otherwise: int) -> None:
        """Learn how far a flow was claimed that may be new since its customer was read. Of a flow
        that is not in the file, nothing waits up to `otherwise` but what was returned."""
        if place not in self.claimed_to:
            found = fetch(self.connection, _CLAIMED_TO, place)
            self.claimed_to[place] = found[0][0] if found else otherwise

    def cancelled(self, customer: int, level: int, order: int) -> None:
        """A waiting document was cancelled, which may have been read ahead."""
        upcoming = self._upcoming.get((customer, level))
        if upcoming:
            kept = [row for row in upcoming if row[0] != order]
            self.ahead -= len(upcoming) - len(kept)
            self._upcoming[customer, level] = kept

    def _returned(self, place: tuple[int, int], order: int) -> Row:
        (row,) = fetch(self.connection, _RETURNED, (*place, order))
        return row

    def _read_ahead(self, place: tuple[int, int]) -> list[Row]:
        size = self._size[place] = min(_AHEAD_MAX, 2 * self._size.get(place, 1))
        rows = fetch(self.connection, _NEXT, (*place, self.claimed_to[place], size))
        self.ahead += len(rows)
        rows.reverse()
        self._upcoming[place] = rows
        return rows
