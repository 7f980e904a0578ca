"""The recount of a file, which compares every derived value with the documents.

Events that no claim has folded are part of the comparison, so a queue in use has no damages.
"""

from collections.abc import Callable, Iterator

import apsw

from fairturn.priority import LEVELS
from fairturn.scheduling.flows import (
    BANDS_PER_KIND,
    WEIGHT_ONE,
)
from fairturn.stores.inspection import Damage
from fairturn.stores.values import ADVANCED, DELAYED, RUNNING, STORED_BYTES, WAITING

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
    f"SELECT {n} AS place, waiting_{n} AS stored FROM queue" for n in range(1, LEVELS + 1)
)
_KINDS = " UNION ALL ".join(
    f"SELECT {BANDS_PER_KIND} * number + {n} AS place, waiting_{n} AS stored FROM kinds"
    for n in range(1, LEVELS + 1)
)
_AUDIT_QUEUE = f"""
    WITH counted AS MATERIALIZED (
        SELECT state, {BANDS_PER_KIND} * kind + priority AS place, count(*) AS n FROM documents
        WHERE state IN ({WAITING}, {DELAYED}) GROUP BY 1, 2),
    active AS MATERIALIZED (
        SELECT f.level, sum(coalesce(s.weight, {WEIGHT_ONE})) AS weight
        FROM flows f LEFT JOIN customer_states s ON s.customer = f.customer
        WHERE f.folded > 0 AND f.held = 0 GROUP BY f.level)
    SELECT kind, NULL, NULL, place, stored, truth FROM (
        SELECT 'queue.waiting' AS kind, q.place, q.stored, (
            SELECT coalesce(sum(n), 0) FROM counted c
            WHERE c.state = {WAITING} AND c.place % {BANDS_PER_KIND} = q.place) AS truth
        FROM ({_QUEUE}) q
        UNION ALL
        SELECT 'kind.waiting', k.place, k.stored, (
            SELECT coalesce(sum(n), 0) FROM counted c
            WHERE c.state = {WAITING} AND c.place = k.place)
        FROM ({_KINDS}) k WHERE k.place >= {BANDS_PER_KIND}  -- the default kind has no counters
        UNION ALL
        SELECT 'queue.delayed', NULL, delayed, (
            SELECT coalesce(sum(n), 0) FROM counted WHERE state = {DELAYED})
        FROM queue
        UNION ALL
        SELECT 'queue.counted', NULL, counted, (SELECT count(*) FROM customers WHERE counted = 1)
        FROM queue
        UNION ALL
        SELECT 'level.weight', level, coalesce(l.weight, 0), coalesce(a.weight, 0)
        FROM levels l FULL JOIN active a USING (level))
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
                AND f.head_order = min(f.head_order) OVER (
                    PARTITION BY f.customer, f.level / {BANDS_PER_KIND}) AS is_head,
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

# Whether a document d that may expire never would.
LACKS_EXPIRATION = f"""
    (d.expires_at IS NOT NULL AND d.state IN ({WAITING}, {DELAYED}) AND d.step = 0
        AND d.attempts = 0 AND NOT EXISTS (
            SELECT 1 FROM expirations e
            WHERE e.expires_at = d.expires_at AND e.document = d.number))"""
_AUDIT_DOCUMENTS = f"""
    WITH steps AS MATERIALIZED (
        SELECT document, count(*) AS n FROM attempts WHERE outcome = {ADVANCED} GROUP BY document),
    compared AS (
        SELECT d.number, d.customer, c.name, d.state, d.returned, d.level, d.step,
            {BANDS_PER_KIND} * d.kind + iif(?1 = 'equal', 1, d.priority) AS its_level,
            coalesce(s.n, 0) AS its_steps, {LACKS_EXPIRATION} AS lacks_expiration
        FROM documents d LEFT JOIN customers c ON c.number = d.customer
            LEFT JOIN steps s ON s.document = d.number)
    SELECT k.kind, o.customer, o.name, o.number,
        CASE k.kind WHEN 'document.returned' THEN o.returned WHEN 'document.level' THEN o.level
            WHEN 'document.step' THEN o.step WHEN 'document.expiration' THEN 0
            ELSE o.customer END,
        CASE k.kind WHEN 'document.returned' THEN 0 WHEN 'document.level' THEN o.its_level
            WHEN 'document.step' THEN o.its_steps WHEN 'document.expiration' THEN 1 END
    FROM compared o JOIN (
        SELECT 'document.returned' AS kind
        UNION ALL SELECT 'document.level' UNION ALL SELECT 'document.step'
        UNION ALL SELECT 'document.expiration' UNION ALL SELECT 'document.orphan') k
    WHERE CASE k.kind
        WHEN 'document.returned' THEN o.returned AND o.state <> {WAITING}
        WHEN 'document.level' THEN o.state IN ({WAITING}, {DELAYED}, {RUNNING})
            AND o.level <> o.its_level
        WHEN 'document.step' THEN o.step <> o.its_steps
        WHEN 'document.expiration' THEN o.lacks_expiration
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
    WHERE NOT EXISTS (SELECT 1 FROM documents WHERE number = document)
    UNION ALL
    SELECT 'attempt.orphan', NULL, NULL, document, count(*), 0 FROM attempts
    WHERE NOT EXISTS (SELECT 1 FROM documents d WHERE d.number = document) GROUP BY document
    UNION ALL
    SELECT 'checkpoint.orphan', NULL, NULL, document, 1, 0 FROM checkpoints
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
