-- Who writes what: submitting writes customers, documents, bodies, keys, and the numbers of waiting
-- documents; only claims write flows, clocks and standings (apart from flows.waiting); everything
-- that a claim has to fold in is a row of `recorded`.

CREATE TABLE queue (
    one            INTEGER PRIMARY KEY CHECK (one = 1),
    settings       TEXT    NOT NULL,            -- a JSON object
    id_key         INTEGER NOT NULL,            -- stirs numbers into public ids
    next_number    INTEGER NOT NULL DEFAULT 1,  -- of a document, or of an order given when due
    next_customer  INTEGER NOT NULL DEFAULT 1,
    delayed        INTEGER NOT NULL DEFAULT 0,  -- how many documents are delayed
    waiting_1      INTEGER NOT NULL DEFAULT 0,  -- documents of priority 1, and so on
    waiting_2      INTEGER NOT NULL DEFAULT 0,
    waiting_3      INTEGER NOT NULL DEFAULT 0,
    waiting_4      INTEGER NOT NULL DEFAULT 0,
    waiting_5      INTEGER NOT NULL DEFAULT 0,
    waiting_6      INTEGER NOT NULL DEFAULT 0,
    waiting_7      INTEGER NOT NULL DEFAULT 0,
    waiting_8      INTEGER NOT NULL DEFAULT 0,
    waiting_9      INTEGER NOT NULL DEFAULT 0,
    counted        INTEGER NOT NULL DEFAULT 0,  -- how many customers are counted, see there
    claims         INTEGER NOT NULL DEFAULT 0,  -- the number of the last claim
    fence          INTEGER NOT NULL DEFAULT 0,  -- of the last lease
    tick           INTEGER NOT NULL DEFAULT 0,  -- of the last activation of a flow
    turns_version  INTEGER NOT NULL DEFAULT 0,  -- changes with every change of flows and clocks
    boot           TEXT    NOT NULL DEFAULT '', -- leases count from this boot of the machine
    documents_pruned_to INTEGER NOT NULL DEFAULT 0, -- where the round of pruning stands
    customers_pruned_to INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE levels (
    level   INTEGER PRIMARY KEY,
    clock   INTEGER NOT NULL DEFAULT 0,
    weight  INTEGER NOT NULL DEFAULT 0          -- the sum over the active flows
) STRICT;
INSERT INTO levels (level) VALUES (1), (2), (3), (4), (5), (6), (7), (8), (9);

CREATE TABLE customers (
    number           INTEGER PRIMARY KEY,
    name             TEXT    NOT NULL UNIQUE,
    count            INTEGER,
    count_updated_at INTEGER,
    delayed          INTEGER NOT NULL DEFAULT 0,
    weight           INTEGER NOT NULL DEFAULT 1000,
    running_max      INTEGER,
    paused           INTEGER NOT NULL DEFAULT 0,
    counted          INTEGER NOT NULL DEFAULT 0 -- has a limit, or had one since the last claim
) STRICT;
CREATE INDEX customers_counted ON customers (number) WHERE counted = 1;

-- A customer's settings as the claims have folded them in; no row where they are the defaults.
CREATE TABLE standings (
    customer     INTEGER PRIMARY KEY,
    weight       INTEGER NOT NULL,
    running_max  INTEGER,
    paused       INTEGER NOT NULL,
    recent_costs TEXT    NOT NULL
) STRICT;

CREATE TABLE flows (
    customer   INTEGER NOT NULL,
    level      INTEGER NOT NULL,
    waiting    INTEGER NOT NULL DEFAULT 0,      -- exact at every moment
    claimed_to INTEGER NOT NULL,                -- lower orders wait only if they were returned
    folded     INTEGER NOT NULL DEFAULT 0,      -- waiting, as far as the claims have folded it in
    running    INTEGER NOT NULL DEFAULT 0,      -- the same, kept only for customers that are counted
    place      INTEGER NOT NULL DEFAULT 0,      -- virtual time; in mode levels the lowest order
    tick       INTEGER NOT NULL DEFAULT 0,
    head_order INTEGER,                         -- the lowest order that waits here
    head_since INTEGER,                         -- only in the flow that has the customer's lowest
    head_bound INTEGER,                         -- there too: head_since, or a moment before it
    held       INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (customer, level)
) STRICT, WITHOUT ROWID;
CREATE INDEX flows_turn ON flows (level, place, tick) WHERE folded > 0 AND held = 0;
-- A head moves with every claim; its bound, and so the index, only once in half the patience.
CREATE INDEX flows_head ON flows (head_bound, customer) WHERE head_bound IS NOT NULL AND held = 0;

CREATE TABLE recorded (
    number INTEGER PRIMARY KEY,
    at     INTEGER NOT NULL,
    events TEXT    NOT NULL                     -- a JSON array
) STRICT;

-- No index has the state of a waiting, running or completed document in it: a claim and a finish
-- change one row each and nothing else. What waits in a flow is what comes after its claimed_to,
-- and the few documents that were returned. Level 0 is where cancelled documents go.
CREATE TABLE documents (
    number           INTEGER PRIMARY KEY,
    customer         INTEGER NOT NULL,
    level            INTEGER NOT NULL,
    order_number     INTEGER,                   -- given at submission, or when first due
    state            INTEGER NOT NULL,
    priority         INTEGER NOT NULL,
    count            INTEGER NOT NULL,
    submitted_at     INTEGER NOT NULL,
    size_bytes       INTEGER NOT NULL,
    kind             TEXT    NOT NULL,
    fence            INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    returned         INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    children         INTEGER NOT NULL DEFAULT 0,
    claimed_at       INTEGER,
    lease_until      INTEGER,                   -- of the boot clock
    charged_cost     INTEGER,
    charged_weight   INTEGER,
    charge           INTEGER,
    ended_at         INTEGER,
    due_at           INTEGER,
    cost             INTEGER,
    parent           INTEGER,
    worker           TEXT,
    error            TEXT,
    name             TEXT,
    metadata         TEXT,
    sha256           BLOB,
    content_name     TEXT,
    body             ANY,                       -- a small one: JSON text, or bytes
    real_cost        INTEGER,
    progress_done    ANY,                       -- as the handler said it
    progress_total   ANY,
    progress_fence   INTEGER,                   -- the attempt that said it
    CHECK (state BETWEEN 0 AND 5),
    CHECK (state <> 2 OR lease_until IS NOT NULL),
    CHECK (state <> 1 OR order_number IS NOT NULL)
) STRICT;
CREATE INDEX documents_flow ON documents (customer, level, order_number);
-- As a rule the order of a document is its number, so that documents_flow lists a customer's
-- documents by age too; this index lists the others.
CREATE INDEX documents_reordered ON documents (customer, number) WHERE order_number IS NOT number;
CREATE INDEX documents_returned ON documents (customer, level, order_number) WHERE returned = 1;
CREATE INDEX documents_delayed ON documents (due_at, number) WHERE state = 0;
CREATE INDEX documents_failed ON documents (state, number) WHERE state > 3;
CREATE INDEX documents_content ON documents (content_name) WHERE content_name IS NOT NULL;

-- The documents that one claim took. It says where to look for leases that ran out; whether one
-- did is in the document's own row.
CREATE TABLE leases (
    fence     INTEGER PRIMARY KEY,
    until     INTEGER NOT NULL,                 -- no lease in it ends before
    running   INTEGER NOT NULL,                 -- how many are left
    documents TEXT    NOT NULL                  -- a JSON array of numbers
) STRICT;
CREATE INDEX leases_until ON leases (until);

-- Who claims: for explanations. Each worker writes here once in some seconds, as a part of a claim.
CREATE TABLE workers (
    name    TEXT    PRIMARY KEY,
    seen_at INTEGER NOT NULL,
    idle    INTEGER NOT NULL                    -- how many more documents it would have taken then
) STRICT, WITHOUT ROWID;

-- Larger bodies, so that a change of state does not rewrite them.
CREATE TABLE bodies (
    document INTEGER PRIMARY KEY,
    body     ANY NOT NULL
) STRICT;

CREATE TABLE results (
    document     INTEGER PRIMARY KEY,
    result       TEXT,
    content_name TEXT,
    size_bytes   INTEGER,
    sha256       BLOB
) STRICT;
CREATE INDEX results_content ON results (content_name) WHERE content_name IS NOT NULL;

CREATE TABLE keys (
    customer     INTEGER NOT NULL,
    key          TEXT    NOT NULL,
    digest       BLOB,
    document     INTEGER NOT NULL,
    count        INTEGER NOT NULL,
    priority     INTEGER NOT NULL,
    submitted_at INTEGER NOT NULL,
    PRIMARY KEY (customer, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX keys_age ON keys (submitted_at);
