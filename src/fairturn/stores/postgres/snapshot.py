"""Explanations and lanes, read from one snapshot of the database."""

from collections.abc import Collection, Iterable, Sequence

from fairturn.clock import Uptime
from fairturn.explain.snapshot import DocumentSnapshot, WorkerHeartbeat
from fairturn.model import (
    ENDED_BY_ATTEMPT,
    PAGE_MAX,
    TRANSITIONS,
    Document,
    Filter,
    KindSettings,
    Lanes,
    ServiceOutage,
    State,
)
from fairturn.scheduling.flows import BANDS_PER_KIND, COST_ONE, WEIGHT_ONE, EventBatch
from fairturn.scheduling.turns import Turns
from fairturn.stores import ids, snapshot
from fairturn.stores.positions import FlowKey
from fairturn.stores.postgres import admin
from fairturn.stores.postgres.flows import SnapshotFlows, to_costs
from fairturn.stores.postgres.outages import outages
from fairturn.stores.postgres.query import find, waiting_by_kind
from fairturn.stores.postgres.rows import (
    EVENT_COLUMNS,
    GENERATION,
    KIND_SETTINGS,
    MAY_EXPIRE,
    NO_ORDER,
    STATES_OF_KINDS,
    TURNS,
    KindRow,
    PostgresQueueRow,
    TurnsRow,
    to_events,
    to_kind_settings,
)
from fairturn.stores.postgres.session import Session, Values
from fairturn.stores.snapshot import DOCUMENTS_SAMPLED, FLOWS_SAMPLED, by_lane, next_numbers
from fairturn.stores.values import ADVANCED, RUNNING, WAITING, Row, codes_of

# Rows of the event log that a snapshot folds, within about 100 ms.
EVENTS_MAX = 20_000

# The column `level` is kept for waiting documents only.
_BAND = "fairturn.band((SELECT one_level FROM fairturn.queue), d.priority, d.kind)"
_EVENTS = f"SELECT {EVENT_COLUMNS} FROM fairturn.event_log LIMIT %s"
_RUNNING = f"""
    SELECT d.lease_until, d.number, d.customer, {_BAND}, d.order_number, d.attempts,
        d.cancel_requested, d.worker, d.claimed_at, k.attempts_max
    FROM fairturn.leases l JOIN fairturn.documents d ON d.number = ANY (l.documents)
        LEFT JOIN fairturn.kinds k ON k.number = d.kind
    WHERE d.state = {RUNNING} AND d.fence = l.fence"""
# By documents_delayed, in its order.
_DUE = f"""
    SELECT d.number, d.customer, {_BAND}, d.order_number, d.delayed_until FROM fairturn.documents d
    WHERE d.delayed_until <= %s ORDER BY d.delayed_until, d.number"""
# By the primary keys.
_LAPSED = f"""
    SELECT d.number, d.customer, d.level, d.order_number, (d.state = {WAITING})::integer
    FROM fairturn.expirations e JOIN fairturn.documents d ON d.number = e.document
    WHERE e.expires_at <= %s AND d.expires_at = e.expires_at AND {MAY_EXPIRE}
    ORDER BY e.expires_at, e.document LIMIT %s"""
# By documents_returned; and by documents_flow after the flow's claimed_to.
_LOWEST = f"""
    SELECT least((
        SELECT min(order_number) FROM fairturn.documents
        WHERE returned AND customer = %(customer)s AND level = %(band)s
            AND order_number <> ALL (%(without)s::bigint[])), (
        SELECT order_number FROM fairturn.documents
        WHERE customer = %(customer)s AND level = %(band)s AND state = {WAITING} AND NOT returned
            AND order_number <> ALL (%(without)s::bigint[]) AND order_number > coalesce((
                SELECT nullif(max(f.claimed_to), {NO_ORDER}) FROM fairturn.flows f
                WHERE f.customer = %(customer)s AND f.level = %(band)s), 0)
        ORDER BY customer, level, order_number LIMIT 1))"""
_FOLLOWING = """
    SELECT last_value + CASE WHEN is_called THEN 1 ELSE 0 END FROM fairturn.document_numbers"""

