-- Cancel documents that have not started, and ask running ones to stop. Returns the state of each afterwards; NULL if
-- there is no such document. Under the lock of claims, so that no claim takes the documents meanwhile.
CREATE OR REPLACE FUNCTION {schema}.cancel(given_now bigint, numbers bigint[]) RETURNS smallint[]
LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    now_us bigint;
    ended bigint[];
    last_cancel bigint;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
    now_us := coalesce(given_now, {now});
    PERFORM FROM {schema}.documents d WHERE d.number = ANY (numbers)
    ORDER BY d.number FOR NO KEY UPDATE NOWAIT;     -- claims wait for this call, so it must not wait
    UPDATE {schema}.documents d SET cancel_requested = true WHERE d.number = ANY (numbers) AND d.state = {running};
    ended := {schema}.end_pending(numbers, {cancelled}::smallint, now_us);
    WITH unreported AS (
        INSERT INTO {schema}.unreported_cancels (document)
        SELECT u.number FROM unnest(ended) WITH ORDINALITY AS u(number, position) ORDER BY u.position
        RETURNING number)
    SELECT max(u.number) INTO last_cancel FROM unreported u;
    DELETE FROM {schema}.unreported_cancels c
    WHERE c.number <= last_cancel - {cancels_kept_max}
        AND c.number >= (SELECT t.cancels_from FROM {schema}.scheduler_states t ORDER BY t.version DESC LIMIT 1);
    PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
    RETURN ARRAY(
        SELECT d.state FROM unnest(numbers) WITH ORDINALITY AS u(number, position)
            LEFT JOIN {schema}.documents d ON d.number = u.number
        ORDER BY u.position);
END
$$;

