-- readable from 10
-- The schema of a queue. {schema} is its name.
--
-- Which operation writes what: submissions write customers, documents, idempotency_keys,
-- arrival_counters and event_log. Only claims write flows, customer_states and scheduler_states; all
-- that a claim has to fold in is a row of event_log.
-- The number of waiting documents is a difference of counters, so that no operation locks another:
-- what submissions counted (customers.arrived, arrival_counters), less what claims counted
-- (flows.taken, scheduler_states.taken), plus what other operations have changed since the last claim
-- (counter_changes).

CREATE SEQUENCE {schema}.document_numbers;  -- of a document, or of an order that is given when due
CREATE SEQUENCE {schema}.customer_numbers;

-- One row. Claims lock it; it changes only with the settings and with an epoch.
CREATE TABLE {schema}.queue (
    one              smallint PRIMARY KEY DEFAULT 1 CHECK (one = 1),
    settings         text     NOT NULL,             -- a JSON object
    settings_version bigint   NOT NULL DEFAULT 1,   -- changes with them
    id_key           bigint   NOT NULL,             -- obfuscates numbers into public ids
    -- The settings that functions read, once more.
    depths           bigint[] NOT NULL,             -- the bounds, without their signs
    reset_interval   bigint   NOT NULL,
    periodic         boolean  NOT NULL,
    one_level        boolean  NOT NULL,
    waiting_max      bigint   NOT NULL,
    waiting_per_customer_max bigint NOT NULL,
    mode             text     NOT NULL,
    costs            text     NOT NULL,
    patience         bigint   NOT NULL,
    attempts_max     integer  NOT NULL,
    -- A failover or a restore begins a new epoch, in which no document number and no fence is reused.
    epoch            bigint   NOT NULL DEFAULT 1,
    incarnation      text     NOT NULL,             -- the server and timeline of this epoch
    charges_from     bigint   NOT NULL DEFAULT 0    -- attempts up to this fence belong to an earlier mode
);

-- The state of the scheduler: the row with the highest version. Each claim inserts one and deletes an
-- old one. An update instead would leave dead row versions in the path of every claim while an old
-- transaction keeps the server from removing them.
CREATE TABLE {schema}.scheduler_states (
    version      bigint   PRIMARY KEY,              -- changes with every change of flows and clocks
    claims       bigint   NOT NULL DEFAULT 0,       -- the number of the last claim
    fence        bigint   NOT NULL DEFAULT 0,       -- of the last lease
    tick         bigint   NOT NULL DEFAULT 0,       -- of the last activation of a flow
    clocks       bigint[] NOT NULL,                 -- of levels 1 to 9
    weights      bigint[] NOT NULL,                 -- the sums over their active flows
    taken        bigint[] NOT NULL,                 -- of priorities 1 to 9: stopped waiting, less began
    promoted     bigint   NOT NULL DEFAULT 0,       -- delayed documents that became due
    boot         text     NOT NULL DEFAULT '',      -- leases count from this boot
    at           bigint   NOT NULL DEFAULT 0,       -- the time of the last claim, to detect clock steps
    repairs      bigint   NOT NULL DEFAULT 0,       -- the number of flows that claims have repaired
    -- Lower bounds, so that no scan begins with index entries that an open transaction keeps from removal.
    places_from  bigint[] NOT NULL                  -- by level: no active flow has a lower place
        DEFAULT array_fill(-9223372036854775807, ARRAY[9]),
    heads_from   bigint   NOT NULL DEFAULT -9223372036854775807,    -- no head_since is lower
    leases_from  bigint   NOT NULL DEFAULT -9223372036854775807,    -- no lease ends before
    cancels_from bigint   NOT NULL DEFAULT 0,       -- no unreported cancel has a lower number
    -- Events of all transactions before events_from are folded, except for those in events_late.
    events_from  xid8     NOT NULL DEFAULT '0',
    events_late  xid8[]   NOT NULL DEFAULT '{{}}',
    -- A change of mode begins a generation of flows. Claims convert customers in the order of their numbers.
    generation   bigint   NOT NULL DEFAULT 0,
    converted_to bigint,                            -- the last converted customer; NULL: no conversion runs
    postponed    bigint[] NOT NULL DEFAULT '{{}}',  -- large customers, which are converted after all others
    levels_to    bigint,                            -- in the customer being converted: the last order whose
                                                    -- level was checked; NULL: both modes have the same levels
    probed_to    bigint   NOT NULL DEFAULT 0,       -- the last customer whose counters were compared,
    probed_at    bigint   NOT NULL DEFAULT 0        -- and when
);
INSERT INTO {schema}.scheduler_states (version, clocks, weights, taken)
VALUES (0, array_fill(0::bigint, ARRAY[9]), array_fill(0::bigint, ARRAY[9]),
    array_fill(0::bigint, ARRAY[9]));

