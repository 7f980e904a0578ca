-- Return an identity of the database that changes when a standby is promoted, a backup is recovered to a point in time,
-- or a dump is restored: the latest transactions may then be lost.
CREATE OR REPLACE FUNCTION {schema}.incarnation() RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    system_id text := '';           -- if the role may not read it
BEGIN
    IF has_function_privilege('pg_control_system()', 'EXECUTE') THEN
        SELECT system_identifier INTO system_id FROM pg_control_system();
    END IF;
    RETURN concat_ws('/', system_id,
        left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),     -- the timeline
        (SELECT oid FROM pg_database WHERE datname = current_database()),
        '{schema}.queue'::regclass::oid);
END
$$;

-- Return whether the queue was last used in this incarnation. System identifiers are compared only if both roles could
-- read them.
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

-- Begin a new epoch under the lock of claims: numbers and fences that lost transactions may have issued are not issued
-- again, and the lower bounds of earlier claims are reset.
CREATE OR REPLACE FUNCTION {schema}.begin_epoch() RETURNS void LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
AS $$
DECLARE
    t {schema}.scheduler_states;
    -- Random, because two restores of one backup must not issue the same numbers.
    jump bigint := {epoch_jump_min} + floor(random() * 1099511627776);
BEGIN
    PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
    PERFORM setval('{schema}.document_numbers', nextval('{schema}.document_numbers') + jump);
    SELECT * INTO t FROM {schema}.scheduler_states ORDER BY version DESC LIMIT 1;
    t := {schema}.reset_bounds({schema}.load_all_kinds(t));
    t.version := t.version + 1;
    t.fence := t.fence + jump;
    t.at := 0;
    t.cancels_from := 0;
    t.events_from := '0';
    t.events_late := '{{}}';
    PERFORM {schema}.save_state(t);
    UPDATE {schema}.queue SET epoch = epoch + 1, incarnation = {schema}.incarnation();
    RAISE LOG 'fairturn: a new epoch begins in %', {schema}.incarnation();
END
$$;

-- Begin a new epoch if the incarnation has changed and no other transaction has begun one since.
CREATE OR REPLACE FUNCTION {schema}.check_epoch() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
    IF NOT {schema}.is_same_incarnation((SELECT q.incarnation FROM {schema}.queue q)) THEN
        PERFORM {schema}.begin_epoch();
    END IF;
END
$$;
