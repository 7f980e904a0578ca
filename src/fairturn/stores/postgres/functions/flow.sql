-- The scheduler state of one customer: fairturn.scheduling.turns in SQL. Tests compare the order of service of both.

-- Change one flow of a customer, and update what depends on it: which flows of the customer are active, their places
-- and ticks, its head of the kind and since when it has been the head. Flows of other kinds are read only if the customer
-- has a limit, which holds all of them, or if its settings have changed.
CREATE OR REPLACE FUNCTION {schema}.change_flow(
    t {schema}.scheduler_states,
    its_mode text,
    its_customer bigint,
    its_level smallint,             -- the band; NULL: only the customer's settings have changed
    at bigint,
    more_waiting bigint DEFAULT 0,
    more_running bigint DEFAULT 0,
    less_taken bigint[] DEFAULT NULL,       -- by priority
    more_place bigint DEFAULT 0,
    arrived bigint DEFAULT NULL,    -- the lowest order that began to wait
    never_ran boolean DEFAULT false,    -- whether those that began to wait are new
    is_recorded boolean DEFAULT false,  -- the arrival comes from the event log: a claim may have taken them already
    departed bigint[] DEFAULT NULL  -- orders that ceased to wait
) RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    customer_weight bigint;
    customer_limit integer;
    is_paused boolean;
    is_held boolean;
    is_unconverted boolean;         -- the flows are of an earlier mode: no claim takes from them
    was_active boolean;
    is_head_unknown boolean;
    its_kinds smallint[];
    its_kind smallint;
    i integer;                      -- the position of a flow's band in the arrays
    flows_before {schema}.flows[];
    flows_after {schema}.flows[];
    f {schema}.flows;
    head_before bigint;
    head_after bigint;
    head_level smallint;
    next_elsewhere bigint;
    ended_elsewhere bigint;
    n bigint;
BEGIN
    SELECT s.weight, s.running_max, s.paused INTO customer_weight, customer_limit, is_paused
    FROM {schema}.customer_states s WHERE s.customer = its_customer;
    customer_weight := least(greatest(coalesce(customer_weight, {weight_one}), {weight_min}), {weight_max});
    is_unconverted := t.converted_to IS NOT NULL AND EXISTS (
        SELECT FROM {schema}.flows o WHERE o.customer = its_customer AND o.generation <> t.generation);
    is_held := is_unconverted OR coalesce(is_paused, false) OR (customer_limit IS NOT NULL AND more_running + (
        SELECT coalesce(sum(o.running), 0) FROM {schema}.flows o WHERE o.customer = its_customer) >= customer_limit);
    IF its_level IS NOT NULL AND customer_limit IS NULL THEN
        its_kinds := ARRAY[its_level / 10];
    ELSE
        its_kinds := ARRAY(
            SELECT o.level / 10 FROM {schema}.flows o WHERE o.customer = its_customer
            UNION SELECT its_level / 10 WHERE its_level IS NOT NULL);
    END IF;

    FOREACH its_kind IN ARRAY its_kinds LOOP
        IF its_kind <> ALL (t.kinds) THEN
            t := {schema}.load_kinds(t, ARRAY[its_kind]);
        END IF;
        flows_before := ARRAY(
            SELECT n.f FROM generate_series(10 * its_kind + 1, 10 * its_kind + 9) l
                CROSS JOIN LATERAL (
                    SELECT o AS f FROM {schema}.flows o
                    WHERE o.customer = its_customer AND o.level = l::smallint
                    ORDER BY o.customer DESC, o.level DESC, o.version DESC LIMIT 1) n);
        IF its_level / 10 = its_kind AND NOT EXISTS (
            SELECT FROM unnest(flows_before) b WHERE b.level = its_level)
        THEN
            f := {schema}.new_flow(its_customer, its_level,
                CASE WHEN is_unconverted THEN -1 ELSE t.generation END);
            flows_before := flows_before || f;
        END IF;
        flows_after := '{{}}';
        head_before := NULL;
        head_after := NULL;
        head_level := NULL;
        next_elsewhere := NULL;
        ended_elsewhere := 0;

        FOREACH f IN ARRAY flows_before LOOP
            i := {schema}.slot(t.kinds, f.level);
            was_active := f.folded > 0 AND NOT f.held AND NOT is_unconverted;
            IF f.head_since IS NOT NULL THEN
                head_before := f.head_order;
            END IF;
            IF f.level = its_level THEN
                -- Negative while a claim has taken a document whose arrival is not applied yet.
                f.folded := f.folded + more_waiting;
                f.running := f.running + more_running;
                IF f.running < 0 THEN
                    -- The attempt began in another mode and is counted in another flow. Only the sum matters.
                    ended_elsewhere := -f.running;
                    f.running := 0;
                END IF;
                IF less_taken IS NOT NULL THEN
                    f.taken := {schema}.subtract(f.taken, less_taken);
                END IF;
                f.place := f.place + more_place;
                f.head_order := least(f.head_order, arrived);
                is_head_unknown := f.head_order = ANY (departed) OR (is_recorded AND f.head_order = arrived
                    AND (f.claimed_to < {no_order} AND arrived <= f.claimed_to OR NOT never_ran));
                IF never_ran THEN
                    f.claimed_to := least(f.claimed_to, arrived - 1);
                END IF;
                IF f.folded <= 0 THEN
                    f.head_order := NULL;
                ELSIF is_head_unknown THEN
                    f := {schema}.find_head(f);
                END IF;
            END IF;
            f.held := is_held;
            IF f.folded > 0 AND NOT is_held THEN
                IF NOT was_active THEN
                    IF its_mode <> 'levels' THEN
                        IF t.weights[i] <= 0 THEN
                            -- The kind becomes active in this level: no credit from absence.
                            t.kind_times[i] := greatest(t.kind_times[i], t.level_times[f.level % 10]);
                        END IF;
                        -- No credit from absence; work received beyond the clock still counts.
                        f.place := greatest(f.place, t.clocks[i]);
                        t.tick := t.tick + 1;
                        f.tick := t.tick;
                    END IF;
                    t.weights[i] := t.weights[i] + customer_weight;
                END IF;
            ELSIF was_active THEN
                t.weights[i] := t.weights[i] - customer_weight;
            END IF;
            IF its_mode = 'levels' THEN
                f.place := coalesce(f.head_order, 0);
            END IF;
            IF f.head_order < head_after OR (head_after IS NULL AND f.head_order IS NOT NULL) THEN
                next_elsewhere := least(head_after, next_elsewhere);
                head_after := f.head_order;
                head_level := f.level;
            ELSE
                next_elsewhere := least(f.head_order, next_elsewhere);
            END IF;
            flows_after := flows_after || f;
        END LOOP;

        FOR p IN 1 .. cardinality(flows_after) LOOP
            f := flows_after[p];
            i := {schema}.slot(t.kinds, f.level);
            IF ended_elsewhere > 0 AND f.running > 0 THEN
                n := least(ended_elsewhere, f.running);
                f.running := f.running - n;
                ended_elsewhere := ended_elsewhere - n;
            END IF;
            IF f.level IS DISTINCT FROM head_level THEN
                f.head_since := NULL;
                f.next_elsewhere := NULL;
            ELSE
                IF head_after IS DISTINCT FROM head_before THEN
                    f.head_since := at;
                END IF;
                n := array_position(t.kinds, its_kind);
                t.kind_heads_from[n] := least(t.kind_heads_from[n], f.head_since);   -- also if the flow was held before
                f.next_elsewhere := coalesce(next_elsewhere, {no_order});
            END IF;
            IF f IS DISTINCT FROM flows_before[p] OR f.version = -1 THEN
                t.places_from[i] := least(t.places_from[i], f.place);
                PERFORM {schema}.save_flow(f, t.version);
            END IF;
        END LOOP;
    END LOOP;
    RETURN t;
