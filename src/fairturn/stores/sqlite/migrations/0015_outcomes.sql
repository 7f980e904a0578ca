-- readable from 13
-- Pipelines, attempts, expiry and outages (decisions 0034 and 0035).
ALTER TABLE documents ADD COLUMN step INTEGER NOT NULL DEFAULT 0;       -- finished steps; `attempts` counts the present one
ALTER TABLE documents ADD COLUMN snoozes INTEGER NOT NULL DEFAULT 0;    -- attempts that did not count and delayed it
ALTER TABLE documents ADD COLUMN expires_at INTEGER;
ALTER TABLE kinds ADD COLUMN expires_in_us INTEGER;                     -- of documents without an expiry, since they are due
CREATE INDEX kinds_expiry ON kinds (number) WHERE expires_in_us IS NOT NULL;
ALTER TABLE outcome_counters ADD COLUMN expired INTEGER NOT NULL DEFAULT 0;

-- Attempts that failed, lost their lease or ended a step. Values of steps are last, so that a query without them does not
-- read them.
CREATE TABLE attempts (
    document     INTEGER NOT NULL,
    number       INTEGER NOT NULL,              -- of the document, from 1, in the order in which they ended
    step         INTEGER NOT NULL,
    kind         INTEGER NOT NULL,
    attempt      INTEGER NOT NULL,              -- of the step, from 1
    worker       TEXT    NOT NULL,
    claimed_at   INTEGER NOT NULL,
    ended_at     INTEGER NOT NULL,
    outcome      INTEGER NOT NULL CHECK (outcome BETWEEN 0 AND 2), -- 0 failed, 1 lost, 2 advanced
    error        TEXT,
    details      TEXT,
    content_name TEXT,                          -- of a step
    size_bytes   INTEGER,
    sha256       BLOB,
    value        TEXT,                          -- of a step, JSON
    PRIMARY KEY (document, number)
) STRICT;
CREATE INDEX attempts_content ON attempts (content_name) WHERE content_name IS NOT NULL;

-- The last checkpoint of a document's present step.
CREATE TABLE checkpoints (
    document INTEGER PRIMARY KEY,
    value    TEXT NOT NULL                      -- JSON
) STRICT;

-- Documents that may expire, by time. A row is deleted when its time comes. If its document runs then, the row is inserted
-- again when the attempt is given back. No index of `documents` contains the expiry.
CREATE TABLE expirations (
    expires_at INTEGER NOT NULL,
    document   INTEGER NOT NULL,
    PRIMARY KEY (expires_at, document)
) STRICT, WITHOUT ROWID;

-- The services that workers have registered for their kinds. Every kind also needs `kind:NAME`.
CREATE TABLE kind_services (
    kind    INTEGER NOT NULL,
    service TEXT    NOT NULL,
    PRIMARY KEY (kind, service)
) STRICT, WITHOUT ROWID;

-- Services that were reported unavailable: `ServiceState` of scheduling/outages.py.
CREATE TABLE outages (
    service           TEXT    PRIMARY KEY,
    began_at          INTEGER NOT NULL,
    reported_at       INTEGER NOT NULL,
    document          INTEGER,                  -- that reported last; NULL after a success
    error             TEXT    NOT NULL,
    first_interval_us INTEGER NOT NULL,
    interval_us       INTEGER NOT NULL,
    fence             INTEGER NOT NULL,         -- of the last claim when the hold began or ended
    held              INTEGER NOT NULL,
    probes            INTEGER NOT NULL,
    probe_at          INTEGER NOT NULL,
    probe_set_at      INTEGER NOT NULL,
    resumed_at        INTEGER
) STRICT, WITHOUT ROWID;

-- Releases up to schema 14 prune and purge too: what belongs to a document is deleted with it.
CREATE TRIGGER document_deleted AFTER DELETE ON documents BEGIN
    DELETE FROM attempts WHERE document = OLD.number;
    DELETE FROM checkpoints WHERE document = OLD.number;
    DELETE FROM expirations WHERE expires_at = OLD.expires_at AND document = OLD.number;
END;

-- With the first step, expiry or outage, these releases are refused at the next opening. In a process that has the file
-- open, claims fail, which would hand out expired documents, and so does prune, which would delete the contents of steps.
CREATE TRIGGER first_step AFTER INSERT ON attempts WHEN NEW.outcome = 2 BEGIN
    UPDATE migrations SET readable_from = 15 WHERE readable_from < 15;
END;
CREATE TRIGGER first_expiry AFTER INSERT ON expirations BEGIN
    UPDATE migrations SET readable_from = 15 WHERE readable_from < 15;
END;
CREATE TRIGGER first_rule_of_expiry AFTER UPDATE OF expires_in_us ON kinds WHEN NEW.expires_in_us IS NOT NULL BEGIN
    UPDATE migrations SET readable_from = 15 WHERE readable_from < 15;
END;
CREATE TRIGGER first_outage AFTER INSERT ON outages BEGIN
    UPDATE migrations SET readable_from = 15 WHERE readable_from < 15;
END;
DROP TRIGGER claim_of_schema_13;
CREATE TRIGGER claim_of_schema_13 BEFORE INSERT ON leases
WHEN NEW.supports_kinds = 0 AND EXISTS (SELECT 1 FROM migrations WHERE readable_from > 13) BEGIN
    SELECT RAISE(ABORT, 'the queue has kinds of work, steps, expiries or outages, which this release does not support; restart this process');
END;
ALTER TABLE queue ADD COLUMN prunes INTEGER NOT NULL DEFAULT 0;         -- batches of releases that know steps
CREATE TRIGGER prune_of_schema_14 BEFORE UPDATE OF documents_pruned_to ON queue
WHEN NEW.prunes = OLD.prunes AND EXISTS (SELECT 1 FROM migrations WHERE readable_from > 14) BEGIN
    SELECT RAISE(ABORT, 'the queue has steps, expiries or outages, which this release does not support; restart this process');
END;
