-- Repairs of the findings of audit.sql, for `fairturn doctor --thorough --repair`. Each call locks the settings and the
-- row of `queue` and blocks all other operations, so it repairs only a batch. A repeated call changes nothing more. A
-- call that returns false has only applied events, and must be repeated.

-- Lock the queue, and apply about `budget` events. No lease expires and no document becomes due here: that depends on
-- the clock of the claims.
CREATE OR REPLACE FUNCTION {schema}.begin_repair(budget integer, OUT t {schema}.scheduler_states, OUT more boolean)
LANGUAGE plpgsql AS $$
DECLARE
    q {schema}.queue;
    r record;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 1);
    SELECT * INTO q FROM {schema}.queue FOR NO KEY UPDATE;
    SELECT * INTO t FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1;
    t.version := t.version + 1;
    t.events_from := '0';
    t.events_late := '{{}}';
    SELECT * INTO r FROM {schema}.fold_events(t, q, budget);
    t := r.t;
    more := r.more;
    SELECT * INTO r FROM {schema}.fold_counter_changes(t, q, t.at, budget);
    t := r.t;
    more := more OR r.more;
END
$$;

-- Write the scheduler state; if the repair is complete, with new sums of weights and no lower bounds.
CREATE OR REPLACE FUNCTION {schema}.end_repair(t {schema}.scheduler_states, is_complete boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF is_complete THEN
        t := {schema}.reset_bounds({schema}.load_all_kinds(t));
        t.weights := ARRAY(
            SELECT coalesce(a.weight, 0)::bigint
            FROM unnest(t.kinds) WITH ORDINALITY AS k(number, position) CROSS JOIN generate_series(1, 9) l
                LEFT JOIN (
                    SELECT f.level, sum(coalesce(s.weight, {weight_one})) AS weight
                    FROM {schema}.flows f LEFT JOIN {schema}.customer_states s ON s.customer = f.customer
                    WHERE f.folded > 0 AND NOT f.held AND f.generation = t.generation GROUP BY f.level) a
                    ON a.level = 10 * k.number + l
            ORDER BY k.position, l);
    END IF;
    PERFORM {schema}.save_state(t);
END
$$;

-- Correct the counters and the bounds of the whole queue. The documents are counted before the queue is locked: other
-- operations do not change the difference between a counter and the documents, and a second repair waits for this one.
CREATE OR REPLACE FUNCTION {schema}.repair_queue(budget integer) RETURNS boolean LANGUAGE plpgsql
SET lock_timeout = '{settings_lock_timeout}'    -- submissions wait while this call waits
AS $$
DECLARE
    wrong jsonb;                    -- the excess of each counter, by priority; delayed documents have the key 0
    wrong_kinds jsonb;              -- of waiting documents of other kinds, by kind and priority
    t {schema}.scheduler_states;
    r record;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 5);
    SELECT coalesce(jsonb_object_agg(coalesce(a.place, 0), a.stored - a.truth), '{{}}') INTO wrong
    FROM {schema}.audit_queue() a WHERE a.kind IN ('queue.waiting', 'queue.delayed');
    SELECT coalesce(jsonb_object_agg(a.place, a.stored - a.truth), '{{}}') INTO wrong_kinds
    FROM {schema}.audit_queue() a WHERE a.kind = 'kind.waiting';
    SELECT * INTO r FROM {schema}.begin_repair(budget);
    t := r.t;
    FOR p IN 1 .. 9 LOOP
        t.taken[p] := t.taken[p] + coalesce((wrong ->> p::text)::bigint, 0);
    END LOOP;
    t.promoted := t.promoted + coalesce((wrong ->> '0')::bigint, 0);
    t := {schema}.load_all_kinds(t);
    FOR r IN SELECT {schema}.slot(t.kinds, w.key::smallint) AS i, w.value::bigint AS excess FROM jsonb_each_text(wrong_kinds) w LOOP
        t.taken[r.i] := t.taken[r.i] + r.excess;
    END LOOP;
    PERFORM {schema}.end_repair(t, true);
    RETURN true;
