-- Who writes what: submitting writes customers, documents, keys, totals and recorded; only claims
-- write flows, standings and turns; everything that a claim has to fold in is a row of `recorded`.
-- How many documents wait is a difference that nobody has to lock for: what submissions counted
-- (customers.arrived, totals), less what claims counted (flows.taken, turns.taken), and what others
-- have moved since the last claim (moved).
--
-- {schema} is the schema of the queue, {now} the moment on the clock of the server.

CREATE SEQUENCE {schema}.document_numbers;  -- of a document, or of an order given when due
CREATE SEQUENCE {schema}.customer_numbers;

-- Claims lock this row, and change it only when the settings change.
CREATE TABLE {schema}.queue (
    one              smallint PRIMARY KEY DEFAULT 1 CHECK (one = 1),
    settings         text   NOT NULL,           -- a JSON object
    settings_version bigint NOT NULL DEFAULT 1, -- changes with them
    id_key           bigint NOT NULL,           -- stirs numbers into public ids
    -- Those of the settings that submit_document needs, once more.
    depths           bigint[] NOT NULL,         -- the bounds, without their signs
    reset_interval   bigint   NOT NULL,
    periodic         boolean  NOT NULL,
    one_level        boolean  NOT NULL,
    waiting_max      bigint   NOT NULL,
    waiting_per_customer_max bigint NOT NULL
);

-- Where the order of service stands: the row with the highest version. Each claim adds one, and an
-- old one goes. An update instead would leave dead rows in the way of every claim as long as some
-- old transaction may still look at them; here they lie behind. A process that has seen one of the
-- last rows need not read all flows anew, but only those that were changed since.
CREATE TABLE {schema}.turns (
    version  bigint   PRIMARY KEY,              -- changes with every change of flows and clocks
    claims   bigint   NOT NULL DEFAULT 0,       -- the number of the last claim
    fence    bigint   NOT NULL DEFAULT 0,       -- of the last lease
    tick     bigint   NOT NULL DEFAULT 0,       -- of the last activation of a flow
    clocks   bigint[] NOT NULL,                 -- of levels 1 to 9
    weights  bigint[] NOT NULL,                 -- the sums over their active flows
    taken    bigint[] NOT NULL,                 -- of priorities 1 to 9: ceased to wait, less began
    promoted bigint   NOT NULL DEFAULT 0,       -- delayed documents that became due
    boot     text     NOT NULL DEFAULT '',      -- leases count from this boot
    customers bigint[],                         -- the flows that were changed by this claim,
    levels    smallint[],
    disturbed boolean[]                         -- and whether not only at the ends of their lines;
                                                -- NULL: more than flows was changed
);
INSERT INTO {schema}.turns (version, clocks, weights, taken)
VALUES (0, array_fill(0::bigint, ARRAY[9]), array_fill(0::bigint, ARRAY[9]),
    array_fill(0::bigint, ARRAY[9]));

CREATE TABLE {schema}.customers (
    number           bigint   PRIMARY KEY DEFAULT nextval('{schema}.customer_numbers'),
    name             text     COLLATE "C" NOT NULL UNIQUE,
    count            bigint,
    count_updated_at bigint,
    arrived          bigint[] NOT NULL DEFAULT '{{0,0,0,0,0,0,0,0,0}}', -- of each priority
    submitted        bigint   NOT NULL DEFAULT 0, -- how many documents it ever had
    weight           integer  NOT NULL DEFAULT 1000,
    running_max      integer,
    paused           boolean  NOT NULL DEFAULT false
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);

-- Customers that have, or had, a limit: of them alone the end of a run is recorded.
CREATE TABLE {schema}.limited (customer bigint PRIMARY KEY);