-- End those of these documents that wait or are delayed, in this order: they were cancelled or have expired. The caller
-- has locked the row of `queue` and the documents. Returns the numbers of those that ended.
CREATE OR REPLACE FUNCTION {schema}.end_pending(numbers bigint[], new_state smallint, now_us bigint) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    ended bigint[];
BEGIN
    WITH found AS MATERIALIZED (
        SELECT d.number, d.state, d.customer, d.level, d.priority, d.kind, d.order_number,
            array_position(numbers, d.number) AS position
        FROM {schema}.documents d WHERE d.number = ANY (numbers) AND d.state IN ({waiting}, {delayed})),
    changed AS (
        UPDATE {schema}.documents d SET state = new_state, failed = true, returned = false, delayed_until = NULL,
            ended_at = now_us
        FROM found f WHERE d.number = f.number),
    counted AS (
        INSERT INTO {schema}.counter_changes (customer, priority, kind, waiting, delayed)
        SELECT f.customer, f.priority, f.kind, -count(*) FILTER (WHERE f.state = {waiting}),
            -count(*) FILTER (WHERE f.state = {delayed})
        FROM found f GROUP BY f.customer, f.priority, f.kind),
    -- The lowest order that stays in each flow.
    staying AS MATERIALIZED (
        SELECT w.customer, w.level, least((
            SELECT min(d.order_number) FROM {schema}.documents d
            WHERE d.returned AND d.customer = w.customer AND d.level = w.level
                AND d.number <> ALL (numbers)), (
            SELECT d.order_number FROM {schema}.documents d
            WHERE d.customer = w.customer AND d.level = w.level AND d.state = {waiting}
                AND NOT d.returned AND d.number <> ALL (numbers) AND d.order_number > coalesce((
                    SELECT nullif(max(o.claimed_to), {no_order}) FROM {schema}.flows o
                    WHERE o.customer = w.customer AND o.level = w.level), 0)
            ORDER BY d.customer, d.level, d.order_number LIMIT 1)) AS lowest
        FROM (SELECT DISTINCT f.customer, f.level FROM found f WHERE f.state = {waiting}) w),
    -- The head of the flow after each departure.
    departed AS (
        SELECT f.*, least(s.lowest, min(f.order_number) OVER (
            PARTITION BY f.customer, f.level ORDER BY f.position DESC
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS next_order
        FROM found f JOIN staying s ON s.customer = f.customer AND s.level = f.level
        WHERE f.state = {waiting}),
    recorded AS (
        INSERT INTO {schema}.event_log (at, customers, events)
        SELECT now_us, array_agg(DISTINCT f.customer), json_agg(json_build_array(
            1, f.customer, f.level, f.order_number, f.next_order) ORDER BY f.position)::text
        FROM departed f HAVING count(*) > 0)
    SELECT coalesce(array_agg(f.number ORDER BY f.position), '{{}}') INTO ended FROM found f;
    PERFORM {schema}.count_outcomes(0, 0, array_fill(new_state, ARRAY[cardinality(ended)]));
    RETURN ended;
END
$$;

-- Return dead documents to the queue, and with a new expiry expired ones too: to their order, or delayed again if they
-- were never due. Returns the state that each had before; NULL if there is no such document. Returns NULL and changes
-- nothing if the expiry has passed.
CREATE OR REPLACE FUNCTION {schema}.retry(given_now bigint, numbers bigint[], new_expires_at bigint DEFAULT NULL)
RETURNS smallint[] LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    now_us bigint;
    is_one_level boolean;
    states smallint[];
    retried constant smallint[] :=
        CASE WHEN new_expires_at IS NULL THEN ARRAY[{dead}] ELSE ARRAY[{dead}, {expired}] END;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    SELECT q.one_level INTO is_one_level FROM {schema}.queue q;
    now_us := coalesce(given_now, {now});
    IF new_expires_at <= now_us THEN
        RETURN NULL;
    ELSIF new_expires_at IS NOT NULL THEN
        PERFORM {schema}.require_schema({schema_of_steps});
    END IF;
    WITH found AS MATERIALIZED (
        SELECT d.number, d.customer, d.priority, d.kind, d.order_number, d.due_at,
            {schema}.band(is_one_level, d.priority, d.kind) AS level,
            CASE WHEN d.order_number IS NULL THEN {delayed} ELSE {waiting} END::smallint AS new_state,
            array_position(numbers, d.number) AS position
        -- Only documents that have ended are locked: claims lock waiting ones in another order.
        FROM {schema}.documents d WHERE d.number = ANY (numbers) AND d.state = ANY (retried)
        ORDER BY d.number FOR NO KEY UPDATE),
    revived AS (
        UPDATE {schema}.documents d SET state = f.new_state, returned = (f.new_state = {waiting}), failed = false,
            attempts = 0, snoozes = 0, ended_at = NULL, level = f.level, expires_at = new_expires_at,
            delayed_until = CASE f.new_state WHEN {delayed} THEN coalesce(f.due_at, 0) END
        FROM found f WHERE d.number = f.number),
    expiring AS (
        INSERT INTO {schema}.expirations (expires_at, document)
        SELECT new_expires_at, f.number FROM found f WHERE new_expires_at IS NOT NULL ON CONFLICT DO NOTHING),
    counted AS (
        INSERT INTO {schema}.counter_changes (customer, priority, kind, waiting, delayed)
        SELECT f.customer, f.priority, f.kind, count(*) FILTER (WHERE f.new_state = {waiting}),
            count(*) FILTER (WHERE f.new_state = {delayed})
        FROM found f GROUP BY f.customer, f.priority, f.kind),
    recorded AS (
        INSERT INTO {schema}.event_log (at, customers, events)
        SELECT now_us, array_agg(DISTINCT f.customer), json_agg(json_build_array(
            0, f.customer, f.level, f.order_number, 1) ORDER BY f.position)::text
        FROM found f WHERE f.new_state = {waiting} HAVING count(*) > 0)
    SELECT ARRAY(
        SELECT CASE WHEN u.position > f.position THEN f.new_state ELSE d.state END
        FROM unnest(numbers) WITH ORDINALITY AS u(number, position)
            LEFT JOIN {schema}.documents d ON d.number = u.number
            LEFT JOIN found f ON f.number = u.number
        ORDER BY u.position) INTO states;
    PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
    RETURN states;
END
$$;

-- Change a customer's settings, if they are the expected ones or `is_expected` is false. The lock on limits excludes
-- `finish` while a limit is set: every later outcome inserts an event for the customer.
CREATE OR REPLACE FUNCTION {schema}.adjust(
    given_now bigint, its_name text, new_weight integer, new_limit integer, new_paused boolean, new_bytes_max bigint,
    is_expected boolean, old_weight integer, old_limit integer, old_paused boolean, old_bytes_max bigint
) RETURNS boolean LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
AS $$
DECLARE
    owner bigint;
    is_same boolean;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    LOOP
        INSERT INTO {schema}.customers (name) VALUES (its_name) ON CONFLICT (name) DO NOTHING;
        SELECT c.number, (c.weight, c.running_max, c.paused, c.bytes_max)
            IS NOT DISTINCT FROM (old_weight, old_limit, old_paused, old_bytes_max)
        INTO owner, is_same FROM {schema}.customers c WHERE c.name = its_name FOR NO KEY UPDATE;
        EXIT WHEN FOUND;            -- a purge may delete the row while this waits for it
    END LOOP;
    IF is_expected AND NOT is_same THEN
        RETURN false;
    END IF;
    IF new_limit IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 2);
        INSERT INTO {schema}.limited_customers AS l (customer) VALUES (owner)
        ON CONFLICT (customer) DO UPDATE SET customer = l.customer;
    END IF;
    UPDATE {schema}.customers c SET weight = new_weight, running_max = new_limit, paused = new_paused,
        bytes_max = new_bytes_max
    WHERE c.number = owner;
    INSERT INTO {schema}.event_log (at, customers, events)
    VALUES (coalesce(given_now, {now}), ARRAY[owner], json_build_array(json_build_array(
        5, owner, new_weight, new_limit, new_paused))::text);
    PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
    RETURN true;
END
$$;

-- Replace the settings, if those in force have the expected version (NULL: any). Returns 0 if they have another
-- version, 1 if the new settings are in force, and 2 if more events must be applied before the mode can change: call it
-- again. A new mode begins a generation of flows, with all clocks at 0; `convert` moves customers into it.
CREATE OR REPLACE FUNCTION {schema}.configure(
    given_now bigint, uptime bigint, its_boot text, budget integer, expected_version bigint,
    new_settings text, new_depths bigint[], new_reset_interval bigint, new_periodic boolean,
    new_one_level boolean, new_waiting_max bigint, new_waiting_per_customer_max bigint,
    new_mode text, new_costs text, new_patience bigint, new_attempts_max integer, new_bytes_per_customer_max bigint
) RETURNS smallint LANGUAGE plpgsql
SET lock_timeout = '{settings_lock_timeout}'    -- submissions wait while this call waits
SET plan_cache_mode = force_generic_plan SET jit = off
AS $$
DECLARE
    q {schema}.queue;
    t {schema}.scheduler_states;
    r record;
    now_us bigint;
    new_charges_from bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 1);
    PERFORM {schema}.check_epoch();
    SELECT * INTO q FROM {schema}.queue FOR NO KEY UPDATE;
    IF q.settings_version <> expected_version THEN
        RETURN 0;
    END IF;
    new_charges_from := q.charges_from;
    IF q.mode <> new_mode THEN
        now_us := coalesce(given_now, {now});
        SELECT * INTO t FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1;
        t.version := t.version + 1;
        SELECT * INTO r FROM {schema}.fold(t, q, now_us, coalesce(uptime, now_us), t.boot <> its_boot, budget);
        t := r.t;
        t.boot := its_boot;
        IF NOT r.more AND t.converted_to IS NOT NULL THEN
            SELECT * INTO r FROM {schema}.convert(t, q, budget);    -- finish the previous change of mode
            t := r.t;
        END IF;
        IF NOT r.more THEN
            t := {schema}.begin_generation(t, q.one_level <> new_one_level);
            new_charges_from := t.fence;
        END IF;
        PERFORM {schema}.save_state(t);
        IF r.more THEN
            RETURN 2;
        END IF;
    END IF;
    UPDATE {schema}.queue SET settings_version = settings_version + 1, settings = new_settings,
        depths = new_depths, reset_interval = new_reset_interval, periodic = new_periodic,
        one_level = new_one_level, waiting_max = new_waiting_max,
        waiting_per_customer_max = new_waiting_per_customer_max, mode = new_mode,
        costs = new_costs, patience = new_patience, attempts_max = new_attempts_max,
        bytes_per_customer_max = new_bytes_per_customer_max,
        charges_from = new_charges_from;
    RETURN 1;
