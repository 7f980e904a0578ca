-- The conversion of flows after a change of mode: customer by customer, about `budget` documents in one transaction.
-- Until a customer is converted, no claim takes its documents. Customers whose documents take more than one
-- transaction come last, so that no other customer waits for them (decision 0028).

-- Begin a generation of flows. Claims take no documents from flows of earlier generations.
CREATE OR REPLACE FUNCTION {schema}.begin_generation(t {schema}.scheduler_states, is_other_level boolean)
RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
BEGIN
    t.generation := t.generation + 1;
    t.converted_to := 0;
    t.postponed := '{{}}';
    t.levels_to := CASE WHEN is_other_level THEN 0 END;
    t := {schema}.reset_bounds({schema}.load_all_kinds(t));
    t.clocks := array_fill(0::bigint, ARRAY[cardinality(t.clocks)]);
    t.weights := t.clocks;
    t.kind_times := t.clocks;
    t.last_claims := t.clocks;
    t.level_times := array_fill(0::bigint, ARRAY[9]);
    RETURN t;
END
$$;

-- Convert the next customers after `configure`, as claims do. Returns whether all are converted.
CREATE OR REPLACE FUNCTION {schema}.convert_next(budget integer) RETURNS boolean LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    q {schema}.queue;
    t {schema}.scheduler_states;
    r record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    SELECT * INTO q FROM {schema}.queue FOR NO KEY UPDATE;
    SELECT * INTO t FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1;
    IF t.converted_to IS NULL THEN
        RETURN true;
    END IF;
    t.version := t.version + 1;
    SELECT * INTO r FROM {schema}.convert(t, q, budget);
    t := r.t;
    PERFORM {schema}.save_state(t);
    RETURN NOT r.more;
END
$$;

-- Convert the next customers, under the lock of claims. Flows become active in the order of their first documents.
CREATE OR REPLACE FUNCTION {schema}.convert(
    INOUT t {schema}.scheduler_states, q {schema}.queue, budget integer, OUT more boolean
) LANGUAGE plpgsql AS $$
DECLARE
    owner bigint;
    is_postponed boolean;
    waiting_count bigint;
    owners bigint[] := '{{}}';      -- customers whose documents all have their new level
    rest bigint := budget;
    f {schema}.flows;
    customer_weight bigint;
    r record;
    i integer;
    k integer;
BEGIN
    WHILE rest > 1 LOOP             -- one for the customer itself
        owner := {schema}.next_unconverted(t);
        is_postponed := owner IS NULL;
        owner := coalesce(owner, t.postponed[1]);
        EXIT WHEN owner IS NULL;
        rest := rest - 1;
        IF t.levels_to IS NOT NULL THEN
            IF NOT is_postponed THEN
                SELECT sum(x.folded) INTO waiting_count FROM {schema}.flows x WHERE x.customer = owner;
                IF waiting_count >= budget - 1 THEN
                    t.postponed := t.postponed || owner;
                    t.converted_to := owner;
                    t.levels_to := 0;
                    CONTINUE;
                END IF;
                EXIT WHEN waiting_count >= rest;    -- the next transaction converts it at once
            END IF;
            SELECT * INTO r FROM {schema}.change_levels(t, q.one_level, owner, rest);
            t := r.t;
            rest := rest - r.n;
            EXIT WHEN rest <= 0;    -- some of its documents may be left
        END IF;
        owners := owners || owner;
        IF is_postponed THEN
            t.postponed := t.postponed[2:];
        ELSE
            t.converted_to := owner;
        END IF;
    END LOOP;
    more := owner IS NOT NULL;
    FOR r IN
        SELECT x AS flow, min(x.head_order) OVER same_customer AS head,
            max(x.head_since) OVER same_customer AS head_since
        FROM {schema}.flows x WHERE x.customer = ANY (owners) AND x.generation <> t.generation
        WINDOW same_customer AS (PARTITION BY x.customer, x.level / 10)     -- and of the same kind
        ORDER BY x.head_order NULLS FIRST, x.customer, x.level
    LOOP
        f := r.flow;
        f.head_since := CASE WHEN f.head_order = r.head THEN coalesce(r.head_since, t.at) END;
        f.next_elsewhere := NULL;
        SELECT coalesce(s.paused, false) OR coalesce(s.running_max <= (
                SELECT sum(x.running) FROM {schema}.flows x WHERE x.customer = f.customer), false),
            least(greatest(coalesce(s.weight, {weight_one}), {weight_min}), {weight_max})
        INTO f.held, customer_weight
        FROM (SELECT) AS always LEFT JOIN {schema}.customer_states s ON s.customer = f.customer;
        f.generation := t.generation;
        f.place := CASE WHEN q.mode = 'levels' THEN coalesce(f.head_order, 0) ELSE 0 END;
        f.tick := 0;
        t := {schema}.load_kinds(t, ARRAY[f.level / 10]::smallint[]);
        i := {schema}.slot(t.kinds, f.level);
        k := array_position(t.kinds, (f.level / 10)::smallint);
        IF f.folded > 0 AND NOT f.held THEN
            IF q.mode <> 'levels' THEN
                IF t.weights[i] <= 0 THEN
                    t.kind_times[i] := greatest(t.kind_times[i], t.level_times[f.level % 10]);
                END IF;
                f.place := t.clocks[i];
                t.tick := t.tick + 1;
                f.tick := t.tick;
            END IF;
            t.weights[i] := t.weights[i] + customer_weight;
        END IF;
        t.places_from[i] := least(t.places_from[i], f.place);
        t.kind_heads_from[k] := least(t.kind_heads_from[k], f.head_since);
        PERFORM {schema}.save_flow(f, t.version);
    END LOOP;
    IF NOT more THEN
        t.converted_to := NULL;
        t.levels_to := NULL;
    END IF;