_HELD = "SELECT customer FROM fairturn.customer_states WHERE running_max IS NOT NULL OR paused"
_CHARGED = "SELECT customer, weight, recent_costs, costs_by_kind FROM fairturn.customer_states"
# By flows_head.
_OVERDUE = f"""
    SELECT head_since, head_order, customer, level FROM fairturn.flows
    WHERE level / {BANDS_PER_KIND} = %(kind)s AND head_since < %(before)s AND NOT held
    LIMIT %(most)s"""
_COUNT_OVERDUE = f"""
    SELECT count(*),
        count(*) FILTER (WHERE (head_since, head_order) < (%(since)s::bigint, %(order)s::bigint))
    FROM fairturn.flows
    WHERE level / {BANDS_PER_KIND} = %(kind)s AND head_since < %(before)s AND NOT held
        AND customer <> ALL (%(without)s::bigint[])"""
# The columns of a `WaitingLine`, and the name.
_LINES = """
    SELECT f.level, f.place, f.tick, f.customer, f.folded, 0, NULL, c.name
    FROM fairturn.flows f LEFT JOIN fairturn.customers c ON c.number = f.customer
    WHERE f.folded > 0 AND f.level = ANY (%s::smallint[]) LIMIT %s"""
# The turns of a flow before a place: `turns_before` of scheduling/position/closed_form.py.
_OTHER_FLOWS = f"""
    FROM (
        SELECT f.customer, f.place, f.tick, f.folded,
            greatest(1, {COST_ONE * WEIGHT_ONE} / coalesce(s.weight, {WEIGHT_ONE})) AS charge
        FROM fairturn.flows f LEFT JOIN fairturn.customer_states s ON s.customer = f.customer
        WHERE f.level = %(band)s AND f.folded > 0
            AND f.customer <> ALL (%(without)s::bigint[])) f"""
_BEFORE = """
    CASE WHEN f.place > %(place)s THEN 0 ELSE least(f.folded, (%(place)s - f.place) / f.charge
        + ((%(place)s - f.place) %% f.charge > 0 OR f.tick < %(tick)s)::int) END"""
_OTHER_LINES = f"""
    SELECT count(*), sum(folded)::bigint, sum(n)::bigint, count(*) FILTER (WHERE n > 0)
    FROM (SELECT f.folded, {_BEFORE} AS n {_OTHER_FLOWS}) f"""
_LARGEST = f"""
    SELECT l.customer, l.n, c.name FROM (
        SELECT f.customer, {_BEFORE} AS n {_OTHER_FLOWS}
        ORDER BY n DESC, f.customer LIMIT %(most)s) l
        LEFT JOIN fairturn.customers c ON c.number = l.customer ORDER BY l.n DESC, l.customer"""