END
$$;

-- Delete up to `budget` documents of a customer; once none is left, the customer itself. Returns the contents of the
-- deleted documents, and whether nothing is left of the customer.
CREATE OR REPLACE FUNCTION {schema}.purge(
    given_now bigint, its_name text, budget integer, OUT contents text[], OUT done boolean
) LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    owner bigint;
    now_us bigint;
    numbers bigint[];
    fences bigint[];
    running_count bigint;
    n bigint;
BEGIN
    contents := '{{}}';
    done := true;
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    SELECT c.number INTO owner FROM {schema}.customers c WHERE c.name = its_name FOR UPDATE;
    IF NOT FOUND THEN
        DELETE FROM {schema}.access_keys a WHERE a.customer = its_name;
        RETURN;
    END IF;
    PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
    now_us := coalesce(given_now, {now});
    numbers := ARRAY(
        SELECT f.number FROM (
            SELECT d.number FROM {schema}.documents d WHERE d.customer = owner
            LIMIT budget FOR UPDATE NOWAIT) f);     -- claims wait for this call, so it must not wait
    contents := ARRAY(
        SELECT d.content_name FROM {schema}.documents d
        WHERE d.number = ANY (numbers) AND d.content_name IS NOT NULL
        UNION ALL
        SELECT r.content_name FROM {schema}.results r
        WHERE r.document = ANY (numbers) AND r.content_name IS NOT NULL);
    WITH gone AS MATERIALIZED (
        SELECT d.number, d.state, d.level, d.priority, d.kind, d.order_number, d.fence
        FROM {schema}.documents d WHERE d.number = ANY (numbers)),
    leaving AS (
        UPDATE {schema}.leases l SET running = l.running - e.n
        FROM (SELECT g.fence, count(*) AS n FROM gone g WHERE g.state = {running} GROUP BY g.fence) e
        WHERE l.fence = e.fence),
    counted AS (
        INSERT INTO {schema}.counter_changes (customer, priority, kind, waiting, delayed)
        SELECT owner, g.priority, g.kind, -count(*) FILTER (WHERE g.state = {waiting}),
            -count(*) FILTER (WHERE g.state = {delayed})
        FROM gone g WHERE g.state IN ({waiting}, {delayed}) GROUP BY g.priority, g.kind),
    events AS (
        SELECT g.number, CASE WHEN g.state = {waiting}
            THEN json_build_array(1, owner, g.level, g.order_number, NULL)
            ELSE json_build_array(2, owner, g.level, 1) END AS event
        FROM gone g WHERE g.state IN ({waiting}, {running})),
    recorded AS (
        INSERT INTO {schema}.event_log (at, customers, events)
        SELECT now_us, ARRAY[owner], json_agg(e.event ORDER BY e.number DESC)::text
        FROM events e HAVING count(*) > 0)
    SELECT count(*), array_agg(g.fence) INTO running_count, fences
    FROM gone g WHERE g.state = {running};
    PERFORM {schema}.count_outcomes(running_count, 0, '{{}}');
    INSERT INTO {schema}.released_bytes (customer, bytes)
    SELECT owner, sum({stored_bytes}) FROM {schema}.documents d WHERE d.number = ANY (numbers)
    HAVING count(*) > 0;
    DELETE FROM {schema}.leases l WHERE l.fence = ANY (fences) AND l.running <= 0;
    DELETE FROM {schema}.results r WHERE r.document = ANY (numbers);
    contents := contents || {schema}.delete_attempts(numbers);
    DELETE FROM {schema}.children c WHERE c.parent = ANY (numbers);
    DELETE FROM {schema}.expirations e USING {schema}.documents d
    WHERE d.number = ANY (numbers) AND e.expires_at = d.expires_at AND e.document = d.number;
    DELETE FROM {schema}.documents d WHERE d.number = ANY (numbers);
    done := cardinality(numbers) < budget;
    IF done THEN
        DELETE FROM {schema}.idempotency_keys k WHERE k.customer = owner AND k.key = ANY (ARRAY(
            SELECT o.key FROM {schema}.idempotency_keys o WHERE o.customer = owner LIMIT 10 * budget));
        GET DIAGNOSTICS n = ROW_COUNT;
        done := n < 10 * budget;
    END IF;
    IF done THEN
        DELETE FROM {schema}.customers c WHERE c.number = owner;
        DELETE FROM {schema}.released_bytes r WHERE r.customer = owner;
        DELETE FROM {schema}.access_keys a WHERE a.customer = its_name;
        INSERT INTO {schema}.event_log (at, customers, events)
        VALUES (now_us, ARRAY[owner], json_build_array(json_build_array(6, owner))::text);
    END IF;
    PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
END
$$;
