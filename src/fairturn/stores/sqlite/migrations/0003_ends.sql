-- What ended otherwise than completed, since this table is there; `stores/outcome_counters.py` says what completed.
CREATE TABLE ends (
    one       INTEGER PRIMARY KEY CHECK (one = 1),
    attempts  INTEGER NOT NULL,
    retried   INTEGER NOT NULL DEFAULT 0,
    dead      INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0
) STRICT;
-- How earlier attempts ended is not known.
INSERT INTO ends (one, attempts)
VALUES (1, coalesce((SELECT claims FROM queue), 0) - coalesce((SELECT sum(running) FROM leases), 0));
