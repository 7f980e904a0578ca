-- Claim up to n documents in the order of service: fairturn.scheduling.turns in SQL (decision 0026). One call is one
-- transaction: the server holds the lock of claims only while it executes this function. The client reads the documents
-- afterwards, by the token; a repeated call with the same token claims nothing more.
CREATE OR REPLACE FUNCTION {schema}.claim(
    its_token uuid,
    n integer,
    its_worker text,
    lease bigint,
    given_now bigint, uptime bigint, its_boot text,    -- NULL, NULL, 'server': the clock of the server
    budget integer,                 -- documents or events that each step may handle
    OUT claimed integer,
    OUT its_at bigint,
    OUT more boolean,               -- events are left to fold: another call may find documents
    OUT changed boolean,
    OUT repaired integer,           -- sums of weights that did not agree with the flows
    OUT suspects bigint[],          -- customers for `repair_customers`: their counters do not agree with the flows
    OUT cancelled bigint[]          -- documents that were cancelled before they were claimed
) LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    q {schema}.queue;
    t {schema}.scheduler_states;
    r record;
    lease_now bigint;
    is_probed boolean := false;
    is_behind boolean := false;
    numbers bigint[] := '{{}}';     -- of the claimed documents
    charged_costs bigint[] := '{{}}';
    charged_weights bigint[] := '{{}}';
    charges bigint[] := '{{}}';
    is_patient boolean;
    any_patient boolean;
    page {schema}.flows[];          -- the next flows in turn
    f {schema}.flows;               -- the flow that has the turn,
    following {schema}.flows;       -- and the one after it
    back_place bigint;              -- the first turn of a flow of this page that comes again
    back_tick bigint;
    d record;
    next_level integer;
    customer_weight bigint;
    customer_limit integer;
    recent bigint[];
    document_cost bigint;
    document_charge bigint;
    run_max bigint;                 -- documents that the flow may give in a row
    run bigint;
    next_order bigint;
