"""Explanations and lanes, read from one snapshot of the database."""

from collections import Counter
from collections.abc import Collection, Iterable

from fairturn.clock import Uptime
from fairturn.explain.snapshot import DocumentSnapshot
from fairturn.model import (
    ENDED_BY_ATTEMPT,
    PAGE_MAX,
    TRANSITIONS,
    Document,
    Filter,
    Lanes,
    State,
    level_of,
)
from fairturn.scheduling.flows import COST_ONE, WEIGHT_ONE, Band, EventBatch
from fairturn.scheduling.turns import Turns
from fairturn.stores import ids, snapshot
from fairturn.stores.positions import FlowKey
from fairturn.stores.postgres.flows import SnapshotFlows
from fairturn.stores.postgres.query import find, summary
from fairturn.stores.postgres.rows import (
    EVENT_COLUMNS,
    GENERATION,
    NO_ORDER,
    TURNS,
    PostgresQueueRow,
    TurnsRow,
    to_events,
)
from fairturn.stores.postgres.session import Session, Values
from fairturn.stores.snapshot import DOCUMENTS_SAMPLED, FLOWS_SAMPLED, by_lane, next_numbers
from fairturn.stores.values import RUNNING, WAITING, Row, codes_of

# Rows of the event log that a snapshot folds, within about 100 ms.
EVENTS_MAX = 20_000

# The column `level` is kept for waiting documents only.
_LEVEL = "CASE WHEN (SELECT one_level FROM fairturn.queue) THEN 1 ELSE d.priority END"
_EVENTS = f"SELECT {EVENT_COLUMNS} FROM fairturn.event_log LIMIT %s"
_RUNNING = f"""
    SELECT d.lease_until, d.number, d.customer, {_LEVEL}, d.order_number, d.attempts,
        d.cancel_requested, d.worker, d.claimed_at
    FROM fairturn.leases l JOIN fairturn.documents d ON d.number = ANY (l.documents)
    WHERE d.state = {RUNNING} AND d.fence = l.fence"""
# By documents_delayed, in its order.
_DUE = f"""
    SELECT d.number, d.customer, {_LEVEL}, d.order_number, d.delayed_until FROM fairturn.documents d
    WHERE d.delayed_until <= %s ORDER BY d.delayed_until, d.number"""
_FOLLOWING = """
    SELECT last_value + CASE WHEN is_called THEN 1 ELSE 0 END FROM fairturn.document_numbers"""

_HELD = "SELECT customer FROM fairturn.customer_states WHERE running_max IS NOT NULL OR paused"
_CHARGED = "SELECT customer, weight, recent_costs FROM fairturn.customer_states"
# By flows_head.
_HEADS = """
    SELECT head_since, head_order, customer, level FROM fairturn.flows
    WHERE head_since < %(before)s AND NOT held LIMIT %(most)s"""
_COUNT_HEADS = """
    SELECT count(*),
        count(*) FILTER (WHERE (head_since, head_order) < (%(since)s::bigint, %(order)s::bigint))
    FROM fairturn.flows
    WHERE head_since < %(before)s AND NOT held AND customer <> ALL (%(without)s::bigint[])"""
# The columns of a `Line`, and the name.
_LINES = """
    SELECT f.level, f.place, f.tick, f.customer, f.folded, %s::bigint, NULL, c.name
    FROM fairturn.flows f LEFT JOIN fairturn.customers c ON c.number = f.customer
    WHERE f.folded > 0 AND f.level = ANY (%s::smallint[]) LIMIT %s"""
# The turns of a flow before a place: `turns_before` of scheduling/position/closed_form.py.
_OTHER_FLOWS = f"""
    FROM (
        SELECT f.customer, f.place, f.tick, f.folded,
            greatest(1, {COST_ONE * WEIGHT_ONE} / coalesce(s.weight, {WEIGHT_ONE})) AS charge
        FROM fairturn.flows f LEFT JOIN fairturn.customer_states s ON s.customer = f.customer
        WHERE f.level = %(level)s AND f.folded > 0
            AND f.customer <> ALL (%(without)s::bigint[])) f"""
