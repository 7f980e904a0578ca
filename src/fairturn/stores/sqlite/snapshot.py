"""Document snapshots and the next documents of each level, in the file."""

import json
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import apsw

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
    by_priority,
)
from fairturn.scheduling.flows import BANDS_PER_KIND, COST_ONE, WEIGHT_ONE, EventBatch
from fairturn.stores import ids, snapshot
from fairturn.stores.positions import FlowKey
from fairturn.stores.snapshot import DOCUMENTS_SAMPLED, FLOWS_SAMPLED, by_lane, next_numbers
from fairturn.stores.sqlite import admin
from fairturn.stores.sqlite.claim import DUE
from fairturn.stores.sqlite.expire import MAY_EXPIRE
from fairturn.stores.sqlite.flows import load_kinds, load_turns, to_costs
from fairturn.stores.sqlite.outages import outages
from fairturn.stores.sqlite.query import find
from fairturn.stores.sqlite.rows import (
    ATTEMPTS_MAX_OF_KIND,
    QueueRow,
    fetch,
    read_events,
    read_kinds,
    waiting_by_kind,
)
from fairturn.stores.values import ADVANCED, DELAYED, RUNNING, WAITING, Row, codes_of

# Characters of the event log: these are folded within 100 ms.
EVENTS_MAX = 1_000_000

_RUNNING = f"""
    SELECT d.lease_until, d.number, d.customer, d.level, d.order_number, d.attempts,
        d.cancel_requested, d.worker, d.claimed_at, {ATTEMPTS_MAX_OF_KIND}
    FROM leases l CROSS JOIN json_each(l.documents) j CROSS JOIN documents d
    WHERE d.number = j.value AND d.state = {RUNNING} AND d.fence = l.fence"""
# By documents_delayed, in its order.
_DUE_BY_WALL_CLOCK = f"""
    SELECT due_at, number, customer, level, priority, order_number
    FROM documents INDEXED BY documents_delayed
    WHERE state = {DELAYED} AND due_at <= ? ORDER BY due_at, number"""
_RETRY_AT = f"SELECT retry_at FROM documents WHERE number = ? AND state = {DELAYED}"

_HELD = "SELECT customer FROM customer_states WHERE running_max IS NOT NULL OR paused <> 0"
_CHARGED = "SELECT customer, weight, recent_costs, costs_by_kind FROM customer_states"
# By flows_head.
_OVERDUE = f"""
    SELECT head_since, head_order, customer, level FROM flows INDEXED BY flows_head
    WHERE level / {BANDS_PER_KIND} = ?1 AND head_bound IS NOT NULL AND held = 0 AND head_bound < ?2
        AND head_since < ?2
    LIMIT ?3"""
_COUNT_OVERDUE = f"""
    SELECT count(*), coalesce(sum((head_since, head_order) < (?3, ?4)), 0)
    FROM flows NOT INDEXED
    WHERE level / {BANDS_PER_KIND} = ?1 AND head_bound IS NOT NULL AND held = 0 AND head_since < ?2
        AND customer NOT IN (SELECT value FROM json_each(?5))"""
# The columns of a `WaitingLine`, and the name. By the primary key: a range of the table is faster
# than an index lookup per flow.
_LINES = """
    SELECT f.level, f.place, f.tick, f.customer, f.folded, 0, NULL, c.name
    FROM flows f NOT INDEXED LEFT JOIN customers c ON c.number = f.customer
    WHERE f.folded > 0 AND f.level IN (SELECT value FROM json_each(?)) LIMIT ?"""
# The turns of a flow before a place, as `turns_before` of scheduling/position/closed_form.py.
_OTHER_FLOWS = f"""
    FROM (
        SELECT f.customer, f.place, f.tick, f.folded,
            max(1, {COST_ONE * WEIGHT_ONE} / coalesce(s.weight, {WEIGHT_ONE})) AS charge
        FROM flows f NOT INDEXED LEFT JOIN customer_states s ON s.customer = f.customer
        WHERE f.level = :band AND f.folded > 0
            AND f.customer NOT IN (SELECT value FROM json_each(:without))) f"""
_BEFORE = """
    iif(f.place > :place, 0, min(f.folded, (:place - f.place) / f.charge
        + ((:place - f.place) % f.charge > 0 OR f.tick < :tick)))"""