# As of the last claim, and the effect of the events since. By the primary key.
_WAITING_OF = """
    SELECT w.level, sum(w.n)::bigint FROM (
        SELECT level, folded AS n FROM fairturn.flows WHERE customer = ANY (%(customers)s::bigint[])
        UNION ALL
        SELECT level, waiting FROM fairturn.unapplied_events()
        WHERE customer = ANY (%(customers)s::bigint[]) AND level IS NOT NULL) w
    GROUP BY w.level"""
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
# In mode `levels`: the documents before an order, for each flow of a band.
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
        SELECT w.customer, %(band)s::smallint AS level, coalesce(o.claimed_to, 0) AS claimed_to
        FROM (
            SELECT customer FROM fairturn.flows WHERE level = %(band)s AND folded > 0
            UNION
            SELECT unnest(%(singled)s::bigint[])) w
            LEFT JOIN fairturn.flows o ON o.customer = w.customer AND o.level = %(band)s) f
        LEFT JOIN fairturn.customers c ON c.number = f.customer"""

# By the primary keys.
_DOCUMENT = """
    SELECT d.customer, d.kind, d.order_number, p.count
    FROM fairturn.documents d LEFT JOIN fairturn.documents p ON p.number = d.parent
    WHERE d.number = %s"""
_CUSTOMER = """
    SELECT c.count, c.count_updated_at, (
            SELECT count(*) FROM fairturn.documents d
            WHERE d.customer = c.number AND d.delayed_until IS NOT NULL),
        c.weight, c.running_max, c.paused
    FROM fairturn.customers c WHERE c.number = %s"""
_KIND_SETTINGS = f"SELECT {KIND_SETTINGS} FROM fairturn.kinds WHERE number = %s"
_NAMES = "SELECT number, name FROM fairturn.customers WHERE number = ANY (%s)"

# By the primary key.
_ARRIVALS = """
    SELECT submitted_at, customer, priority FROM (
        SELECT * FROM fairturn.documents ORDER BY number DESC LIMIT %s) d
    WHERE kind = %s"""
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
_ATTEMPT = f"""d.claimed_at, d.number, d.step, d.customer,
    CASE WHEN d.state IN ({codes_of(ENDED_BY_ATTEMPT)}) THEN d.ended_at - d.claimed_at END"""
# The last attempt of a document that begins a step was one of the step before.
_HAS_ENDED = f"""
    d.claimed_at IS NOT NULL AND d.state NOT IN ({codes_of(TRANSITIONS[State.WAITING])})
    AND NOT (d.step > 0 AND d.attempts = 0)"""
_LAST_OF_FLOWS = f"""
    CROSS JOIN LATERAL (
        SELECT * FROM fairturn.documents n
        WHERE n.customer = f.customer AND n.level = f.level AND n.order_number <= f.claimed_to
        ORDER BY n.customer DESC, n.level DESC, n.order_number DESC LIMIT {DOCUMENTS_SAMPLED}) d
    WHERE {_HAS_ENDED}"""
_LAST_OF_BAND = f"""
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
    WHERE d.kind = %s AND {_HAS_ENDED}"""
_LAST_STEPS = f"""
    SELECT a.claimed_at, d.number, a.step, d.customer, a.ended_at - a.claimed_at
    FROM (SELECT number FROM fairturn.documents ORDER BY number DESC LIMIT %s) n
        JOIN fairturn.documents d ON d.number = n.number
        JOIN fairturn.attempts a ON a.document = d.number
    WHERE d.step > 0 AND a.kind = %s AND a.outcome = {ADVANCED}"""


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
        self.kinds = [KindRow._make(row) for row in session.fetch(STATES_OF_KINDS)]
        self._waiting = waiting_by_kind(session)
        self.following = self._one(_FOLLOWING)
        self.source = SnapshotFlows(session, settings.mode)
        self.turns = Turns(
            self.source,
            mode=settings.mode,
            costs=settings.costs,
            patience_us=settings.patience_us,
            number=state.claims,
            tick=state.tick,
            bands=dict(band for kind in self.kinds for band in kind.bands()),
            level_times=dict(enumerate(state.level_times, start=1)),
            since_patience={kind.kind: kind.since_patience for kind in self.kinds},
            kind_names={kind.kind: kind.name for kind in self.kinds},
        )

    def _fetch(self, statement: str, values: Values = ()) -> list[Row]:
        return self._session.fetch(statement, values)

    def _one(self, statement: str, values: Values = ()) -> int:
        ((n,),) = self._fetch(statement, values)
        return int(n)

    def waiting(self, kind: int) -> Sequence[int]:
        return self._waiting[kind]

    # ── Input of the next fold ───────────────────────────────────────────────────────────────────

    def running(self) -> list[Row]:
        return self._fetch(_RUNNING)

    def due(self) -> list[Row]:
        return self._fetch(_DUE, (self.now,))

    def lapsed(self, most: int) -> list[Row]:
        return self._fetch(_LAPSED, (self.now, most))

    def lowest(self, flow: FlowKey, without: Collection[int]) -> int | None:
        customer, band = flow
        values = {"customer": customer, "band": band, "without": [*without]}
        ((order,),) = self._fetch(_LOWEST, values)
        return None if order is None else int(order)

    def events(self) -> list[EventBatch] | None:
        rows = self._fetch(_EVENTS, (EVENTS_MAX + 1,))
        return to_events(rows) if len(rows) <= EVENTS_MAX else None

    def expect(self, customers: Collection[int]) -> None:
        self.source.expect(customers)

    # ── Positions of flows ───────────────────────────────────────────────────────────────────────

    def held(self) -> list[int]:
        return [customer for (customer,) in self._fetch(_HELD)]

    def charged(self) -> Iterable[tuple[int, int, dict[int, Sequence[int]]]]:
        return [(c, weight, to_costs(*costs)) for c, weight, *costs in self._fetch(_CHARGED)]

    def overdue(self, kind: int, before: int, most: int) -> list[Row]:
        return self._fetch(_OVERDUE, {"kind": kind, "before": before, "most": most})

    def lines(self, bands: Collection[int], most: int) -> list[Row]:
        return self._fetch(_LINES, ([*bands], most))

    def other_lines(self, band: int, place: int, tick: int, without: Collection[int]) -> Row:
        values = {"band": band, "place": place, "tick": tick, "without": [*without]}
        return self._fetch(_OTHER_LINES, values)[0]

    def largest(
        self, band: int, place: int, tick: int, without: Collection[int], most: int
    ) -> list[Row]:
        values = {"band": band, "place": place, "tick": tick, "without": [*without]}
        return self._fetch(_LARGEST, {**values, "most": most})

    def count_overdue(
        self, kind: int, before: int, own: tuple[int, int], without: Collection[int]
    ) -> tuple[int, int]:
        since, order = own
        values = {"kind": kind, "before": before, "since": since, "order": order}
        ((number, ahead),) = self._fetch(_COUNT_OVERDUE, {**values, "without": [*without]})
        return int(number), int(ahead)

    def lower(self, band: int, order: int, customers: Collection[int]) -> list[Row]:
        values = {"order": order, "band": band, "singled": [*customers]}
        return self._fetch(_LOWER, values)

    def waiting_of(self, customers: Collection[int]) -> dict[int, int]:
        return dict(self._fetch(_WAITING_OF, {"customers": [*customers]}))

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

    def kind_settings(self, kind: int) -> KindSettings:
        return to_kind_settings(self._fetch(_KIND_SETTINGS, (kind,))[0])

    def workers(self) -> list[WorkerHeartbeat]:
        return admin.workers(self._session)

    def outages(self) -> list[ServiceOutage]:
        return outages(self._session, self.now)

    def arrivals(self, kind: int, most: int) -> list[Row]:
        return self._fetch(_ARRIVALS, (most, kind))

    def last_submitted(self, kind: int, most: int) -> list[Row]:
        return self._fetch(_LAST_SUBMITTED, (most, kind))

    def last_steps(self, kind: int, most: int) -> list[Row]:
        return self._fetch(_LAST_STEPS, (most, kind))

    def last_of_flow(self, flow: FlowKey) -> list[Row]:
        return self._fetch(_LAST_OF_ITS_FLOW, flow)

    def last_of_band(self, band: int) -> list[Row]:
        return self._fetch(_LAST_OF_BAND, (band,))

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
    WHERE customer = %(customer)s AND level = %(band)s AND state = {WAITING} AND NOT returned
        AND order_number > coalesce((
            SELECT nullif(f.claimed_to, {NO_ORDER}) FROM fairturn.flows f
            WHERE f.customer = %(customer)s AND f.level = %(band)s), %(before)s)
    ORDER BY order_number LIMIT %(most)s"""
