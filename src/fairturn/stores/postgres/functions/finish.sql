-- Record the outcomes of attempts, each exactly once: an outcome counts only while its fence is the document's last and
-- the document is running. Returns the positions of the outcomes that did not count. Codes of outcomes are those of
-- fairturn.stores.postgres.finish, the next states those of fairturn.stores.transitions.
CREATE OR REPLACE FUNCTION {schema}.finish(
    given_now bigint,                  -- NULL: the clock of the server
    numbers bigint[], fences bigint[],
    codes smallint[],               -- 0: completed, 1: failed, 2: released, 3: stopped, 4: advanced, 5: snoozed, 6: outage report
    errors text[],                  -- failed and outage reports
    delays bigint[],                -- in microseconds. Failed: until the retry; NULL: no retry. Snoozed. Outage reports: until the
                                    -- service may be available
    kept_costs bigint[],            -- completed: the cost to store
    real_costs bigint[],            -- completed and advanced: the cost to learn from; NULL: the time that the attempt took
    results text[],                 -- completed; advanced: the value of the step
    content_names text[], content_sizes bigint[], content_hashes bytea[],   -- the same
    details text[],                 -- failed
    next_kinds text[],              -- advanced: the kind of the next step,
    next_costs bigint[],            -- and its cost; NULL: as before
    services text[]                 -- outage reports; NULL: of the kind alone
) RETURNS integer[] LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    now_us bigint;
    is_learned boolean;
    most_attempts integer;          -- of kinds without a maximum of their own
    is_one_level boolean;
    earlier_mode_fence bigint;      -- charges of attempts up to this fence belong to an earlier mode
    next_numbers smallint[];        -- of next_kinds; NULL: the queue refuses the kind,
    refusal text;                   -- for this reason: a format
    counted boolean[];              -- outage reports that count as failed attempts; NULL: none
    lost integer[];
    other_attempts bigint;          -- that ended other than completed
    retried bigint;
    ended smallint[];
    stored bigint[];                -- documents whose attempt was stored
    finished bigint[];              -- documents whose step has ended
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1),
        pg_advisory_xact_lock_shared(hashtext('{schema}.'), 2);
    now_us := coalesce(given_now, {now});
    SELECT q.costs = 'learned', q.attempts_max, q.one_level, q.charges_from
    INTO is_learned, most_attempts, is_one_level, earlier_mode_fence
    FROM {schema}.queue q;
    PERFORM {schema}.prepare_outcomes(numbers, fences, codes, next_kinds);
    IF 4 = ANY (codes) THEN
        next_numbers := {schema}.kind_numbers(next_kinds);
        refusal := (
            SELECT CASE WHEN q.settings::json ->> 'kinds' = '{open_kinds}' THEN {too_many_kinds} ELSE {unknown_kind} END
            FROM {schema}.queue q);
    END IF;
    SELECT e.delays, e.counted INTO delays, counted
    FROM {schema}.end_probes(now_us, numbers, fences, codes, errors, delays, services, next_numbers) e;
    WITH given AS MATERIALIZED (
        SELECT DISTINCT ON (g.number, g.fence) g.*
        FROM unnest(numbers, fences, codes, errors, delays, counted, kept_costs, real_costs, results,
                content_names, content_sizes, content_hashes, details, next_kinds, next_numbers, next_costs)
            WITH ORDINALITY AS g(number, fence, code, error, delay, is_counted, kept_cost, real_cost, result,
                content_name, content_size, content_hash, details, next_kind, next_number, next_cost, position)
        WHERE g.number IS NOT NULL ORDER BY g.number, g.fence, g.position),
    held AS MATERIALIZED (
        SELECT g.*, d.customer, d.priority, d.kind, d.order_number, d.claimed_at, d.worker, d.step, d.attempts, d.snoozes,
            d.cancel_requested, d.expires_at,
            CASE WHEN d.fence > earlier_mode_fence THEN d.charged_cost END AS charged_cost,
            CASE WHEN d.fence > earlier_mode_fence THEN d.charged_weight END AS charged_weight,
            CASE WHEN d.fence > earlier_mode_fence THEN d.charge END AS charge
        FROM given g JOIN {schema}.documents d ON d.number = g.number
        WHERE d.fence = g.fence AND d.state = {running}
        ORDER BY d.number FOR NO KEY UPDATE OF d),
    judged AS (
        SELECT h.*, CASE WHEN h.cancel_requested THEN NULL
            WHEN h.code = 4 AND h.step >= {steps_max} THEN {too_many_steps}
            WHEN h.code = 4 AND h.next_number IS NULL THEN format(refusal, h.next_kind)
            WHEN h.code = 5 AND h.snoozes >= {snoozes_max} THEN {snoozed_too_often} END AS refused,
            h.code = 6 AND (h.is_counted IS TRUE AND h.snoozes >= {probes_free} OR h.snoozes >= {snoozes_max})
                AS fails_by_report
        FROM held h),
    decided AS (
        SELECT j.*, CASE WHEN j.code = 0 THEN {completed}
                WHEN j.cancel_requested OR j.code = 3 THEN {cancelled}
                WHEN j.refused IS NOT NULL THEN {dead}
                WHEN j.code IN (2, 4) THEN {waiting}
                WHEN (j.code = 1 OR j.fails_by_report) AND (
                    j.delay IS NULL OR j.attempts >= {schema}.attempts_max(j.kind, most_attempts)) THEN {dead}
                ELSE {delayed} END::smallint AS state
        FROM judged j),
    endings AS MATERIALIZED (
        SELECT d.*, {schema}.band(is_one_level, d.priority, d.kind) AS level,
            d.code = 4 AND d.state = {waiting} AS has_advanced,
            d.code = 1 OR d.refused IS NOT NULL OR (d.fails_by_report AND NOT d.cancel_requested) AS has_failed,
            CASE WHEN d.code = 1 OR NOT d.cancel_requested THEN coalesce(d.refused, d.error) END AS its_error,
            CASE WHEN d.code = 4 AND d.state = {waiting} THEN d.next_number ELSE d.kind END AS kind_after
        FROM decided d),
    changed AS (
        UPDATE {schema}.documents d SET state = h.state, kind = h.kind_after,
            level = {schema}.band(is_one_level, h.priority, h.kind_after),
            returned = (h.state = {waiting}), failed = (h.state IN ({failed_states})),
            step = CASE WHEN h.has_advanced THEN d.step + 1 ELSE d.step END,
            cost = CASE WHEN h.has_advanced THEN coalesce(h.next_cost, d.cost) ELSE d.cost END,
            attempts = CASE WHEN h.has_advanced THEN 0
                WHEN h.state IN ({waiting}, {delayed}) AND NOT h.has_failed THEN d.attempts - 1 ELSE d.attempts END,
            snoozes = CASE WHEN h.state = {delayed} AND NOT h.has_failed THEN d.snoozes + 1 ELSE d.snoozes END,
            ended_at = CASE WHEN h.state IN ({ended_states}) THEN now_us END,
            due_at = CASE h.state WHEN {delayed} THEN now_us + greatest(h.delay, 0) ELSE d.due_at END,
            delayed_until = CASE h.state WHEN {delayed} THEN now_us + greatest(h.delay, 0) END,
            error = CASE WHEN h.state = {waiting} AND NOT h.has_advanced THEN d.error ELSE h.its_error END,
            real_cost = h.kept_cost
        FROM endings h WHERE d.number = h.number),
    recorded_results AS (
        INSERT INTO {schema}.results (document, result, content_name, size_bytes, sha256)
        SELECT h.number, h.result, h.content_name, h.content_size, h.content_hash FROM endings h
        WHERE h.code = 0 AND (h.result IS NOT NULL OR h.content_name IS NOT NULL)
        ON CONFLICT (document) DO UPDATE SET result = excluded.result,
            content_name = excluded.content_name, size_bytes = excluded.size_bytes,
            sha256 = excluded.sha256),
    -- Attempts of a document are inserted only with the end of its present one, under the lock of its row.
    recorded_attempts AS (
        INSERT INTO {schema}.attempts (document, number, step, kind, attempt, worker, claimed_at, ended_at, outcome,
            error, details, content_name, size_bytes, sha256, value)
        SELECT h.number, {schema}.next_attempt(h.number), h.step, h.kind, h.attempts, coalesce(h.worker, ''),
            coalesce(h.claimed_at, now_us), now_us, CASE WHEN h.has_advanced THEN {advanced} ELSE {attempt_failed} END, h.its_error, h.details, s.*
        FROM endings h LEFT JOIN LATERAL (
            SELECT h.content_name, h.content_size, h.content_hash, h.result WHERE h.has_advanced) s ON true
        WHERE h.has_failed OR h.has_advanced),
    -- A claim may have deleted the row while the document was running.
    expiring AS (
        INSERT INTO {schema}.expirations (expires_at, document)
        SELECT h.expires_at, h.number FROM endings h
        WHERE h.expires_at IS NOT NULL AND h.step = 0 AND h.attempts = 1 AND h.state IN ({waiting}, {delayed})
            AND NOT h.has_failed AND NOT h.has_advanced
        ON CONFLICT DO NOTHING),
    leaving AS MATERIALIZED (
        SELECT l.fence, l.running - e.n AS rest
        FROM (SELECT fence, count(*) AS n FROM held GROUP BY fence) e
            JOIN {schema}.leases l ON l.fence = e.fence
        ORDER BY l.fence FOR UPDATE OF l),
    dropped AS (
        DELETE FROM {schema}.leases l USING leaving e WHERE l.fence = e.fence AND e.rest <= 0),
    shrunk AS (
        UPDATE {schema}.leases l SET running = e.rest FROM leaving e
        WHERE l.fence = e.fence AND e.rest > 0),
    counted_changes AS (
        INSERT INTO {schema}.counter_changes (customer, priority, kind, waiting, delayed)
        SELECT h.customer, h.priority, h.kind_after, count(*) FILTER (WHERE h.state = {waiting}),
            count(*) FILTER (WHERE h.state = {delayed})
        FROM endings h WHERE h.state IN ({waiting}, {delayed})
        GROUP BY h.customer, h.priority, h.kind_after),
    -- The next step arrives after the end of the attempt, in one row, which a claim folds as a whole.
    events AS (
        SELECT h.position, h.customer, false AS is_arrival, CASE
            WHEN is_learned AND (h.code = 0 OR h.has_advanced) THEN json_build_array(3, h.customer, h.level,
                h.charged_cost, h.charged_weight, least(greatest(
                    coalesce(h.real_cost, now_us - h.claimed_at), 0), {real_cost_max}))
            WHEN h.state = {waiting} AND NOT h.has_advanced THEN json_build_array(4, h.customer, h.level,
                h.order_number, coalesce(h.charge, 0))
            ELSE json_build_array(2, h.customer, h.level, 1) END AS event
        FROM endings h
        WHERE (is_learned AND (h.code = 0 OR h.has_advanced)) OR (h.state = {waiting} AND NOT h.has_advanced)
            OR EXISTS (SELECT FROM {schema}.limited_customers l WHERE l.customer = h.customer)
        UNION ALL
        SELECT h.position, h.customer, true, json_build_array(0, h.customer,
            {schema}.band(is_one_level, h.priority, h.kind_after), h.order_number, 1)
        FROM endings h WHERE h.has_advanced),
    recorded AS (
        INSERT INTO {schema}.event_log (at, customers, events)
        SELECT now_us, array_agg(DISTINCT e.customer),
            json_agg(e.event ORDER BY e.position, e.is_arrival)::text
        FROM events e HAVING count(*) > 0)
    SELECT ARRAY(
            SELECT p FROM generate_subscripts(numbers, 1) p
            EXCEPT SELECT h.position FROM held h ORDER BY 1),
        count(*) FILTER (WHERE h.state <> {completed}),
        count(*) FILTER (WHERE h.state = {delayed} AND h.has_failed),
        coalesce(array_agg(h.state) FILTER (WHERE h.state <> {completed}), '{{}}'),
        array_agg(h.number) FILTER (WHERE h.has_failed OR h.has_advanced),
        array_agg(h.number) FILTER (WHERE h.code = 0 OR h.has_advanced)
    INTO lost, other_attempts, retried, ended, stored, finished
    FROM endings h;
    -- A statement of its own: the one above does not see what a renewal stored while it waited for the document.
    IF finished IS NOT NULL THEN
        DELETE FROM {schema}.checkpoints c WHERE c.document = ANY (finished);
    END IF;
    IF stored IS NOT NULL THEN
        PERFORM {schema}.trim_attempts(stored);
    END IF;
    PERFORM {schema}.count_outcomes(other_attempts, retried, ended);
    PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
    RETURN lost;
