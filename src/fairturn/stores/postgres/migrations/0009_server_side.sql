-- Every write operation becomes one function call, so that the server never holds a lock while it waits for a
-- client. What processes kept between claims is a part of `turns` now: only its newest row is needed.
DELETE FROM {schema}.turns
WHERE version < (SELECT max(version) FROM {schema}.turns);
ALTER TABLE {schema}.turns
    DROP COLUMN customers,
    DROP COLUMN levels,
    DROP COLUMN disturbed,
    ADD COLUMN at bigint NOT NULL DEFAULT 0,                -- when the last claim was, to notice clock steps
    ADD COLUMN repairs bigint NOT NULL DEFAULT 0,           -- how many flows claims have repaired
    -- Lower bounds, so that no scan begins with index entries that an open transaction keeps from removal.
    ADD COLUMN places_from bigint[] NOT NULL                -- by level: no active flow has a lower place
        DEFAULT array_fill(-9223372036854775807, ARRAY[9]),
    ADD COLUMN heads_from bigint NOT NULL DEFAULT -9223372036854775807,     -- no head_since is lower
    ADD COLUMN leases_from bigint NOT NULL DEFAULT -9223372036854775807,    -- no lease ends before
    -- Events of all transactions before events_from are folded, but for those in events_late.
    ADD COLUMN events_from xid8 NOT NULL DEFAULT '0',
    ADD COLUMN events_late xid8[] NOT NULL DEFAULT '{{}}',
    -- A change of mode begins a generation of flows. Claims convert customers in the order of their numbers.
    ADD COLUMN generation bigint NOT NULL DEFAULT 0,
    ADD COLUMN converted_to bigint,                         -- the last converted customer; NULL: no conversion runs
    ADD COLUMN postponed bigint[] NOT NULL DEFAULT '{{}}',  -- large customers, which are converted after all others
    ADD COLUMN levels_to bigint,                            -- in the customer being converted: the last order whose
                                                            -- level was checked; NULL: both modes have the same levels
    ADD COLUMN probed_to bigint NOT NULL DEFAULT 0,         -- the last customer whose counters were compared,
    ADD COLUMN probed_at bigint NOT NULL DEFAULT 0;         -- and when

ALTER TABLE {schema}.queue
    ADD COLUMN mode text NOT NULL DEFAULT 'fair',
    ADD COLUMN costs text NOT NULL DEFAULT 'equal',
    ADD COLUMN patience bigint NOT NULL DEFAULT 120000000,
    ADD COLUMN attempts_max integer NOT NULL DEFAULT 5,
    -- After a failover or a restore a new epoch begins, in which no number of a document and no fence comes again.
    ADD COLUMN epoch bigint NOT NULL DEFAULT 1,
    ADD COLUMN incarnation text NOT NULL DEFAULT '',
    ADD COLUMN charges_from bigint NOT NULL DEFAULT 0;      -- attempts up to this fence belong to an earlier mode
UPDATE {schema}.queue SET mode = settings::jsonb ->> 'mode', costs = settings::jsonb ->> 'costs',
    patience = round((settings::jsonb ->> 'patience_s')::numeric * 1000000),
    attempts_max = (settings::jsonb ->> 'attempts_max')::integer;

DROP INDEX {schema}.flows_head;
DROP INDEX {schema}.flows_turn;
ALTER TABLE {schema}.flows
    DROP COLUMN head_bound,
    -- Where head_since is known: the lowest order in the customer's other flows, or one below it; NULL: unknown.
    ADD COLUMN next_elsewhere bigint,
    ADD COLUMN generation bigint NOT NULL DEFAULT 0,        -- of `turns`; claims take from the newest only
    -- By priority. In mode equal one flow has documents of all priorities: there it is computed anew.
    ALTER COLUMN taken TYPE bigint[] USING array_fill(0::bigint, ARRAY[level - 1]) || taken
        || array_fill(0::bigint, ARRAY[9 - level]);
UPDATE {schema}.flows f SET taken = ARRAY(
    SELECT a.n - (SELECT count(*) FROM {schema}.documents d
            WHERE d.customer = f.customer AND d.state = {waiting} AND d.priority = a.priority)
        + (SELECT coalesce(sum(m.waiting), 0) FROM {schema}.moved m
            WHERE m.customer = f.customer AND m.priority = a.priority)::bigint
    FROM {schema}.customers c CROSS JOIN LATERAL unnest(c.arrived) WITH ORDINALITY AS a(n, priority)
    WHERE c.number = f.customer ORDER BY a.priority)
WHERE (SELECT q.mode FROM {schema}.queue q) = 'equal'
    AND EXISTS (SELECT FROM {schema}.customers c WHERE c.number = f.customer);
CREATE INDEX flows_turn ON {schema}.flows (generation, level, place, tick) WHERE folded > 0 AND NOT held;
ALTER TABLE {schema}.moved DROP COLUMN level;
CREATE INDEX flows_head ON {schema}.flows (head_since, head_order)
    WHERE head_since IS NOT NULL AND NOT held;

-- A claim is identified by a token that the caller draws: a repeated call returns the same documents.
ALTER TABLE {schema}.leases
    ADD COLUMN token uuid,
    ADD COLUMN length bigint NOT NULL DEFAULT 86400000000;  -- the longest that was asked for
CREATE UNIQUE INDEX leases_token ON {schema}.leases (token);

-- Documents that were cancelled while they waited or were delayed, until a claim reports them to its worker. Rows of
-- documents that were deleted since are removed by a claim too.
CREATE TABLE {schema}.unreported_cancels (
    number   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,   -- in the order of the cancels
    document bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
ALTER TABLE {schema}.turns
    ADD COLUMN cancels_from bigint NOT NULL DEFAULT 0;      -- a lower bound: no unreported cancel is below it

DROP TABLE {schema}.wanted;
DROP FUNCTION IF EXISTS {schema}.await_turn, {schema}.claim_alone, {schema}.submit_one,
    {schema}.submit_document;

-- Workers report how many documents they run at the same time, by heartbeats and not by their claims.
ALTER TABLE {schema}.workers
    DROP COLUMN idle,
    ADD COLUMN slots bigint NOT NULL DEFAULT 0;
