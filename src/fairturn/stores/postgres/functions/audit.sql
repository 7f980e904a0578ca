-- Recounts for `fairturn doctor --thorough`. Each function compares derived values with the documents, in the snapshot
-- of the caller, and returns a row for each wrong value. It takes no locks, and its plans depend on statistics. Events
-- that no claim has applied yet are part of the comparison: a queue in use has no findings.

-- The effect of unapplied events on each flow. Level NULL: events of the customer as a whole.
CREATE OR REPLACE FUNCTION {schema}.unapplied_events() RETURNS TABLE (
    customer bigint, level smallint, waiting bigint, ended bigint, adjusted boolean
) LANGUAGE sql STABLE AS $$
    SELECT u.customer, u.level, sum(u.waiting)::bigint, sum(u.ended)::bigint, bool_or(u.code = 5)
    FROM (
        SELECT a.customer, a.level, a.size::bigint AS waiting, 0::bigint AS ended, 0 AS code
        FROM {schema}.event_log r
            CROSS JOIN LATERAL unnest(r.customers, r.levels, r.sizes) AS a(customer, level, size)
        WHERE r.events IS NULL
        UNION ALL
        -- The codes are positions in fairturn.stores.values.
        SELECT (e.event ->> 1)::bigint,
            CASE WHEN e.code NOT IN (5, 6) THEN (e.event ->> 2)::smallint END,
            CASE e.code WHEN 0 THEN (e.event ->> 4)::bigint WHEN 1 THEN -1 WHEN 4 THEN 1 ELSE 0 END,
            CASE e.code WHEN 2 THEN (e.event ->> 3)::bigint WHEN 3 THEN 1 WHEN 4 THEN 1 ELSE 0 END,
            e.code
        FROM {schema}.event_log r CROSS JOIN LATERAL (
            SELECT v AS event, (v ->> 0)::integer AS code
            FROM jsonb_array_elements(r.events::jsonb) v) e
        WHERE r.events IS NOT NULL) u
    GROUP BY u.customer, u.level
$$;

