"""The recount of a file, which compares every derived value with the documents, and its repairs.

Events that no claim has folded are part of the comparison, so a queue in use has no damages.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import apsw

from fairturn.model import Settings
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import WEIGHT_ONE, Mode
from fairturn.stores.inspection import Damage, Damages
from fairturn.stores.sqlite.connection import Database
from fairturn.stores.sqlite.rows import COUNT_COUNTED, INVALIDATE_SCHEDULER, fetch
from fairturn.stores.values import DELAYED, RUNNING, STORED_BYTES, WAITING, Row

# The codes of events are positions in `_EVENTS` of `stores/values.py`.
_EVENTS = """
    events AS MATERIALIZED (
        SELECT code, customer, iif(code IN (5, 6), NULL, third) AS level,
            CASE code WHEN 0 THEN fifth WHEN 1 THEN -1 WHEN 4 THEN 1 ELSE 0 END AS more,
            CASE code WHEN 2 THEN fourth WHEN 3 THEN 1 WHEN 4 THEN 1 ELSE 0 END AS ended
        FROM (
            SELECT e.value ->> 0 AS code, e.value ->> 1 AS customer, e.value ->> 2 AS third,
                e.value ->> 3 AS fourth, e.value ->> 4 AS fifth
            FROM event_log r, json_each(r.events) e)),
    unsettled AS MATERIALIZED (
        SELECT customer, max(code = 5) AS adjusted FROM events GROUP BY customer)"""

_QUEUE = " UNION ALL ".join(
    f"SELECT {n} AS priority, waiting_{n} AS stored FROM queue" for n in range(1, LEVELS + 1)
)
_AUDIT_QUEUE = f"""
    WITH counted AS MATERIALIZED (
        SELECT state, priority, count(*) AS n FROM documents
        WHERE state IN ({WAITING}, {DELAYED}) GROUP BY state, priority),
    active AS MATERIALIZED (
        SELECT f.level, sum(coalesce(s.weight, {WEIGHT_ONE})) AS weight
        FROM flows f LEFT JOIN customer_states s ON s.customer = f.customer
        WHERE f.folded > 0 AND f.held = 0 GROUP BY f.level)
    SELECT kind, NULL, NULL, place, stored, truth FROM (
        SELECT 'queue.waiting' AS kind, q.priority AS place, q.stored, coalesce((
            SELECT n FROM counted c WHERE c.state = {WAITING} AND c.priority = q.priority), 0)
            AS truth
        FROM ({_QUEUE}) q
        UNION ALL
        SELECT 'queue.delayed', NULL, delayed, (
            SELECT coalesce(sum(n), 0) FROM counted WHERE state = {DELAYED})
        FROM queue
        UNION ALL
        SELECT 'queue.counted', NULL, counted, (SELECT count(*) FROM customers WHERE counted = 1)
        FROM queue
        UNION ALL
        SELECT 'level.weight', l.level, l.weight, coalesce(a.weight, 0)
        FROM levels l LEFT JOIN active a ON a.level = l.level)
    WHERE stored <> truth"""

_AUDIT_FLOWS = f"""
    WITH {_EVENTS},
    pending AS (
        SELECT customer, level, sum(more) AS more, sum(ended) AS ended FROM events
        WHERE level IS NOT NULL GROUP BY customer, level),
    counted AS (
        SELECT customer, level, sum(state = {WAITING}) AS waiting,
            sum(state = {RUNNING}) AS running,
            min(iif(state = {WAITING}, order_number, NULL)) AS head,
            min(iif(state = {WAITING} AND returned = 0, order_number, NULL)) AS head_new,
            max(iif(state = {WAITING} AND returned = 0, NULL, order_number)) AS last_old
        FROM documents GROUP BY customer, level),
    compared AS MATERIALIZED (
        SELECT c.name, x.*, u.customer IS NULL AS settled,
            s.running_max IS NOT NULL AND coalesce(u.adjusted, 0) = 0 AS limited
        FROM (
            SELECT customer, level, f.waiting AS stored_waiting, f.folded,
                f.running AS stored_running, f.claimed_to, f.head_order,
                coalesce(n.waiting, 0) AS waiting, coalesce(n.running, 0) AS running,
                n.head, n.head_new, n.last_old, coalesce(p.more, 0) AS more,
                coalesce(p.ended, 0) AS ended
            FROM flows f FULL JOIN counted n USING (customer, level)
                FULL JOIN pending p USING (customer, level)) x
            JOIN customers c ON c.number = x.customer
            LEFT JOIN customer_states s ON s.customer = c.number
            LEFT JOIN unsettled u ON u.customer = c.number
        WHERE x.level > 0)
    SELECT 'customer.waiting', customer, name, level, coalesce(stored_waiting, 0), waiting
    FROM compared WHERE coalesce(stored_waiting, 0) <> waiting
    UNION ALL
    SELECT 'flow.folded', customer, name, level, coalesce(folded, 0), waiting - more
    FROM compared WHERE coalesce(folded, 0) <> waiting - more
    UNION ALL
    SELECT 'flow.running', customer, name, level, coalesce(stored_running, 0), running + ended
    FROM compared WHERE limited AND coalesce(stored_running, 0) <> running + ended
    UNION ALL
    SELECT 'flow.head_order', customer, name, level, head_order, head
    FROM compared WHERE settled AND head_order IS NOT head
    UNION ALL
    -- Above claimed_to are exactly the waiting documents that were never claimed.
    SELECT 'flow.claimed_to', customer, name, level, claimed_to,
        iif(claimed_to < last_old, last_old, head_new - 1)
    FROM compared
    WHERE waiting > 0 AND settled AND (claimed_to < last_old OR claimed_to >= head_new)"""

_AUDIT_CUSTOMERS = f"""
    WITH {_EVENTS},
    seats AS MATERIALIZED (
        SELECT f.customer, f.level, f.head_since, f.head_bound, f.held, f.place, f.head_order,
            f.folded,
            f.head_order IS NOT NULL
                AND f.head_order = min(f.head_order) OVER (PARTITION BY f.customer) AS is_head,
            coalesce(s.paused, 0) <> 0 OR coalesce(
                sum(f.running) OVER (PARTITION BY f.customer) >= s.running_max, 0) AS is_held
        FROM flows f LEFT JOIN customer_states s ON s.customer = f.customer),
    known AS MATERIALIZED (
        SELECT c.*, s.weight AS its_weight, s.running_max AS its_limit, s.paused AS its_pause,
            coalesce(u.adjusted, 0) AS adjusted
        FROM customers c LEFT JOIN customer_states s ON s.customer = c.number
            LEFT JOIN unsettled u ON u.customer = c.number),
    rows(kind, customer) AS (
        SELECT DISTINCT 'flow.orphan', customer FROM flows
        UNION ALL SELECT 'customer_state.orphan', customer FROM customer_states
        UNION ALL SELECT DISTINCT 'key.orphan', customer FROM idempotency_keys)
    SELECT k.kind, k.customer, c.name, k.place, k.stored, k.truth
    FROM (
        SELECT 'flow.held' AS kind, customer, level AS place, held AS stored, is_held AS truth
        FROM seats WHERE folded > 0 AND held <> is_held
        UNION ALL
        SELECT 'flow.head_since', customer, level, head_since IS NOT NULL, is_head
        FROM seats WHERE (head_since IS NOT NULL) <> is_head
        UNION ALL
        SELECT 'flow.head_bound', customer, level, head_bound, head_since
        FROM seats WHERE (head_bound IS NULL) <> (head_since IS NULL) OR head_bound > head_since
        UNION ALL
        SELECT 'flow.place', customer, level, place, head_order
        FROM seats WHERE folded > 0 AND place IS NOT head_order AND ?1 = 'levels'
        UNION ALL
        SELECT 'customer_state.weight', number, NULL, coalesce(its_weight, {WEIGHT_ONE}), weight
        FROM known WHERE NOT adjusted AND coalesce(its_weight, {WEIGHT_ONE}) <> weight
        UNION ALL
        SELECT 'customer_state.running_max', number, NULL, its_limit, running_max
        FROM known WHERE NOT adjusted AND its_limit IS NOT running_max
        UNION ALL
        SELECT 'customer_state.paused', number, NULL, coalesce(its_pause, 0), paused
        FROM known WHERE NOT adjusted AND coalesce(its_pause, 0) <> paused
        UNION ALL
        SELECT 'customer.counted', number, NULL, counted, running_max IS NOT NULL
        FROM known WHERE NOT adjusted AND counted <> (running_max IS NOT NULL)
        UNION ALL
        SELECT 'customer.delayed', number, NULL, delayed, coalesce(n, 0)
        FROM customers LEFT JOIN (
            SELECT customer, count(*) AS n FROM documents WHERE state = {DELAYED} GROUP BY customer)
            ON customer = number
        WHERE delayed <> coalesce(n, 0)
        UNION ALL
        SELECT 'customer.stored_bytes', number, NULL, stored_bytes, coalesce(n, 0)
        FROM customers LEFT JOIN (
            SELECT customer, sum({STORED_BYTES}) AS n FROM documents GROUP BY customer)
            ON customer = number
        WHERE stored_bytes <> coalesce(n, 0)
        UNION ALL
        -- An event of a purged customer removes its rows when it is applied.
        SELECT kind, customer, NULL, 1, 0 FROM rows o
        WHERE NOT EXISTS (SELECT 1 FROM customers c WHERE c.number = o.customer)
            AND NOT EXISTS (SELECT 1 FROM unsettled u WHERE u.customer = o.customer)) k
    LEFT JOIN customers c ON c.number = k.customer"""

_AUDIT_DOCUMENTS = f"""
    WITH compared AS (
        SELECT d.number, d.customer, c.name, d.state, d.returned, d.level,
            iif(?1 = 'equal', 1, d.priority) AS its_level
        FROM documents d LEFT JOIN customers c ON c.number = d.customer)
    SELECT k.kind, o.customer, o.name, o.number,
        CASE k.kind WHEN 'document.returned' THEN o.returned WHEN 'document.level' THEN o.level
            ELSE o.customer END,
        CASE k.kind WHEN 'document.returned' THEN 0 WHEN 'document.level' THEN o.its_level END
    FROM compared o JOIN (
        SELECT 'document.returned' AS kind
        UNION ALL SELECT 'document.level' UNION ALL SELECT 'document.orphan') k
    WHERE CASE k.kind
        WHEN 'document.returned' THEN o.returned AND o.state <> {WAITING}
        WHEN 'document.level' THEN o.state IN ({WAITING}, {DELAYED}, {RUNNING})
            AND o.level <> o.its_level
        ELSE o.name IS NULL END"""

_AUDIT_LEASES = f"""
    WITH held AS MATERIALIZED (
        SELECT l.fence, l.running, l.until, d.number, d.lease_until
        FROM leases l, json_each(l.documents) j
            LEFT JOIN documents d ON d.number = j.value AND d.fence = l.fence
                AND d.state = {RUNNING}),
    sums AS MATERIALIZED (
        SELECT l.fence, l.running, l.until, count(h.number) AS n, min(h.lease_until) AS first
        FROM leases l LEFT JOIN held h ON h.fence = l.fence GROUP BY l.fence)
    SELECT 'lease.running', NULL, NULL, fence, running, n FROM sums WHERE running <> n
    UNION ALL
    SELECT 'lease.until', NULL, NULL, fence, until, first FROM sums WHERE until > first
    UNION ALL
    SELECT 'lease.missing', d.customer, c.name, d.number, NULL, d.fence
    FROM documents d LEFT JOIN customers c ON c.number = d.customer
    WHERE d.state = {RUNNING} AND d.number NOT IN (SELECT number FROM held WHERE number IS NOT NULL)
    UNION ALL
    SELECT 'body.orphan', NULL, NULL, document, 1, 0 FROM bodies
    WHERE NOT EXISTS (SELECT 1 FROM documents WHERE number = document)
    UNION ALL
    SELECT 'result.orphan', NULL, NULL, document, 1, 0 FROM results
    WHERE NOT EXISTS (SELECT 1 FROM documents WHERE number = document)"""

STEPS = (_AUDIT_QUEUE, _AUDIT_FLOWS, _AUDIT_CUSTOMERS, _AUDIT_DOCUMENTS, _AUDIT_LEASES)
_MODE = "SELECT settings ->> 'mode' FROM queue"


def recount(connection: apsw.Connection, advance: Callable[[int, int], None]) -> Iterator[Damage]:
    """Yield every stored value that does not agree with the documents, from one snapshot."""
    connection.execute("BEGIN")
    try:
        mode = connection.execute(_MODE).get
        for done, statement in enumerate(STEPS):
            advance(done, len(STEPS))
            values = (mode,) if "?1" in statement else ()
            yield from (Damage(*row) for row in connection.execute(statement, values))
        advance(len(STEPS), len(STEPS))
    finally:
        connection.execute("COMMIT")


BATCH = 100  # customers or leases in one transaction

_QUEUE_STATE = "SELECT settings, next_number, tick FROM queue"
_EVENT_LOG = "SELECT number, events FROM event_log"
_KEEP_EVENTS = "UPDATE event_log SET events = ? WHERE number = ?"
_DROP_EVENTS = "DELETE FROM event_log WHERE number = ?"
# By documents_flow.
_SET_FLAGS = f"""
    UPDATE documents SET returned = (returned AND state = {WAITING}),
        level = CASE WHEN state NOT IN ({WAITING}, {DELAYED}, {RUNNING}) THEN level
            WHEN ?2 THEN 1 ELSE priority END
    WHERE customer = ?1 AND ((returned AND state <> {WAITING})
        OR (state IN ({WAITING}, {DELAYED}, {RUNNING}) AND level <> iif(?2, 1, priority)))"""
_COUNTED = f"""
    SELECT level, sum(state = {WAITING}), sum(state = {RUNNING}),
        min(iif(state = {WAITING}, order_number, NULL)),
        min(iif(state = {WAITING} AND returned = 0, order_number, NULL)),
        max(iif(state = {WAITING} AND returned = 0, NULL, order_number))
    FROM documents INDEXED BY documents_flow WHERE customer = ? AND level > 0 GROUP BY level"""
_RETURN_ALL = f"""
    UPDATE documents SET returned = 1 WHERE customer = ? AND level = ? AND state = {WAITING}"""
_CUSTOMER = "SELECT weight, running_max, paused FROM customers WHERE number = ?"
_SET_CUSTOMER = f"""
    UPDATE customers SET counted = running_max IS NOT NULL, delayed = (
        SELECT count(*) FROM documents WHERE customer = ?1 AND state = {DELAYED}),
        stored_bytes = (
        SELECT coalesce(sum({STORED_BYTES}), 0) FROM documents WHERE customer = ?1)
    WHERE number = ?1"""
_SET_CUSTOMER_STATE = """
    INSERT INTO customer_states (customer, weight, running_max, paused, recent_costs)
    VALUES (?, ?, ?, ?, '[]')
    ON CONFLICT DO UPDATE SET weight = excluded.weight, running_max = excluded.running_max,
        paused = excluded.paused"""
_DROP_PLAIN_CUSTOMER_STATE = f"""
    DELETE FROM customer_states WHERE customer = ? AND weight = {WEIGHT_ONE} AND running_max IS NULL
        AND paused = 0 AND recent_costs = '[]'"""
_FLOWS = """
    SELECT level, claimed_to, place, tick, folded > 0 AND held = 0, head_since
    FROM flows WHERE customer = ?"""
_SET_FLOW = """
    INSERT OR REPLACE INTO flows (customer, level, waiting, claimed_to, folded, running, place,
        tick, head_order, head_since, head_bound, held)
    VALUES (?1, ?2, ?3, ?4, ?3, ?5, ?6, ?7, ?8, ?9, ?9, ?10)"""
_DELETE_CUSTOMER = (
    "DELETE FROM flows WHERE customer = ?",
    "DELETE FROM customer_states WHERE customer = ?",
    "DELETE FROM idempotency_keys WHERE customer = ?",
)
_CLOCKS = "SELECT level, clock FROM levels"
_SET_WEIGHTS = f"""
    UPDATE levels SET weight = (
        SELECT coalesce(sum(coalesce(s.weight, {WEIGHT_ONE})), 0)
        FROM flows f INDEXED BY flows_turn LEFT JOIN customer_states s ON s.customer = f.customer
        WHERE f.folded > 0 AND f.held = 0 AND f.level = levels.level)"""
_SET_TICK = "UPDATE queue SET tick = ?"
_WAITING_BY_PRIORITY = f"""
    SELECT priority, count(*) FROM documents WHERE state = {WAITING} GROUP BY priority"""
# Outside mode equal the level of a waiting document is its priority.
_WAITING_BY_LEVEL = "SELECT level, sum(waiting) FROM flows GROUP BY level"
_SET_COUNTS = f"""
    UPDATE queue SET delayed = (SELECT coalesce(sum(delayed), 0) FROM customers),
        {", ".join(f"waiting_{n} = ?" for n in range(1, LEVELS + 1))}"""
_FENCES = f"SELECT DISTINCT fence FROM documents WHERE number = ? AND state = {RUNNING}"
_LEASED = f"""
    SELECT d.number FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value AND d.fence = l.fence
    WHERE l.fence = ? AND d.state = {RUNNING}"""
_UNLEASED = f"SELECT number FROM documents WHERE number = ? AND fence = ? AND state = {RUNNING}"
_SET_LEASE = """
    INSERT OR REPLACE INTO leases (fence, until, running, documents) VALUES (?, 0, ?, ?)"""
_DROP_LEASE = "DELETE FROM leases WHERE fence = ?"
_DROP_ORPHANS = (
    """DELETE FROM bodies WHERE document = ?1
        AND NOT EXISTS (SELECT 1 FROM documents WHERE number = ?1)""",
    """DELETE FROM results WHERE document = ?1
        AND NOT EXISTS (SELECT 1 FROM documents WHERE number = ?1)""",
)


def repair(path: Path, damages: Damages, advance: Callable[[int, int], None], now: int) -> None:
    """Repair the damages of a recount, in a transaction for each batch."""
    work: list[Callable[[apsw.Connection], None]] = [
        *(partial(repair_customers, owners=b, now=now) for b in _batches(damages.customers)),
        *(partial(_repair_leases, fences=b, unleased=()) for b in _batches(damages.fences)),
        *(partial(_repair_leases, fences=(), unleased=b) for b in _batches(damages.unleased)),
        *(partial(_drop_orphans, numbers=b) for b in _batches(damages.orphans)),
    ]
    if damages.queue or damages.customers:
        work.append(_repair_queue)
    database = Database(path, synchronous="FULL", allow_network=True)
    try:
        for done, each in enumerate(work):
            advance(done, len(work))
            with database.writing("configure") as connection:
                each(connection)
                connection.execute(INVALIDATE_SCHEDULER)
    finally:
        database.close()


def _batches(numbers: Iterable[int]) -> Iterator[list[int]]:
    left = iter(sorted(numbers))
    while batch := list(islice(left, BATCH)):
        yield batch


# ── Customers ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _RepairState:
    """The scheduler state that a repair reads and writes."""

    mode: Mode
    clocks: dict[int, int]
    next_number: int
    tick: int
    now: int


def repair_customers(connection: apsw.Connection, owners: Iterable[int], now: int) -> None:
    """Rebuild the derived values of some customers, inside a transaction. Their unfolded events are
    deleted, because the documents already reflect them."""
    ((settings, next_number, tick),) = fetch(connection, _QUEUE_STATE)
    clocks: dict[int, int] = dict(fetch(connection, _CLOCKS))
    turns = _RepairState(Settings.from_json(settings).mode, clocks, next_number, tick, now)
    wanted = set(owners)
    _drop_events(connection, wanted)
    for owner in sorted(wanted):
        connection.execute(_SET_FLAGS, (owner, turns.mode is Mode.EQUAL))
        found = fetch(connection, _CUSTOMER, (owner,))
        if found:
            _repair_customer(connection, owner, found[0], turns)
        else:
            for statement in _DELETE_CUSTOMER:
                connection.execute(statement, (owner,))
    connection.execute(_SET_TICK, (turns.tick,))
    connection.execute(COUNT_COUNTED)
    connection.execute(_SET_WEIGHTS)
    connection.execute(INVALIDATE_SCHEDULER)


def _drop_events(connection: apsw.Connection, owners: set[int]) -> None:
    for number, text in fetch(connection, _EVENT_LOG):
        events = json.loads(text)
        kept = [event for event in events if event[1] not in owners]
        if not kept:
            connection.execute(_DROP_EVENTS, (number,))
        elif len(kept) < len(events):
            connection.execute(_KEEP_EVENTS, (json.dumps(kept, separators=(",", ":")), number))


def _repair_customer(
    connection: apsw.Connection, owner: int, settings: Row, turns: _RepairState
) -> None:
    """Rebuild the flows of a customer. Flows that stay active keep their turn."""
    _, limit, paused = settings
    connection.execute(_SET_CUSTOMER, (owner,))
    connection.execute(_SET_CUSTOMER_STATE, (owner, *settings))
    connection.execute(_DROP_PLAIN_CUSTOMER_STATE, (owner,))
    stored = {level: row for level, *row in fetch(connection, _FLOWS, (owner,))}
    counted = {level: row for level, *row in fetch(connection, _COUNTED, (owner,))}
    held = bool(paused) or (limit is not None and sum(r[1] for r in counted.values()) >= limit)
    head = min((row[2] for row in counted.values() if row[2] is not None), default=None)
    since = max((row[4] for row in stored.values() if row[4] is not None), default=turns.now)
    for level in sorted(stored.keys() | counted.keys()):
        waiting, running, first, first_new, last_old = counted.get(level, (0, 0, None, None, None))
        claimed_to, place, its_tick, was_active, _ = stored.get(level, (-1, 0, 0, 0, None))
        if level not in stored and not waiting and not running:
            continue
        if (last_old is not None and claimed_to < last_old) or (
            first_new is not None and claimed_to >= first_new
        ):
            connection.execute(_RETURN_ALL, (owner, level))
            claimed_to = turns.next_number - 1
        if turns.mode is Mode.LEVELS:
            place = first or 0
        elif waiting and not held and not was_active:
            turns.tick += 1
            place, its_tick = max(place, turns.clocks[level]), turns.tick
        head_since = since if first is not None and first == head else None
        values = (waiting, claimed_to, running, place, its_tick, first, head_since, held)
        connection.execute(_SET_FLOW, (owner, level, *values))


# ── The queue, leases, rows ──────────────────────────────────────────────────────────────────────


def _repair_queue(connection: apsw.Connection) -> None:
    ((settings, *_),) = fetch(connection, _QUEUE_STATE)
    is_equal = Settings.from_json(settings).mode is Mode.EQUAL
    statement = _WAITING_BY_PRIORITY if is_equal else _WAITING_BY_LEVEL
    waiting: dict[int, int] = dict(fetch(connection, statement))
    connection.execute(_SET_COUNTS, [waiting.get(n, 0) for n in range(1, LEVELS + 1)])
    connection.execute(COUNT_COUNTED)
    connection.execute(_SET_WEIGHTS)


def _repair_leases(
    connection: apsw.Connection, fences: Iterable[int], unleased: Iterable[int]
) -> None:
    """Rebuild the leases of these fences and of the documents in `unleased`."""
    numbers = list(unleased)
    found = [fence for n in numbers for (fence,) in fetch(connection, _FENCES, (n,))]
    for fence in {*fences, *found}:
        leased = {n for (n,) in fetch(connection, _LEASED, (fence,))}
        leased.update(n for n in numbers if fetch(connection, _UNLEASED, (n, fence)))
        if leased:
            connection.execute(_SET_LEASE, (fence, len(leased), json.dumps(sorted(leased))))
        else:
            connection.execute(_DROP_LEASE, (fence,))


def _drop_orphans(connection: apsw.Connection, numbers: Iterable[int]) -> None:
    for number in numbers:
        for statement in _DROP_ORPHANS:
            connection.execute(statement, (number,))
