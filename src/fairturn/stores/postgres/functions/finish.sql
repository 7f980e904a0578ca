-- Record the outcomes of attempts, each exactly once: an outcome counts only while its fence is the document's last and
-- the document is running. Returns the positions of the outcomes that did not count. Kinds are those of
-- fairturn.stores.postgres.finish, the next states those of fairturn.stores.transitions.
CREATE OR REPLACE FUNCTION {schema}.finish(
    given_now bigint,                  -- NULL: the clock of the server
    numbers bigint[], fences bigint[],
    kinds smallint[],               -- 0: completed, 1: failed, 2: released, 3: stopped
    errors text[],
    retries bigint[],               -- failed: the delay of the retry in microseconds; NULL: no retry
    kept_costs bigint[],            -- completed: the cost to store,
    real_costs bigint[],            -- and to learn from; NULL: the time that the attempt took
    results text[], content_names text[], content_sizes bigint[], content_hashes bytea[]
) RETURNS integer[] LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    now_us bigint;
    is_learned boolean;
    most_attempts integer;
    is_one_level boolean;
    earlier_mode_fence bigint;      -- charges of attempts up to this fence belong to an earlier mode
    lost integer[];
    other_attempts bigint;          -- that ended other than completed
    retried bigint;
    ended smallint[];
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1),
        pg_advisory_xact_lock_shared(hashtext('{schema}.'), 2);
    now_us := coalesce(given_now, {now});
    SELECT q.costs = 'learned', q.attempts_max, q.one_level, q.charges_from
    INTO is_learned, most_attempts, is_one_level, earlier_mode_fence
    FROM {schema}.queue q;
    WITH given AS MATERIALIZED (
        SELECT DISTINCT ON (g.number, g.fence) g.*
        FROM unnest(numbers, fences, kinds, errors, retries, kept_costs, real_costs, results,
                content_names, content_sizes, content_hashes) WITH ORDINALITY
            AS g(number, fence, kind, error, retry_in, kept_cost, real_cost, result,
                content_name, content_size, content_hash, position)
        WHERE g.number IS NOT NULL ORDER BY g.number, g.fence, g.position),
    held AS MATERIALIZED (
        SELECT g.*, d.customer, d.priority, d.order_number, d.claimed_at,
            CASE WHEN is_one_level THEN 1 ELSE d.priority END::smallint AS level,
            CASE WHEN d.fence > earlier_mode_fence THEN d.charged_cost END AS charged_cost,
            CASE WHEN d.fence > earlier_mode_fence THEN d.charged_weight END AS charged_weight,
            CASE WHEN d.fence > earlier_mode_fence THEN d.charge END AS charge,
            CASE WHEN g.kind = 0 THEN {completed}
                WHEN d.cancel_requested OR g.kind = 3 THEN {cancelled}
                WHEN g.kind = 2 THEN {waiting}
                WHEN g.retry_in IS NULL OR d.attempts >= most_attempts THEN {dead}
                ELSE {delayed} END::smallint AS state
        FROM given g JOIN {schema}.documents d ON d.number = g.number
        WHERE d.fence = g.fence AND d.state = {running}
        ORDER BY d.number FOR NO KEY UPDATE OF d),
    changed AS (
        UPDATE {schema}.documents d SET state = h.state, level = h.level,
            returned = (h.state = {waiting}), failed = (h.state IN ({failed_states})),
            attempts = d.attempts - CASE h.state WHEN {waiting} THEN 1 ELSE 0 END,
            ended_at = CASE WHEN h.state IN ({ended_states}) THEN now_us END,
            due_at = CASE h.state WHEN {delayed} THEN now_us + greatest(h.retry_in, 0) ELSE d.due_at END,
            delayed_until = CASE h.state WHEN {delayed} THEN now_us + greatest(h.retry_in, 0) END,
            error = CASE h.state WHEN {waiting} THEN d.error ELSE h.error END,
            real_cost = h.kept_cost
        FROM held h WHERE d.number = h.number),
    stored AS (
        INSERT INTO {schema}.results (document, result, content_name, size_bytes, sha256)
        SELECT h.number, h.result, h.content_name, h.content_size, h.content_hash FROM held h
        WHERE h.kind = 0 AND (h.result IS NOT NULL OR h.content_name IS NOT NULL)
        ON CONFLICT (document) DO UPDATE SET result = excluded.result,
            content_name = excluded.content_name, size_bytes = excluded.size_bytes,
            sha256 = excluded.sha256),
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
    counted AS (
        INSERT INTO {schema}.counter_changes (customer, priority, waiting, delayed)
        SELECT h.customer, h.priority, count(*) FILTER (WHERE h.state = {waiting}),
            count(*) FILTER (WHERE h.state = {delayed})
        FROM held h WHERE h.state IN ({waiting}, {delayed})
        GROUP BY h.customer, h.priority),
    events AS (
        SELECT h.position, h.customer, CASE
            WHEN h.kind = 0 AND is_learned THEN json_build_array(3, h.customer, h.level,
                h.charged_cost, h.charged_weight, least(greatest(
                    coalesce(h.real_cost, now_us - h.claimed_at), 0), {real_cost_max}))
            WHEN h.state = {waiting} THEN json_build_array(4, h.customer, h.level, h.order_number,
                coalesce(h.charge, 0))
            ELSE json_build_array(2, h.customer, h.level, 1) END AS event
        FROM held h
        WHERE (h.kind = 0 AND is_learned) OR h.state = {waiting} OR EXISTS (
            SELECT FROM {schema}.limited_customers l WHERE l.customer = h.customer)),
    recorded AS (
        INSERT INTO {schema}.event_log (at, customers, events)
        SELECT now_us, array_agg(DISTINCT e.customer),
            json_agg(e.event ORDER BY e.position)::text
        FROM events e HAVING count(*) > 0)
    SELECT ARRAY(
            SELECT p FROM generate_subscripts(numbers, 1) p
            EXCEPT SELECT h.position FROM held h ORDER BY 1),
        count(*), count(*) FILTER (WHERE h.state = {delayed}), coalesce(array_agg(h.state), '{{}}')
    INTO lost, other_attempts, retried, ended
    FROM held h WHERE h.state <> {completed};
    PERFORM {schema}.count_outcomes(other_attempts, retried, ended);
    PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
    RETURN lost;
END
$$;

-- Renew the leases of attempts, and store their progress. Returns the attempts that still have their lease, and whether
-- a cancel was requested.
CREATE OR REPLACE FUNCTION {schema}.renew(
    given_now bigint, lease bigint, numbers bigint[], fences bigint[], progresses text[]
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
            SELECT d.number, g.fence, g.progress
            FROM unnest(numbers, fences, progresses) AS g(number, fence, progress)
                JOIN {schema}.documents d ON d.number = g.number
            WHERE d.fence = g.fence AND d.state = {running}
            ORDER BY d.number FOR NO KEY UPDATE OF d)
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