-- The counters of the whole queue and of its kinds, and the lower bounds from which claims read. `place` is a priority, a
-- band, a kind, or 10 * kind + priority.
CREATE OR REPLACE FUNCTION {schema}.audit_queue() RETURNS TABLE (
    kind text, customer bigint, place bigint, stored bigint, truth bigint
) LANGUAGE sql STABLE AS $$
    WITH t AS MATERIALIZED (SELECT * FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1),
    states AS MATERIALIZED (SELECT * FROM {schema}.states_of_kinds()),
    counted AS MATERIALIZED (
        SELECT d.state, d.kind, d.priority, count(*) AS n FROM {schema}.documents d
        WHERE d.state IN ({waiting}, {delayed}) GROUP BY d.state, d.kind, d.priority),
    active AS MATERIALIZED (
        SELECT f.level, sum(coalesce(s.weight, {weight_one})) AS weight, min(f.place) AS place,
            min(f.head_since) AS head_since
        FROM {schema}.flows f LEFT JOIN {schema}.customer_states s ON s.customer = f.customer
        WHERE f.folded > 0 AND NOT f.held AND f.generation = (SELECT t.generation FROM t)
        GROUP BY f.level),
    checks(kind, place, stored, truth, is_wrong) AS (
        SELECT 'queue.waiting', p, v.stored, v.truth, v.stored <> v.truth
        FROM generate_series(1, 9) p CROSS JOIN LATERAL (
            SELECT (SELECT coalesce(sum(o.arrived[p]), 0) FROM {schema}.arrival_counters o)
                    - (SELECT t.taken[p] FROM t)
                    + (SELECT coalesce(sum(m.waiting), 0) FROM {schema}.counter_changes m WHERE m.priority = p),
                (SELECT coalesce(sum(c.n), 0) FROM counted c
                WHERE c.state = {waiting} AND c.priority = p)) AS v(stored, truth)
        UNION ALL
        SELECT 'queue.delayed', NULL, v.stored, v.truth, v.stored <> v.truth
        FROM (
            SELECT (SELECT coalesce(sum(o.delayed), 0) FROM {schema}.arrival_counters o)
                    - (SELECT t.promoted FROM t)
                    + (SELECT coalesce(sum(m.delayed), 0) FROM {schema}.counter_changes m),
                (SELECT coalesce(sum(c.n), 0) FROM counted c WHERE c.state = {delayed})
        ) AS v(stored, truth)
        UNION ALL
        SELECT 'kind.waiting', 10 * k.kind + p, v.stored, v.truth, v.stored <> v.truth
        FROM states k CROSS JOIN generate_series(1, 9) p CROSS JOIN LATERAL (
            SELECT (SELECT coalesce(sum(o.arrived[p]), 0) FROM {schema}.kind_arrivals o WHERE o.kind = k.kind)
                    - k.taken[p] + (
                    SELECT coalesce(sum(m.waiting), 0) FROM {schema}.counter_changes m
                    WHERE m.kind = k.kind AND m.priority = p),
                (SELECT coalesce(sum(c.n), 0) FROM counted c
                WHERE c.state = {waiting} AND c.kind = k.kind AND c.priority = p)) AS v(stored, truth)
        WHERE k.kind <> {default_kind}
        UNION ALL
        SELECT 'level.weight', 10 * k.kind + l, k.weights[l], coalesce(a.weight, 0),
            k.weights[l] <> coalesce(a.weight, 0)
        FROM states k CROSS JOIN generate_series(1, 9) l LEFT JOIN active a ON a.level = 10 * k.kind + l
        UNION ALL
        SELECT 'level.places_from', a.level, k.places_from[a.level % 10], a.place,
            k.places_from[a.level % 10] > a.place
        FROM states k JOIN active a ON a.level / 10 = k.kind
        UNION ALL
        SELECT 'queue.heads_from', k.kind, k.heads_from, a.since, k.heads_from > a.since
        FROM states k CROSS JOIN LATERAL (
            SELECT min(o.head_since) AS since FROM active o WHERE o.level / 10 = k.kind) a
        WHERE (SELECT q.mode FROM {schema}.queue q) <> 'levels'
        UNION ALL
        SELECT 'queue.leases_from', NULL, t.leases_from, l.until, t.leases_from > l.until
        FROM t CROSS JOIN (SELECT min(o.until) AS until FROM {schema}.leases o) l
        UNION ALL
        -- Events before events_from are applied, but for those of events_late.
        SELECT 'queue.events_from', NULL, count(*), 0, count(*) > 0
        FROM t JOIN {schema}.event_log r ON r.xid < t.events_from AND r.xid <> ALL (t.events_late))
    SELECT k.kind, NULL::bigint, k.place::bigint, k.stored::bigint, k.truth::bigint
    FROM checks k WHERE k.is_wrong
$$;

