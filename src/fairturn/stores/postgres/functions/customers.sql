-- What claims know of a customer beside its flows: the settings that they have applied, running documents, learned costs.

-- Return the last 20 costs.
CREATE OR REPLACE FUNCTION {schema}.last_costs(costs bigint[]) RETURNS bigint[] LANGUAGE sql IMMUTABLE AS $$
    SELECT costs[greatest(cardinality(costs) + 1 - 20, 1):]
$$;

-- Return the recent costs of a customer in a kind.
CREATE OR REPLACE FUNCTION {schema}.costs_of(s {schema}.customer_states, its_kind integer) RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF its_kind = {default_kind} THEN
        RETURN s.recent_costs;
    END IF;
    RETURN ARRAY(
        SELECT u.cost::bigint FROM jsonb_array_elements_text(s.costs_by_kind -> its_kind::text)
            WITH ORDINALITY AS u(cost, position)
        ORDER BY u.position);
END
$$;

-- Append a cost to those of a customer in a kind.
CREATE OR REPLACE FUNCTION {schema}.learn_cost(owner bigint, its_kind integer, cost bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO {schema}.customer_states AS s (customer, weight, paused, recent_costs)
    VALUES (owner, {weight_one}, false, '{{}}') ON CONFLICT DO NOTHING;
    UPDATE {schema}.customer_states s SET
        recent_costs = CASE WHEN its_kind = {default_kind} THEN {schema}.last_costs(s.recent_costs || cost)
            ELSE s.recent_costs END,
        costs_by_kind = CASE WHEN its_kind = {default_kind} THEN s.costs_by_kind
            ELSE s.costs_by_kind || jsonb_build_object(its_kind, to_jsonb({schema}.last_costs(
                {schema}.costs_of(s, its_kind) || cost))) END
    WHERE s.customer = owner;
END
$$;

-- Apply new settings of a customer.
CREATE OR REPLACE FUNCTION {schema}.change_customer_state(
    t {schema}.scheduler_states, q {schema}.queue, owner bigint, at bigint,
    new_weight integer, new_limit integer, new_paused boolean, later text[]
) RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    old_weight integer;
    f record;
    i integer;
BEGIN
    SELECT s.weight INTO old_weight FROM {schema}.customer_states s WHERE s.customer = owner;
    old_weight := coalesce(old_weight, {weight_one});
    FOR f IN SELECT o.level FROM {schema}.flows o
        WHERE o.customer = owner AND o.folded > 0 AND NOT o.held AND o.generation = t.generation
    LOOP
        t := {schema}.load_kinds(t, ARRAY[f.level / 10]::smallint[]);
        i := {schema}.slot(t.kinds, f.level);
        t.weights[i] := t.weights[i] + new_weight - old_weight;
    END LOOP;
    INSERT INTO {schema}.customer_states AS s (customer, weight, running_max, paused, recent_costs)
    VALUES (owner, new_weight, new_limit, new_paused, '{{}}')
    ON CONFLICT (customer) DO UPDATE SET weight = excluded.weight,
        running_max = excluded.running_max, paused = excluded.paused;
    DELETE FROM {schema}.customer_states s
    WHERE s.customer = owner AND s.weight = {weight_one} AND s.running_max IS NULL AND NOT s.paused
        AND s.recent_costs = '{{}}' AND s.costs_by_kind = '{{}}';
    IF new_limit IS NOT NULL THEN
        t := {schema}.count_running(t, q, owner, at, later);
    END IF;
    RETURN {schema}.change_flow(t, q.mode, owner, NULL, at);
END
$$;

-- Count the running documents of a customer that gets a limit: without a limit there is no counter. Attempts whose end
-- is an unapplied event count as running.
CREATE OR REPLACE FUNCTION {schema}.count_running(
    t {schema}.scheduler_states, q {schema}.queue, owner bigint, at bigint, later text[]
) RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    r record;
BEGIN
    FOR r IN
        SELECT l.level, sum(l.n) - coalesce((
                SELECT f.running FROM {schema}.flows f
                WHERE f.customer = owner AND f.level = l.level), 0) AS more
        FROM (
            SELECT {schema}.band(q.one_level, d.priority, d.kind) AS level, 1 AS n
            FROM {schema}.leases s CROSS JOIN LATERAL unnest(s.documents) AS u(number)
                JOIN {schema}.documents d ON d.number = u.number AND d.fence = s.fence
            WHERE d.state = {running} AND d.customer = owner
            UNION ALL
            SELECT (v ->> 2)::smallint, CASE WHEN v ->> 0 = '2' THEN (v ->> 3)::bigint ELSE 1 END
            FROM (
                SELECT e.events FROM {schema}.event_log e
                WHERE e.events IS NOT NULL AND owner = ANY (e.customers)
                UNION ALL
                SELECT unnest(later)) e CROSS JOIN LATERAL jsonb_array_elements(e.events::jsonb) v
            WHERE (v ->> 1)::bigint = owner AND v ->> 0 IN ('2', '3', '4')
            UNION ALL
            SELECT f.level, 0 FROM {schema}.flows f WHERE f.customer = owner) l
        GROUP BY l.level
    LOOP
        t := {schema}.change_flow(t, q.mode, owner, r.level, at, more_running => r.more::bigint);
    END LOOP;
    RETURN t;
END
$$;

-- Delete the scheduler state of a purged customer.
CREATE OR REPLACE FUNCTION {schema}.delete_customer_state(t {schema}.scheduler_states, owner bigint)
RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    f record;
    customer_weight integer;
    i integer;
BEGIN
    IF t.levels_to > 0 AND owner = coalesce({schema}.next_unconverted(t), t.postponed[1]) THEN
        t.levels_to := 0;           -- it is a position within this customer
    END IF;
    t.postponed := array_remove(t.postponed, owner);
    SELECT s.weight INTO customer_weight FROM {schema}.customer_states s WHERE s.customer = owner;
    FOR f IN DELETE FROM {schema}.flows o WHERE o.customer = owner
        RETURNING o.level, o.folded, o.held, o.generation
    LOOP
        IF f.folded > 0 AND NOT f.held AND f.generation = t.generation THEN
            t := {schema}.load_kinds(t, ARRAY[f.level / 10]::smallint[]);
            i := {schema}.slot(t.kinds, f.level);
            t.weights[i] := t.weights[i] - coalesce(customer_weight, {weight_one});
        END IF;
    END LOOP;
    DELETE FROM {schema}.customer_states s WHERE s.customer = owner;
    DELETE FROM {schema}.limited_customers l WHERE l.customer = owner;
    RETURN t;
END
$$;
