-- readable from 11
-- Kinds of work (decision 0033). The column `level` of flows, documents and events contains the band, 10 * kind + level.
-- The band of the default kind, number 0, is the level itself. The column `kind` of flows stays unused. The first other
-- kind raises readable_from: `create_kinds`.
CREATE TABLE {schema}.kinds (
    number       smallint PRIMARY KEY,
    name         text     COLLATE "C" NOT NULL UNIQUE,
    running_max  integer,
    paused       boolean  NOT NULL DEFAULT false,
    attempts_max integer
);
INSERT INTO {schema}.kinds (number, name) VALUES ({default_kind}, '{default_kind_name}');

-- A row has the values of the default kind. While a transaction changes the state, those of other kinds follow in the same
-- arrays, in the order of `kinds`: `load_kinds`. `taken` of the default kind counts the documents of all kinds.
ALTER TABLE {schema}.scheduler_states
    ADD COLUMN kinds smallint[] NOT NULL DEFAULT '{{0}}',
    ADD COLUMN kind_times bigint[] NOT NULL DEFAULT array_fill(0::bigint, ARRAY[9]),    -- by level
    ADD COLUMN last_claims bigint[] NOT NULL DEFAULT array_fill(0::bigint, ARRAY[9]),   -- numbers of claims
    ADD COLUMN level_times bigint[] NOT NULL DEFAULT array_fill(0::bigint, ARRAY[9]),   -- of all kinds together
    ADD COLUMN since_patience bigint[] NOT NULL DEFAULT '{{0}}',  -- by kind: claims since the last patience claim
    ADD COLUMN kind_heads_from bigint[] NOT NULL DEFAULT '{{-9223372036854775807}}';    -- heads_from by kind
UPDATE {schema}.scheduler_states SET since_patience = ARRAY[claims % 10];

-- The values of the other kinds, one row for each, as in scheduler_states. `version` is that of the last change.
CREATE TABLE {schema}.kind_states (
    kind           smallint NOT NULL,
    version        bigint   NOT NULL,
    clocks         bigint[] NOT NULL DEFAULT array_fill(0::bigint, ARRAY[9]),
    weights        bigint[] NOT NULL DEFAULT array_fill(0::bigint, ARRAY[9]),
    taken          bigint[] NOT NULL DEFAULT array_fill(0::bigint, ARRAY[9]),
    places_from    bigint[] NOT NULL DEFAULT array_fill(-9223372036854775807, ARRAY[9]),
    kind_times     bigint[] NOT NULL DEFAULT array_fill(0::bigint, ARRAY[9]),
    last_claims    bigint[] NOT NULL DEFAULT array_fill(0::bigint, ARRAY[9]),
    heads_from     bigint   NOT NULL DEFAULT -9223372036854775807,
    since_patience bigint   NOT NULL DEFAULT 0,
    PRIMARY KEY (kind, version)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);

-- Submissions of the other kinds, by priority. arrival_counters counts those of all kinds.
CREATE TABLE {schema}.kind_arrivals (
    kind    smallint NOT NULL,
    shard   integer  NOT NULL,
    arrived bigint[] NOT NULL,
    PRIMARY KEY (kind, shard)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
ALTER TABLE {schema}.counter_changes ADD COLUMN kind smallint NOT NULL DEFAULT 0;

-- Recent costs in the other kinds: an array for each number of a kind.
ALTER TABLE {schema}.customer_states ADD COLUMN costs_by_kind jsonb NOT NULL DEFAULT '{{}}';

-- Flows have the head of their customer by kind.
DROP INDEX {schema}.flows_head;
CREATE INDEX flows_head ON {schema}.flows ((level / 10), head_since, head_order)
    WHERE head_since IS NOT NULL AND NOT held;

ALTER TABLE {schema}.workers ADD COLUMN kinds text[];   -- that it serves; NULL: every kind

-- It returns a value now. Calls in flight may still use the other functions of schema 13 whose parameters have changed; the
-- next migration can drop these: has_work, hidden_level, recount_level.
DROP FUNCTION IF EXISTS {schema}.count_arrived(integer, bigint[], bigint);
