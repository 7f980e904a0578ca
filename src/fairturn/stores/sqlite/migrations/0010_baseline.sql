-- readable from 10
-- The schema of a queue in a file.
--
-- Which operation writes what: submissions write customers, documents, bodies, idempotency_keys and the
-- counters of waiting documents. Only claims write flows, clocks and customer_states (apart from
-- flows.waiting); all that a claim has to fold in is a row of event_log.

-- The migrations that made this schema, and the oldest version whose release still reads each result.
CREATE TABLE migrations (
    number        INTEGER PRIMARY KEY,
    readable_from INTEGER NOT NULL
) STRICT;

CREATE TABLE queue (
    one            INTEGER PRIMARY KEY CHECK (one = 1),
    settings       TEXT    NOT NULL,            -- a JSON object
    id_key         INTEGER NOT NULL,            -- obfuscates numbers into public ids
    next_number    INTEGER NOT NULL DEFAULT 1,  -- of a document, or of an order that is given when due
    next_customer  INTEGER NOT NULL DEFAULT 1,
    delayed        INTEGER NOT NULL DEFAULT 0,  -- delayed documents
    waiting_1      INTEGER NOT NULL DEFAULT 0,  -- waiting documents of priority 1, and so on
    waiting_2      INTEGER NOT NULL DEFAULT 0,
    waiting_3      INTEGER NOT NULL DEFAULT 0,
    waiting_4      INTEGER NOT NULL DEFAULT 0,
    waiting_5      INTEGER NOT NULL DEFAULT 0,
    waiting_6      INTEGER NOT NULL DEFAULT 0,
    waiting_7      INTEGER NOT NULL DEFAULT 0,
    waiting_8      INTEGER NOT NULL DEFAULT 0,
    waiting_9      INTEGER NOT NULL DEFAULT 0,
    counted        INTEGER NOT NULL DEFAULT 0,  -- customers with customers.counted
    claims         INTEGER NOT NULL DEFAULT 0,  -- the number of the last claim
    fence          INTEGER NOT NULL DEFAULT 0,  -- of the last lease
    tick           INTEGER NOT NULL DEFAULT 0,  -- of the last activation of a flow
    scheduler_version INTEGER NOT NULL DEFAULT 0, -- changes with every change of flows and clocks
    boot           TEXT    NOT NULL DEFAULT '', -- leases count from this boot of the machine
    epoch          INTEGER NOT NULL DEFAULT 0,  -- a restore begins a new one: numbers and fences jump
    is_copy        INTEGER NOT NULL DEFAULT 0,  -- 1 in a backup: its first write begins a new epoch
    repairs        INTEGER NOT NULL DEFAULT 0,  -- repairs that claims have made
    documents_pruned_to INTEGER NOT NULL DEFAULT 0, -- where the round of prune stands
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

-- A customer's settings as claims have folded them in; no row for the defaults.
CREATE TABLE customer_states (
    customer     INTEGER PRIMARY KEY,
    weight       INTEGER NOT NULL,
    running_max  INTEGER,
    paused       INTEGER NOT NULL,
    recent_costs TEXT    NOT NULL
) STRICT;

CREATE TABLE flows (
    customer   INTEGER NOT NULL,
    level      INTEGER NOT NULL CHECK (level BETWEEN 0 AND 9),
    kind       INTEGER NOT NULL DEFAULT 0,      -- of work; 0 is the default kind
    waiting    INTEGER NOT NULL DEFAULT 0,      -- exact at every instant
    claimed_to INTEGER NOT NULL,                -- up to this order only returned documents wait
    folded     INTEGER NOT NULL DEFAULT 0,      -- waiting, as far as claims have folded it in
    running    INTEGER NOT NULL DEFAULT 0,      -- the same, only for customers that are counted
    place      INTEGER NOT NULL DEFAULT 0,      -- virtual time; in mode levels the lowest order
    tick       INTEGER NOT NULL DEFAULT 0,
    head_order INTEGER,                         -- the lowest waiting order
    head_since INTEGER,                         -- only in the flow that has the customer's lowest order
    head_bound INTEGER,                         -- there too: head_since, or an earlier time
    held       INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (customer, level, kind)
) STRICT, WITHOUT ROWID;
CREATE INDEX flows_turn ON flows (level, place, tick) WHERE folded > 0 AND held = 0;
-- A head changes with every claim; its bound, and so the index, only once in half the patience.
CREATE INDEX flows_head ON flows (head_bound, customer) WHERE head_bound IS NOT NULL AND held = 0;

-- Events that no claim has folded yet.
CREATE TABLE event_log (
    number INTEGER PRIMARY KEY,
    at     INTEGER NOT NULL,
    events TEXT    NOT NULL                     -- a JSON array
) STRICT;

-- No index contains the state of a waiting, running or completed document: a claim and a finish change one
-- row each and nothing else. A document waits in its flow if its order is above claimed_to, or if it was
-- returned. Cancelled documents are in level 0. States: 0 delayed, 1 waiting, 2 running, 3 completed,
-- 4 dead, 5 cancelled; 6 is reserved for expired.
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
    body_type        TEXT    NOT NULL,          -- payload or content
    kind             INTEGER NOT NULL DEFAULT 0, -- of work; 0 is the default kind
    fence            INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    returned         INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    children         INTEGER NOT NULL DEFAULT 0,
    claimed_at       INTEGER,
    lease_until      INTEGER,                   -- on the boot clock
    charged_cost     INTEGER,
    charged_weight   INTEGER,
    charge           INTEGER,
    ended_at         INTEGER,
    due_at           INTEGER,
    retry_at         INTEGER,                   -- of a failed one, on the boot clock; after a reboot due_at
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
    progress_done    ANY,                       -- as the handler reported it
    progress_total   ANY,
    progress_fence   INTEGER,                   -- the attempt that reported it
    CHECK (state BETWEEN 0 AND 6),
    CHECK (state <> 2 OR lease_until IS NOT NULL),
    CHECK (state <> 1 OR order_number IS NOT NULL)
) STRICT;
CREATE INDEX documents_flow ON documents (customer, level, order_number);
-- The order of a document that was never delayed is its number, so that documents_flow lists a customer's
-- documents by age too. This index lists the others.
CREATE INDEX documents_reordered ON documents (customer, number) WHERE order_number IS NOT number;
CREATE INDEX documents_returned ON documents (customer, level, order_number) WHERE returned = 1;
CREATE INDEX documents_delayed ON documents (due_at, number, retry_at) WHERE state = 0;
CREATE INDEX documents_retried ON documents (retry_at) WHERE state = 0 AND retry_at IS NOT NULL;
CREATE INDEX documents_failed ON documents (state, number) WHERE state > 3;
CREATE INDEX documents_content ON documents (content_name) WHERE content_name IS NOT NULL;