_RETURNED_IN_LANE = f"""
    SELECT order_number, number, cost FROM fairturn.documents
    WHERE returned AND customer = %s AND level = %s AND state = {WAITING}
    ORDER BY order_number LIMIT %s"""


def lanes(
    session: Session,
    queue: PostgresQueueRow,
    size: int,
    kind: str | None,
    *,
    now: int,
    uptime: Uptime,
) -> Lanes:
    """Return the next documents of each priority, of one kind or of all."""
    reader = PostgresQueueReader(session, queue, now, uptime)
    known = reader.turns.customers
    names = {each.kind: each.name for each in reader.kinds if kind in (None, each.name)}

    def first_lines(band: int, most: int) -> Iterable[Row]:
        return session.fetch(_NEXT_TURNS, (band, list(known), most))

    def next_in(flow: FlowKey, before: int, most: int) -> Iterable[Row]:
        customer, band = flow
        values = {"customer": customer, "band": band, "before": before, "most": most}
        return session.fetch(_FOLLOWING_IN_LANE, values) + session.fetch(
            _RETURNED_IN_LANE, (*flow, most)
        )

    numbers = next_numbers(reader, size, names, first_lines, next_in)
    found = [ids.encode(number, queue.key) for number in numbers]
    documents: list[Document] = []
    for start in range(0, len(found), PAGE_MAX):
        wanted = Filter(ids=tuple(found[start : start + PAGE_MAX]))
        documents += find(session, queue.key, wanted, None, PAGE_MAX).documents
    return Lanes(reader.turns.number, by_lane(documents, found, size))
