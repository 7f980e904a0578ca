-- Apply the changes since the last claim, in the order of every store: expired leases, events, documents that became
-- due. Each step handles about `budget` documents or events; `more` reports that a step was cut short. A returned
-- document gets the level of the current mode, which may have changed since its attempt began.
CREATE OR REPLACE FUNCTION {schema}.fold(
    INOUT t {schema}.scheduler_states,
    q {schema}.queue,
    its_now bigint,
    lease_now bigint,
    is_rebooted boolean,            -- the clock of the leases was restarted: all have expired
    budget integer,
    OUT more boolean,
    OUT changed boolean
) LANGUAGE plpgsql AS $$
DECLARE
    r record;
    handled bigint;
    back bigint[];
BEGIN
    more := false;
    changed := is_rebooted;

    -- Leases. If the clock was set back, no lease may last longer than requested.
    IF its_now < t.at AND NOT is_rebooted THEN
        RAISE LOG 'fairturn: the clock was set back by % s', (t.at - its_now) / 1000000.0;
        PERFORM {schema}.shorten_leases(lease_now);
        t := {schema}.reset_bounds({schema}.load_all_kinds(t));
        changed := true;
    END IF;
    IF is_rebooted OR {schema}.has_expired(t, its_now, lease_now) THEN
        FOR r IN SELECT * FROM {schema}.expire(
            CASE WHEN is_rebooted THEN -9223372036854775807 ELSE {schema}.leases_bound(t, its_now) END,
            q.attempts_max, q.one_level, its_now, lease_now, is_rebooted,
            CASE WHEN is_rebooted THEN 2147483647 ELSE budget END)  -- once: later leases follow the new clock
        LOOP
            changed := true;
            IF r.customer IS NULL THEN
                more := more OR r.more;
            ELSE
                back := {schema}.by_priority(r.priorities);
                t := {schema}.count_returned(t, (r.level / 10)::smallint, back);
                t := {schema}.change_flow(t, q.mode, r.customer, r.level, its_now,
                    more_waiting => r.n, more_running => -r.ended, less_taken => back,
                    arrived => r.lowest);
            END IF;
        END LOOP;
    END IF;
    t.leases_from := least(lease_now, coalesce((
        SELECT l.until FROM {schema}.leases l WHERE l.until >= t.leases_from
        ORDER BY l.until LIMIT 1), lease_now));

    -- Events.
    IF EXISTS (SELECT FROM {schema}.event_log e WHERE e.xid >= t.events_from)
        OR EXISTS (SELECT FROM {schema}.event_log e WHERE e.xid = ANY (t.events_late))
    THEN
        SELECT * INTO r FROM {schema}.fold_events(t, q, budget);
        t := r.t;
        more := more OR r.more;
        changed := changed OR r.changed;
    END IF;

    IF EXISTS (SELECT FROM {schema}.counter_changes) THEN
        SELECT * INTO r FROM {schema}.fold_counter_changes(t, q, its_now, budget);
        t := r.t;
        more := more OR r.more;
        changed := true;
    END IF;

    -- Documents that became due. They get their order the first time.
    handled := 0;
    FOR r IN
        WITH due AS MATERIALIZED (
            SELECT d.number, d.customer, d.priority, d.delayed_until,
                {schema}.band(q.one_level, d.priority, d.kind) AS level,
                row_number() OVER () AS position,
                coalesce(d.order_number, nextval('{schema}.document_numbers')) AS assigned_order
            FROM (
                SELECT * FROM {schema}.documents WHERE delayed_until <= its_now AND state = {delayed}
                ORDER BY delayed_until, number LIMIT budget FOR NO KEY UPDATE SKIP LOCKED) d),
        promoted AS (
            UPDATE {schema}.documents d SET state = {waiting}, returned = true, delayed_until = NULL,
                order_number = due.assigned_order, level = due.level
            FROM due WHERE d.number = due.number)
        SELECT customer, level, min(assigned_order) AS lowest, count(*) AS n,
            (array_agg(delayed_until ORDER BY assigned_order))[1] AS at,
            array_agg(priority) AS priorities
        FROM due GROUP BY customer, level ORDER BY min(position)
    LOOP
        changed := true;
        handled := handled + r.n;
        back := {schema}.by_priority(r.priorities);
        t := {schema}.count_returned(t, (r.level / 10)::smallint, back);
        t.promoted := t.promoted + r.n;
        t := {schema}.change_flow(t, q.mode, r.customer, r.level, r.at,
            more_waiting => r.n, less_taken => back, arrived => r.lowest);
    END LOOP;
    more := more OR handled >= budget;