_OTHER_LINES = f"""
    SELECT count(*), sum(folded), sum(n), coalesce(sum(n > 0), 0)
    FROM (SELECT f.folded, {_BEFORE} AS n {_OTHER_FLOWS})"""
_LARGEST = f"""
    SELECT l.customer, l.n, c.name FROM (
        SELECT f.customer, {_BEFORE} AS n {_OTHER_FLOWS}
        ORDER BY n DESC, f.customer LIMIT :most) l
        LEFT JOIN customers c ON c.number = l.customer ORDER BY l.n DESC, l.customer"""
_WAITING_OF = """
    SELECT level, sum(waiting) FROM flows INDEXED BY flows_customer
    WHERE customer IN (SELECT value FROM json_each(?)) GROUP BY level"""
_PAUSED = "SELECT paused FROM customers WHERE number = ?"

# By documents_flow, a covering index, after claimed_to: all documents there wait.
_IN_FLOW = "FROM documents INDEXED BY documents_flow WHERE customer = ? AND level = ?"
_COUNT_LOWER = f"""
    SELECT count(*) FROM (
        SELECT 1 {_IN_FLOW} AND order_number > ? AND order_number < ? LIMIT ?)"""
_COUNT_HIGHER = f"SELECT count(*) FROM (SELECT 1 {_IN_FLOW} AND order_number >= ? LIMIT ?)"
_CLAIMED_TO = "SELECT claimed_to, waiting FROM flows WHERE customer = ? AND level = ?"
# By documents_returned.
_RETURNED = """
    SELECT count(*) FROM documents INDEXED BY documents_returned
    WHERE returned = 1 AND customer = ? AND level = ? AND order_number < ?"""
_NO_ORDER = (1 << 63) - 1
# In mode `levels`: documents before an order, for all flows of a band.
_LOWER = """
    SELECT f.level, 0, 0, f.customer, (
            SELECT count(*) FROM documents d INDEXED BY documents_flow
            WHERE d.customer = f.customer AND d.level = f.level
                AND d.order_number > f.claimed_to AND d.order_number < ?1) + (
            SELECT count(*) FROM documents r INDEXED BY documents_returned
            WHERE r.returned = 1 AND r.customer = f.customer AND r.level = f.level
                AND r.order_number < ?1), 0, NULL, c.name
    FROM flows f NOT INDEXED LEFT JOIN customers c ON c.number = f.customer
    WHERE f.level = ?2 AND f.waiting > 0"""

# By the primary keys.
_DOCUMENT = """
    SELECT d.customer, d.kind, d.order_number, p.count
    FROM documents d LEFT JOIN documents p ON p.number = d.parent WHERE d.number = ?"""
_CUSTOMER = """
    SELECT count, count_updated_at, delayed, weight, running_max, paused
    FROM customers WHERE number = ?"""
_NAMES = "SELECT number, name FROM customers WHERE number IN (SELECT value FROM json_each(?))"

# By the primary key.
_ARRIVALS = """
    SELECT submitted_at, customer, priority FROM (
        SELECT submitted_at, customer, priority, kind FROM documents ORDER BY number DESC LIMIT ?)
    WHERE kind = ?"""
_NEIGHBOURS = """
    SELECT customer, count(*) FROM documents
    WHERE number BETWEEN ? AND ? AND claimed_at >= ? AND claimed_at < ? GROUP BY customer"""
_MAYBE_MORE = """
    SELECT EXISTS (SELECT 1 FROM documents WHERE number < ?1)
        OR EXISTS (SELECT 1 FROM documents WHERE number > ?2)
        OR EXISTS (
            SELECT 1 FROM documents
            WHERE number BETWEEN ?1 AND ?2 AND number <> ?3 AND attempts > 1
                AND claimed_at >= ?4 AND submitted_at < ?4)"""

# The flows with the highest places were served last; their last documents have the highest orders
# up to claimed_to. By flows_turn or the primary key, and documents_flow.
_ATTEMPT = f"""d.claimed_at, d.number, d.step, d.customer,
    iif(d.state IN ({codes_of(ENDED_BY_ATTEMPT)}), d.ended_at - d.claimed_at, NULL)"""
