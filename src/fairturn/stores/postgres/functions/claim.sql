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
    its_kinds text[],               -- that the worker serves; NULL: every kind
    capped_kinds text[], caps integer[],    -- the most documents to take of some kinds
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
    has_recorded boolean;
    served smallint[];              -- the kinds that may give documents, by name,
    free integer[];                 -- how many each of them may give,
    probing smallint[];             -- and those that an outage holds: each may give one, as a probe
    numbers bigint[] := '{{}}';     -- of the claimed documents
    charged_costs bigint[] := '{{}}';
    charged_weights bigint[] := '{{}}';
    charges bigint[] := '{{}}';
    is_due boolean;                 -- one of the kinds has counted nine claims since its last patience claim
    is_patient boolean;
    any_patient boolean;
    ended_kinds smallint[];         -- that may give no more
    next_band smallint;
    its_kind smallint;
    rival bigint;                   -- where the next turn is that of another kind: its kind time, in mode levels an order
    page_max integer;
    page {schema}.flows[];          -- the next flows in turn
    f {schema}.flows;               -- the flow that has the turn,
    following {schema}.flows;       -- and the one after it
    back_place bigint;              -- the first turn of a flow of this page that comes again
    back_tick bigint;
    d record;
    i integer;                      -- the position of the band in the arrays of the state,
    k integer;                      -- that of its kind,
    p integer;                      -- and that of its kind among those served
    clock bigint;
    kind_time bigint;
    level_time bigint;
    since_patience bigint;
    owner {schema}.customer_states; -- NULL: the defaults
    customer_weight bigint;
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
    IF NOT {schema}.has_work(its_at, coalesce(uptime, its_at), its_boot, its_kinds, capped_kinds, caps)
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
    -- 4. Documents that have expired. Expired leases, events, due documents; the conversion after a change of mode.
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 7);
    its_at := coalesce(given_now, {now});
    lease_now := coalesce(uptime, its_at);
    SELECT * INTO r FROM {schema}.record_expired(its_at, {expire_max});
    has_recorded := r.expired > 0;
    IF r.more THEN
        changed := true;
        more := true;
        RETURN;
    END IF;
    SELECT * INTO t FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1;
    t.version := t.version + 1;
    SELECT * INTO r FROM {schema}.fold(t, q, its_at, lease_now, t.boot <> its_boot, budget);
    t := r.t;
    more := r.more;
    changed := r.changed OR has_recorded;
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
    SELECT o.numbers, o.free, o.probing INTO served, free, probing
    FROM {schema}.free_kinds(its_at, its_kinds, capped_kinds, caps) o;
    IF served <> t.kinds THEN
        t := {schema}.load_kinds(t, served, only_used => true);
    END IF;
    any_patient := false;
    IF q.mode <> 'levels' AND 10 - n <= ANY (t.since_patience) THEN     -- a patience claim may be due
        any_patient := ({schema}.longest_waiting(t, served, its_at - q.patience)).customer IS NOT NULL;
    END IF;
    WHILE claimed < n AND served <> '{{}}' LOOP
        -- Read a page of flows in the order of turns, or the flow of the customer that has waited longest.
        is_due := 9 <= ANY (t.since_patience) AND {schema}.is_patience_due(t, served);
        is_patient := false;
        IF any_patient AND is_due THEN
            f := {schema}.longest_waiting(t, served, its_at - q.patience);
            is_patient := f.customer IS NOT NULL;
            any_patient := is_patient;
        END IF;
        IF is_patient THEN
            next_band := f.level;
            page := ARRAY[f];
            page_max := 1;
        ELSE
            SELECT o.band, o.rival INTO next_band, rival FROM {schema}.next_band(t, q.mode, served) o;
            IF next_band IS NULL THEN
                next_band := {schema}.hidden_band(t, served, its_at);
                EXIT WHEN next_band IS NULL;
                t := {schema}.recount_band({schema}.load_kinds(t, ARRAY[next_band / 10]::smallint[]), next_band);
                EXIT WHEN t.weights[{schema}.slot(t.kinds, next_band)] <= 0;
                repaired := repaired + 1;
                changed := true;
                CONTINUE;
            END IF;
        END IF;
        its_kind := next_band / 10;
        i := {schema}.slot(t.kinds, next_band);
        k := array_position(t.kinds, its_kind);
        p := array_position(served, its_kind);
        clock := t.clocks[i];
        kind_time := t.kind_times[i];
        level_time := t.level_times[next_band % 10];
        since_patience := CASE WHEN is_due THEN 9 ELSE t.since_patience[k] END;
        IF is_patient THEN
            t.kind_heads_from[k] := f.head_since;
        ELSE
            page_max := least(n - claimed, free[p], {page});
            IF rival IS NOT NULL AND q.mode <> 'levels' THEN
                -- An estimate of the turns until that of another kind: with all costs 1.
                page_max := least(page_max, 1 + (rival - kind_time) / greatest({cost_one} * 1000 / t.weights[i], 1));
            END IF;
            page := ARRAY(
                SELECT o FROM {schema}.flows o
                WHERE o.folded > 0 AND NOT o.held AND o.generation = t.generation
                    AND o.level = next_band AND o.place >= t.places_from[i]
                ORDER BY o.generation, o.level, o.place, o.tick LIMIT page_max + 1);
            IF page = '{{}}' THEN
                -- The sum of weights does not agree with the flows.
                t := {schema}.recount_band(t, next_band);
                repaired := repaired + 1;
                changed := true;
                CONTINUE;
            END IF;
        END IF;

        back_place := NULL;
        FOR j IN 1 .. least(cardinality(page), page_max) LOOP
            f := page[j];
            following := page[j + 1];
            -- The page ends where a flow that had a turn comes first again, or with the turn of another kind or of
            -- the longest wait.
            EXIT WHEN claimed = n OR j > 1 AND (
                free[p] = 0 OR (any_patient AND since_patience = 9)
                OR CASE WHEN q.mode = 'levels' THEN f.place ELSE kind_time END >= rival
                OR (f.place, f.tick) > (back_place, back_tick));
            IF following.customer IS NULL OR (following.place, following.tick) > (back_place, back_tick)
            THEN
                following.place := back_place;
                following.tick := back_tick;
            END IF;
            IF NOT is_patient THEN
                t.places_from[i] := f.place;
            END IF;

            SELECT * INTO owner FROM {schema}.customer_states s WHERE s.customer = f.customer;
            customer_weight := least(greatest(coalesce(owner.weight, {weight_one}), {weight_min}), {weight_max});
            IF t.weights[i] < customer_weight THEN
                -- The sum of weights does not contain this flow's.
                t := {schema}.recount_band(t, f.level);
                repaired := repaired + 1;
            END IF;
            document_cost := {cost_one};
            IF q.costs = 'learned' AND owner.customer IS NOT NULL THEN
                document_cost := coalesce((
                    SELECT least(greatest(div(sum(v), count(*)), 0), {real_cost_max})
                    FROM unnest({schema}.costs_of(owner, its_kind)) v HAVING count(*) > 0), {cost_one});
            END IF;
            run_max := CASE WHEN is_patient THEN least(1, f.folded)
                WHEN any_patient THEN least(n - claimed, f.folded, free[p], 9 - since_patience)
                ELSE least(n - claimed, f.folded, free[p]) END;
            IF owner.running_max IS NOT NULL THEN
                run_max := greatest(0, least(run_max, owner.running_max - (
                    SELECT sum(o.running) FROM {schema}.flows o WHERE o.customer = f.customer)));
            END IF;
            run := 0;
            next_order := NULL;
            -- By documents_flow and documents_returned.
            FOR d IN
                SELECT w.* FROM (
                    (SELECT o.order_number, o.number, o.priority, o.cost, false AS returned, o.expires_at,
                        o.expires_at <= its_at AND o.step = 0 AND o.attempts = 0 AS has_expired
                    FROM {schema}.documents o
                    WHERE o.customer = f.customer AND o.level = f.level
                        AND o.order_number > f.claimed_to AND o.state = {waiting} AND NOT o.returned
                    ORDER BY o.customer, o.level, o.order_number LIMIT run_max + 1)
                    UNION ALL
                    (SELECT o.order_number, o.number, o.priority, o.cost, true, o.expires_at,
                        o.expires_at <= its_at AND o.step = 0 AND o.attempts = 0
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
                    AND CASE WHEN q.mode = 'levels' THEN next_order > following.place OR next_order >= rival
                        ELSE (f.place, f.tick) > (following.place, following.tick) OR kind_time >= rival END);
                IF d.has_expired THEN
                    -- It was given back or submitted since step 4. The next call records it.
                    INSERT INTO {schema}.expirations (expires_at, document) VALUES (d.expires_at, d.number)
                    ON CONFLICT DO NOTHING;
                    more := true;
                    is_behind := true;
                    EXIT;
                END IF;
                run := run + 1;
                next_order := NULL;
                t.claims := t.claims + 1;
                t.taken[d.priority] := t.taken[d.priority] + 1;
                IF k > 1 THEN
                    t.taken[9 * k - 9 + d.priority] := t.taken[9 * k - 9 + d.priority] + 1;
                END IF;
                f.taken[d.priority] := f.taken[d.priority] + 1;
                IF NOT d.returned THEN
                    f.claimed_to := d.order_number;
                END IF;
                since_patience := since_patience + 1;
                IF since_patience > 9 THEN
                    t := {schema}.restart_patience(t, served);
                    since_patience := 0;
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
                    clock := greatest(clock + document_cost * 1000 / t.weights[i], f.place);
                    level_time := greatest(level_time, kind_time);
                    kind_time := kind_time + document_cost * 1000 / t.weights[i];
                    t.last_claims[i] := t.claims;
                    f.place := f.place + document_charge;
                    charged_costs := charged_costs || document_cost;
                    charged_weights := charged_weights || customer_weight;
                    charges := charges || document_charge;
                END IF;
            END LOOP;
            t.clocks[i] := clock;
            t.kind_times[i] := kind_time;
            t.level_times[next_band % 10] := level_time;
            t.since_patience[k] := since_patience;
            free[p] := free[p] - run;
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
                t.weights[i] := t.weights[i] - customer_weight;
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
            IF owner.running_max IS NOT NULL THEN
                -- At the limit, all flows of the customer are held.
                t := {schema}.change_flow(t, q.mode, f.customer, NULL, its_at);
            END IF;
            EXIT WHEN is_behind;
        END LOOP;
        EXIT WHEN is_behind;        -- the caller repeats the call
        IF free[p] <= 0 THEN
            ended_kinds := ARRAY[its_kind];
            IF its_kind = ANY (probing) THEN
                ended_kinds := {schema}.take_probe(its_kind, served, lease, its_at);
            END IF;
            SELECT coalesce(array_agg(u.number ORDER BY u.position), '{{}}'), coalesce(array_agg(u.n ORDER BY u.position), '{{}}')
            INTO served, free FROM unnest(served, free) WITH ORDINALITY AS u(number, n, position)
            WHERE u.number <> ALL (ended_kinds);
        END IF;
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
        IF {clock_max} < ANY (t.clocks) OR {clock_max} < ANY (t.kind_times) THEN
            t := {schema}.rebase_clocks(t);
        END IF;
        PERFORM {schema}.save_state(t);
    END IF;
END
$$;

-- Return the documents of a claim, in the order of service, with the value and content of their last step, their finished
-- steps (a JSON array; NULL: none) and their checkpoint. By leases_token and the primary keys.
CREATE OR REPLACE FUNCTION {schema}.claimed(its_token uuid)
RETURNS TABLE (document {schema}.documents, customer_name text, previous text, content_name text, content_size bigint,
    content_hash bytea, steps text, checkpoint text) LANGUAGE sql STABLE
{planned_by_indexes}
AS $$
    SELECT d, c.name, a.value, a.content_name, a.size_bytes, a.sha256, s.steps,
        (SELECT p.value FROM {schema}.checkpoints p WHERE p.document = d.number)
    FROM {schema}.leases l
        CROSS JOIN LATERAL unnest(l.documents) WITH ORDINALITY AS u(number, position)
        JOIN {schema}.documents d ON d.number = u.number
        JOIN {schema}.customers c ON c.number = d.customer
        LEFT JOIN LATERAL (
            SELECT o.* FROM {schema}.attempts o
            WHERE d.step > 0 AND o.document = d.number AND o.outcome = {advanced}
            ORDER BY o.document DESC, o.number DESC LIMIT 1) a ON true
        LEFT JOIN LATERAL (
            SELECT json_agg(json_build_array(o.step, k.name, o.attempt, o.worker, o.claimed_at, o.ended_at)
                ORDER BY o.number)::text AS steps
            FROM {schema}.attempts o JOIN {schema}.kinds k ON k.number = o.kind
            WHERE d.step > 0 AND o.document = d.number AND o.outcome = {advanced}) s ON true
    WHERE l.token = its_token AND d.state = {running} AND d.fence = l.fence
    ORDER BY u.position
$$;

-- Record outcomes, then claim, in one transaction. The lock of claims is taken before the documents.
CREATE OR REPLACE FUNCTION {schema}.claim_after(
    its_token uuid, n integer, its_worker text, lease bigint,
    given_now bigint, uptime bigint, its_boot text, budget integer,
    its_kinds text[], capped_kinds text[], caps integer[],
    numbers bigint[], fences bigint[], codes smallint[], errors text[], delays bigint[],
    kept_costs bigint[], real_costs bigint[],
    results text[], content_names text[], content_sizes bigint[], content_hashes bytea[],
    details text[], next_kinds text[], next_costs bigint[], services text[],
    OUT claimed integer, OUT its_at bigint, OUT more boolean, OUT changed boolean,
    OUT repaired integer, OUT suspects bigint[], OUT cancelled bigint[], OUT lost integer[]
) LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1),
        pg_advisory_xact_lock_shared(hashtext('{schema}.'), 2);
    PERFORM {schema}.prepare_outcomes(numbers, fences, codes, next_kinds);
    PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
    lost := {schema}.finish(given_now, numbers, fences, codes, errors, delays, kept_costs, real_costs,
        results, content_names, content_sizes, content_hashes, details, next_kinds, next_costs, services);
    SELECT c.claimed, c.its_at, c.more, c.repaired, c.suspects, c.cancelled
    INTO claimed, its_at, more, repaired, suspects, cancelled
    FROM {schema}.claim(its_token, n, its_worker, lease, given_now, uptime, its_boot, budget,
        its_kinds, capped_kinds, caps) c;
    changed := true;