_BEFORE = """
    CASE WHEN f.place > %(place)s THEN 0 ELSE least(f.folded, (%(place)s - f.place) / f.charge
        + ((%(place)s - f.place) %% f.charge > 0 OR f.tick < %(tick)s)::int) END"""
_OTHERS = f"""
    SELECT count(*), sum(folded)::bigint, sum(n)::bigint, count(*) FILTER (WHERE n > 0)
    FROM (SELECT f.folded, {_BEFORE} AS n {_OTHER_FLOWS}) f"""
_LARGEST = f"""
    SELECT l.customer, l.n, c.name FROM (
        SELECT f.customer, {_BEFORE} AS n {_OTHER_FLOWS}
        ORDER BY n DESC, f.customer LIMIT %(most)s) l
        LEFT JOIN fairturn.customers c ON c.number = l.customer ORDER BY l.n DESC, l.customer"""
# Arrivals, less those taken by claims, plus the changes of other operations. By the primary keys.
_WAITING_OF = """
    SELECT w.customer, a.priority, (a.n - coalesce((
            SELECT sum(f.taken[a.priority]) FROM fairturn.flows f
            WHERE f.customer = w.customer), 0) + coalesce((
            SELECT sum(m.waiting) FROM fairturn.counter_changes m
            WHERE m.customer = w.customer AND m.priority = a.priority), 0))::bigint
    FROM unnest(%s::bigint[]) AS w(customer)
        JOIN fairturn.customers c ON c.number = w.customer
        CROSS JOIN LATERAL unnest(c.arrived) WITH ORDINALITY AS a(n, priority)"""
_PAUSED = "SELECT paused FROM fairturn.customers WHERE number = %s"

# By documents_flow, from claimed_to on.
_IN_FLOW = f"""
    FROM fairturn.documents
    WHERE customer = %s AND level = %s AND state = {WAITING} AND NOT returned"""
_COUNT_LOWER = f"""
    SELECT count(*) FROM (
        SELECT 1 {_IN_FLOW} AND order_number > %s AND order_number < %s LIMIT %s) d"""
_COUNT_HIGHER = f"SELECT count(*) FROM (SELECT 1 {_IN_FLOW} AND order_number >= %s LIMIT %s) d"
_CLAIMED_TO = f"""
    SELECT CASE WHEN claimed_to < {NO_ORDER} THEN claimed_to ELSE 0 END
    FROM fairturn.flows WHERE customer = %s AND level = %s"""
# By documents_returned.
_RETURNED = """
    SELECT count(*) FROM fairturn.documents
    WHERE returned AND customer = %s AND level = %s AND order_number < %s"""
# In mode `levels`: the documents before an order, for each flow of a level.
_LOWER = f"""
    SELECT f.level, 0, 0, f.customer, (
            SELECT count(*) FROM fairturn.documents d
            WHERE d.customer = f.customer AND d.level = f.level AND d.state = {WAITING}
                AND d.order_number > CASE WHEN f.claimed_to < {NO_ORDER} THEN f.claimed_to
                    ELSE 0 END
                AND d.order_number < %(order)s AND NOT d.returned) + (
            SELECT count(*) FROM fairturn.documents r
            WHERE r.returned AND r.customer = f.customer AND r.level = f.level
                AND r.order_number < %(order)s), 0, NULL, c.name
    FROM (
        SELECT w.customer, %(level)s::smallint AS level, coalesce(o.claimed_to, 0) AS claimed_to
        FROM (
            SELECT customer FROM fairturn.flows WHERE level = %(level)s AND folded > 0
            UNION
            SELECT unnest(%(singled)s::bigint[])) w
            LEFT JOIN fairturn.flows o ON o.customer = w.customer AND o.level = %(level)s) f
        LEFT JOIN fairturn.customers c ON c.number = f.customer"""

# By the primary keys.
_DOCUMENT = f"""
    SELECT d.customer, {_LEVEL}, d.order_number, p.count
    FROM fairturn.documents d LEFT JOIN fairturn.documents p ON p.number = d.parent
    WHERE d.number = %s"""