# After a step that is no longer the document's, `attempts` has the attempt.
_HAS_ENDED = f"""d.claimed_at IS NOT NULL AND (d.step = 0 OR d.attempts > 0)
    AND d.state NOT IN ({codes_of(TRANSITIONS[State.WAITING])})"""
_LAST_OF_FLOWS = f"""
    CROSS JOIN documents d ON d.number IN (
        SELECT n.number FROM documents n INDEXED BY documents_flow
        WHERE n.customer = f.customer AND n.level = f.level AND n.order_number <= f.claimed_to
        ORDER BY n.order_number DESC LIMIT {DOCUMENTS_SAMPLED})
    WHERE {_HAS_ENDED}"""
_LAST_OF_BAND = f"""
    SELECT {_ATTEMPT} FROM (
        SELECT customer, level, claimed_to FROM flows INDEXED BY flows_turn
        WHERE folded > 0 AND held = 0 AND level = ? ORDER BY level DESC, place DESC, tick DESC
        LIMIT {FLOWS_SAMPLED}) f {_LAST_OF_FLOWS}"""
_LAST_OF_ITS_FLOW = f"""
    SELECT {_ATTEMPT} FROM (
        SELECT customer, level, claimed_to FROM flows WHERE customer = ? AND level = ?) f
    {_LAST_OF_FLOWS}"""
_LAST_SUBMITTED = f"""
    SELECT {_ATTEMPT}
    FROM (SELECT number FROM documents ORDER BY number DESC LIMIT ?) n
        CROSS JOIN documents d ON d.number = n.number
    WHERE d.kind = ? AND {_HAS_ENDED}"""
# By the primary keys.
_LAST_STEPS = f"""
    SELECT a.claimed_at, d.number, a.step, d.customer, a.ended_at - a.claimed_at
    FROM (SELECT number, customer FROM documents ORDER BY number DESC LIMIT ?) d
        CROSS JOIN attempts a ON a.document = d.number
    WHERE a.kind = ? AND a.outcome = {ADVANCED}"""
_LAPSED = f"""
    SELECT d.number, d.customer, d.level, d.order_number, d.state = {WAITING}
    FROM expirations e CROSS JOIN documents d ON d.number = e.document
    WHERE e.expires_at <= ? AND {MAY_EXPIRE} ORDER BY e.expires_at, e.document LIMIT ?"""
# By documents_returned; and by documents_flow after the flow's claimed_to.
_LOWEST_RETURNED = """
    SELECT min(order_number) FROM documents INDEXED BY documents_returned
    WHERE returned = 1 AND customer = ?1 AND level = ?2
        AND order_number NOT IN (SELECT value FROM json_each(?3))"""
_LOWEST_NEW = """
    SELECT order_number FROM documents INDEXED BY documents_flow
    WHERE customer = ?1 AND level = ?2
        AND order_number > (SELECT claimed_to FROM flows WHERE customer = ?1 AND level = ?2)
        AND order_number NOT IN (SELECT value FROM json_each(?3))
    ORDER BY order_number LIMIT 1"""


def read_snapshot(
    connection: apsw.Connection, queue: QueueRow, id: str, now: int, uptime: Uptime
) -> DocumentSnapshot | None:
    """Return the snapshot of a document, or None for an unknown id."""
    found = find(connection, queue, Filter(ids=(id,)), None, 1).documents
    number = ids.decode(id, queue.key)
    if not found or number is None:
        return None
    document = found[0]
    retry_at = connection.execute(_RETRY_AT, (number,)).get
    if retry_at is not None and queue.boot == uptime.boot:
        document = document._replace(due_at_us=now + retry_at - uptime.at)  # by the present clock
    reader = SqliteQueueReader(connection, queue, now, uptime)
    return snapshot.read_snapshot(reader, document, number)