END
$$;

-- Apply the counter changes of operations other than claims and submissions.
CREATE OR REPLACE FUNCTION {schema}.fold_counter_changes(
    INOUT t {schema}.scheduler_states, q {schema}.queue, its_now bigint, budget integer,
    OUT more boolean, OUT changed boolean
) LANGUAGE plpgsql AS $$
DECLARE
    r record;
    back bigint[];
    handled bigint := 0;
BEGIN
    changed := false;
    FOR r IN
        WITH gone AS (
            DELETE FROM {schema}.counter_changes m WHERE m.number = ANY (ARRAY(
                SELECT o.number FROM {schema}.counter_changes o ORDER BY o.number LIMIT budget))
            RETURNING m.customer, m.priority, m.kind, m.waiting, m.delayed)
        SELECT g.customer, g.priority, g.kind, sum(g.waiting)::bigint AS waiting,
            sum(g.delayed)::bigint AS delayed, count(*) AS n
        FROM gone g GROUP BY g.customer, g.priority, g.kind
    LOOP
        changed := true;
        handled := handled + r.n;
        t.promoted := t.promoted - r.delayed;
        CONTINUE WHEN r.waiting = 0;
        back := array_fill(0::bigint, ARRAY[9]);
        back[r.priority] := r.waiting;
        t := {schema}.count_returned(t, r.kind, back);
        IF EXISTS (SELECT FROM {schema}.customers c WHERE c.number = r.customer) THEN
            t := {schema}.change_flow(t, q.mode, r.customer,
                {schema}.band(q.one_level, r.priority, r.kind), its_now, less_taken => back);
        END IF;
    END LOOP;
    more := handled >= budget;
END
$$;