END
$$;

-- Rebuild the derived values of some customers from their documents: flags of the documents, flows, scheduler state.
-- Rows of customers that do not exist are deleted.
CREATE OR REPLACE FUNCTION {schema}.repair_customers(owners bigint[], budget integer) RETURNS boolean
LANGUAGE plpgsql
SET lock_timeout = '{settings_lock_timeout}'
AS $$
DECLARE
    t {schema}.scheduler_states;
    r record;
    queue_mode text;
    owner bigint;
BEGIN
    SELECT * INTO r FROM {schema}.begin_repair(budget);
    t := r.t;
    IF NOT r.more THEN
        SELECT q.mode INTO queue_mode FROM {schema}.queue q;
        PERFORM {schema}.repair_documents(owners, queue_mode);
        FOREACH owner IN ARRAY owners LOOP
            t.repairs := t.repairs + 1;
            IF EXISTS (SELECT FROM {schema}.customers c WHERE c.number = owner) THEN
                t := {schema}.repair_customer(t, queue_mode, owner);
            ELSE
                t := {schema}.delete_customer_state(t, owner);
                DELETE FROM {schema}.idempotency_keys k WHERE k.customer = owner;
            END IF;
        END LOOP;
    END IF;
    PERFORM {schema}.end_repair(t, NOT r.more);
    RETURN NOT r.more;
END
$$;