BEGIN
    claimed := 0;
    more := false;
    changed := false;
    repaired := 0;
    suspects := '{{}}';
    cancelled := '{{}}';
    -- 1. Idle workers poll: without work, no lock is taken.
    its_at := coalesce(given_now, {now});
    IF NOT {schema}.has_work(its_at, coalesce(uptime, its_at), its_boot)
        AND NOT EXISTS (SELECT FROM {schema}.leases l WHERE l.token = its_token)
    THEN
        RETURN;
    END IF;
    -- 2. The lock of claims. A known token: the call is a repetition.
    SELECT * INTO q FROM {schema}.queue FOR NO KEY UPDATE;
    SELECT l.running INTO claimed FROM {schema}.leases l WHERE l.token = its_token;
    IF FOUND THEN
        changed := true;
        RETURN;
    END IF;
    claimed := 0;
    -- 3. A new epoch after a failover or a restore.
    IF NOT {schema}.is_same_incarnation(q.incarnation) THEN
        PERFORM {schema}.check_epoch();
    END IF;
    -- 4. Expired leases, events, due documents; the conversion after a change of mode.
    its_at := coalesce(given_now, {now});
    lease_now := coalesce(uptime, its_at);
    SELECT * INTO t FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1;
    t.version := t.version + 1;
    SELECT * INTO r FROM {schema}.fold(t, q, its_at, lease_now, t.boot <> its_boot, budget);
    t := r.t;
    more := r.more;
    changed := r.changed;
    t.boot := its_boot;
    t.at := its_at;
    IF t.converted_to IS NOT NULL AND NOT more THEN
        SELECT * INTO r FROM {schema}.convert(t, q, budget);
        t := r.t;
        more := r.more;
        changed := true;
    END IF;
    -- 5. The counters of the next customers, once in `probe_every`.
    IF NOT more AND its_at NOT BETWEEN t.probed_at AND t.probed_at + {probe_every} THEN
        SELECT * INTO r FROM {schema}.probe(t);
        t := r.t;
        suspects := r.suspects;
        t.probed_at := its_at;
        is_probed := true;
    END IF;

    -- 6. Turns. New heads are younger than the patience: if no head is older now, none will be during this claim.
    any_patient := false;
    IF q.mode <> 'levels' THEN
        any_patient := EXISTS (
            SELECT FROM {schema}.flows o
            WHERE o.head_since >= t.heads_from AND o.head_since < its_at - q.patience
                AND NOT o.held AND o.generation = t.generation);
    END IF;
    WHILE claimed < n LOOP
        -- Read a page of flows in the order of turns, or the flow of the customer that has waited longest.
        is_patient := false;
        IF any_patient AND (t.claims + 1) % 10 = 0 THEN
            SELECT * INTO f FROM {schema}.flows o
            WHERE o.head_since >= t.heads_from AND o.head_since < its_at - q.patience AND NOT o.held
                AND o.generation = t.generation
            ORDER BY o.head_since, o.head_order LIMIT 1;
            is_patient := FOUND;
            any_patient := FOUND;
            IF is_patient THEN
                t.heads_from := f.head_since;
                page := ARRAY[f];
            END IF;
        END IF;
        IF NOT is_patient THEN
            next_level := (SELECT min(l) FROM generate_subscripts(t.weights, 1) l WHERE t.weights[l] > 0);
            IF next_level IS NULL THEN
                next_level := {schema}.hidden_level(t, its_at);
                EXIT WHEN next_level IS NULL;
                t := {schema}.recount_level(t, next_level);
                EXIT WHEN t.weights[next_level] <= 0;
                repaired := repaired + 1;
                changed := true;
            END IF;
            page := ARRAY(
                SELECT o FROM {schema}.flows o
                WHERE o.folded > 0 AND NOT o.held AND o.generation = t.generation
                    AND o.level = next_level::smallint AND o.place >= t.places_from[next_level]
                ORDER BY o.generation, o.level, o.place, o.tick LIMIT least(n - claimed, {page}) + 1);
            IF page = '{{}}' THEN
                -- The sum of weights does not agree with the flows.
                t := {schema}.recount_level(t, next_level);
                repaired := repaired + 1;
                changed := true;
                CONTINUE;
            END IF;
        END IF;

        back_place := NULL;
        FOR i IN 1 .. least(cardinality(page), {page}, n - claimed) LOOP
            f := page[i];
            following := page[i + 1];
            -- The page ends where a flow that had a turn comes first again, or with the turn of the longest wait.
            EXIT WHEN claimed = n OR i > 1 AND ((any_patient AND (t.claims + 1) % 10 = 0)
                OR (f.place, f.tick) > (back_place, back_tick));
            IF following.customer IS NULL OR (following.place, following.tick) > (back_place, back_tick)
            THEN
                following.place := back_place;
                following.tick := back_tick;
            END IF;
            IF NOT is_patient THEN
                t.places_from[next_level] := f.place;
            END IF;

            SELECT s.weight, s.running_max, s.recent_costs INTO customer_weight, customer_limit, recent
            FROM {schema}.customer_states s WHERE s.customer = f.customer;
            customer_weight := least(greatest(coalesce(customer_weight, {weight_one}), {weight_min}), {weight_max});
            IF t.weights[f.level] < customer_weight THEN
                -- The sum of weights does not contain this flow's.
                t := {schema}.recount_level(t, f.level);
                repaired := repaired + 1;
            END IF;
            document_cost := {cost_one};
            IF q.costs = 'learned' AND cardinality(recent) > 0 THEN
                document_cost := least(greatest((SELECT div(sum(c), count(*)) FROM unnest(recent) c), 0),
                    {real_cost_max});
            END IF;
            run_max := CASE WHEN is_patient THEN least(1, f.folded)
                WHEN any_patient THEN least(n - claimed, f.folded, 9 - t.claims % 10)
                ELSE least(n - claimed, f.folded) END;
            IF customer_limit IS NOT NULL THEN
                run_max := greatest(0, least(run_max, customer_limit - (
                    SELECT sum(o.running) FROM {schema}.flows o WHERE o.customer = f.customer)));
            END IF;
            run := 0;
            next_order := NULL;
            -- By documents_flow and documents_returned.
            FOR d IN
                SELECT w.* FROM (
                    (SELECT o.order_number, o.number, o.priority, o.cost, false AS returned
                    FROM {schema}.documents o
                    WHERE o.customer = f.customer AND o.level = f.level
                        AND o.order_number > f.claimed_to AND o.state = {waiting} AND NOT o.returned
                    ORDER BY o.customer, o.level, o.order_number LIMIT run_max + 1)
                    UNION ALL
                    (SELECT o.order_number, o.number, o.priority, o.cost, true
                    FROM {schema}.documents o
                    WHERE o.returned AND o.customer = f.customer AND o.level = f.level
                        AND o.state = {waiting}
                        -- This claim has taken those before the head.
                        AND o.order_number >= CASE WHEN f.version = t.version
                            THEN coalesce(f.head_order, 0) ELSE 0 END
                    ORDER BY o.customer, o.level, o.order_number LIMIT run_max + 1)) w
                ORDER BY w.order_number LIMIT run_max + 1
            LOOP
                next_order := d.order_number;
                EXIT WHEN run = run_max OR (run > 0
                    AND CASE WHEN q.mode = 'levels' THEN next_order > following.place
                        ELSE (f.place, f.tick) > (following.place, following.tick) END);
                run := run + 1;
                next_order := NULL;
                t.claims := t.claims + 1;
                t.taken[d.priority] := t.taken[d.priority] + 1;
                f.taken[d.priority] := f.taken[d.priority] + 1;
                IF NOT d.returned THEN
                    f.claimed_to := d.order_number;
                END IF;
                numbers := numbers || d.number;
                IF is_patient OR q.mode = 'levels' THEN
                    charged_costs := charged_costs || NULL::bigint;
                    charged_weights := charged_weights || NULL::bigint;
                    charges := charges || 0::bigint;
                ELSE
                    IF q.costs = 'known' THEN
                        document_cost := least(greatest(coalesce(d.cost, {cost_one}), 0), {real_cost_max});
                    END IF;
                    document_charge := greatest(document_cost * 1000 / customer_weight, 1);
                    t.clocks[next_level] := greatest(
                        t.clocks[next_level] + document_cost * 1000 / t.weights[next_level], f.place);
                    f.place := f.place + document_charge;
                    charged_costs := charged_costs || document_cost;
                    charged_weights := charged_weights || customer_weight;
                    charges := charges || document_charge;
                END IF;
            END LOOP;
            claimed := claimed + run;
            changed := true;
            f.folded := f.folded - run;
            f.running := f.running + run;
            IF f.folded > 0 AND next_order IS NULL THEN
                -- Fewer documents wait than were counted.
                IF more THEN
                    is_behind := true;      -- events of their cancels are not applied yet
                ELSE
                    f.folded := 0;
                    suspects := suspects || f.customer;
                END IF;
            END IF;
            f.head_order := CASE WHEN f.folded > 0 THEN next_order END;
            IF f.folded = 0 THEN
                t.weights[f.level] := t.weights[f.level] - customer_weight;
            ELSE
                IF q.mode = 'levels' THEN
                    f.place := coalesce(f.head_order, f.place);
                END IF;
                IF back_place IS NULL OR (f.place, f.tick) < (back_place, back_tick) THEN
                    back_place := f.place;
                    back_tick := f.tick;
                END IF;
            END IF;
            IF f.head_since IS NOT NULL THEN
                f := {schema}.move_head(f, q.mode, its_at, t.version);
            END IF;
            PERFORM {schema}.save_flow(f, t.version);
            IF customer_limit IS NOT NULL THEN
                -- At the limit, all flows of the customer are held.
                t := {schema}.change_flow(t, q.mode, f.customer, NULL, its_at);
            END IF;
            EXIT WHEN is_behind;
        END LOOP;
        EXIT WHEN is_behind;        -- the caller repeats the call
    END LOOP;

    -- 7. Documents, lease, reported cancels and the scheduler state.
    IF claimed > 0 THEN
        t.fence := t.fence + 1;
        UPDATE {schema}.documents o SET state = {running}, returned = false,
            attempts = o.attempts + 1, fence = t.fence, claimed_at = its_at,
            lease_until = lease_now + lease, worker = its_worker, charged_cost = v.cost,
            charged_weight = v.weight, charge = v.charge
        FROM unnest(numbers, charged_costs, charged_weights, charges)
            AS v(number, cost, weight, charge)
        WHERE o.number = v.number;
        INSERT INTO {schema}.leases (fence, until, running, documents, token, length)
        VALUES (t.fence, lease_now + lease, claimed, numbers, its_token, lease);
        t.leases_from := least(t.leases_from, lease_now + lease);
    END IF;
    IF EXISTS (SELECT FROM {schema}.unreported_cancels c WHERE c.number >= t.cancels_from) THEN
        WITH reported AS (
            DELETE FROM {schema}.unreported_cancels c WHERE c.number = ANY (ARRAY(
                SELECT o.number FROM {schema}.unreported_cancels o WHERE o.number >= t.cancels_from
                ORDER BY o.number LIMIT {cancels_reported_max}))
            RETURNING c.number, c.document)
        SELECT coalesce(array_agg(e.document ORDER BY e.number), '{{}}'),
            coalesce(max(e.number) + 1, t.cancels_from)
        INTO cancelled, t.cancels_from FROM reported e;
        changed := true;
    END IF;
    IF changed OR is_probed THEN
        t.repairs := t.repairs + repaired;
        IF {clock_max} < ANY (t.clocks) THEN
            t := {schema}.rebase_clocks(t);
        END IF;
        DELETE FROM {schema}.scheduler_states o WHERE o.version = t.version - 1;
        INSERT INTO {schema}.scheduler_states SELECT t.*;
    END IF;