CREATE TABLE {schema}.customers (
    number           bigint   PRIMARY KEY DEFAULT nextval('{schema}.customer_numbers'),
    name             text     COLLATE "C" NOT NULL UNIQUE,
    count            bigint,
    count_updated_at bigint,
    arrived          bigint[] NOT NULL DEFAULT '{{0,0,0,0,0,0,0,0,0}}', -- by priority
    submitted        bigint   NOT NULL DEFAULT 0,   -- documents since the customer was created
    weight           integer  NOT NULL DEFAULT 1000,
    running_max      integer,
    paused           boolean  NOT NULL DEFAULT false
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);

-- Customers that have or had a limit. Only for them, the end of a run is an event.
CREATE TABLE {schema}.limited_customers (customer bigint PRIMARY KEY);

-- Counters of submissions, over all customers; and the number of transactions, other than claims and
-- changes of settings, that have changed anything. A transaction takes a shard that no other one holds.
CREATE TABLE {schema}.arrival_counters (
    shard   integer  PRIMARY KEY,
    arrived bigint[] NOT NULL DEFAULT '{{0,0,0,0,0,0,0,0,0}}',
    delayed bigint   NOT NULL DEFAULT 0,
    changes bigint   NOT NULL DEFAULT 0
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
INSERT INTO {schema}.arrival_counters (shard) SELECT generate_series(0, 15);

-- Changes of counters by operations other than submissions and claims. The next claim applies them.
CREATE TABLE {schema}.counter_changes (
    number   bigint   GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer bigint   NOT NULL,
    priority smallint NOT NULL,
    waiting  integer  NOT NULL,
    delayed  integer  NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
CREATE INDEX counter_changes_customer ON {schema}.counter_changes (customer);

-- The number of attempts that ended otherwise than by completion: the sum over all rows. A transaction
-- takes a row that no other one holds, or inserts one.
CREATE TABLE {schema}.outcome_counters (
    number    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    attempts  bigint NOT NULL,
    retried   bigint NOT NULL DEFAULT 0,
    dead      bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
INSERT INTO {schema}.outcome_counters (attempts) VALUES (0);

-- A customer's settings as claims have folded them in; no row for the defaults.
CREATE TABLE {schema}.customer_states (
    customer     bigint   PRIMARY KEY,
    weight       integer  NOT NULL,
    running_max  integer,
    paused       boolean  NOT NULL,
    recent_costs bigint[] NOT NULL
);

-- A claim that changes a flow gives its row another key, by the version: a scan finds the newest row
-- first, before row versions that an old transaction keeps from removal. Only claims insert flows, under
-- the lock of the row of `queue`.
CREATE TABLE {schema}.flows (
    customer       bigint   NOT NULL,
    level          smallint NOT NULL,               -- 0 to 9
    kind           smallint NOT NULL DEFAULT 0,     -- of work; 0 is the default kind
    version        bigint   NOT NULL DEFAULT 0,     -- of scheduler_states
    generation     bigint   NOT NULL DEFAULT 0,     -- of scheduler_states; claims take from the newest only
    place          bigint   NOT NULL,               -- virtual time; in mode levels the lowest order
    tick           bigint   NOT NULL,
    folded         bigint   NOT NULL,               -- waiting, as far as claims have folded it in
    running        bigint   NOT NULL,               -- the same, only for customers in limited_customers
    taken          bigint[] NOT NULL,               -- by priority: stopped waiting, less began, without submissions
    claimed_to     bigint   NOT NULL,               -- up to this order only returned documents wait
    head_order     bigint,                          -- the lowest waiting order
    head_since     bigint,                          -- only in the flow that has the customer's lowest order
    next_elsewhere bigint,                          -- where head_since is known: a lower bound of the orders in
                                                    -- the customer's other flows; NULL: unknown
    held           boolean  NOT NULL,
    PRIMARY KEY (customer, level, version, kind)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);
CREATE INDEX flows_turn ON {schema}.flows (generation, level, place, tick) WHERE folded > 0 AND NOT held;
CREATE INDEX flows_head ON {schema}.flows (head_since, head_order)
    WHERE head_since IS NOT NULL AND NOT held;

-- Events that no claim has folded yet, in the order of their numbers. A claim sees a transaction once it
-- has committed, which is not in the order of numbers. By its xid, a claim skips what it has folded.
CREATE SEQUENCE {schema}.event_numbers;
CREATE TABLE {schema}.event_log (
    xid       xid8     NOT NULL DEFAULT pg_current_xact_id(),
    number    bigint   NOT NULL DEFAULT nextval('{schema}.event_numbers'),
    at        bigint   NOT NULL,
    customers bigint[] NOT NULL,
    levels    smallint[],                           -- arrivals: for each flow its level,
    heads     bigint[],                             -- the lowest order,
    sizes     integer[],                            -- and the number of documents
    events    text,                                 -- or other events: a JSON array
    PRIMARY KEY (xid, number)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);

-- Neither a claim nor a completion changes an index: both are updates that stay on their page, for which
-- the fillfactor leaves room. A document waits in its flow if its order is above claimed_to, or if it was
-- returned. There is no CHECK: the server would compile it for each statement, an eighth of the time of a
-- submission. States: 0 delayed, 1 waiting, 2 running, 3 completed, 4 dead, 5 cancelled; 6 is reserved for
-- expired.
CREATE TABLE {schema}.documents (
    number           bigint   PRIMARY KEY,
    customer         bigint   NOT NULL,
    order_number     bigint,                        -- given at submission, or when first due
    count            bigint   NOT NULL,
    submitted_at     bigint   NOT NULL,
    size_bytes       bigint   NOT NULL,
    fence            bigint   NOT NULL DEFAULT 0,
    attempts         integer  NOT NULL DEFAULT 0,
    level            smallint NOT NULL,
    priority         smallint NOT NULL,
    state            smallint NOT NULL,
    kind             smallint NOT NULL DEFAULT 0,   -- of work; 0 is the default kind
    returned         boolean  NOT NULL DEFAULT false,
    failed           boolean  NOT NULL DEFAULT false, -- dead or cancelled
    cancel_requested boolean  NOT NULL DEFAULT false,
    claimed_at       bigint,
    lease_until      bigint,
    charged_cost     bigint,
    charged_weight   bigint,
    charge           bigint,
    ended_at         bigint,
    due_at           bigint,
    delayed_until    bigint,                        -- due_at, only while it is delayed
    cost             bigint,
    parent           bigint,
    real_cost        bigint,
    progress_fence   bigint,                        -- the attempt that reported progress
    body_type        text     NOT NULL,             -- payload or content
    worker           text,
    error            text,
    name             text,
    metadata         text,
    content_name     text,
    progress         text,                          -- a JSON array: done, total
    sha256           bytea,
    body_text        text,
    body_bytes       bytea
) WITH (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_analyze_scale_factor = 0.02);
CREATE INDEX documents_flow ON {schema}.documents (customer, level, order_number);
-- The order of a document that was never delayed is its number, so that documents_flow lists a customer's
-- documents by age too. This index lists the others.
CREATE INDEX documents_reordered ON {schema}.documents (customer, number)
    WHERE order_number IS DISTINCT FROM number;
CREATE INDEX documents_returned ON {schema}.documents (customer, level, order_number)
    WHERE returned;
CREATE INDEX documents_delayed ON {schema}.documents (delayed_until, number)
    WHERE delayed_until IS NOT NULL;
CREATE INDEX documents_delayed_of ON {schema}.documents (customer)
    WHERE delayed_until IS NOT NULL;
CREATE INDEX documents_failed ON {schema}.documents (number) WHERE failed;
CREATE INDEX documents_content ON {schema}.documents (content_name)
    WHERE content_name IS NOT NULL;

-- The number of children of each document. Not in its own row, which a claim may lock.
CREATE TABLE {schema}.children (
    parent bigint  PRIMARY KEY,
    made   integer NOT NULL
);

-- The documents of one claim: where to look for expired leases. The row of a document says whether its
-- lease has expired. The array stays in the row: compressing it takes longer than writing it.
CREATE TABLE {schema}.leases (
    fence     bigint   PRIMARY KEY,
    token     uuid,                                 -- drawn by the claimer: a repeated claim returns the same
    until     bigint   NOT NULL,                    -- no lease in it ends before
    length    bigint   NOT NULL DEFAULT 86400000000, -- the longest that was requested
    running   integer  NOT NULL,                    -- documents that still run
    documents bigint[] NOT NULL
) WITH (toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000);
CREATE INDEX leases_until ON {schema}.leases (until);
CREATE UNIQUE INDEX leases_token ON {schema}.leases (token);

-- Documents that were cancelled while they waited or were delayed, until a claim reports them to its
-- worker. A claim also removes rows of documents that were deleted since.
CREATE TABLE {schema}.unreported_cancels (
    number   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,   -- in the order of the cancels
    document bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);

-- Heartbeats of workers, for explanations.
CREATE TABLE {schema}.workers (
    name    text   COLLATE "C" PRIMARY KEY,
    seen_at bigint NOT NULL,
    slots   bigint NOT NULL DEFAULT 0               -- documents that it runs at the same time
);

CREATE TABLE {schema}.results (
    document     bigint PRIMARY KEY,
    result       text,
    content_name text,
    size_bytes   bigint,
    sha256       bytea
);
CREATE INDEX results_content ON {schema}.results (content_name) WHERE content_name IS NOT NULL;

CREATE TABLE {schema}.idempotency_keys (
    customer     bigint   NOT NULL,
    key          text     COLLATE "C" NOT NULL,
    digest       bytea,
    document     bigint   NOT NULL,
    count        bigint   NOT NULL,
    priority     smallint NOT NULL,
    submitted_at bigint   NOT NULL,
    PRIMARY KEY (customer, key)
);
CREATE INDEX idempotency_keys_age ON {schema}.idempotency_keys (submitted_at);

-- Where the round of prune stands; a prune locks this row.
CREATE TABLE {schema}.prune_cursor (
    one       smallint PRIMARY KEY DEFAULT 1 CHECK (one = 1),
    documents bigint   NOT NULL DEFAULT 0,
    customers bigint   NOT NULL DEFAULT 0
);
INSERT INTO {schema}.prune_cursor (one) VALUES (1);

-- Access keys of the service, found by their ids. Of a secret only a hash is stored.
CREATE TABLE {schema}.access_keys (
    id       text   COLLATE "C" PRIMARY KEY,
    role     text   NOT NULL,
    customer text   COLLATE "C",                    -- by name: a key outlives an idle customer
    name     text   NOT NULL,
    digest   bytea  NOT NULL,                       -- SHA-256 of the secret
    made_at  bigint NOT NULL,
    used_at  bigint,
    ends_at  bigint,
    CHECK ((role = 'customer') = (customer IS NOT NULL))
);
CREATE INDEX access_keys_customer ON {schema}.access_keys (customer, id)
    WHERE customer IS NOT NULL;
