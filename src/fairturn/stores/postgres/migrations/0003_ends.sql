-- What ended otherwise than completed, since this table is there; `stores/outcome_counters.py` says what completed.
-- The sum over all rows: whoever counts takes one that nobody holds, or adds one, and waits for nobody.
CREATE TABLE {schema}.ends (
    number    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    attempts  bigint NOT NULL,
    retried   bigint NOT NULL DEFAULT 0,
    dead      bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
-- How earlier attempts ended is not known.
INSERT INTO {schema}.ends (attempts)
SELECT (SELECT claims FROM {schema}.turns ORDER BY version DESC LIMIT 1)
    - (SELECT coalesce(sum(running), 0) FROM {schema}.leases);
