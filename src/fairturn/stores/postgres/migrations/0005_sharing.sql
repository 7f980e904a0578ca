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
