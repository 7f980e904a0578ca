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

from fairturn.model import DEFAULT_KIND_NAME
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import (
    BANDS_PER_KIND,
    DEFAULT_KIND,
    ArrivalEvent,
    Band,
    CancelEvent,
    CustomerState,
    Flow,
    FlowMismatch,
    Head,
    HeadEntry,
    Mode,
    TurnEntry,
    band_of,
    kind_of,
    level_in,
)
from fairturn.scheduling.turns import Turns
from fairturn.stores.sqlite.cancel import LOWEST_RETURNED
from fairturn.stores.sqlite.rows import KindRow, QueueRow, fetch
from fairturn.stores.values import CLAIM_COLUMNS, COST, ORDER, Row
from fairturn.validation.text import compact_json

PAGE_MIN = 16
_PREFETCH_MAX = 32  # documents of one flow
_PREFETCH_TOTAL_MAX = 8_000  # of all flows; beyond it, two documents of a flow are read at a time
_LOWEST_INT = -(1 << 63)
BAND_COLUMNS = "clock, weight, kind_time, last_claim, level_time"
_BAND = f"SELECT {BAND_COLUMNS} FROM levels WHERE level = ?"

# By flows_turn, in its order: the turns of one kind, whose bands end before ?5.
_PAGE_OF_TURNS = """
    FROM flows INDEXED BY flows_turn
    WHERE folded > 0 AND held = 0 AND (level, place, tick) > (?1, ?2, ?3) AND level < ?5
    ORDER BY level, place, tick LIMIT ?4"""
_SETTINGS_COLUMNS = "s.weight, s.running_max, s.paused, s.recent_costs, s.costs_by_kind"
_FLOW_COLUMNS = """
    f.level, f.place, f.tick, f.customer, f.claimed_to, f.folded, f.running, f.head_order,
    f.head_since, f.head_bound, f.held"""
