-- Return the number of waiting and delayed documents.
CREATE OR REPLACE FUNCTION {schema}.pending() RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT ((SELECT sum((SELECT sum(n) FROM unnest(t.arrived) n) + t.delayed)
            FROM {schema}.arrival_counters t)
        - (SELECT (SELECT sum(n) FROM unnest(s.taken) n) + s.promoted
            FROM (SELECT taken, promoted FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1) s)
        + (SELECT coalesce(sum(waiting + delayed), 0) FROM {schema}.counter_changes))::bigint
$$;

-- Return the number of waiting and delayed documents of one customer.
CREATE OR REPLACE FUNCTION {schema}.pending_of(its_number bigint, its_arrived bigint[]) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT ((SELECT sum(n) FROM unnest(its_arrived) n)
        - (SELECT coalesce(sum(n), 0) FROM {schema}.flows f CROSS JOIN LATERAL unnest(f.taken) n
            WHERE f.customer = its_number)
        + (SELECT coalesce(sum(waiting), 0) FROM {schema}.counter_changes WHERE customer = its_number)
        + (SELECT count(*) FROM {schema}.documents
            WHERE customer = its_number AND delayed_until IS NOT NULL))::bigint
$$;

-- Count submitted documents, and a change, in a shard of arrival_counters, and return the shard, which this transaction
-- holds. An advisory try-lock chooses it: it costs the server less than FOR UPDATE SKIP LOCKED.
CREATE OR REPLACE FUNCTION {schema}.count_arrived(first_try integer, n bigint[], n_delayed bigint)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    taken integer := first_try;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('{schema}.arrival_counters'), taken) THEN
        taken := 0;
        WHILE NOT pg_try_advisory_xact_lock(hashtext('{schema}.arrival_counters'), taken) LOOP
            taken := taken + 1;
        END LOOP;
    END IF;
    INSERT INTO {schema}.arrival_counters AS t (shard, arrived, delayed, changes)
    VALUES (taken, n, n_delayed, 1)
    ON CONFLICT (shard) DO UPDATE SET delayed = t.delayed + excluded.delayed,
        changes = t.changes + 1, arrived = {schema}.add(t.arrived, excluded.arrived);
    RETURN taken;
END
$$;

-- Subtract the bytes of deleted documents from these customers, whose rows the caller has locked.
CREATE OR REPLACE FUNCTION {schema}.subtract_released_bytes(owners bigint[]) RETURNS void
LANGUAGE sql AS $$
    WITH deleted AS (
        DELETE FROM {schema}.released_bytes r WHERE r.customer = ANY (owners) RETURNING r.customer, r.bytes)
    UPDATE {schema}.customers c SET stored_bytes = c.stored_bytes - d.bytes
    FROM (SELECT o.customer, sum(o.bytes) AS bytes FROM deleted o GROUP BY o.customer) d
    WHERE c.number = d.customer
$$;

-- Count how often each priority occurs.
CREATE OR REPLACE FUNCTION {schema}.by_priority(priorities smallint[]) RETURNS bigint[] LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY[{count_each_priority}] FROM unnest(priorities) p
$$;

-- Return the element-wise difference of two arrays.
CREATE OR REPLACE FUNCTION {schema}.subtract(a bigint[], b bigint[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY(SELECT u.a - u.b FROM unnest(a, b) WITH ORDINALITY AS u(a, b, priority) ORDER BY u.priority)
$$;

-- Return the element-wise sum of two arrays.
CREATE OR REPLACE FUNCTION {schema}.add(a bigint[], b bigint[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY(SELECT u.a + u.b FROM unnest(a, b) WITH ORDINALITY AS u(a, b, priority) ORDER BY u.priority)
$$;

-- Count documents that began to wait, by priority, other than by a submission.
CREATE OR REPLACE FUNCTION {schema}.count_returned(t {schema}.scheduler_states, its_kind smallint, returned bigint[])
RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    k integer;
BEGIN
    t.taken[1:9] := {schema}.subtract(t.taken[1:9], returned);
    IF its_kind > 0 THEN
        t := {schema}.load_kinds(t, ARRAY[its_kind]);
        k := array_position(t.kinds, its_kind);
        t.taken[9 * k - 8:9 * k] := {schema}.subtract(t.taken[9 * k - 8:9 * k], returned);
    END IF;
    RETURN t;
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