-- The flows and counters of existing customers against their documents. `place` is the band.
CREATE OR REPLACE FUNCTION {schema}.audit_flows() RETURNS TABLE (
    kind text, customer bigint, place bigint, stored bigint, truth bigint
) LANGUAGE sql STABLE AS $$
    WITH events AS MATERIALIZED (SELECT * FROM {schema}.unapplied_events()),
    pending AS (
        SELECT e.customer, e.level, e.waiting AS more, e.ended FROM events e WHERE e.level IS NOT NULL),
    unsettled AS (
        SELECT e.customer, bool_or(e.adjusted) AS adjusted FROM events e GROUP BY e.customer),
    newest AS (
        SELECT DISTINCT ON (f.customer, f.level) f.customer, f.level, f.folded, f.claimed_to,
            f.head_order, f.generation = (
                SELECT t.generation FROM {schema}.scheduler_states t ORDER BY t.version DESC LIMIT 1)
                AS is_converted
        FROM {schema}.flows f ORDER BY f.customer, f.level, f.version DESC),
    counted AS (
        SELECT d.customer, d.level, count(*) AS waiting, min(d.order_number) AS head,
            min(d.order_number) FILTER (WHERE NOT d.returned) AS head_new
        FROM {schema}.documents d WHERE d.state = {waiting}
        GROUP BY d.customer, d.level)
    SELECT k.kind, c.number, level::bigint, k.stored, k.truth
    FROM newest f FULL JOIN counted n USING (customer, level)
        FULL JOIN pending p USING (customer, level)
        JOIN {schema}.customers c ON c.number = customer
        LEFT JOIN unsettled u ON u.customer = c.number
        CROSS JOIN LATERAL (VALUES
            ('flow.folded', coalesce(f.folded, 0), coalesce(n.waiting, 0) - coalesce(p.more, 0), true),
            ('flow.head_order', f.head_order, n.head, u.customer IS NULL AND f.is_converted IS NOT false),
            -- Documents up to claimed_to are found only if they were returned.
            ('flow.claimed_to', f.claimed_to, n.head_new - 1,
                u.customer IS NULL AND f.claimed_to >= n.head_new)
        ) AS k(kind, stored, truth, applies)
    WHERE k.applies AND k.stored IS DISTINCT FROM k.truth
    UNION ALL
    -- `place` is a priority.
    SELECT 'customer.waiting', c.number, a.priority, k.stored, k.truth
    FROM {schema}.customers c CROSS JOIN LATERAL unnest(c.arrived) WITH ORDINALITY AS a(n, priority)
        LEFT JOIN (
            SELECT f.customer, u.priority, sum(u.n) AS taken
            FROM {schema}.flows f CROSS JOIN LATERAL unnest(f.taken) WITH ORDINALITY AS u(n, priority)
            GROUP BY f.customer, u.priority) f ON f.customer = c.number AND f.priority = a.priority
        LEFT JOIN (
            SELECT m.customer, m.priority, sum(m.waiting) AS n FROM {schema}.counter_changes m
            GROUP BY m.customer, m.priority) m ON m.customer = c.number AND m.priority = a.priority
        LEFT JOIN (
            SELECT d.customer, d.priority, count(*) AS n FROM {schema}.documents d
            WHERE d.state = {waiting} GROUP BY d.customer, d.priority) d
            ON d.customer = c.number AND d.priority = a.priority
        CROSS JOIN LATERAL (
            SELECT (a.n - coalesce(f.taken, 0) + coalesce(m.n, 0))::bigint, coalesce(d.n, 0)
        ) AS k(stored, truth)
    WHERE k.stored <> k.truth
$$;