_CUSTOMER = """
    SELECT c.count, c.count_updated_at, (
            SELECT count(*) FROM fairturn.documents d
            WHERE d.customer = c.number AND d.delayed_until IS NOT NULL),
        c.weight, c.running_max, c.paused
    FROM fairturn.customers c WHERE c.number = %s"""
_NAMES = "SELECT number, name FROM fairturn.customers WHERE number = ANY (%s)"

_WORKERS = "SELECT name, seen_at, slots FROM fairturn.workers ORDER BY name LIMIT %s"
# By the primary key.
_ARRIVALS = """
    SELECT submitted_at, customer, priority FROM fairturn.documents ORDER BY number DESC LIMIT %s"""
_NEIGHBOURS = """
    SELECT customer, count(*) FROM fairturn.documents
    WHERE number BETWEEN %s AND %s AND claimed_at >= %s AND claimed_at < %s GROUP BY customer"""
# Whether documents may be missing from the count: outside the range, or claimed again later.
_MAYBE_MORE = """
    SELECT EXISTS (SELECT 1 FROM fairturn.documents WHERE number < %(first)s)
        OR EXISTS (SELECT 1 FROM fairturn.documents WHERE number > %(last)s)
        OR EXISTS (
            SELECT 1 FROM fairturn.documents
            WHERE number BETWEEN %(first)s AND %(last)s AND number <> %(number)s AND attempts > 1
                AND claimed_at >= %(claimed_at)s AND submitted_at < %(claimed_at)s)"""

# The flows with the highest places were served last, and their last documents have the highest
# orders up to claimed_to. By flows_turn or the primary key, and documents_flow.
_ATTEMPT = f"""d.claimed_at, d.number, d.customer,
    CASE WHEN d.state IN ({codes_of(ENDED_BY_ATTEMPT)}) THEN d.ended_at - d.claimed_at END"""
_HAS_ENDED = f"d.claimed_at IS NOT NULL AND d.state NOT IN ({codes_of(TRANSITIONS[State.WAITING])})"
_LAST_OF_FLOWS = f"""
    CROSS JOIN LATERAL (
        SELECT * FROM fairturn.documents n
        WHERE n.customer = f.customer AND n.level = f.level AND n.order_number <= f.claimed_to
        ORDER BY n.customer DESC, n.level DESC, n.order_number DESC LIMIT {DOCUMENTS_SAMPLED}) d
    WHERE {_HAS_ENDED}"""
_LAST_OF_LEVEL = f"""
    SELECT {_ATTEMPT} FROM (
        SELECT customer, level, claimed_to FROM fairturn.flows
        WHERE folded > 0 AND NOT held AND generation = {GENERATION} AND level = %s
        ORDER BY generation DESC, level DESC, place DESC, tick DESC
        LIMIT {FLOWS_SAMPLED}) f {_LAST_OF_FLOWS}"""
_LAST_OF_ITS_FLOW = f"""
    SELECT {_ATTEMPT} FROM (
        SELECT customer, level, claimed_to FROM fairturn.flows WHERE customer = %s AND level = %s) f
    {_LAST_OF_FLOWS}"""
_LAST_SUBMITTED = f"""
    SELECT {_ATTEMPT}
    FROM (SELECT number FROM fairturn.documents ORDER BY number DESC LIMIT %s) n
        JOIN fairturn.documents d ON d.number = n.number
    WHERE {_HAS_ENDED}"""


def read_snapshot(
    session: Session, queue: PostgresQueueRow, id: str, now: int, uptime: Uptime
) -> DocumentSnapshot | None:
    """Return the snapshot that explains a document, or None for an unknown id."""
    found = find(session, queue.key, Filter(ids=(id,)), None, 1).documents
    number = ids.decode(id, queue.key)
    if not found or number is None:
        return None
    return snapshot.read_snapshot(
        PostgresQueueReader(session, queue, now, uptime), found[0], number
    )


