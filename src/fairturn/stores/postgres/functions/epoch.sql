-- Which incarnation of the database this is. It changes when a standby is promoted, when a backup is recovered to a
-- point in time, and when a dump is restored: then the latest transactions may be lost.
CREATE OR REPLACE FUNCTION {schema}.incarnation() RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    its_system text := '';          -- where the role may not read it
BEGIN
    IF has_function_privilege('pg_control_system()', 'EXECUTE') THEN
        SELECT system_identifier INTO its_system FROM pg_control_system();
    END IF;
    RETURN concat_ws('/', its_system,
        left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),     -- the timeline
        (SELECT oid FROM pg_database WHERE datname = current_database()),
        '{schema}.queue'::regclass::oid);
END
$$;

-- Whether the queue was last used in this incarnation. A system identifier that one of two roles may not read does
-- not count.
CREATE OR REPLACE FUNCTION {schema}.is_same_incarnation(stored text) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    present text := {schema}.incarnation();
BEGIN
    RETURN stored = present OR (
        '' IN (split_part(stored, '/', 1), split_part(present, '/', 1))
        AND substr(stored, strpos(stored, '/')) = substr(present, strpos(present, '/')));
END
$$;

-- Begin a new epoch: numbers of documents and fences that transactions since lost may have handed out never come
-- again, and nothing is assumed of what earlier claims have seen. Under the lock of claims.
CREATE OR REPLACE FUNCTION {schema}.begin_epoch() RETURNS void LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
AS $$
DECLARE
    t {schema}.turns;
    -- Random, too: two restores of one backup must not give out the same numbers.
    jump bigint := {epoch_jump_min} + floor(random() * 1099511627776);
BEGIN
    PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
    PERFORM setval('{schema}.document_numbers', nextval('{schema}.document_numbers') + jump);
    SELECT * INTO t FROM {schema}.turns ORDER BY version DESC LIMIT 1;
    DELETE FROM {schema}.turns o WHERE o.version = t.version;
    t.version := t.version + 1;
    t.fence := t.fence + jump;
    t.at := 0;
    t.places_from := array_fill(-9223372036854775807, ARRAY[9]);
    t.heads_from := -9223372036854775807;
    t.leases_from := -9223372036854775807;
    t.cancels_from := 0;
    t.events_from := '0';
    t.events_late := '{{}}';
    INSERT INTO {schema}.turns SELECT t.*;
    UPDATE {schema}.queue SET epoch = epoch + 1, incarnation = {schema}.incarnation();
    RAISE LOG 'fairturn: a new epoch begins in %', {schema}.incarnation();
END
$$;

-- Begin a new epoch, unless another transaction has done so since.
CREATE OR REPLACE FUNCTION {schema}.check_epoch() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
    IF NOT {schema}.is_same_incarnation((SELECT q.incarnation FROM {schema}.queue q)) THEN
        PERFORM {schema}.begin_epoch();
    END IF;
END
$$;