class SqliteQueueReader:
    """A `SnapshotReader` of the file. It has more than 20 methods because each is one statement."""

    def __init__(
        self, connection: apsw.Connection, queue: QueueRow, now: int, uptime: Uptime
    ) -> None:
        self._connection = connection
        self.settings = queue.settings
        self.now = now
        self.leases_end_at = uptime.at if queue.boot == uptime.boot else None
        self.following = queue.next_number
        self.source, self.turns = load_turns(connection, queue)
        self.source.given = queue.next_number - 1
        self.kinds = {kind.number: kind for kind in read_kinds(connection)}
        load_kinds(self.source, self.turns, self.kinds.values())
        self._waiting = waiting_by_kind(connection, queue)

    def _fetch(self, statement: str, *values: object) -> list[Row]:
        return fetch(self._connection, statement, values)

    def _one(self, statement: str, *values: object) -> int:
        ((n,),) = self._fetch(statement, *values)
        return int(n)

    def waiting(self, kind: int) -> Sequence[int]:
        return self._waiting.get(kind, by_priority({}))  # a damaged document may name no kind

    # ── Events ───────────────────────────────────────────────────────────────────────────────────

    def running(self) -> list[Row]:
        return self._fetch(_RUNNING)

    def due(self) -> list[Row]:
        if self.leases_end_at is None:
            rows = self._fetch(_DUE_BY_WALL_CLOCK, self.now)
        else:
            rows = sorted(self._fetch(DUE, self.now, self.leases_end_at))
        return [
            (number, customer, band, order, min(due_at, self.now))
            for due_at, number, customer, band, _, order in rows
        ]

    def lapsed(self, most: int) -> list[Row]:
        return self._fetch(_LAPSED, self.now, most)

    def lowest(self, flow: FlowKey, without: Collection[int]) -> int | None:
        values = (*flow, json.dumps([*without]))
        rows = self._fetch(_LOWEST_RETURNED, *values) + self._fetch(_LOWEST_NEW, *values)
        return min((order for (order,) in rows if order is not None), default=None)

    def events(self) -> list[EventBatch] | None:
        return read_events(self._connection, EVENTS_MAX)

    def expect(self, customers: Collection[int]) -> None:
        """Do nothing: reading customers one by one costs no more."""

    # ── Lines ────────────────────────────────────────────────────────────────────────────────────

    def held(self) -> list[int]:
        return [customer for (customer,) in self._fetch(_HELD)]

    def charged(self) -> Iterable[tuple[int, int, dict[int, list[int]]]]:
        return [(c, weight, to_costs(*costs)) for c, weight, *costs in self._fetch(_CHARGED)]

    def overdue(self, kind: int, before: int, most: int) -> list[Row]:
        return self._fetch(_OVERDUE, kind, before, most)

    def lines(self, bands: Collection[int], most: int) -> list[Row]:
        return self._fetch(_LINES, json.dumps([*bands]), most)

    def other_lines(self, band: int, place: int, tick: int, without: Collection[int]) -> Row:
        (row,) = self._connection.execute(
            _OTHER_LINES, _turn(band, place, tick, without)
        ).fetchall()
        return row

    def largest(
        self, band: int, place: int, tick: int, without: Collection[int], most: int
    ) -> list[Row]:
        values = {**_turn(band, place, tick, without), "most": most}
        return self._connection.execute(_LARGEST, values).fetchall()

    def count_overdue(
        self, kind: int, before: int, own: tuple[int, int], without: Collection[int]
    ) -> tuple[int, int]:
        values = (kind, before, *own, json.dumps([*without]))
        ((number, ahead),) = self._fetch(_COUNT_OVERDUE, *values)
        return int(number), int(ahead)

    def lower(self, band: int, order: int, customers: Collection[int]) -> list[Row]:
        return self._fetch(_LOWER, order, band)

    def waiting_of(self, customers: Collection[int]) -> dict[int, int]:
        return dict(self._fetch(_WAITING_OF, json.dumps([*customers])))

    def is_paused(self, customer: int) -> bool:
        return self._one(_PAUSED, customer) != 0

    def claimed_to(self, flow: FlowKey) -> int | None:
        found = self._fetch(_CLAIMED_TO, *flow)
        return found[0][0] if found else None

    def waiting_in(self, flow: FlowKey) -> int:
        ((_, waiting),) = self._fetch(_CLAIMED_TO, *flow)
        return int(waiting)

    def returned(self, flow: FlowKey, before: int | None) -> int:
        return self._one(_RETURNED, *flow, _NO_ORDER if before is None else before)

    def between(self, flow: FlowKey, after: int, before: int, most: int) -> int:
        return self._one(_COUNT_LOWER, *flow, after, before, most)

    def not_before(self, flow: FlowKey, order: int, most: int) -> int:
        return self._one(_COUNT_HIGHER, *flow, order, most)

    # ── The document and its queue ───────────────────────────────────────────────────────────────

    def document(self, number: int) -> Row:
        return self._fetch(_DOCUMENT, number)[0]

    def customer(self, number: int) -> Row:
        return self._fetch(_CUSTOMER, number)[0]

    def names_of(self, customers: Collection[int]) -> Iterable[tuple[int, str]]:
        return [(number, name) for number, name in self._fetch(_NAMES, json.dumps([*customers]))]

    def kind_settings(self, kind: int) -> KindSettings:
        return self.kinds[kind].settings if kind in self.kinds else KindSettings()

    def workers(self) -> list[WorkerHeartbeat]:
        return admin.workers(self._connection)

    def outages(self) -> list[ServiceOutage]:
        return outages(self._connection, self.now)

    def arrivals(self, kind: int, most: int) -> list[Row]:
        return self._fetch(_ARRIVALS, most, kind)

    def last_submitted(self, kind: int, most: int) -> list[Row]:
        return self._fetch(_LAST_SUBMITTED, most, kind)

    def last_steps(self, kind: int, most: int) -> list[Row]:
        return self._fetch(_LAST_STEPS, most, kind)

    def last_of_flow(self, flow: FlowKey) -> list[Row]:
        return self._fetch(_LAST_OF_ITS_FLOW, *flow)

    def last_of_band(self, band: int) -> list[Row]:
        return self._fetch(_LAST_OF_BAND, band)

    def served(self, numbers: tuple[int, int], since: int, until: int) -> dict[int, int]:
        return dict(self._fetch(_NEIGHBOURS, *numbers, since, until))

    def may_be_more(self, numbers: tuple[int, int], number: int, claimed_at: int) -> bool:
        return self._one(_MAYBE_MORE, *numbers, number, claimed_at) != 0


