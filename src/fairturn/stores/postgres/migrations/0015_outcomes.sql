-- readable from 11
-- Pipelines, attempts, expiry and outages (decisions 0034 and 0035). Their first use raises readable_from: `require_schema`.
ALTER TABLE {schema}.documents
    ADD COLUMN step integer NOT NULL DEFAULT 0,     -- finished steps; `attempts` counts the present one
    ADD COLUMN snoozes integer NOT NULL DEFAULT 0,  -- attempts that did not count and delayed it
    ADD COLUMN expires_at bigint;
ALTER TABLE {schema}.kinds ADD COLUMN expires_in_us bigint;     -- of documents without an expiry, since they are due
ALTER TABLE {schema}.outcome_counters ADD COLUMN expired bigint NOT NULL DEFAULT 0;

-- Attempts that failed, lost their lease or ended a step.
CREATE TABLE {schema}.attempts (
    document     bigint   NOT NULL,
    number       integer  NOT NULL,                 -- of the document, from 1, in the order in which they ended
    step         integer  NOT NULL,
    kind         smallint NOT NULL,
    attempt      integer  NOT NULL,                 -- of the step, from 1
    worker       text     NOT NULL,
    claimed_at   bigint   NOT NULL,
    ended_at     bigint   NOT NULL,
    outcome      smallint NOT NULL,                 -- 0 failed, 1 lost, 2 advanced
    error        text,
    details      text,
    content_name text,                              -- of a step
    size_bytes   bigint,
    sha256       bytea,
    value        text,                              -- of a step, JSON
    PRIMARY KEY (document, number)
);
CREATE INDEX attempts_content ON {schema}.attempts (content_name) WHERE content_name IS NOT NULL;

-- The last checkpoint of a document's present step.
CREATE TABLE {schema}.checkpoints (
    document bigint PRIMARY KEY,
    value    text   NOT NULL                        -- JSON
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);

-- Documents that may expire, by time. A row is deleted when its time comes. If its document runs then, the row is inserted
-- again when the attempt is given back. No index of `documents` contains the expiry.
CREATE TABLE {schema}.expirations (
    expires_at bigint NOT NULL,
    document   bigint NOT NULL,
    PRIMARY KEY (expires_at, document)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);

-- The services that workers have registered for their kinds. Every kind also needs `kind:NAME`.
CREATE TABLE {schema}.kind_services (
    kind    smallint NOT NULL,
    service text     COLLATE "C" NOT NULL,
    PRIMARY KEY (kind, service)
);

-- Services that were reported unavailable: `ServiceState` of scheduling/outages.py.
CREATE TABLE {schema}.outages (
    service           text    COLLATE "C" PRIMARY KEY,
    began_at          bigint  NOT NULL,
    reported_at       bigint  NOT NULL,
    document          bigint,                       -- that reported last; NULL after a success
    error             text    NOT NULL,
    first_interval_us bigint  NOT NULL,
    interval_us       bigint  NOT NULL,
    fence             bigint  NOT NULL,             -- of the last claim when the hold began or ended
    held              boolean NOT NULL,
    probes            bigint  NOT NULL,
    probe_at          bigint  NOT NULL,
    probe_set_at      bigint  NOT NULL,
    resumed_at        bigint
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 100);

-- Functions whose parameters or results have changed.
DROP FUNCTION IF EXISTS {schema}.submit(bigint, bigint, integer, text[], text[], bytea[], text[], bigint[], bytea[], text[],
    text[], text[], text[], bigint[], bigint[], text[], bytea[], bigint[], text[]);
DROP FUNCTION IF EXISTS {schema}.free_kinds(text[], text[], integer[]);
DROP FUNCTION IF EXISTS {schema}.configure_kind(text, integer, boolean, integer, boolean, integer, boolean, integer);
DROP FUNCTION IF EXISTS {schema}.sign_on(bigint, text, bigint, text[]);
DROP FUNCTION IF EXISTS {schema}.retry(bigint, bigint[]);
DROP FUNCTION IF EXISTS {schema}.claimed(uuid);