END
$$;

-- Return the next customer to convert, without the postponed ones. By the primary key.
CREATE OR REPLACE FUNCTION {schema}.next_unconverted(t {schema}.scheduler_states) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT x.customer FROM {schema}.flows x
    WHERE x.customer > t.converted_to AND x.generation <> t.generation
    ORDER BY x.customer, x.level, x.version LIMIT 1
$$;

-- Read the next `most` waiting documents of a customer after the order `levels_to`, and give them the level of the
-- current mode. `n` is the number read; the customer is done if it is below `most`. They count as returned, because
-- claims may have taken higher orders from the flow that they move to; `claimed_to` is raised past them, so that claims
-- do not search there for documents that never ran.
CREATE OR REPLACE FUNCTION {schema}.change_levels(
    INOUT t {schema}.scheduler_states, is_one_level boolean, owner bigint, most bigint, OUT n bigint
) LANGUAGE plpgsql AS $$
DECLARE
    numbers bigint[];
    last_order bigint;
    f {schema}.flows;
    r record;
BEGIN
    -- By documents_flow and documents_returned.
    SELECT count(*), array_agg(b.number), max(b.order_number) INTO n, numbers, last_order
    FROM (
        SELECT w.number, w.order_number
        FROM {schema}.flows x CROSS JOIN LATERAL (
            (SELECT d.* FROM {schema}.documents d
            WHERE d.customer = owner AND d.level = x.level AND d.state = {waiting} AND NOT d.returned
                AND d.order_number > greatest(x.claimed_to, t.levels_to)
            ORDER BY d.customer, d.level, d.order_number LIMIT most)
            UNION ALL
            (SELECT d.* FROM {schema}.documents d
            WHERE d.returned AND d.customer = owner AND d.level = x.level AND d.state = {waiting}
                AND d.order_number > t.levels_to
            ORDER BY d.customer, d.level, d.order_number LIMIT most)) w
        WHERE x.customer = owner
        ORDER BY w.order_number LIMIT most) b;
    FOR r IN
        WITH old AS MATERIALIZED (
            SELECT d.number, d.level FROM {schema}.documents d WHERE d.number = ANY (numbers)),
        changed AS (
            UPDATE {schema}.documents d
            SET level = {schema}.band(is_one_level, d.priority, d.kind), returned = true
            FROM old o WHERE d.number = o.number
            RETURNING o.level AS level_before, d.level)
        SELECT u.level, sum(u.n)::bigint AS n
        FROM changed c CROSS JOIN LATERAL (VALUES (c.level, 1), (c.level_before, -1)) AS u(level, n)
        GROUP BY u.level
    LOOP
        SELECT * INTO f FROM {schema}.flows x WHERE x.customer = owner AND x.level = r.level;
        IF NOT FOUND THEN
            f := {schema}.new_flow(owner, r.level, -1);
        END IF;
        f.folded := f.folded + r.n;
        PERFORM {schema}.save_flow(f, t.version);
    END LOOP;
    -- A flow with a lower claimed_to has a document of a submission that committed late.
    UPDATE {schema}.flows x SET claimed_to = last_order
    WHERE x.customer = owner AND x.claimed_to >= t.levels_to AND x.claimed_to < last_order;
    IF n = most THEN
        t.levels_to := last_order;
        RETURN;
    END IF;
    t.levels_to := 0;               -- of the next customer
    UPDATE {schema}.flows x SET head_order = CASE
        WHEN x.folded > 0 THEN least(
            (SELECT min(d.order_number) FROM {schema}.documents d
            WHERE d.returned AND d.customer = owner AND d.level = x.level AND d.state = {waiting}),
            (SELECT d.order_number FROM {schema}.documents d
            WHERE d.customer = owner AND d.level = x.level AND d.order_number > x.claimed_to
                AND d.state = {waiting} AND NOT d.returned
            ORDER BY d.customer, d.level, d.order_number LIMIT 1)) END
    WHERE x.customer = owner;
END
$$;