class PostgresQueueReader:
    """A `SnapshotReader` of the database. It has more than 20 methods because each one is a query
    that the explanation needs."""

    def __init__(self, session: Session, queue: PostgresQueueRow, now: int, uptime: Uptime) -> None:
        self._session = session
        self.settings = settings = queue.settings
        self.now = now
        state = TurnsRow._make(session.fetch(TURNS)[0])
        self.leases_end_at = uptime.at if state.boot == uptime.boot else None
        self.waiting = summary(session).waiting_by_priority
        self.following = self._one(_FOLLOWING)
        self.source = SnapshotFlows(session, settings.mode)
        self.turns = Turns(
            self.source,
            mode=settings.mode,
            costs=settings.costs,
            patience_us=settings.patience_us,
            number=state.claims,
            tick=state.tick,
            bands={
                level: Band(clock, weight)
                for level, (clock, weight) in enumerate(
                    zip(state.clocks, state.weights, strict=True), 1
                )
            },
        )

    def _fetch(self, statement: str, values: Values = ()) -> list[Row]:
        return self._session.fetch(statement, values)

    def _one(self, statement: str, values: Values = ()) -> int:
        ((n,),) = self._fetch(statement, values)
        return int(n)

    # ── Input of the next fold ───────────────────────────────────────────────────────────────────

    def running(self) -> list[Row]:
        return self._fetch(_RUNNING)

    def due(self) -> list[Row]:
        return self._fetch(_DUE, (self.now,))

    def events(self) -> list[EventBatch] | None:
        rows = self._fetch(_EVENTS, (EVENTS_MAX + 1,))
        return to_events(rows) if len(rows) <= EVENTS_MAX else None

    def expect(self, customers: Collection[int]) -> None:
        self.source.expect(customers)

    # ── Positions of flows ───────────────────────────────────────────────────────────────────────

    def held(self) -> list[int]:
        return [customer for (customer,) in self._fetch(_HELD)]

    def charged(self) -> Iterable[tuple[int, int, list[int]]]:
        return [(c, weight, costs) for c, weight, costs in self._fetch(_CHARGED)]

    def overdue(self, before: int, most: int) -> list[Row]:
        return self._fetch(_HEADS, {"before": before, "most": most})

    def lines(self, charge: int, levels: Collection[int], most: int) -> list[Row]:
        return self._fetch(_LINES, (charge, [*levels], most))

    def other_lines(self, level: int, place: int, tick: int, without: Collection[int]) -> Row:
        values = {"level": level, "place": place, "tick": tick, "without": [*without]}
        return self._fetch(_OTHERS, values)[0]

    def largest(
        self, level: int, place: int, tick: int, without: Collection[int], most: int
    ) -> list[Row]:
        values = {"level": level, "place": place, "tick": tick, "without": [*without]}
        return self._fetch(_LARGEST, {**values, "most": most})

    def count_overdue(
        self, before: int, own: tuple[int, int], without: Collection[int]
    ) -> tuple[int, int]:
        since, order = own
        values = {"before": before, "since": since, "order": order, "without": [*without]}
        ((number, ahead),) = self._fetch(_COUNT_HEADS, values)
        return int(number), int(ahead)

    def lower(self, level: int, order: int, customers: Collection[int]) -> list[Row]:
        values = {"order": order, "level": level, "singled": [*customers]}
        return self._fetch(_LOWER, values)

    def waiting_of(self, customers: Collection[int]) -> dict[int, int]:
        by_level: Counter[int] = Counter()
        for _, priority, n in self._fetch(_WAITING_OF, ([*customers],)):
            by_level[level_of(priority, self.settings.mode)] += n
        return by_level

    def is_paused(self, customer: int) -> bool:
        return self._one(_PAUSED, (customer,)) != 0

    def claimed_to(self, flow: FlowKey) -> int | None:
        found = self._fetch(_CLAIMED_TO, flow)
        return found[0][0] if found else 0

    def waiting_in(self, flow: FlowKey) -> int:
        return self.waiting_of([flow[0]]).get(flow[1], 0)

    def returned(self, flow: FlowKey, before: int | None) -> int:
        return self._one(_RETURNED, (*flow, NO_ORDER if before is None else before))

    def between(self, flow: FlowKey, after: int, before: int, most: int) -> int:
        return self._one(_COUNT_LOWER, (*flow, after, before, most))

    def not_before(self, flow: FlowKey, order: int, most: int) -> int:
        return self._one(_COUNT_HIGHER, (*flow, order, most))

    # ── The document and its surroundings ────────────────────────────────────────────────────────

    def document(self, number: int) -> Row:
        return self._fetch(_DOCUMENT, (number,))[0]

    def customer(self, number: int) -> Row:
        return self._fetch(_CUSTOMER, (number,))[0]

    def names_of(self, customers: Collection[int]) -> Iterable[tuple[int, str]]:
        return [(number, name) for number, name in self._fetch(_NAMES, ([*customers],))]

    def workers(self, most: int) -> list[Row]:
        return self._fetch(_WORKERS, (most,))

    def arrivals(self, most: int) -> list[Row]:
        return self._fetch(_ARRIVALS, (most,))

    def last_submitted(self, most: int) -> list[Row]:
        return self._fetch(_LAST_SUBMITTED, (most,))

    def last_of_flow(self, flow: FlowKey) -> list[Row]:
        return self._fetch(_LAST_OF_ITS_FLOW, flow)

    def last_of_level(self, level: int) -> list[Row]:
        return self._fetch(_LAST_OF_LEVEL, (level,))

    def served(self, numbers: tuple[int, int], since: int, until: int) -> dict[int, int]:
        return dict(self._fetch(_NEIGHBOURS, (*numbers, since, until)))

    def may_be_more(self, numbers: tuple[int, int], number: int, claimed_at: int) -> bool:
        first, last = numbers
        near = {"first": first, "last": last, "number": number, "claimed_at": claimed_at}
        return self._one(_MAYBE_MORE, near) != 0