-- Recompute the columns of the customers' documents that are derived from the state.
CREATE OR REPLACE FUNCTION {schema}.repair_documents(owners bigint[], its_mode text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {schema}.documents d SET returned = v.returned, failed = v.failed,
        delayed_until = v.delayed_until, level = v.level, order_number = v.order_number, step = v.step
    FROM (
        SELECT o.number, o.state = {waiting} AND (o.returned
                OR o.level <> {schema}.band(its_mode = 'equal', o.priority, o.kind)) AS returned,
            o.state IN ({failed_states}) AS failed,
            CASE WHEN o.state = {delayed} THEN coalesce(o.delayed_until, o.due_at, 0) END
                AS delayed_until,
            CASE WHEN o.state <> {waiting} THEN o.level
                ELSE {schema}.band(its_mode = 'equal', o.priority, o.kind) END AS level,
            CASE WHEN o.state = {waiting} THEN coalesce(o.order_number, o.number)
                ELSE o.order_number END AS order_number,
            (SELECT count(*) FROM {schema}.attempts a WHERE a.document = o.number AND a.outcome = {advanced}) AS step
        FROM {schema}.documents o WHERE o.customer = ANY (owners)) v
    WHERE d.number = v.number AND (d.returned, d.failed, d.delayed_until, d.level, d.order_number, d.step)
        IS DISTINCT FROM (v.returned, v.failed, v.delayed_until, v.level, v.order_number, v.step);
    INSERT INTO {schema}.expirations (expires_at, document)
    SELECT d.expires_at, d.number FROM {schema}.documents d
    WHERE d.customer = ANY (owners) AND d.expires_at IS NOT NULL AND {may_expire}
    ON CONFLICT DO NOTHING;
    UPDATE {schema}.customers c SET submitted = greatest(c.submitted, d.n)
    FROM (
        SELECT o.customer, count(*) AS n FROM {schema}.documents o
        WHERE o.customer = ANY (owners) GROUP BY o.customer) d
    WHERE c.number = d.customer AND c.submitted < d.n;
    DELETE FROM {schema}.released_bytes r WHERE r.customer = ANY (owners);
    UPDATE {schema}.customers c SET stored_bytes = (
        SELECT coalesce(sum({stored_bytes}), 0) FROM {schema}.documents o WHERE o.customer = c.number)
    WHERE c.number = ANY (owners);
END
$$;

-- Rebuild the scheduler state of one customer. Flows that stay active keep their place in the order of service.
CREATE OR REPLACE FUNCTION {schema}.repair_customer(t {schema}.scheduler_states, its_mode text, owner bigint)
RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    c {schema}.customers;
    r record;
    f {schema}.flows;
    i integer;
    was_active boolean;
    is_held boolean;
BEGIN
    SELECT * INTO c FROM {schema}.customers o WHERE o.number = owner;
    INSERT INTO {schema}.customer_states AS s (customer, weight, running_max, paused, recent_costs)
    VALUES (owner, c.weight, c.running_max, c.paused, '{{}}')
    ON CONFLICT (customer) DO UPDATE SET weight = excluded.weight,
        running_max = excluded.running_max, paused = excluded.paused;
    DELETE FROM {schema}.customer_states s
    WHERE s.customer = owner AND s.weight = {weight_one} AND s.running_max IS NULL AND NOT s.paused
        AND s.recent_costs = '{{}}' AND s.costs_by_kind = '{{}}';
    IF c.running_max IS NOT NULL THEN
        INSERT INTO {schema}.limited_customers (customer) VALUES (owner) ON CONFLICT DO NOTHING;
    END IF;
    DELETE FROM {schema}.flows o WHERE o.customer = owner AND EXISTS (
        SELECT FROM {schema}.flows x
        WHERE x.customer = owner AND x.level = o.level AND x.version > o.version);

    SELECT c.paused OR coalesce(count(*) FILTER (WHERE d.state = {running}) >= c.running_max, false)
    INTO is_held FROM {schema}.documents d WHERE d.customer = owner;
    FOR r IN
        WITH counted AS MATERIALIZED (
            SELECT {schema}.band(its_mode = 'equal', o.priority, o.kind) AS level,
                count(*) FILTER (WHERE o.state = {waiting}) AS waiting,
                count(*) FILTER (WHERE o.state = {running}) AS running,
                min(o.order_number) FILTER (WHERE o.state = {waiting}) AS head,
                min(o.order_number) FILTER (WHERE o.state = {waiting} AND NOT o.returned) AS head_new
            FROM {schema}.documents o
            WHERE o.customer = owner AND o.state IN ({waiting}, {running}) GROUP BY 1),
        -- Taken are the arrivals that do not wait. The flows of the default kind count those of all kinds.
        taken AS MATERIALIZED (
            SELECT {schema}.band(its_mode = 'equal', u.priority::smallint, {default_kind}::smallint) AS level, u.priority,
                u.n - (SELECT count(*) FROM {schema}.documents o WHERE o.customer = owner AND o.state = {waiting}
                    AND o.priority = u.priority) AS n
            FROM unnest(c.arrived) WITH ORDINALITY AS u(n, priority))
        SELECT l.level, ARRAY(
                SELECT coalesce((SELECT x.n FROM taken x WHERE x.level = l.level AND x.priority = y), 0)
                FROM generate_series(1, 9) y ORDER BY y) AS taken,
            coalesce(n.waiting, 0) AS waiting, coalesce(n.running, 0) AS running, n.head, n.head_new,
            n.head = min(n.head) OVER (PARTITION BY l.level / 10) AS has_head,
            (SELECT max(o.head_since) FROM {schema}.flows o
                WHERE o.customer = owner AND o.level / 10 = l.level / 10) AS head_since
        FROM (
            SELECT o.level FROM {schema}.flows o WHERE o.customer = owner
            UNION SELECT n.level FROM counted n
            UNION SELECT x.level FROM taken x) l
            LEFT JOIN counted n ON n.level = l.level
    LOOP
        SELECT * INTO f FROM {schema}.flows o WHERE o.customer = owner AND o.level = r.level;
        IF NOT FOUND THEN
            CONTINUE WHEN 0 = ALL (r.taken) AND r.waiting = 0 AND r.running = 0;
            f := {schema}.new_flow(owner, r.level, t.generation);
        END IF;
        was_active := f.folded > 0 AND NOT f.held AND f.generation = t.generation;
        IF f.generation <> t.generation THEN
            f.generation := t.generation;
            f.place := 0;
        END IF;
        f.folded := r.waiting;
        f.running := r.running;
        f.taken := r.taken;
        f.claimed_to := least(f.claimed_to, r.head_new - 1);
        f.head_order := r.head;
        f.head_since := CASE WHEN r.has_head THEN coalesce(r.head_since, t.at) END;
        f.next_elsewhere := NULL;
        f.held := is_held;
        IF its_mode = 'levels' THEN
            f.place := coalesce(r.head, 0);
        ELSIF f.folded > 0 AND NOT is_held AND NOT was_active THEN
            t := {schema}.load_kinds(t, ARRAY[f.level / 10]::smallint[]);
            i := {schema}.slot(t.kinds, f.level);
            IF t.weights[i] <= 0 THEN
                t.kind_times[i] := greatest(t.kind_times[i], t.level_times[f.level % 10]);
            END IF;
            f.place := greatest(f.place, t.clocks[i]);
            t.tick := t.tick + 1;
            f.tick := t.tick;
        END IF;
        PERFORM {schema}.save_flow(f, t.version);
    END LOOP;
    RETURN t;
END
$$;

-- Rebuild the leases of some fences from the running documents with these fences. Their expiry is set to 0, so that the
-- next claim checks their documents and takes back those whose own lease has expired.
CREATE OR REPLACE FUNCTION {schema}.repair_leases(fences bigint[], numbers bigint[], budget integer)
RETURNS boolean LANGUAGE plpgsql
SET lock_timeout = '{settings_lock_timeout}'
AS $$
DECLARE
    t {schema}.scheduler_states;
    r record;
BEGIN
    SELECT * INTO r FROM {schema}.begin_repair(budget);
    t := r.t;
    IF NOT r.more THEN
        UPDATE {schema}.documents d SET lease_until = 0
        WHERE d.number = ANY (numbers) AND d.state = {running} AND d.lease_until IS NULL;
        WITH held AS (
            SELECT d.fence, d.number, d.lease_until FROM {schema}.documents d
            WHERE d.number = ANY (numbers) AND d.state = {running}
            UNION
            SELECT d.fence, d.number, d.lease_until
            FROM {schema}.leases l CROSS JOIN LATERAL unnest(l.documents) AS u(number)
                JOIN {schema}.documents d ON d.number = u.number AND d.fence = l.fence
            WHERE d.state = {running} AND (l.fence = ANY (fences) OR l.fence IN (
                SELECT o.fence FROM {schema}.documents o WHERE o.number = ANY (numbers))))
        INSERT INTO {schema}.leases AS l (fence, until, running, documents)
        SELECT h.fence, 0, count(*), array_agg(h.number ORDER BY h.number) FROM held h GROUP BY h.fence
        ON CONFLICT (fence) DO UPDATE SET until = excluded.until, running = excluded.running,
            documents = excluded.documents;
        DELETE FROM {schema}.leases l WHERE l.fence = ANY (fences) AND NOT EXISTS (
            SELECT FROM unnest(l.documents) AS u(number)
                JOIN {schema}.documents d ON d.number = u.number AND d.fence = l.fence
            WHERE d.state = {running});
    END IF;
    PERFORM {schema}.end_repair(t, NOT r.more);
    RETURN NOT r.more;
END
$$;

-- Delete rows without their document.
CREATE OR REPLACE FUNCTION {schema}.repair_rows(documents bigint[]) RETURNS boolean LANGUAGE plpgsql
SET lock_timeout = '{settings_lock_timeout}'
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 1);
    DELETE FROM {schema}.results r WHERE r.document = ANY (documents)
        AND NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = r.document);
    DELETE FROM {schema}.children c WHERE c.parent = ANY (documents)
        AND NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = c.parent);
    DELETE FROM {schema}.attempts a WHERE a.document = ANY (documents)
        AND NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = a.document);
    DELETE FROM {schema}.checkpoints p WHERE p.document = ANY (documents)
        AND NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = p.document);
    RETURN true;
END
$$;