END
$$;

-- Return a flow with waiting documents with its head. By documents_flow and documents_returned.
CREATE OR REPLACE FUNCTION {schema}.find_head(f {schema}.flows) RETURNS {schema}.flows LANGUAGE plpgsql AS $$
DECLARE
    next_new bigint;
BEGIN
    SELECT d.order_number INTO next_new FROM {schema}.documents d
    WHERE d.customer = f.customer AND d.level = f.level
        AND d.order_number > f.claimed_to AND d.state = {waiting} AND NOT d.returned
    ORDER BY d.customer, d.level, d.order_number LIMIT 1;
    -- The next search need not pass the cancelled documents again.
    f.claimed_to := greatest(f.claimed_to, next_new - 1);
    f.head_order := least(next_new, (
        SELECT min(d.order_number) FROM {schema}.documents d
        WHERE d.returned AND d.customer = f.customer AND d.level = f.level));
    RETURN f;
END
$$;

-- Write a flow with this version of the scheduler state. The version is a part of the key: a scan finds the newest row
-- first even while a long transaction prevents VACUUM from removing older ones (decision 0011).
CREATE OR REPLACE FUNCTION {schema}.save_flow(f {schema}.flows, its_version bigint)
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE {schema}.flows o SET version = its_version, generation = f.generation,
        place = f.place, tick = f.tick, folded = f.folded, running = f.running, taken = f.taken,
        claimed_to = f.claimed_to, head_order = f.head_order, head_since = f.head_since,
        next_elsewhere = f.next_elsewhere, held = f.held
    WHERE o.customer = f.customer AND o.level = f.level AND o.version = f.version;
    IF NOT FOUND THEN
        INSERT INTO {schema}.flows (customer, level, version, generation, place, tick, folded,
            running, taken, claimed_to, head_order, head_since, next_elsewhere, held)
        VALUES (f.customer, f.level, its_version, f.generation, f.place, f.tick, f.folded,
            f.running, f.taken, f.claimed_to, f.head_order, f.head_since, f.next_elsewhere, f.held);
    END IF;
END
$$;

-- Return an empty flow. Its version of -1 marks it as not stored.
CREATE OR REPLACE FUNCTION {schema}.new_flow(
    its_customer bigint, its_level smallint, its_generation bigint
) RETURNS {schema}.flows LANGUAGE plpgsql AS $$
DECLARE
    f {schema}.flows;
BEGIN
    f.customer := its_customer;
    f.level := its_level;
    f.version := -1;
    f.generation := its_generation;
    f.place := 0;
    f.tick := 0;
    f.folded := 0;
    f.running := 0;
    f.taken := array_fill(0::bigint, ARRAY[9]);
    f.claimed_to := {no_order};
    f.held := false;
    RETURN f;
END
$$;

-- Division that rounds down, as in Python; the divisor is positive.
CREATE OR REPLACE FUNCTION {schema}.floor_div(a bigint, b bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT (a - ((a % b) + b) % b) / b
$$;