END
$$;

-- Find the customer's new head, after the flow that had it gave documents.
CREATE OR REPLACE FUNCTION {schema}.move_head(
    f {schema}.flows, its_mode text, at bigint, its_version bigint
) RETURNS {schema}.flows LANGUAGE plpgsql AS $$
BEGIN
    IF f.next_elsewhere IS NULL OR f.head_order IS NULL OR f.head_order > f.next_elsewhere THEN
        f.next_elsewhere := {no_order};
        IF its_mode <> 'equal' THEN
            SELECT coalesce(min(o.head_order), {no_order}) INTO f.next_elsewhere
            FROM generate_series(1, 9) l CROSS JOIN LATERAL (
                SELECT x.head_order FROM {schema}.flows x
                WHERE x.customer = f.customer AND x.level = l::smallint
                ORDER BY x.customer DESC, x.level DESC, x.version DESC LIMIT 1) o
            WHERE l <> f.level;
        END IF;
    END IF;
    IF f.head_order < f.next_elsewhere THEN
        f.head_since := at;
    ELSE
        UPDATE {schema}.flows o SET head_since = at, next_elsewhere = NULL, version = its_version
        WHERE o.customer = f.customer AND o.level <> f.level AND o.head_order = f.next_elsewhere;
        f.head_since := NULL;
        f.next_elsewhere := NULL;
    END IF;
    RETURN f;