def _turn(band: int, place: int, tick: int, without: Collection[int]) -> dict[str, int | str]:
    return {"band": band, "place": place, "tick": tick, "without": json.dumps([*without])}


# By flows_turn, in its order.
_TURNS_OF_BAND = """
    SELECT level, place, tick, customer, folded FROM flows INDEXED BY flows_turn
    WHERE folded > 0 AND held = 0 AND level = ? ORDER BY level, place, tick"""
# By documents_flow after claimed_to, where all documents wait; and by documents_returned.
_NEXT_WAITING = f"""
    SELECT d.order_number, d.number, d.cost FROM documents d INDEXED BY documents_flow
    WHERE d.customer = ?1 AND d.level = ?2 AND d.state = {WAITING} AND d.returned = 0
        AND d.order_number > coalesce(
            (SELECT f.claimed_to FROM flows f WHERE f.customer = ?1 AND f.level = ?2), ?4)
    ORDER BY d.order_number LIMIT ?3"""
_NEXT_RETURNED = f"""
    SELECT order_number, number, cost FROM documents INDEXED BY documents_returned
    WHERE returned = 1 AND customer = ? AND level = ? AND state = {WAITING}
    ORDER BY order_number LIMIT ?"""


def lanes(
    connection: apsw.Connection,
    queue: QueueRow,
    size: int,
    kind: str | None,
    *,
    now: int,
    uptime: Uptime,
) -> Lanes:
    """Return the next documents of each priority, of one kind or of all."""
    reader = SqliteQueueReader(connection, queue, now, uptime)
    known = reader.turns.customers
    names = {each.number: each.name for each in reader.kinds.values() if kind in (None, each.name)}

    def first_lines(band: int, most: int) -> Iterable[Row]:
        rows = connection.execute(_TURNS_OF_BAND, (band,))
        return islice((row for row in rows if row[3] not in known), most)

    def next_in(flow: FlowKey, before: int, most: int) -> Iterable[Row]:
        following = fetch(connection, _NEXT_WAITING, (*flow, most, before))
        return following + fetch(connection, _NEXT_RETURNED, (*flow, most))

    numbers = next_numbers(reader, size, names, first_lines, next_in)
    found = [ids.encode(number, queue.key) for number in numbers]
    documents: list[Document] = []
    for start in range(0, len(found), PAGE_MAX):
        wanted = Filter(ids=tuple(found[start : start + PAGE_MAX]))
        documents += find(connection, queue, wanted, None, PAGE_MAX).documents
    return Lanes(queue.claims, by_lane(documents, found, size))