# By flows_turn, in its order.
_NEXT_TURNS = f"""
    SELECT level, place, tick, customer, folded FROM fairturn.flows
    WHERE folded > 0 AND NOT held AND generation = {GENERATION} AND level = %s
        AND NOT customer = ANY (%s::bigint[])
    ORDER BY generation, level, place, tick LIMIT %s"""
# By documents_flow from claimed_to on, and by documents_returned.
_FOLLOWING_IN_LANE = f"""
    SELECT order_number, number, cost FROM fairturn.documents
    WHERE customer = %(customer)s AND level = %(level)s AND state = {WAITING} AND NOT returned
        AND order_number > coalesce((
            SELECT nullif(f.claimed_to, {NO_ORDER}) FROM fairturn.flows f
            WHERE f.customer = %(customer)s AND f.level = %(level)s), %(before)s)
    ORDER BY order_number LIMIT %(most)s"""
_RETURNED_IN_LANE = f"""
    SELECT order_number, number, cost FROM fairturn.documents
    WHERE returned AND customer = %s AND level = %s AND state = {WAITING}
    ORDER BY order_number LIMIT %s"""


def lanes(session: Session, queue: PostgresQueueRow, size: int, now: int, uptime: Uptime) -> Lanes:
    """Return the next documents of each priority."""
    reader = PostgresQueueReader(session, queue, now, uptime)
    known = reader.turns.customers

    def first_lines(level: int, most: int) -> Iterable[Row]:
        return session.fetch(_NEXT_TURNS, (level, list(known), most))

    def next_in(flow: FlowKey, before: int, most: int) -> Iterable[Row]:
        customer, level = flow
        values = {"customer": customer, "level": level, "before": before, "most": most}
        return session.fetch(_FOLLOWING_IN_LANE, values) + session.fetch(
            _RETURNED_IN_LANE, (*flow, most)
        )

    numbers = next_numbers(reader, size, first_lines, next_in)
    found = [ids.encode(number, queue.key) for number in numbers]
    documents: list[Document] = []
    for start in range(0, len(found), PAGE_MAX):
        wanted = Filter(ids=tuple(found[start : start + PAGE_MAX]))
        documents += find(session, queue.key, wanted, None, PAGE_MAX).documents
    return Lanes(reader.turns.number, by_lane(documents, found, size))