-- The documents of one claim: where to look for expired leases. The row of a document says whether its
-- lease has expired.
CREATE TABLE leases (
    fence     INTEGER PRIMARY KEY,
    until     INTEGER NOT NULL,                 -- no lease in it ends before
    running   INTEGER NOT NULL,                 -- documents that still run
    documents TEXT    NOT NULL                  -- a JSON array of numbers
) STRICT;
CREATE INDEX leases_until ON leases (until);

-- Documents that were cancelled while they waited or were delayed, until a claim reports them to its
-- worker. A claim also removes rows of documents that were deleted since.
CREATE TABLE unreported_cancels (
    number   INTEGER PRIMARY KEY,               -- in the order of the cancels
    document INTEGER NOT NULL
) STRICT;

-- Heartbeats of workers, for explanations.
CREATE TABLE workers (
    name    TEXT    PRIMARY KEY,
    seen_at INTEGER NOT NULL,
    slots   INTEGER NOT NULL DEFAULT 0          -- documents that it runs at the same time
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

CREATE TABLE idempotency_keys (
    customer     INTEGER NOT NULL,
    key          TEXT    NOT NULL,
    digest       BLOB,
    document     INTEGER NOT NULL,
    count        INTEGER NOT NULL,
    priority     INTEGER NOT NULL,
    submitted_at INTEGER NOT NULL,
    PRIMARY KEY (customer, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX idempotency_keys_age ON idempotency_keys (submitted_at);

-- The number of attempts that ended otherwise than by completion.
CREATE TABLE outcome_counters (
    one       INTEGER PRIMARY KEY CHECK (one = 1),
    attempts  INTEGER NOT NULL,
    retried   INTEGER NOT NULL DEFAULT 0,
    dead      INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO outcome_counters (one, attempts) VALUES (1, 0);

-- Access keys of the service, found by their ids. Of a secret only a hash is stored.
CREATE TABLE access_keys (
    id       TEXT    PRIMARY KEY,
    role     TEXT    NOT NULL,
    customer TEXT,                              -- by name: a key outlives an idle customer
    name     TEXT    NOT NULL,
    digest   BLOB    NOT NULL,                  -- SHA-256 of the secret
    made_at  INTEGER NOT NULL,
    used_at  INTEGER,
    ends_at  INTEGER,
    CHECK ((role = 'customer') = (customer IS NOT NULL))
) STRICT, WITHOUT ROWID;
CREATE INDEX access_keys_customer ON access_keys (customer, id) WHERE customer IS NOT NULL;