END
$$;

-- Return whether a claim of these kinds would change anything. By the primary keys, leases_until and documents_delayed.
CREATE OR REPLACE FUNCTION {schema}.has_work(
    its_at bigint, lease_now bigint, its_boot text, its_kinds text[], capped_kinds text[], caps integer[]
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    t {schema}.scheduler_states;
    served smallint[];
BEGIN
    SELECT * INTO t FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1;
    SELECT k.numbers INTO served FROM {schema}.free_kinds(its_at, its_kinds, capped_kinds, caps) k;
    IF {default_kind} = ANY (served) AND 0 < ANY (t.weights) THEN
        RETURN true;
    END IF;
    IF served <> t.kinds AND EXISTS (
        SELECT FROM unnest(served) AS k CROSS JOIN LATERAL {schema}.kind_state(k) s WHERE 0 < ANY (s.weights))
    THEN
        RETURN true;
    END IF;
    RETURN t.boot <> its_boot OR its_at < t.at
        OR t.converted_to IS NOT NULL OR its_at > t.probed_at + {probe_every_idle}
        OR {schema}.hidden_band(t, served, its_at) IS NOT NULL
        OR NOT {schema}.is_same_incarnation((SELECT q.incarnation FROM {schema}.queue q))
        OR EXISTS (SELECT FROM {schema}.event_log r WHERE r.xid >= t.events_from)
        OR EXISTS (SELECT FROM {schema}.event_log r WHERE r.xid = ANY (t.events_late))
        OR EXISTS (SELECT FROM {schema}.counter_changes)
        OR EXISTS (SELECT FROM {schema}.unreported_cancels c WHERE c.number >= t.cancels_from)
        OR {schema}.has_expired(t, its_at, lease_now)
        OR EXISTS (SELECT FROM {schema}.expirations e WHERE e.expires_at <= its_at)
        OR EXISTS (SELECT FROM {schema}.documents d WHERE d.delayed_until <= its_at);
END
$$;

-- Return whether a lease may have expired. One that ends later than the longest possible lease has, too.
CREATE OR REPLACE FUNCTION {schema}.has_expired(t {schema}.scheduler_states, its_at bigint, lease_now bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (
            SELECT FROM {schema}.leases l
            WHERE l.until >= {schema}.leases_bound(t, its_at) AND l.until <= lease_now)
        OR EXISTS (SELECT FROM {schema}.leases l WHERE l.until > lease_now + {lease_max});
END
$$;

-- Return the lower bound of the search for expired leases. In one second of 16 there is none: a clock that is set back
-- and forth between two claims could leave a lease below the bound.
CREATE OR REPLACE FUNCTION {schema}.leases_bound(t {schema}.scheduler_states, its_at bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN its_at / 1000000 % 16 = 0 THEN -9223372036854775807 ELSE t.leases_from END
$$;

-- Compare the counters of the next customers with their flows in all kinds, and return the customers where they do not
-- agree. A customer with unapplied events is left out: its flows are stale. By the primary keys and
-- counter_changes_customer.
CREATE OR REPLACE FUNCTION {schema}.probe(INOUT t {schema}.scheduler_states, OUT suspects bigint[])
LANGUAGE plpgsql AS $$
DECLARE
    c record;
    f record;
    customers integer := 0;
    flows bigint := 0;
BEGIN
    suspects := '{{}}';
    FOR c IN
        SELECT o.number, (SELECT sum(n) FROM unnest(o.arrived) n) + (
                SELECT coalesce(sum(m.waiting), 0) FROM {schema}.counter_changes m WHERE m.customer = o.number) AS arrived
        FROM {schema}.customers o WHERE o.number > t.probed_to ORDER BY o.number LIMIT {probe_size}
    LOOP
        SELECT count(*) AS n, coalesce(sum((SELECT sum(n) FROM unnest(x.taken) n)), 0) AS taken,
            coalesce(sum(x.folded), 0) AS folded
        INTO f FROM {schema}.flows x WHERE x.customer = c.number;
        IF c.arrived - f.taken <> f.folded AND NOT EXISTS (
            SELECT FROM {schema}.event_log r WHERE c.number = ANY (r.customers))
        THEN
            suspects := suspects || c.number;
        END IF;
        t.probed_to := c.number;
        customers := customers + 1;
        flows := flows + f.n;
        EXIT WHEN flows >= {probe_flows_max};
    END LOOP;
    IF customers < {probe_size} AND flows < {probe_flows_max} THEN
        t.probed_to := 0;
    END IF;
END
$$;