END
$$;

-- Return the documents of a claim, in the order of service. By leases_token and the primary keys.
CREATE OR REPLACE FUNCTION {schema}.claimed(its_token uuid)
RETURNS TABLE (document {schema}.documents, customer_name text) LANGUAGE sql STABLE
{planned_by_indexes}
AS $$
    SELECT d, c.name
    FROM {schema}.leases l
        CROSS JOIN LATERAL unnest(l.documents) WITH ORDINALITY AS u(number, position)
        JOIN {schema}.documents d ON d.number = u.number
        JOIN {schema}.customers c ON c.number = d.customer
    WHERE l.token = its_token AND d.state = {running} AND d.fence = l.fence
    ORDER BY u.position
$$;

-- Record outcomes, then claim, in one transaction. The lock of claims is taken before the documents.
CREATE OR REPLACE FUNCTION {schema}.claim_after(
    its_token uuid, n integer, its_worker text, lease bigint,
    given_now bigint, uptime bigint, its_boot text, budget integer,
    numbers bigint[], fences bigint[], kinds smallint[], errors text[], retries bigint[],
    kept_costs bigint[], real_costs bigint[],
    results text[], content_names text[], content_sizes bigint[], content_hashes bytea[],
    OUT claimed integer, OUT its_at bigint, OUT more boolean, OUT changed boolean,
    OUT repaired integer, OUT suspects bigint[], OUT cancelled bigint[], OUT lost integer[]
) LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1),
        pg_advisory_xact_lock_shared(hashtext('{schema}.'), 2);
    PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
    lost := {schema}.finish(given_now, numbers, fences, kinds, errors, retries, kept_costs, real_costs,
        results, content_names, content_sizes, content_hashes);
    SELECT c.claimed, c.its_at, c.more, c.repaired, c.suspects, c.cancelled
    INTO claimed, its_at, more, repaired, suspects, cancelled
    FROM {schema}.claim(its_token, n, its_worker, lease, given_now, uptime, its_boot, budget) c;
    changed := true;
