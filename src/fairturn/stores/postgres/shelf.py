"""What `turns.py` reads of the database: flows in the order of their turns, documents in theirs.

A claim asks for all that it will probably need in one round trip, and what is missing is read when
it is needed. A shelf lives as long as no other process has claimed in between: what it has read
stays true, and what happens meanwhile reaches it through the events that every claim folds in.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import psycopg

from fairturn.flows import Flow, Mode, Standing
from fairturn.stores.postgres.database import Overtaken, Session
from fairturn.stores.postgres.rows import NO_ORDER, columns
from fairturn.stores.values import Row

PAGE_MIN = 4
_AHEAD_MAX = 32  # rows of one flow
_ROWS_AHEAD_MAX = 8_000  # of all flows; beyond it, only what is needed next is read
_HEADS_MIN = 16
_LOWEST_INT = -(1 << 63)

# What a flow has waiting from some order on, in its order: by documents_flow what was not claimed
# yet, and by documents_returned. Where it is used, `f` is the flow, and the limit follows.
_WAITING = """
    SELECT d.order_number, d.number, d.priority, d.cost, d.returned FROM (
        (SELECT order_number, number, priority, cost, returned FROM fairturn.documents
        WHERE customer = f.customer AND level = f.level AND order_number > f.after
            AND state = 1 AND NOT returned
        ORDER BY customer, level, order_number LIMIT {limit})
        UNION ALL
        (SELECT order_number, number, priority, cost, returned FROM fairturn.documents
        WHERE returned AND customer = f.customer AND level = f.level
            AND order_number >= f.head_order
        ORDER BY customer, level, order_number LIMIT {limit})) d
    ORDER BY d.order_number LIMIT {limit}"""
ORDER, NUMBER, PRIORITY, COST, RETURNED = range(5)

# Whether this process has seen the present version of the turns, as `kept`.
_STATE = """
    state AS MATERIALIZED (
        SELECT version = %(version)s AS kept FROM fairturn.turns ORDER BY version DESC LIMIT 1)"""
# By flows_turn, in its order: from where this process stands, or from the beginning.
_PAGE = f"""
    WITH {_STATE}, page AS MATERIALIZED (
        SELECT customer, level, place, tick, head_order, claimed_to FROM fairturn.flows
        WHERE folded > 0 AND NOT held AND (level, place, tick) > (
                (SELECT CASE WHEN kept THEN %(level)s ELSE 0 END FROM state)::smallint,
                (SELECT CASE WHEN kept THEN %(place)s ELSE 0 END FROM state),
                (SELECT CASE WHEN kept THEN %(tick)s ELSE 0 END FROM state))
        ORDER BY level, place, tick
        LIMIT (SELECT CASE WHEN kept THEN %(size)s ELSE %(page)s END FROM state))"""
_TURNS = f"{_PAGE} SELECT level, place, tick, customer FROM page ORDER BY level, place, tick"
_LOAD_COLUMNS = """
    SELECT w.customer, c.name, s.weight, s.running_max, s.paused, s.recent_costs,
        f.level, f.place, f.tick, f.folded, f.running, f.taken, f.claimed_to, f.head_order,
        f.head_since, f.head_bound, f.held"""
# By the primary keys.
_LOAD_FROM = """
        LEFT JOIN fairturn.customers c ON c.number = w.customer
        LEFT JOIN fairturn.standings s ON s.customer = w.customer
        LEFT JOIN fairturn.flows f ON f.customer = w.customer
    ORDER BY w.customer"""
_LOAD_PAGE = f"""
    {_PAGE} {_LOAD_COLUMNS} FROM (SELECT DISTINCT customer FROM page) w {_LOAD_FROM}"""
_LOAD = f"{_LOAD_COLUMNS} FROM unnest(%s::bigint[]) AS w(customer) {_LOAD_FROM}"
# Of those of whom something was recorded. By the primary key of `recorded`.
_LOAD_RECORDED = f"""
    {_LOAD_COLUMNS} FROM (
        SELECT DISTINCT unnest(r.customers) FROM fairturn.recorded r
        WHERE r.xid >= %(since)s::text::xid8) AS w(customer)
    {_LOAD_FROM}"""
_NEXT_COLUMNS = "SELECT f.customer, f.level, d.* FROM"
_FROM_HEAD = "greatest(claimed_to, head_order - 1) AS after"
# As many for each flow as it takes to have one for each turn, and the one after that.
_SHARE = "(SELECT 1 + (%(page)s - 2 + count(*)) / greatest(count(*), 1) FROM page)"
_NEXT_OF_PAGE = f"""
    {_PAGE} {_NEXT_COLUMNS} (SELECT customer, level, head_order, {_FROM_HEAD} FROM page) f
        CROSS JOIN LATERAL ({
    _WAITING.format(
        limit="(SELECT 1 + (%(page)s - 2 + count(*)) / greatest(count(*), 1) FROM page)"
    )
}) d"""
# By the primary key of `recorded`, and by documents_flow.
_NEXT_OF_RECORDED = f"""
    {_NEXT_COLUMNS} (
        SELECT a.customer, a.level, a.head - 1 AS after, a.size FROM fairturn.recorded r
            CROSS JOIN LATERAL unnest(r.customers, r.levels, r.heads, r.sizes)
                AS a(customer, level, head, size)
        WHERE r.xid >= %(since)s::text::xid8 AND r.heads IS NOT NULL) f
        CROSS JOIN LATERAL (
            SELECT order_number, number, priority, cost, returned FROM fairturn.documents
            WHERE customer = f.customer AND level = f.level AND order_number > f.after
                AND state = 1 AND NOT returned
            ORDER BY customer, level, order_number LIMIT least(f.size, %(ahead)s)) d"""
_NEXT_OF = f"""
    {_NEXT_COLUMNS} unnest(%s::bigint[], %s::smallint[], %s::bigint[], %s::bigint[], %s::bigint[])
        AS f(customer, level, head_order, after, size)
        CROSS JOIN LATERAL ({_WAITING.format(limit="f.size")}) d"""
# By flows_head, in its order.
_FIRST_HEADS = f"""
    WITH {_STATE}
    SELECT head_bound, 0::bigint, customer FROM fairturn.flows
    WHERE head_bound IS NOT NULL AND NOT held
    ORDER BY head_bound, customer
    LIMIT (SELECT CASE WHEN kept THEN 0 ELSE %(page)s END FROM state)"""
_HEADS = """
    SELECT head_bound, 0::bigint, customer FROM fairturn.flows
    WHERE head_bound IS NOT NULL AND NOT held AND (head_bound, customer) > (%s, %s)
    ORDER BY head_bound, customer LIMIT %s"""
_BY_CUSTOMER, _BY_FLOW = itemgetter(0), itemgetter(0, 1)


@dataclass(slots=True, eq=False)
class StoredFlow(Flow):
    """A flow, and what else its row says; and its next documents, as far as they were read."""

    taken: int = 0
    claimed_to: int = NO_ORDER  # nothing waits here that was not returned
    bound: int | None = None  # head_bound and held, as they are in the database
    held: bool = False
    stored: bool = False
    upcoming: list[Row] | None = None  # the next one last
    ahead: int = 1  # how many were read the last time


class Asked:
    """What was asked for ahead: cursors, whose rows are there when the round trip is over. `whole`:
    with all that is needed if another process has claimed meanwhile."""

    def __init__(
        self, shelf: "PostgresShelf", session: Session, version: int, since: str, *, whole: bool
    ) -> None:
        self.turns: psycopg.Cursor[Row] | None = None
        self.load_recorded: psycopg.Cursor[Row] | None = None
        if whole or shelf.wants_page:
            self._ask_page(session, shelf.page_values(version))
        if whole or shelf.wants_arrivals:
            values = {"since": since, "ahead": min(shelf.page, _AHEAD_MAX)}
            self.load_recorded = _ask(session, _LOAD_RECORDED, values)
            self.arrived = _ask(session, _NEXT_OF_RECORDED, values)
        wanted = shelf.wanted()
        self.more = session.ask(_NEXT_OF, wanted) if wanted else None

    def _ask_page(self, session: Session, values: Mapping[str, object]) -> None:
        self.turns = _ask(session, _TURNS, values)
        self.load_page = _ask(session, _LOAD_PAGE, values)
        self.next = _ask(session, _NEXT_OF_PAGE, values)
        self.heads = _ask(session, _FIRST_HEADS, values)

    def ask_anew(self, shelf: "PostgresShelf", session: Session) -> None:
        """Another process has claimed, and it was not expected."""
        with session.together():
            self._ask_page(session, shelf.page_values(_LOWEST_INT))


def _ask(session: Session, statement: str, values: Mapping[str, object]) -> psycopg.Cursor[Row]:
    return session.ask(statement, {n: v for n, v in values.items() if f"%({n})s" in statement})


class PostgresShelf:
    """The database as the last claim left it, read ahead a little."""

    def __init__(self, mode: Mode) -> None:
        self.session: Session  # that of the transaction under way
        self.page = PAGE_MIN
        self.picked: list[Row] = []  # the rows of what was picked, in order
        self.names: dict[int, str] = {}  # of the customers that were loaded
        self.position = (0, 0, 0)  # up to here the turns were read
        self._mode = mode
        self._ahead = 0  # how many rows were read and not used yet
        self._turns: list[tuple[int, int, int, int]] = []  # read, the next one last
        self._turns_left = True  # whether there are more in the database
        self._heads: list[tuple[int, int, int]] = []
        self._heads_left = True
        self._head = (_LOWEST_INT, 0)
        self.wants_arrivals = True
        self._standings: dict[int, Standing] = {}
        self._loaded: dict[int, list[Row]] = {}  # of customers that will be loaded soon
        self._arrived: dict[tuple[int, int], list[Row]] = {}
        self._next: dict[tuple[int, int], list[Row]] = {}
        self._low: set[StoredFlow] = set()  # flows whose next documents are to be read

    # ── In one round trip ────────────────────────────────────────────────────────────────────────

    @property
    def wants_page(self) -> bool:
        """Whether the next claim may need more turns than were read."""
        return self._turns_left and len(self._turns) < self.page

    def page_values(self, version: int) -> dict[str, int]:
        """Where the next page of turns begins, for a process that has seen this version."""
        level, place, tick = self.position
        return {
            "version": version,
            "level": level,
            "place": place,
            "tick": tick,
            "size": self.page if self.wants_page else 0,
            "page": self.page,
        }

    def receive(
        self, session: Session, asked: Asked, standings: dict[int, Standing], *, anew: bool
    ) -> None:
        """Take in what was asked for; `anew`: another process has claimed since."""
        self.session = session
        self._standings = standings
        if anew and asked.turns is None:
            asked.ask_anew(self, session)
        if asked.load_recorded is not None:
            self._take_loaded(asked.load_recorded)
            # Of each arrival the first ones were read; of all together no more are sure to be next.
            enough = min(self.page, _AHEAD_MAX)
            self._arrived = {
                flow: sorted(rows)[:enough] for flow, rows in _grouped(asked.arrived).items()
            }
        self.wants_arrivals = False
        if asked.turns is not None and (anew or self.wants_page):
            self._take_loaded(asked.load_page)
            self._next.update(_grouped(asked.next))
            self._take_turns(asked.turns.fetchall())
        if anew:
            assert asked.turns is not None
            self._take_heads(asked.heads.fetchall(), self.page)
        if asked.more is not None and not anew:
            read = _grouped(asked.more)
            for flow in self._low:
                self._put(flow, read.get((flow.customer, flow.level), []))
        self._low.clear()

    def _take_loaded(self, cursor: psycopg.Cursor[Row]) -> None:
        for customer, rows in groupby(cursor.fetchall(), _BY_CUSTOMER):
            if customer not in self._standings:
                self._loaded[customer] = list(rows)

    def _put(self, flow: StoredFlow, rows: list[Row]) -> None:
        """These are the flow's next documents."""
        self._ahead += len(rows) - len(flow.upcoming or ())
        flow.upcoming = rows[::-1]

    def seat_arrived(self, standings: dict[int, Standing]) -> None:
        """Give the documents that arrived to their flows, where these had none before."""
        self.wants_arrivals = True  # there were some, so there may be more the next time
        for (customer, level), rows in self._arrived.items():
            flow = standings[customer].flows.get(level) if customer in standings else None
            if not isinstance(flow, StoredFlow) or flow.upcoming:
                continue
            if flow.head_order == rows[0][ORDER] and self._ahead < _ROWS_AHEAD_MAX:
                self._put(flow, rows)
        self._arrived = {}

    def _take_turns(self, turns: list[Row]) -> None:
        if turns:
            self.position = turns[-1][:3]
        self._turns_left = len(turns) == self.page
        self._turns[:0] = [(row[0], row[1], row[2], row[3]) for row in reversed(turns)]

    def _take_heads(self, page: list[Row], size: int) -> None:
        self._heads = [(row[0], row[1], row[2]) for row in reversed(page)]
        self._heads_left = len(page) == size
        if page:
            self._head = (page[-1][0], page[-1][2])

    def wanted(self) -> list[list[int]]:
        """For which flows the next documents are to be read ahead, as arrays for `_NEXT_OF`."""
        rows = []
        for flow in self._low:
            head, after = _place(flow)
            flow.ahead = min(self._most, 2 * flow.ahead)
            rows.append((flow.customer, flow.level, head, after, flow.ahead))
        return columns(rows)

    @property
    def _most(self) -> int:
        return _AHEAD_MAX if self._ahead < _ROWS_AHEAD_MAX else 2

    def expect(self, customers: Iterable[int], standings: dict[int, Standing]) -> None:
        """Read these customers together, unless they are known."""
        missing = [c for c in customers if c not in standings and c not in self._loaded]
        if missing:
            rows = self.session.fetch(_LOAD, (missing,))
            self._loaded.update((c, list(own)) for c, own in groupby(rows, _BY_CUSTOMER))

    # ── Flows ────────────────────────────────────────────────────────────────────────────────────

    def standing(self, customer: int) -> Standing:
        rows = self._loaded.pop(customer, None)
        if rows is None:
            rows = self.session.fetch(_LOAD, ([customer],))
        standing = Standing(customer)
        _, name, weight, limit, paused, costs = rows[0][:6]
        if name is not None:
            self.names[customer] = name
        if weight is not None:
            standing.weight, standing.limit, standing.paused = weight, limit, paused
            standing.recent_costs = tuple(costs)
        by_order = self._mode is Mode.LEVELS
        for row in rows:
            level, place, tick, folded, running, taken, claimed_to, order, since, bound, held = row[
                6:
            ]
            if level is None:
                continue
            flow = standing.flows[level] = StoredFlow(
                customer,
                level,
                0 if by_order else place,
                tick,
                folded,
                running,
                order,
                folded > 0 and not held,
                None,
                taken,
                claimed_to,
                bound,
                held,
                True,
            )
            standing.running += running
            if since is not None:
                standing.head_order, standing.head_since = order, since
            upcoming = self._next.pop((customer, level), None)
            if upcoming is not None:
                flow.upcoming = upcoming[::-1]
                self._ahead += len(upcoming)
        return standing

    def flows(self, customer: int) -> Iterable[Flow]:
        """Nothing: every customer is loaded with all its flows."""
        return ()

    def flow(self, customer: int, level: int) -> StoredFlow:
        """Only claims make flows, so that this one is new."""
        return StoredFlow(customer, level)

    # Whoever is not loaded stays where it is in the database: what changes it loads it. So a stream
    # goes on from claim to claim, and never begins again.

    def turns(self) -> Iterator[tuple[int, int, int, int]]:
        while True:
            while self._turns:
                yield self._turns.pop()
            if not self._turns_left:
                return
            values = {**self.page_values(_LOWEST_INT), "size": self.page}
            with self.session.together():
                turns = _ask(self.session, _from_here(_TURNS), values)
                load = _ask(self.session, _from_here(_LOAD_PAGE), values)
                following = _ask(self.session, _from_here(_NEXT_OF_PAGE), values)
            self._take_loaded(load)
            self._next.update(_grouped(following))
            self._take_turns(turns.fetchall())

    def heads(self) -> Iterator[tuple[int, int, int]]:
        while True:
            while self._heads:
                yield self._heads.pop()
            if not self._heads_left:
                return
            size = max(_HEADS_MIN, self.page)
            self._take_heads(self.session.fetch(_HEADS, (*self._head, size)), size)

    # ── Documents ────────────────────────────────────────────────────────────────────────────────

    def order_after(self, flow: Flow, order: int) -> int | None:
        assert isinstance(flow, StoredFlow)
        row = self._first(flow, order)
        assert flow.upcoming is not None
        flow.upcoming.pop()
        self._ahead -= 1
        self.picked.append(row)
        if not row[RETURNED]:
            flow.claimed_to = order
        if flow.waiting == 0:
            self._low.discard(flow)
            return None
        if len(flow.upcoming) <= 1 < flow.waiting:
            self._low.add(flow)
        if not flow.upcoming:
            self._read(flow, order + 1)
        return flow.upcoming[-1][ORDER]  # type: ignore[no-any-return]

    def cost(self, flow: Flow) -> int | None:
        assert isinstance(flow, StoredFlow)
        assert flow.head_order is not None
        return self._first(flow, flow.head_order)[COST]  # type: ignore[no-any-return]

    def _first(self, flow: StoredFlow, order: int) -> Row:
        """The flow's first document, which has this order."""
        if not flow.upcoming or flow.upcoming[-1][ORDER] != order:
            self._read(flow, order)
        assert flow.upcoming
        return flow.upcoming[-1]

    def _read(self, flow: StoredFlow, head: int) -> None:
        """Read the next documents of a flow, from this order on; and with them those of others of
        its level that will have their turns, too."""
        flow.ahead = min(self._most, 2 * flow.ahead)
        rows = [(flow.customer, flow.level, head, max(flow.claimed_to, head - 1), flow.ahead)]
        others = {(flow.customer, flow.level): flow}
        for standing in self._standings.values():
            other = standing.flows.get(flow.level)
            if (
                isinstance(other, StoredFlow)
                and other.active
                and not other.upcoming
                and other is not flow
                and other.head_order is not None
            ):
                others[other.customer, other.level] = other
                rows.append((other.customer, other.level, *_place(other), 2))
                if len(rows) >= self.page:
                    break
        found = _grouped(self.session.ask(_NEXT_OF, columns(rows)))
        if (flow.customer, flow.level) not in found:
            raise Overtaken("a document that was to be claimed does not wait any more")
        for place, documents in found.items():
            self._put(others[place], documents)

    def forget_line(self, standing: Standing | None, customer: int, level: int) -> None:
        """Another document than those after all others began, or ceased, to wait in a flow."""
        self._arrived.pop((customer, level), None)
        self._next.pop((customer, level), None)
        flow = standing.flows.get(level) if standing else None
        if isinstance(flow, StoredFlow) and flow.upcoming is not None:
            self._ahead -= len(flow.upcoming)
            flow.upcoming = None

    def arrive(self, flow: StoredFlow, order: int) -> None:
        """Documents arrived, of which this is the first: what was not returned comes from it on."""
        if flow.claimed_to == NO_ORDER:
            flow.claimed_to = order - 1


def _place(flow: StoredFlow) -> tuple[int, int]:
    """The first order of a flow, and that after which what was not returned waits."""
    head = flow.head_order or 0
    return head, max(flow.claimed_to, head - 1)


def _grouped(cursor: psycopg.Cursor[Row]) -> dict[tuple[int, int], list[Row]]:
    """Rows of documents by their flows."""
    grouped: dict[tuple[int, int], list[Row]] = {}
    for row in cursor.fetchall():
        grouped.setdefault((row[0], row[1]), []).append(row[2:])
    return grouped


def _from_here(statement: str) -> str:
    return statement.replace("version = %(version)s", "version > %(version)s")