# Each turn with the columns that load its customer, the lowest order in its other flows of the kind
# if this flow is enough (`_is_enough`), the order of the flow's second document, and its first
# document unless it was returned. By flows_customer, documents_flow and the primary keys.
_TURNS = f"""
    SELECT {_FLOW_COLUMNS}, c.name, {_SETTINGS_COLUMNS}, CASE
        WHEN f.head_since IS NOT NULL AND s.customer IS NULL THEN (
            SELECT min(o.head_order) FROM flows o INDEXED BY flows_customer
            WHERE o.customer = f.customer AND o.level <> f.level
                AND o.level >= ?5 - {BANDS_PER_KIND} AND o.level < ?5) END, (
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
_NAME_AND_SETTINGS, _NAME, _WEIGHT, _ELSEWHERE, _FOLLOWING = slice(11, 17), 11, 12, 17, 18
_FIRST, _FIRST_ORDER = slice(19, None), 19 + ORDER
_BY_CUSTOMER = itemgetter(_CUSTOMER)
# All flows of a customer, and those of a kind. The last is for all customers on a page of `_TURNS`.
_FLOWS = f"""
    SELECT {_FLOW_COLUMNS} FROM flows f INDEXED BY flows_customer WHERE f.customer = ?"""
_FLOWS_OF_KIND = f"{_FLOWS} AND f.level BETWEEN ? AND ?"
_FLOWS_OF_PAGE = f"""
    SELECT {_FLOW_COLUMNS} FROM flows f INDEXED BY flows_customer
    WHERE f.customer IN (SELECT customer {_PAGE_OF_TURNS})
        AND f.level >= ?5 - {BANDS_PER_KIND} AND f.level < ?5
    ORDER BY f.customer"""
# By the primary key.
_FLOW_OF_BAND = f"SELECT {_FLOW_COLUMNS} FROM flows f WHERE f.customer = ? AND f.level = ?"
# The customer may have been purged: its flows exist until the next claim folds the event.
_SETTINGS = f"""
    SELECT (SELECT name FROM customers WHERE number = ?1), {_SETTINGS_COLUMNS}
    FROM queue LEFT JOIN customer_states s ON s.customer = ?1"""
# By flows_head, in its order.
_HEADS = f"""
    SELECT head_bound, 0, customer FROM flows INDEXED BY flows_head
    WHERE level / {BANDS_PER_KIND} = ? AND head_bound IS NOT NULL AND held = 0
        AND (head_bound, customer) > (?, ?)
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
# Virtual times end at 2^63; one claim adds less than 2^57.
CLOCK_MAX = 1 << 60
# The bands of the default kind, with the times of their levels.
_DEFAULT_BANDS = f"""
    SELECT level, {BAND_COLUMNS} FROM levels WHERE level < {BANDS_PER_KIND}"""

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
    INSERT OR REPLACE INTO customer_states
        (customer, weight, running_max, paused, recent_costs, costs_by_kind)
    VALUES (?, ?, ?, ?, ?, ?)"""
_DROP_CUSTOMER_STATE = "DELETE FROM customer_states WHERE customer = ?"
_SAVE_BAND = f"""
    INSERT INTO levels (level, {BAND_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET clock = excluded.clock, weight = excluded.weight,
        kind_time = excluded.kind_time, last_claim = excluded.last_claim,
        level_time = excluded.level_time"""
_SAVE_SINCE_PATIENCE = "UPDATE kinds SET since_patience = ? WHERE number = ?"
# Only differences within a band matter to its flows, and only those within a level to its kinds, so
# all of it can be shifted to 0. Flows and kinds without turns for long stay inside 64 bits: they
# begin at the clock of their band or the time of their level.
_RESET_CLOCKS = f"""
    UPDATE flows SET place = max({-CLOCK_MAX}, place - coalesce(
        (SELECT clock FROM levels l WHERE l.level = flows.level), 0));
    UPDATE levels SET clock = 0, kind_time = max({-CLOCK_MAX}, kind_time - (
        SELECT level_time FROM levels l WHERE l.level = levels.level % {BANDS_PER_KIND}));
    UPDATE levels SET level_time = 0"""


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
        self.known_to = 0  # below it are all orders that were given when documents were last read
        self.page = PAGE_MIN
        self.picked: list[Row] = []  # rows of picked documents, in order
        self._prefetched = 0  # rows that were read and not picked yet
        self.names: dict[int, str] = {}  # of loaded customers
        self.kind_names = {DEFAULT_KIND: DEFAULT_KIND_NAME}  # of the kinds that claims have served
        # Bands as they are in the file: only changed ones are written.
        self.bands: dict[int, Row] = {}
        self._mode = mode
        # By customer: the last turn that was read of each kind, because it is usually loaded next.
        self._turns: dict[int, Row] = {}
        # By kind and customer: flows of customers on the page of its turns, if any needs them.
        self._flows: dict[int, dict[int, list[Row]]] = {}

    # ── Flows ────────────────────────────────────────────────────────────────────────────────────

    def customer_state(self, customer: int) -> CustomerState:
        """Return the customer with the flow of its next turn if that is enough; otherwise with the
        flows of that kind. A limit or a pause needs all its flows."""
        turn = self._turns.pop(customer, None)
        if turn is None:
            return self._with_settings(customer, self._settings(customer))
        if _is_enough(turn):
            return self._with_this_flow(turn)
        state = self._with_settings(customer, turn[_NAME_AND_SETTINGS])
        if not state.whole:
            kind = kind_of(turn[0])
            state.kinds = (kind,)
            self._add_flows(state, self._rows(customer, kind))
        flow = state.flows[turn[0]]
        assert isinstance(flow, StoredFlow)
        self._expect(flow, turn)
        return state

    def _with_this_flow(self, turn: Row) -> CustomerState:
        flow = self._to_flow(turn)
        self._expect(flow, turn)
        self.names[flow.customer] = turn[_NAME]
        head = Head(flow.head_order, turn[_SINCE], elsewhere=turn[_ELSEWHERE])
        return CustomerState(
            flow.customer,
            flows={flow.band: flow},
            heads={kind_of(flow.band): head},
            running=flow.running,
            whole=False,
        )

    def _expect(self, flow: StoredFlow, turn: Row) -> None:
        if turn[_FIRST_ORDER] is not None:
            flow.upcoming, flow.following = [turn[_FIRST]], turn[_FOLLOWING]
            self._prefetched += 1

    def _with_settings(self, customer: int, settings: Row) -> CustomerState:
        """Return the customer without flows, or with all of them if it has a limit or is paused."""
        name, weight, limit, paused, costs, costs_by_kind = settings
        state = CustomerState(customer, whole=False)
        if name is not None:
            self.names[customer] = name
        if weight is not None:
            state.weight, state.limit, state.paused = weight, limit, bool(paused)
            for kind, recent in to_costs(costs, costs_by_kind).items():
                state.head(kind).recent_costs = tuple(recent)
        if limit is not None or paused:
            state.whole = True
            self._add_flows(state, self._rows(customer, None))
        return state

    def _add_flows(self, state: CustomerState, rows: Iterable[Row]) -> None:
        for row in rows:
            flow = state.flows[row[0]] = self._to_flow(row)
            state.running += flow.running
            if row[_SINCE] is not None:
                head = state.head(kind_of(flow.band))
                head.order, head.since = flow.head_order, row[_SINCE]

    def _rows(self, customer: int, kind: int | None) -> list[Row]:
        if kind is None:
            return fetch(self.connection, _FLOWS, (customer,))
        rows = self._flows.get(kind, {}).pop(customer, None)
        if rows is not None:
            return rows
        bands = (band_of(1, kind), band_of(LEVELS, kind))
        return fetch(self.connection, _FLOWS_OF_KIND, (customer, *bands))

    def _to_flow(self, row: Row) -> StoredFlow:
        band, place, tick, customer, claimed_to, folded, running, order, _, bound, held = row[_FLOW]
        return StoredFlow(
            customer,
            band,
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

    def flows(self, customer: int, kind: int | None) -> list[tuple[StoredFlow, int | None]]:
        turn = self._turns.pop(customer, None)
        found = [(self._to_flow(row), row[_SINCE]) for row in self._rows(customer, kind)]
        for flow, _ in found:
            if turn is not None and turn[0] == flow.band:
                self._expect(flow, turn)
        return found

    def _settings(self, customer: int) -> Row:
        (settings,) = fetch(self.connection, _SETTINGS, (customer,))
        return settings

    def flow(self, customer: int, band: int) -> StoredFlow:
        """Return a flow that may have been inserted after its customer was loaded. If it has no
        row, only returned documents wait in it up to the orders assigned so far."""
        found = fetch(self.connection, _FLOW_OF_BAND, (customer, band))
        if found:
            return self._to_flow(found[0])
        return StoredFlow(customer, band, claimed_to=self.given)

    def band(self, number: int) -> Band:
        """Return a band as it is in the file."""
        if number not in self.bands:
            found = fetch(self.connection, _BAND, (number,))
            if not found:
                return Band()
            (self.bands[number],) = found
        return Band(*self.bands[number][:-1])

    # A customer that is not loaded does not change: every event loads its customer. The generators
    # below therefore continue from claim to claim and never restart.

    def turns(self, kind: int) -> Iterator[TurnEntry]:
        last = (band_of(0, kind), 0, 0)
        while True:
            size = self.page
            after = (*last, size, band_of(0, kind + 1))
            page: list[Any] = fetch(self.connection, _TURNS, after)
            self._flows[kind] = self._flows_of(page, after)
            for row in page:
                self._turns[row[_CUSTOMER]] = row
                yield row[_TURN]
                self._turns.pop(row[_CUSTOMER], None)
            if len(page) < size:
                return
            last = page[-1][:3]

    def _flows_of(self, page: list[Row], after: Row) -> dict[int, list[Row]]:
        """Return the flows of the kind of all customers on the page, unless each turn is enough."""
        if all(map(_is_enough, page)):
            return {}
        rows = fetch(self.connection, _FLOWS_OF_PAGE, after)
        return {customer: list(flows) for customer, flows in groupby(rows, _BY_CUSTOMER)}

    def heads(self, kind: int) -> Iterator[HeadEntry]:
        last = (_LOWEST_INT, 0)
        while True:
            size = self.page
            page: list[Any] = fetch(self.connection, _HEADS, (kind, *last, size))
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
        self._turns.pop(left.customer, None)
        flow = state.flows.get(left.band) if state else None
        if isinstance(flow, StoredFlow) and flow.upcoming is not None:
            kept = [row for row in flow.upcoming if row[ORDER] != left.order]
            self._prefetched -= len(flow.upcoming) - len(kept)
            flow.upcoming, flow.following = kept, None

    def came_back(self, state: CustomerState | None, joined: ArrivalEvent) -> None:
        """Discard the prefetched documents of a flow that an older document has joined: it may come
        before them."""
        self._turns.pop(joined.customer, None)
        flow = state.flows.get(joined.band) if state else None
        if isinstance(flow, StoredFlow) and joined.order > flow.claimed_to:
            self._prefetched -= len(flow.upcoming or ())
            flow.upcoming = flow.following = None

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


def to_costs(costs: str, costs_by_kind: str) -> dict[int, list[int]]:
    """Return the recent costs of a customer by kind, from the columns of `customer_states`."""
    others = {int(kind): recent for kind, recent in json.loads(costs_by_kind).items()}
    return {DEFAULT_KIND: json.loads(costs), **others}


def load_turns(connection: apsw.Connection, queue: QueueRow) -> tuple[SqliteFlows, Turns]:
    """Return the scheduler state as of the last claim, and its flow source."""
    settings = queue.settings
    source = SqliteFlows(settings.mode)
    source.connection = connection
    level_times = {}
    for level, *row in connection.execute(_DEFAULT_BANDS):
        source.bands[level] = tuple(row)
        level_times[level] = row[-1]
    turns = Turns(
        source,
        mode=settings.mode,
        costs=settings.costs,
        patience_us=settings.patience_us,
        number=queue.claims,
        tick=queue.tick,
        read_band=source.band,
        level_times=level_times,
        kind_names=source.kind_names,
    )
    return source, turns


def load_kinds(source: SqliteFlows, turns: Turns, kinds: Iterable[KindRow]) -> None:
    """Pass the names and the claims since the last patience claim of these kinds to the scheduler,
    before the next claim."""
    for kind in kinds:
        source.kind_names[kind.number] = kind.name
        turns.since_patience[kind.number] = kind.since_patience(turns.number)


def save_customer_states(connection: apsw.Connection, turns: Turns) -> None:
    """Write the customers whose settings or recent costs have changed."""
    for customer in turns.adjusted:
        state = turns.customers[customer]
        if state.is_plain:
            connection.execute(_DROP_CUSTOMER_STATE, (customer,))
            continue
        costs = {kind: head.recent_costs for kind, head in state.heads.items()}
        default = costs.pop(DEFAULT_KIND, ())
        others = {kind: recent for kind, recent in costs.items() if recent}
        settings = (customer, state.weight, state.limit, int(state.paused))
        row = (*settings, json.dumps(default), compact_json(others))
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
        customer, band, order = flow.customer, flow.band, flow.head_order
        state = turns.customers[customer]
        head = state.heads.get(band // BANDS_PER_KIND)
        is_head = head is not None and order is not None and order == head.order
        since = head.since if head is not None and is_head else None
        values = (
            moved.get((customer, band), 0),
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
            same_head.append((*values, customer, band))
        else:
            flow.bound, flow.held = bound, held
            new_head.append((*values, bound, held, customer, band))
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


def save_bands(
    connection: apsw.Connection, turns: Turns, source: SqliteFlows, bands: set[int]
) -> bool:
    """Write those of these bands that have changed, and the times of their levels. Return whether
    a clock is near the end of 64 bits."""
    rows = []
    for number in bands | {level_in(number) for number in bands}:
        band, level_time = turns.bands[number], 0
        if number < BANDS_PER_KIND:
            level_time = turns.level_times[number]
        row = (band.clock, band.weight, band.kind_time, band.last_claim, level_time)
        if row != source.bands.get(number):
            source.bands[number] = row
            rows.append((number, *row))
    connection.executemany(_SAVE_BAND, rows)
    return any(max(clock, kind_time) > CLOCK_MAX for _, clock, _, kind_time, *_ in rows)


def save_patience(connection: apsw.Connection, turns: Turns, kinds: Iterable[KindRow]) -> None:
    """Write how many claims these kinds were served since their last patience claim."""
    for number, *_, stored in kinds:
        now = turns.since_patience[number]
        if stored is not None and stored != now:
            connection.execute(_SAVE_SINCE_PATIENCE, (now, number))


def reset_clocks(connection: apsw.Connection) -> None:
    """Set all clocks to 0, and shift the flows by the same amount, before they overflow."""
    connection.execute(_RESET_CLOCKS)