END
$$;

-- Return whether a claim would change anything. By the primary keys, leases_until and documents_delayed.
CREATE OR REPLACE FUNCTION {schema}.has_work(its_at bigint, lease_now bigint, its_boot text)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    t {schema}.scheduler_states;
BEGIN
    SELECT * INTO t FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1;
    RETURN 0 < ANY (t.weights) OR t.boot <> its_boot OR its_at < t.at
        OR t.converted_to IS NOT NULL OR its_at > t.probed_at + {probe_every_idle}
        OR {schema}.hidden_level(t, its_at) IS NOT NULL
        OR NOT {schema}.is_same_incarnation((SELECT q.incarnation FROM {schema}.queue q))
        OR EXISTS (SELECT FROM {schema}.event_log r WHERE r.xid >= t.events_from)
        OR EXISTS (SELECT FROM {schema}.event_log r WHERE r.xid = ANY (t.events_late))
        OR EXISTS (SELECT FROM {schema}.counter_changes)
        OR EXISTS (SELECT FROM {schema}.unreported_cancels c WHERE c.number >= t.cancels_from)
        OR EXISTS (
            SELECT FROM {schema}.leases l
            WHERE l.until >= {schema}.leases_bound(t, its_at) AND l.until <= lease_now)
        OR EXISTS (SELECT FROM {schema}.leases l WHERE l.until > lease_now + {lease_max})
        OR EXISTS (SELECT FROM {schema}.documents d WHERE d.delayed_until <= its_at);
END
$$;

-- Return a level with an active flow although all sums of weights are 0, which only a wrong sum causes. Searched in
-- one second of 16, because idle claims would pay for it.
CREATE OR REPLACE FUNCTION {schema}.hidden_level(t {schema}.scheduler_states, its_at bigint) RETURNS integer
LANGUAGE plpgsql AS $$
BEGIN
    IF its_at / 1000000 % 16 <> 0 THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT o.level FROM {schema}.flows o
        WHERE o.folded > 0 AND NOT o.held AND o.generation = t.generation
        ORDER BY o.generation, o.level, o.place, o.tick LIMIT 1);
END
$$;