-- The scheduler state of each customer: settings, limits, which of its flows has the head of a kind. `place` is a band.
CREATE OR REPLACE FUNCTION {schema}.audit_customers() RETURNS TABLE (
    kind text, customer bigint, place bigint, stored bigint, truth bigint
) LANGUAGE sql STABLE AS $$
    WITH unsettled AS MATERIALIZED (
        SELECT e.customer, bool_or(e.adjusted) AS adjusted, sum(e.ended)::bigint AS ended
        FROM {schema}.unapplied_events() e GROUP BY e.customer),
    flows AS (
        SELECT f.customer, f.level, f.head_since, f.head_order, f.held, f.next_elsewhere,
            (SELECT min(o.head_order) FROM {schema}.flows o
            WHERE o.customer = f.customer AND o.level / 10 = f.level / 10 AND o.level <> f.level
                AND f.next_elsewhere IS NOT NULL) AS elsewhere,
            f.head_order = min(f.head_order) OVER (PARTITION BY f.customer, f.level / 10) AS is_head,
            coalesce(s.paused, false) OR coalesce(
                sum(f.running) OVER (PARTITION BY f.customer) >= s.running_max, false) AS is_held,
            row_number() OVER (PARTITION BY f.customer, f.level ORDER BY f.version DESC) AS copy
        FROM {schema}.flows f LEFT JOIN {schema}.customer_states s ON s.customer = f.customer
        -- Flows of an earlier mode are corrected when their customer is converted.
        WHERE NOT EXISTS (
            SELECT FROM {schema}.flows o WHERE o.customer = f.customer AND o.generation <> (
                SELECT t.generation FROM {schema}.scheduler_states t ORDER BY t.version DESC LIMIT 1))),
    checks(kind, customer, place, stored, truth) AS (
        SELECT 'customer.running', c.number, NULL, k.stored, k.truth
        FROM {schema}.customers c JOIN {schema}.customer_states s ON s.customer = c.number
            LEFT JOIN unsettled u ON u.customer = c.number
            CROSS JOIN LATERAL (
                SELECT (SELECT coalesce(sum(f.running), 0) FROM {schema}.flows f
                        WHERE f.customer = c.number)::bigint,
                    (SELECT count(*) FROM {schema}.documents d
                    WHERE d.customer = c.number AND d.state = {running}) + coalesce(u.ended, 0)
            ) AS k(stored, truth)
        WHERE s.running_max IS NOT NULL AND u.adjusted IS NOT TRUE AND k.stored <> k.truth
        UNION ALL
        SELECT 'flow.held', f.customer, f.level, f.held::integer, f.is_held::integer
        FROM flows f WHERE f.held <> f.is_held
        UNION ALL
        SELECT 'flow.head_since', f.customer, f.level, (f.head_since IS NOT NULL)::integer,
            (f.is_head IS TRUE)::integer
        FROM flows f WHERE (f.head_since IS NOT NULL) <> (f.is_head IS TRUE)
        UNION ALL
        SELECT 'flow.next_elsewhere', f.customer, f.level, f.next_elsewhere, f.elsewhere
        FROM flows f WHERE f.next_elsewhere > f.elsewhere
        UNION ALL
        SELECT 'flow.copies', f.customer, f.level, f.copy, 1 FROM flows f WHERE f.copy > 1
        UNION ALL
        SELECT k.kind, c.number, NULL, k.stored, k.truth
        FROM {schema}.customers c LEFT JOIN {schema}.customer_states s ON s.customer = c.number
            LEFT JOIN unsettled u ON u.customer = c.number
            CROSS JOIN LATERAL (VALUES
                ('customer_state.weight', coalesce(s.weight, {weight_one}), c.weight),
                ('customer_state.running_max', s.running_max, c.running_max),
                ('customer_state.paused', coalesce(s.paused, false)::integer, c.paused::integer)
            ) AS k(kind, stored, truth)
        WHERE u.adjusted IS NOT TRUE AND k.stored IS DISTINCT FROM k.truth
        UNION ALL
        SELECT 'limited.missing', c.number, NULL, 0, 1 FROM {schema}.customers c
        WHERE c.running_max IS NOT NULL
            AND NOT EXISTS (SELECT FROM {schema}.limited_customers l WHERE l.customer = c.number)
        UNION ALL
        -- `submit` checks waiting_per_customer_max only if this counter exceeds it.
        SELECT 'customer.submitted', c.number, NULL, c.submitted, d.n
        FROM {schema}.customers c JOIN (
            SELECT o.customer, count(*) AS n FROM {schema}.documents o GROUP BY o.customer) d
            ON d.customer = c.number
        WHERE c.submitted < d.n
        UNION ALL
        SELECT 'customer.stored_bytes', c.number, NULL, k.stored, k.truth
        FROM {schema}.customers c LEFT JOIN (
                SELECT o.customer, sum({stored_bytes}) AS n FROM {schema}.documents o GROUP BY o.customer) d
                ON d.customer = c.number
            CROSS JOIN LATERAL (
                SELECT c.stored_bytes - (SELECT coalesce(sum(r.bytes), 0) FROM {schema}.released_bytes r
                    WHERE r.customer = c.number), coalesce(d.n, 0)
            ) AS k(stored, truth)
        WHERE k.stored <> k.truth
        UNION ALL
        -- Rows of purged customers that no event in the log will remove.
        SELECT o.kind, o.customer, NULL, 1, 0
        FROM (
            SELECT DISTINCT 'flow.orphan' AS kind, f.customer FROM {schema}.flows f
            UNION ALL SELECT 'customer_state.orphan', s.customer FROM {schema}.customer_states s
            UNION ALL SELECT 'limited.orphan', l.customer FROM {schema}.limited_customers l
            UNION ALL SELECT DISTINCT 'key.orphan', k.customer FROM {schema}.idempotency_keys k) o
        WHERE NOT EXISTS (SELECT FROM {schema}.customers c WHERE c.number = o.customer)
            AND NOT EXISTS (SELECT FROM unsettled u WHERE u.customer = o.customer))
    SELECT k.kind, k.customer, k.place::bigint, k.stored::bigint, k.truth::bigint FROM checks k
$$;