-- End attempts whose leases have expired, the oldest first: leases of about `budget` documents. A lease that ends later
-- than the longest possible lease counts as expired: the clock was set back since. Returns a row for each flow that
-- gets documents back or loses running ones; and a last row that reports whether there are more.
CREATE OR REPLACE FUNCTION {schema}.expire(
    leases_from bigint,
    attempts_max integer,           -- of kinds without a maximum of their own
    is_one_level boolean,
    its_now bigint,
    lease_now bigint,
    is_rebooted boolean,
    budget integer
) RETURNS TABLE (
    customer bigint,
    level smallint,
    n bigint,                       -- documents that wait again,
    lowest bigint,                  -- the lowest order of these,
    priorities smallint[],          -- and their priorities
    ended bigint,                   -- attempts that ended
    more boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    expired_fences bigint[];
    numbers bigint[];
    states smallint[];
    has_more boolean;
BEGIN
    SELECT coalesce(array_agg(c.fence) FILTER (WHERE c.before < budget), '{{}}'),
        coalesce(bool_or(c.before + c.n >= budget), false)
    INTO expired_fences, has_more
    FROM (
        SELECT l.fence, l.n, sum(l.n) OVER (ORDER BY l.until, l.fence) - l.n AS before
        FROM (
            SELECT * FROM (
                SELECT o.fence, o.until, greatest(o.running, 1) AS n FROM {schema}.leases o
                WHERE o.until >= leases_from AND (is_rebooted OR o.until <= lease_now)
                ORDER BY o.until LIMIT budget FOR UPDATE SKIP LOCKED) past
            UNION ALL
            SELECT * FROM (
                SELECT o.fence, o.until, greatest(o.running, 1) FROM {schema}.leases o
                WHERE o.until > lease_now + {lease_max} AND NOT is_rebooted
                ORDER BY o.until LIMIT budget FOR UPDATE SKIP LOCKED) ahead) l) c;
    IF expired_fences = '{{}}' THEN
        RETURN;
    END IF;
    -- A document that another transaction has locked stays in its lease; the next claim checks it again.
    SELECT coalesce(array_agg(e.number ORDER BY e.lease_until, e.number), '{{}}'),
        coalesce(array_agg(CASE
            WHEN e.cancel_requested THEN {cancelled}
            WHEN e.attempts >= {schema}.attempts_max(e.kind, attempts_max) THEN {dead}
            ELSE {waiting} END::smallint ORDER BY e.lease_until, e.number), '{{}}')
    INTO numbers, states
    FROM (
        SELECT d.number, d.lease_until, d.attempts, d.cancel_requested, d.kind
        FROM {schema}.leases l
            CROSS JOIN LATERAL unnest(l.documents) AS u(number)
            JOIN {schema}.documents d ON d.number = u.number AND d.fence = l.fence
        WHERE l.fence = ANY (expired_fences) AND d.state = {running}
            AND (is_rebooted OR d.lease_until <= lease_now OR d.lease_until > lease_now + {lease_max})
        FOR NO KEY UPDATE OF d SKIP LOCKED) e;
    RETURN QUERY
        WITH ending AS MATERIALIZED (
            SELECT * FROM unnest(numbers, states) WITH ORDINALITY AS u(number, state, position)),
        changed AS (
            UPDATE {schema}.documents d SET state = v.state, returned = (v.state = {waiting}),
                level = {schema}.band(is_one_level, d.priority, d.kind),
                failed = v.state IN ({failed_states}),
                ended_at = CASE WHEN v.state IN ({ended_states}) THEN its_now END,
                error = CASE WHEN v.state <> {cancelled} THEN '{lease_expired}' END
            FROM ending v WHERE d.number = v.number
            RETURNING d.*, v.position),
        recorded AS (
            INSERT INTO {schema}.attempts (document, number, step, kind, attempt, worker, claimed_at, ended_at, outcome, error)
            SELECT c.number, {schema}.next_attempt(c.number), c.step, c.kind, c.attempts, coalesce(c.worker, ''),
                coalesce(c.claimed_at, its_now), its_now, {attempt_lost}, c.error
            FROM changed c)
        SELECT c.customer, c.level, count(*) FILTER (WHERE c.state = {waiting}),
            min(c.order_number) FILTER (WHERE c.state = {waiting}),
            array_agg(c.priority) FILTER (WHERE c.state = {waiting}),
            count(*), false
        FROM changed c LEFT JOIN {schema}.customer_states s ON s.customer = c.customer
        GROUP BY c.customer, c.level
        -- A flow becomes active with its first document that waits again; that of a customer with a
        -- limit perhaps with its first attempt that ended.
        ORDER BY min(c.position) FILTER (WHERE c.state = {waiting} OR s.running_max IS NOT NULL);
    -- Leases keep the documents that have not expired. No lease may last longer than requested.
    UPDATE {schema}.leases l SET documents = k.documents, running = cardinality(k.documents),
        until = greatest(k.until, lease_now + 1)
    FROM (
        SELECT o.fence, coalesce(array_agg(d.number) FILTER (WHERE d.number IS NOT NULL), '{{}}')
                AS documents,
            coalesce(min(least(d.lease_until, lease_now + o.length)), 0) AS until
        FROM {schema}.leases o
            LEFT JOIN LATERAL unnest(o.documents) AS u(number) ON true
            LEFT JOIN {schema}.documents d ON d.number = u.number AND d.fence = o.fence
                AND d.state = {running}
        WHERE o.fence = ANY (expired_fences) GROUP BY o.fence) k
    WHERE l.fence = k.fence;
    UPDATE {schema}.documents d SET lease_until = lease_now + l.length
    FROM {schema}.leases l CROSS JOIN LATERAL unnest(l.documents) AS u(number)
    WHERE l.fence = ANY (expired_fences) AND d.number = u.number AND d.fence = l.fence
        AND d.state = {running} AND d.lease_until > lease_now + l.length;
    DELETE FROM {schema}.leases l WHERE l.fence = ANY (expired_fences) AND l.documents = '{{}}';
    PERFORM {schema}.trim_attempts(numbers);
    PERFORM {schema}.count_outcomes(
        cardinality(numbers), cardinality(array_positions(states, {waiting}::smallint)), states);
    RETURN QUERY SELECT NULL::bigint, NULL::smallint, NULL::bigint, NULL::bigint, NULL::smallint[],
        NULL::bigint, has_more;
END
$$;

-- Shorten all leases to the requested length from now on, because the clock was set back.
CREATE OR REPLACE FUNCTION {schema}.shorten_leases(lease_now bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {schema}.documents d SET lease_until = lease_now + l.length
    FROM {schema}.leases l CROSS JOIN LATERAL unnest(l.documents) AS u(number)
    WHERE d.number = u.number AND d.fence = l.fence AND d.state = {running}
        AND d.lease_until > lease_now + l.length;
    UPDATE {schema}.leases l SET until = lease_now + l.length WHERE l.until > lease_now + l.length;
END
$$;

-- Apply about `budget` events. Arrivals in one flow between two other events are applied together.
CREATE OR REPLACE FUNCTION {schema}.fold_events(
    INOUT t {schema}.scheduler_states, q {schema}.queue, budget integer, OUT more boolean, OUT changed boolean
) LANGUAGE plpgsql AS $$
DECLARE
    seen pg_snapshot := pg_current_snapshot();
    r record;
    last_xid xid8;
BEGIN
    changed := false;
    -- By the primary key. The next statement sees at least the transactions of `seen`.
    FOR r IN
        WITH pending AS MATERIALIZED (
            (SELECT xid, number FROM {schema}.event_log WHERE xid = ANY (t.events_late))
            UNION ALL
            -- An event has at least 16 bytes. octet_length does not decompress the text.
            (SELECT o.xid, o.number FROM (
                SELECT e.xid, e.number, sum(coalesce(octet_length(e.events) / 16, cardinality(e.customers)))
                    OVER (ORDER BY e.xid, e.number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
                    AS before
                FROM (
                    SELECT * FROM {schema}.event_log WHERE xid >= t.events_from
                    ORDER BY xid, number LIMIT budget) e) o
            WHERE coalesce(o.before, 0) < budget)),
        gone AS (
            DELETE FROM {schema}.event_log e USING pending p
            WHERE e.xid = p.xid AND e.number = p.number
            RETURNING e.xid, e.number, e.at, e.customers, e.levels, e.heads, e.sizes, e.events),
        runs AS MATERIALIZED (
            SELECT g.*, count(g.events) OVER (ORDER BY g.number) AS run FROM gone g),
        arrived AS (
            SELECT e.run, u.customer, u.level, min(u.head) AS head, sum(u.size)::bigint AS n,
                min(e.number) AS first, (array_agg(u.position ORDER BY e.number))[1] AS position,
                (array_agg(e.at ORDER BY u.head))[1] AS at, max(e.xid::text::bigint) AS xid,
                count(*) AS rows
            FROM runs e CROSS JOIN LATERAL unnest(e.customers, e.levels, e.heads, e.sizes)
                WITH ORDINALITY AS u(customer, level, head, size, position)
            WHERE e.events IS NULL GROUP BY e.run, u.customer, u.level)
        SELECT a.run, a.first, a.position, a.customer, a.level, a.head, a.n, a.at, a.xid,
            NULL AS events, NULL AS later
        FROM arrived a
        UNION ALL
        SELECT e.run, 0, 0, NULL, NULL, NULL, NULL, e.at, e.xid::text::bigint, e.events,
            CASE WHEN e.events LIKE '[[5,%' THEN ARRAY(
                SELECT o.events FROM runs o WHERE o.events IS NOT NULL AND o.number > e.number) END
        FROM runs e WHERE e.events IS NOT NULL
        ORDER BY 1, 2, 3
    LOOP
        changed := true;
        last_xid := greatest(last_xid, r.xid::text::xid8);
        IF r.events IS NOT NULL THEN
            BEGIN
                t := {schema}.apply_events(t, q, r.at, r.events::jsonb, r.later);
            EXCEPTION WHEN data_exception OR case_not_found THEN
                -- A wrong row must not stop the queue. It is deleted, and doctor finds its consequences.
                RAISE LOG 'fairturn: skipped events that cannot be applied: %', SQLERRM;
                t.repairs := t.repairs + 1;
            END;
        ELSIF EXISTS (SELECT FROM {schema}.customers c WHERE c.number = r.customer) THEN
            t := {schema}.change_flow(t, q.mode, r.customer, r.level, r.at,
                more_waiting => r.n, arrived => r.head, never_ran => true, is_recorded => true);
        END IF;
    END LOOP;
    SELECT count(*) > 0 INTO more FROM (
        SELECT FROM {schema}.event_log
        WHERE last_xid IS NOT NULL AND xid >= last_xid AND pg_visible_in_snapshot(xid, seen)
        LIMIT 1) left_over;
    t.events_from := CASE WHEN more THEN last_xid ELSE pg_snapshot_xmax(seen) END;
    t.events_late := ARRAY(SELECT x FROM pg_snapshot_xip(seen) x WHERE x < t.events_from);
END
$$;

-- Correct the clock of a band by the difference between the real and the charged cost of a document; NULL: it was not
-- charged.
CREATE OR REPLACE FUNCTION {schema}.correct_clock(
    t {schema}.scheduler_states, event_level smallint, difference bigint
) RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    i integer;
BEGIN
    t := {schema}.load_kinds(t, ARRAY[event_level / 10]::smallint[]);
    i := {schema}.slot(t.kinds, event_level);
    IF difference IS NOT NULL AND t.weights[i] > 0 THEN
        t.clocks[i] := t.clocks[i] + {schema}.floor_div(difference * 1000, t.weights[i]);
    END IF;
    RETURN t;
END
$$;

-- Apply the events of one row. Their codes are positions in fairturn.stores.values. Departures from one flow between
-- two other events are applied together.
CREATE OR REPLACE FUNCTION {schema}.apply_events(
    t {schema}.scheduler_states, q {schema}.queue, at bigint, events jsonb,
    later text[]                    -- later events of the same batch, if these change settings
) RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    e jsonb;
    departed bigint[];              -- orders of documents that left a flow
    owner bigint;
    event_level smallint;
    difference bigint;
BEGIN
    FOR e, departed IN
        SELECT (array_agg(u.value ORDER BY u.position))[1], array_agg((u.value ->> 3)::bigint) FILTER (WHERE u.has_left)
        FROM (
            SELECT v.value, v.position, v.value ->> 0 = '1' AS has_left,
                count(*) FILTER (WHERE v.value ->> 0 <> '1') OVER (ORDER BY v.position) AS run
            FROM jsonb_array_elements(events) WITH ORDINALITY AS v(value, position)) u
        GROUP BY CASE WHEN NOT u.has_left THEN u.position END, u.run,
            CASE WHEN u.has_left THEN (u.value -> 1, u.value -> 2) END
        ORDER BY min(u.position)
    LOOP
        owner := e ->> 1;
        IF NOT EXISTS (SELECT FROM {schema}.customers c WHERE c.number = owner) THEN
            -- It was purged after these events. Completions still correct the clock, for which its flow counts.
            IF e ->> 0 = '3' THEN
                t := {schema}.correct_clock(t, (e ->> 2)::smallint, (e ->> 5)::bigint - (e ->> 3)::bigint);
            ELSE
                t := {schema}.delete_customer_state(t, owner);
            END IF;
            CONTINUE;
        END IF;
        IF (e ->> 0)::integer NOT IN (5, 6) THEN
            event_level := e ->> 2;
        END IF;
        CASE (e ->> 0)::integer
        WHEN 0 THEN -- Arrived: order, n
            t := {schema}.change_flow(t, q.mode, owner, event_level, at,
                more_waiting => (e ->> 4)::bigint, arrived => (e ->> 3)::bigint, is_recorded => true);
        WHEN 1 THEN -- Left: order
            t := {schema}.change_flow(t, q.mode, owner, event_level, at,
                more_waiting => -cardinality(departed), departed => departed);
        WHEN 2 THEN -- Ended: n
            t := {schema}.change_flow(t, q.mode, owner, event_level, at,
                more_running => -(e ->> 3)::bigint);
        WHEN 3 THEN -- Finished: cost, weight, real cost
            PERFORM {schema}.learn_cost(owner, event_level / 10, (e ->> 5)::bigint);
            difference := 0;
            IF e ->> 3 IS NOT NULL AND e ->> 4 IS NOT NULL THEN
                -- The clock is corrected with the flow: with costs below the estimate it would
                -- otherwise run ahead of the work, and customers that become active would starve.
                difference := (e ->> 5)::bigint - (e ->> 3)::bigint;
                t := {schema}.correct_clock(t, event_level, difference);
                difference := {schema}.floor_div(difference * 1000, (e ->> 4)::bigint);
            END IF;
            t := {schema}.change_flow(t, q.mode, owner, event_level, at,
                more_running => -1, more_place => difference);
        WHEN 4 THEN -- Returned: order, refund
            t := {schema}.change_flow(t, q.mode, owner, event_level, at, more_waiting => 1,
                more_running => -1, more_place => -(e ->> 4)::bigint, arrived => (e ->> 3)::bigint,
                is_recorded => true);
        WHEN 5 THEN -- Changed: weight, limit, paused
            t := {schema}.change_customer_state(t, q, owner, at, (e ->> 2)::integer, (e ->> 3)::integer,
                (e ->> 4)::boolean, later);
        WHEN 6 THEN -- Purged: never reached, since the customer does not exist
            NULL;
        END CASE;
    END LOOP;
    RETURN t;
END
$$;
