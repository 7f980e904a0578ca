-- What claims want that wait for the queue's row: whoever has it serves them, too. None of it needs to
-- survive a crash, after which nobody waits. By their transactions a claim leaves out what it has seen
-- before, as in `recorded`.
CREATE UNLOGGED TABLE {schema}.wanted (
    number   integer PRIMARY KEY,               -- drawn by whoever wants it
    xid      xid8    NOT NULL DEFAULT pg_current_xact_id(),
    n        integer NOT NULL,
    worker   text    NOT NULL,
    lease_us bigint  NOT NULL,
    fence    bigint                             -- of what it got; 0: nothing; NULL: it waits
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
CREATE INDEX wanted_xid ON {schema}.wanted (xid);

-- The documents of a claim stay in the row: to compress them takes longer than to write them.
ALTER TABLE {schema}.leases SET (toast_tuple_target = 8160);

-- Wait for the queue's row. Who was served meanwhile does not keep it: what an inner block has locked
-- is let go when the block is undone. The lock by agreement tells others that somebody waits here.
CREATE FUNCTION {schema}.await_turn(its_number integer, OUT its_fence bigint)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('{schema}.wanted'), its_number);
    BEGIN
        PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
        SELECT w.fence INTO its_fence FROM {schema}.wanted w WHERE w.number = its_number;
        IF its_fence IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'FT000', MESSAGE = 'served';
        END IF;
    EXCEPTION WHEN SQLSTATE 'FT000' THEN
        NULL;
    END;
END
$$;