-- What submissions counted, of all customers; and how many transactions, other than claims and
-- changes of settings, have changed anything. Each takes a row that nobody holds.
CREATE TABLE {schema}.totals (
    shard   integer  PRIMARY KEY,
    arrived bigint[] NOT NULL DEFAULT '{{0,0,0,0,0,0,0,0,0}}',
    delayed bigint   NOT NULL DEFAULT 0,
    changes bigint   NOT NULL DEFAULT 0
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
INSERT INTO {schema}.totals (shard) SELECT generate_series(0, 15);

-- What neither submissions nor claims counted; the next claim takes it over.
CREATE TABLE {schema}.moved (
    number   bigint   GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer bigint   NOT NULL,
    level    smallint NOT NULL,
    priority smallint NOT NULL,
    waiting  integer  NOT NULL,
    delayed  integer  NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
CREATE INDEX moved_customer ON {schema}.moved (customer);

-- A customer's settings as the claims have folded them in; no row where they are the defaults.
CREATE TABLE {schema}.standings (
    customer     bigint   PRIMARY KEY,
    weight       integer  NOT NULL,
    running_max  integer,
    paused       boolean  NOT NULL,
    recent_costs bigint[] NOT NULL
);

CREATE TABLE {schema}.flows (
    customer   bigint   NOT NULL,
    level      smallint NOT NULL,
    place      bigint   NOT NULL,               -- virtual time; in mode levels the lowest order
    tick       bigint   NOT NULL,
    folded     bigint   NOT NULL,               -- waiting, as far as the claims have folded it in
    running    bigint   NOT NULL,               -- the same, kept only for customers in limited
    taken      bigint   NOT NULL,               -- ceased to wait, less began, but by submissions
    claimed_to bigint   NOT NULL,               -- up to it only what was returned waits
    head_order bigint,                          -- the lowest order that waits here
    head_since bigint,                          -- only in the flow that has the customer's lowest
    head_bound bigint,                          -- there too: head_since, or a moment before it
    held       boolean  NOT NULL,
    PRIMARY KEY (customer, level)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);
CREATE INDEX flows_turn ON {schema}.flows (level, place, tick) WHERE folded > 0 AND NOT held;
-- A head moves with every claim; its bound, and so the index, only once in half the patience.
CREATE INDEX flows_head ON {schema}.flows (head_bound, customer)
    WHERE head_bound IS NOT NULL AND NOT held;

-- Numbers give the order. A transaction becomes visible to a claim when it commits, and not in the
-- order of its numbers: a claim takes whatever it sees. By their transactions it can leave out what
-- it has seen before, and so what is dead.
CREATE SEQUENCE {schema}.recorded_numbers;
CREATE TABLE {schema}.recorded (
    xid       xid8     NOT NULL DEFAULT pg_current_xact_id(),
    number    bigint   NOT NULL DEFAULT nextval('{schema}.recorded_numbers'),
    at        bigint   NOT NULL,
    customers bigint[] NOT NULL,                -- of what is told here
    levels    smallint[],                       -- documents that arrived: of each flow its level,
    heads     bigint[],                         -- the lowest order,
    sizes     integer[],                        -- and how many
    events    text,                             -- or other events: a JSON array
    PRIMARY KEY (xid, number)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);

-- No index changes when a document is claimed and when it completes: both are updates that stay on
-- their page, for which there is room. What waits in a flow comes after its claimed_to, or was
-- returned. There is no CHECK: the server compiles it anew for each statement, an eighth of the time
-- of a submission.
CREATE TABLE {schema}.documents (
    number           bigint   PRIMARY KEY,
    customer         bigint   NOT NULL,
    order_number     bigint,                    -- given at submission, or when first due
    count            bigint   NOT NULL,
    submitted_at     bigint   NOT NULL,
    size_bytes       bigint   NOT NULL,
    fence            bigint   NOT NULL DEFAULT 0,
    attempts         integer  NOT NULL DEFAULT 0,
    level            smallint NOT NULL,
    priority         smallint NOT NULL,
    state            smallint NOT NULL,
    returned         boolean  NOT NULL DEFAULT false,
    failed           boolean  NOT NULL DEFAULT false, -- dead or cancelled
    cancel_requested boolean  NOT NULL DEFAULT false,
    is_payload       boolean  NOT NULL,
    claimed_at       bigint,
    lease_until      bigint,
    charged_cost     bigint,
    charged_weight   bigint,
    charge           bigint,
    ended_at         bigint,
    due_at           bigint,
    delayed_until    bigint,                    -- the same, only while it is delayed
    cost             bigint,
    parent           bigint,
    real_cost        bigint,
    progress_fence   bigint,                    -- the attempt that said it
    worker           text,
    error            text,
    name             text,
    metadata         text,
    content_name     text,
    progress         text,                      -- a JSON array: done, total
    sha256           bytea,
    body_text        text,
    body_bytes       bytea
) WITH (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_analyze_scale_factor = 0.02);
CREATE INDEX documents_flow ON {schema}.documents (customer, level, order_number);
CREATE INDEX documents_customer ON {schema}.documents (customer, number);
CREATE INDEX documents_returned ON {schema}.documents (customer, level, order_number)
    WHERE returned;
CREATE INDEX documents_delayed ON {schema}.documents (delayed_until, number)
    WHERE delayed_until IS NOT NULL;
CREATE INDEX documents_delayed_of ON {schema}.documents (customer)
    WHERE delayed_until IS NOT NULL;
CREATE INDEX documents_failed ON {schema}.documents (number) WHERE failed;
CREATE INDEX documents_content ON {schema}.documents (content_name)
    WHERE content_name IS NOT NULL;

-- How many documents each document has made. Not in its own row, which a claim may need.
CREATE TABLE {schema}.children (
    parent bigint  PRIMARY KEY,
    made   integer NOT NULL
);

-- The documents that one claim took. It says where to look for leases that ran out; whether one
-- did is in the document's own row.
CREATE TABLE {schema}.leases (
    fence     bigint   PRIMARY KEY,
    until     bigint   NOT NULL,                -- no lease in it ends before
    running   integer  NOT NULL,                -- how many are left
    documents bigint[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
CREATE INDEX leases_until ON {schema}.leases (until);

-- Who claims: for explanations. Each worker writes here once in some seconds, as a part of a claim.
CREATE TABLE {schema}.workers (
    name    text   COLLATE "C" PRIMARY KEY,
    seen_at bigint NOT NULL,
    idle    bigint NOT NULL                     -- how many more documents it would have taken then
);

CREATE TABLE {schema}.results (
    document     bigint PRIMARY KEY,
    result       text,
    content_name text,
    size_bytes   bigint,
    sha256       bytea
);
CREATE INDEX results_content ON {schema}.results (content_name) WHERE content_name IS NOT NULL;

CREATE TABLE {schema}.keys (
    customer     bigint   NOT NULL,
    key          text     COLLATE "C" NOT NULL,
    digest       bytea,
    document     bigint   NOT NULL,
    count        bigint   NOT NULL,
    priority     smallint NOT NULL,
    submitted_at bigint   NOT NULL,
    PRIMARY KEY (customer, key)
);
CREATE INDEX keys_age ON {schema}.keys (submitted_at);

-- Where the round of pruning stands; whoever prunes holds this row.
CREATE TABLE {schema}.pruning (
    one       smallint PRIMARY KEY DEFAULT 1 CHECK (one = 1),
    documents bigint   NOT NULL DEFAULT 0,
    customers bigint   NOT NULL DEFAULT 0
);
INSERT INTO {schema}.pruning (one) VALUES (1);
