-- readable from 13
-- Kinds of work (decision 0033). The column `level` of flows, documents, levels and events contains a band: ten times the
-- number of the kind, plus the level.
CREATE TABLE kinds (
    number         INTEGER PRIMARY KEY CHECK (number BETWEEN 0 AND 99),
    name           TEXT    NOT NULL UNIQUE,
    running_max    INTEGER,
    paused         INTEGER NOT NULL DEFAULT 0,
    attempts_max   INTEGER,                     -- NULL: that of the queue
    since_patience INTEGER,                     -- claims since the last patience claim; NULL while there is no
                                                -- other kind: the number of the last claim, modulo ten
    -- Waiting documents by priority. The default kind has the rest of those in `queue`.
    waiting_1      INTEGER NOT NULL DEFAULT 0,
    waiting_2      INTEGER NOT NULL DEFAULT 0,
    waiting_3      INTEGER NOT NULL DEFAULT 0,
    waiting_4      INTEGER NOT NULL DEFAULT 0,
    waiting_5      INTEGER NOT NULL DEFAULT 0,
    waiting_6      INTEGER NOT NULL DEFAULT 0,
    waiting_7      INTEGER NOT NULL DEFAULT 0,
    waiting_8      INTEGER NOT NULL DEFAULT 0,
    waiting_9      INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO kinds (number, name) VALUES (0, 'default');
CREATE TRIGGER kinds_stay BEFORE DELETE ON kinds BEGIN
    SELECT RAISE(ABORT, 'a kind of work cannot be deleted');
END;

-- A band has a row once it was active.
ALTER TABLE levels ADD COLUMN kind_time INTEGER NOT NULL DEFAULT 0;
ALTER TABLE levels ADD COLUMN last_claim INTEGER NOT NULL DEFAULT 0;    -- the number of the kind's last turn in the level
ALTER TABLE levels ADD COLUMN level_time INTEGER NOT NULL DEFAULT 0;    -- only in the band of the default kind

-- Learned costs of kinds other than the default: a JSON object, from the number of the kind to an array.
ALTER TABLE customer_states ADD COLUMN costs_by_kind TEXT NOT NULL DEFAULT '{}';
ALTER TABLE workers ADD COLUMN kinds TEXT;      -- that it serves, a JSON array; NULL: every kind
ALTER TABLE leases ADD COLUMN supports_kinds INTEGER NOT NULL DEFAULT 0; -- 1: the release that claimed does

-- The same table, whose levels end at 999. A claim writes a flow for each customer that it serves: with the band first in the
-- key, these rows are neighbours, however many flows of other kinds their customers have. So are the heads of a kind in their
-- index.
CREATE TABLE flows_14 (
    customer   INTEGER NOT NULL,
    level      INTEGER NOT NULL CHECK (level BETWEEN 0 AND 999),
    kind       INTEGER NOT NULL DEFAULT 0,      -- unused
    waiting    INTEGER NOT NULL DEFAULT 0,
    claimed_to INTEGER NOT NULL,
    folded     INTEGER NOT NULL DEFAULT 0,
    running    INTEGER NOT NULL DEFAULT 0,
    place      INTEGER NOT NULL DEFAULT 0,
    tick       INTEGER NOT NULL DEFAULT 0,
    head_order INTEGER,
    head_since INTEGER,                         -- only in the flow that has the customer's lowest order of the kind
    head_bound INTEGER,
    held       INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (level, customer, kind)
) STRICT, WITHOUT ROWID;
INSERT INTO flows_14 (customer, level, kind, waiting, claimed_to, folded, running, place, tick, head_order, head_since,
    head_bound, held)
SELECT customer, level, kind, waiting, claimed_to, folded, running, place, tick, head_order, head_since, head_bound, held
FROM flows;
DROP TABLE flows;
ALTER TABLE flows_14 RENAME TO flows;
CREATE INDEX flows_customer ON flows (customer, level);
CREATE INDEX flows_turn ON flows (level, place, tick) WHERE folded > 0 AND held = 0;
CREATE INDEX flows_head ON flows (level / 10, head_bound, customer) WHERE head_bound IS NOT NULL AND held = 0;

-- With the first other kind, releases up to schema 13 are refused: at the next opening, and in a process that has the file
-- open, where it would claim documents of every kind or move one to the default kind.
CREATE TRIGGER other_kind AFTER INSERT ON kinds WHEN NEW.number > 0 BEGIN
    UPDATE migrations SET readable_from = 14 WHERE readable_from < 14;
    UPDATE kinds SET since_patience = (SELECT claims % 10 FROM queue) WHERE number = 0 AND since_patience IS NULL;
END;
CREATE TRIGGER claim_of_schema_13 BEFORE INSERT ON leases
WHEN NEW.supports_kinds = 0 AND EXISTS (SELECT 1 FROM kinds WHERE number > 0) BEGIN
    SELECT RAISE(ABORT, 'the queue has kinds of work, which this release does not support; restart this process');
END;
CREATE TRIGGER level_of_schema_13 BEFORE UPDATE OF level ON documents
WHEN NEW.level > 0 AND NEW.level / 10 <> NEW.kind BEGIN
    SELECT RAISE(ABORT, 'the level of a document does not belong to its kind of work; restart this process');
END;