END
$$;

-- Renew the leases of attempts, and store their progress and checkpoints. Returns the attempts that still have their
-- lease, and whether a cancel was requested.
CREATE OR REPLACE FUNCTION {schema}.renew(
    given_now bigint, lease bigint, numbers bigint[], fences bigint[], progresses text[], checkpoints text[]
) RETURNS TABLE (its_number bigint, its_fence bigint, is_cancelled boolean) LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    now_us bigint := coalesce(given_now, {now});
BEGIN
    -- Locks documents before leases, in the order of their numbers, as `finish` does.
    RETURN QUERY
        WITH held AS MATERIALIZED (
            SELECT d.number, g.fence, g.progress, g.checkpoint
            FROM unnest(numbers, fences, progresses, checkpoints) AS g(number, fence, progress, checkpoint)
                JOIN {schema}.documents d ON d.number = g.number
            WHERE d.fence = g.fence AND d.state = {running}
            ORDER BY d.number FOR NO KEY UPDATE OF d),
        kept AS (
            INSERT INTO {schema}.checkpoints (document, value)
            SELECT h.number, h.checkpoint FROM held h WHERE h.checkpoint IS NOT NULL
            ON CONFLICT (document) DO UPDATE SET value = excluded.value)
        UPDATE {schema}.documents d SET lease_until = now_us + lease,
            progress = coalesce(h.progress, d.progress),
            progress_fence = CASE WHEN h.progress IS NULL THEN d.progress_fence ELSE h.fence END
        FROM held h WHERE d.number = h.number
        RETURNING d.number, d.fence, d.cancel_requested;
    UPDATE {schema}.leases l
    SET until = least(l.until, now_us + lease), length = greatest(l.length, lease)
    WHERE l.fence = ANY (fences) AND (l.until > now_us + lease OR l.length < lease);
END
$$;