-- Columns of documents that are derived from their state. `place` is the number of the document.
CREATE OR REPLACE FUNCTION {schema}.audit_documents() RETURNS TABLE (
    kind text, customer bigint, place bigint, stored bigint, truth bigint
) LANGUAGE sql STABLE AS $$
    SELECT k.kind, d.customer, d.number, k.stored::bigint, k.truth::bigint
    FROM {schema}.queue q CROSS JOIN {schema}.documents d
        LEFT JOIN {schema}.customers c ON c.number = d.customer
        CROSS JOIN LATERAL (
            SELECT count(*) AS steps FROM {schema}.attempts o WHERE o.document = d.number AND o.outcome = {advanced}) a
        CROSS JOIN LATERAL (VALUES
            ('document.returned', d.returned::integer, 0, d.returned AND d.state <> {waiting}),
            ('document.failed', d.failed::integer, (d.state IN ({failed_states}))::integer,
                d.failed <> (d.state IN ({failed_states}))),
            ('document.delayed_until', (d.delayed_until IS NOT NULL)::integer,
                (d.state = {delayed})::integer, (d.delayed_until IS NOT NULL) <> (d.state = {delayed})),
            ('document.level', d.level, {schema}.band(q.mode = 'equal', d.priority, d.kind),
                d.state = {waiting}
                AND d.level <> {schema}.band(q.mode = 'equal', d.priority, d.kind)
                AND NOT EXISTS (
                    SELECT FROM {schema}.scheduler_states t JOIN {schema}.flows f ON f.generation <> t.generation
                    WHERE f.customer = d.customer)),
            ('document.order_number', NULL, d.number, d.state = {waiting} AND d.order_number IS NULL),
            ('document.step', d.step, a.steps, d.step <> a.steps),
            -- It would not expire before a claim looks at it.
            ('document.expiration', 0, 1, d.expires_at IS NOT NULL AND {may_expire} AND NOT EXISTS (
                SELECT FROM {schema}.expirations e WHERE e.expires_at = d.expires_at AND e.document = d.number)),
            ('document.orphan', d.customer, NULL, c.number IS NULL)
        ) AS k(kind, stored, truth, is_wrong)
    WHERE k.is_wrong
$$;

-- Leases against running documents, and rows without their document. `place` is a fence, or the document.
CREATE OR REPLACE FUNCTION {schema}.audit_leases() RETURNS TABLE (
    kind text, customer bigint, place bigint, stored bigint, truth bigint
) LANGUAGE sql STABLE AS $$
    WITH held AS MATERIALIZED (
        SELECT l.fence, l.running, l.until, d.number, d.lease_until
        FROM {schema}.leases l LEFT JOIN (
            {schema}.leases o CROSS JOIN LATERAL unnest(o.documents) AS u(number)
            JOIN {schema}.documents d ON d.number = u.number AND d.fence = o.fence
                AND d.state = {running}) ON o.fence = l.fence),
    checks(kind, customer, place, stored, truth) AS (
        SELECT 'lease.running', NULL::bigint, h.fence, h.running, count(h.number)
        FROM held h GROUP BY h.fence, h.running HAVING h.running <> count(h.number)
        UNION ALL
        SELECT 'lease.until', NULL, h.fence, h.until, min(h.lease_until)
        FROM held h GROUP BY h.fence, h.until
        HAVING h.until > min(h.lease_until) AND h.until > {now}
        UNION ALL
        SELECT 'lease.missing', d.customer, d.number, NULL, d.fence FROM {schema}.documents d
        WHERE d.state = {running} AND (d.lease_until IS NULL
            OR NOT EXISTS (SELECT FROM held h WHERE h.number = d.number))
        UNION ALL
        SELECT 'result.orphan', NULL, r.document, 1, 0 FROM {schema}.results r
        WHERE NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = r.document)
        UNION ALL
        SELECT 'children.orphan', NULL, c.parent, 1, 0 FROM {schema}.children c
        WHERE NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = c.parent)
        UNION ALL
        SELECT 'attempt.orphan', NULL, a.document, count(*), 0 FROM {schema}.attempts a
        WHERE NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = a.document) GROUP BY a.document
        UNION ALL
        SELECT 'checkpoint.orphan', NULL, p.document, 1, 0 FROM {schema}.checkpoints p
        WHERE NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = p.document))
    SELECT k.kind, k.customer, k.place, k.stored, k.truth FROM checks k
$$;