-- Return the lower bound of the search for expired leases. In one second of 16 there is none: a clock that is set back
-- and forth between two claims could leave a lease below the bound.
CREATE OR REPLACE FUNCTION {schema}.leases_bound(t {schema}.scheduler_states, its_at bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN its_at / 1000000 % 16 = 0 THEN -9223372036854775807 ELSE t.leases_from END
$$;

-- Recompute the sum of weights and the lowest place of a level from its active flows.
CREATE OR REPLACE FUNCTION {schema}.recount_level(t {schema}.scheduler_states, its_level integer)
RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    level_weight bigint;
    lowest_place bigint;
BEGIN
    SELECT coalesce(sum(least(greatest(coalesce(s.weight, {weight_one}), {weight_min}), {weight_max})), 0),
        coalesce(min(o.place), 0)
    INTO level_weight, lowest_place
    FROM {schema}.flows o LEFT JOIN {schema}.customer_states s ON s.customer = o.customer
    WHERE o.folded > 0 AND NOT o.held AND o.generation = t.generation AND o.level = its_level::smallint;
    t.weights[its_level] := level_weight;
    t.places_from[its_level] := lowest_place;
    RAISE LOG 'fairturn: recounted the active flows of level %', its_level;
    RETURN t;
END
$$;

-- Subtract each level's clock from its places, before virtual times reach 2^63. Only differences within a level matter.
CREATE OR REPLACE FUNCTION {schema}.rebase_clocks(t {schema}.scheduler_states) RETURNS {schema}.scheduler_states
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {schema}.flows o SET place = o.place - t.clocks[o.level];
    t.places_from := array_fill(-9223372036854775807, ARRAY[9]);
    t.clocks := array_fill(0::bigint, ARRAY[9]);
    RETURN t;
END
$$;

-- Compare the counters of the next customers with their flows, and return the customers where they do not agree. A
-- customer with unapplied events is left out: its flows are stale. By the primary keys and counter_changes_customer.
CREATE OR REPLACE FUNCTION {schema}.probe(INOUT t {schema}.scheduler_states, OUT suspects bigint[])
LANGUAGE plpgsql AS $$
DECLARE
    probed bigint[];
BEGIN
    SELECT array_agg(c.number), array_agg(c.number) FILTER (WHERE c.waiting <> c.folded AND NOT EXISTS (
            SELECT FROM {schema}.event_log r WHERE c.number = ANY (r.customers)))
    INTO probed, suspects
    FROM (
        SELECT o.number, (SELECT sum(n) FROM unnest(o.arrived) n) - coalesce(f.taken, 0) + (
                SELECT coalesce(sum(m.waiting), 0) FROM {schema}.counter_changes m WHERE m.customer = o.number)
                AS waiting,
            coalesce(f.folded, 0) AS folded
        FROM {schema}.customers o CROSS JOIN LATERAL (
            SELECT sum((SELECT sum(n) FROM unnest(x.taken) n)) AS taken, sum(x.folded) AS folded
            FROM {schema}.flows x WHERE x.customer = o.number) f
        WHERE o.number > t.probed_to ORDER BY o.number LIMIT {probe_size}) c;
    t.probed_to := CASE WHEN cardinality(probed) = {probe_size} THEN probed[{probe_size}] ELSE 0 END;
    suspects := coalesce(suspects, '{{}}');
END
$$;

-- Count attempts and documents that ended other than completed, in the first row that is not locked.
CREATE OR REPLACE FUNCTION {schema}.count_outcomes(
    its_attempts bigint, its_retried bigint,
    ended smallint[]                -- the states of documents that ended; other than failed ones are not counted
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    shard bigint;
BEGIN
    IF its_attempts = 0 AND its_retried = 0 AND ended = '{{}}' THEN
        RETURN;
    END IF;
    SELECT o.number INTO shard FROM {schema}.outcome_counters o
    ORDER BY o.number LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        INSERT INTO {schema}.outcome_counters (attempts) VALUES (0) RETURNING number INTO shard;
    END IF;
    UPDATE {schema}.outcome_counters e SET attempts = e.attempts + its_attempts,
        retried = e.retried + its_retried, {count_failed}
    WHERE e.number = shard;
END
$$;
