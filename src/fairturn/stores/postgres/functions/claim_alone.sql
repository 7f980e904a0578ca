-- Look whether there is anything to claim, without a lock if nothing arrived; and claim a document that
-- waits alone, in one round trip. Then nothing has to be decided, because nothing else could have the
-- turn. What is written is what fairturn.turns would have decided: tests hold it against that.
CREATE OR REPLACE FUNCTION {schema}.claim_alone(
    moment bigint, uptime bigint, its_boot text,    -- NULL, NULL, 'server': the clock of the server
    since xid8, late xid8[],    -- new is what was recorded by transactions from one on, and by these
    leases_from bigint,         -- no lease ends before
    thorough boolean,           -- whether to fold in what was recorded although nothing waits
    known_settings bigint,      -- the version of the settings that the next three are from
    is_plain boolean,           -- not in the mode `levels`, and not with costs that are learned
    costs_are_known boolean,
    patience bigint,
    n bigint, its_worker text, lease bigint,
    noted_at bigint, note_every bigint,     -- when the worker was noted the last time; NULL: never
    OUT answer smallint,        -- 0: nothing; 1: claimed; 2: something that is not decided here
    OUT its_at bigint,
    OUT first_end bigint,       -- of all leases
    OUT seen_since text, OUT seen_late bigint[],    -- the next `since` and `late`
    OUT customer_name text,
    OUT claimed {schema}.documents
) LANGUAGE plpgsql AS $$
DECLARE
    planned text;
    its_settings bigint;
    leases_at bigint;
    first_due bigint;
    was_moved boolean;
    -- of `turns`
    last_version bigint;
    last_claim bigint;
    last_fence bigint;
    last_tick bigint;
    its_clocks bigint[];
    its_weights bigint[];
    its_taken bigint[];
    its_promoted bigint;
    last_boot text;
    -- of `recorded`
    told_n bigint;
    told_xid xid8;
    told_number bigint;
    told_at bigint;
    told_sizes integer[];
    owner bigint;
    its_level smallint;
    -- of the document, its customer and its flow
    its_row tid;
    its_number bigint;
    its_order bigint;
    its_priority smallint;
    its_cost bigint;
    its_weight bigint;
    its_limit integer;
    is_paused boolean;
    flow_row tid;
    flow_time bigint;
    begun bigint;               -- the virtual time of its turn,
    charged bigint;             -- and what it costs
BEGIN
    -- As in fairturn.stores.postgres.session: every statement has one right plan, by its indexes. An
    -- assignment takes less time than a statement.
    planned := set_config('enable_seqscan', 'off', true);
    planned := set_config('enable_hashjoin', 'off', true);
    planned := set_config('enable_mergejoin', 'off', true);
    planned := set_config('enable_bitmapscan', 'off', true);
    planned := set_config('plan_cache_mode', 'force_generic_plan', true);
    planned := set_config('jit', 'off', true);

    IF current_setting('transaction_isolation') <> 'read committed' THEN
        answer := 2;            -- what follows the lock would not see what was committed before it
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM {schema}.recorded r WHERE r.xid >= since AND r.heads IS NOT NULL)
        OR EXISTS (SELECT FROM {schema}.recorded r
            WHERE r.xid = ANY (late) AND r.heads IS NOT NULL)
    THEN
        answer := 2;
        IF NOT is_plain THEN
            RETURN;
        END IF;
        SELECT q.settings_version INTO its_settings FROM {schema}.queue q FOR NO KEY UPDATE;
        its_at := coalesce(moment, {now});
        leases_at := coalesce(uptime, its_at);
        -- It sees all that was committed before. By the primary keys, leases_until, documents_delayed
        -- and documents_flow.
        SELECT t.version, t.claims, t.fence, t.tick, t.clocks, t.weights, t.taken, t.promoted, t.boot,
            r.n, r.xid, r.number, r.at, r.sizes, r.customer, r.level,
            d.ctid, d.number, d.order_number, d.priority, d.cost, s.weight, s.running_max, s.paused,
            c.name, f.ctid, f.place,
            (SELECT l.until FROM {schema}.leases l WHERE l.until >= leases_from
                ORDER BY l.until LIMIT 1),
            (SELECT o.delayed_until FROM {schema}.documents o WHERE o.delayed_until IS NOT NULL
                ORDER BY o.delayed_until, o.number LIMIT 1),
            EXISTS (SELECT FROM {schema}.moved),
            pg_snapshot_xmax(pg_current_snapshot())::text,
            ARRAY(SELECT x::text::bigint FROM pg_snapshot_xip(pg_current_snapshot()) x)
        INTO last_version, last_claim, last_fence, last_tick, its_clocks, its_weights, its_taken,
            its_promoted, last_boot,
            told_n, told_xid, told_number, told_at, told_sizes, owner, its_level,
            its_row, its_number, its_order, its_priority, its_cost, its_weight, its_limit, is_paused,
            customer_name, flow_row, flow_time,
            first_end, first_due, was_moved, seen_since, seen_late
        FROM (SELECT * FROM {schema}.turns ORDER BY version DESC LIMIT 1) t
            LEFT JOIN LATERAL (
                SELECT count(*) OVER () AS n, u.xid, u.number, u.at, u.sizes,
                    u.customers[1] AS customer, u.levels[1] AS level, u.heads[1] AS head
                FROM (
                    (SELECT * FROM {schema}.recorded WHERE xid >= since LIMIT 2)
                    UNION ALL
                    (SELECT * FROM {schema}.recorded
                    WHERE xid = ANY (late) LIMIT 2)) u
                LIMIT 1) r ON true
            LEFT JOIN {schema}.customers c ON c.number = r.customer
            LEFT JOIN {schema}.standings s ON s.customer = r.customer
            LEFT JOIN LATERAL (
                SELECT ctid, place FROM {schema}.flows
                WHERE customer = r.customer AND level = r.level
                ORDER BY customer DESC, level DESC, version DESC LIMIT 1) f ON true
            LEFT JOIN {schema}.documents d ON d.customer = r.customer AND d.level = r.level
                AND d.order_number = r.head AND d.state = 1 AND NOT d.returned;
        IF its_settings <> known_settings OR last_boot <> its_boot OR first_end <= leases_at
            OR first_due <= its_at OR was_moved OR 0 < ANY (its_weights)
        THEN
            RETURN;
        END IF;
        IF told_n IS NULL THEN
            answer := 0;        -- somebody else was faster
        ELSIF told_n = 1 AND told_sizes = '{{1}}' AND its_number IS NOT NULL AND its_limit IS NULL
            AND is_paused IS NOT TRUE
            AND its_at - told_at <= patience            -- it has no turn as the longest waiting
            AND its_clocks[its_level] <= {clock_max}    -- a claim that decides takes them back
        THEN
            answer := 1;
        ELSE
            RETURN;
        END IF;
    ELSE
        -- What else was recorded, above all the outcomes of others, makes room only for documents that
        -- wait; while none does it can wait itself.
        its_at := coalesce(moment, {now});
        leases_at := coalesce(uptime, its_at);
        SELECT CASE WHEN
            (thorough OR (SELECT sum(k) FROM {schema}.totals t, unnest(t.arrived) k)
                    - (SELECT sum(k) FROM unnest(u.taken) k)
                    + (SELECT coalesce(sum(waiting), 0) FROM {schema}.moved) > 0)
                AND (0 < ANY (u.weights)
                    OR EXISTS (SELECT FROM {schema}.recorded WHERE xid >= since)
                    OR EXISTS (SELECT FROM {schema}.recorded
                        WHERE xid = ANY (late))
                    OR EXISTS (SELECT FROM {schema}.moved))
                OR (SELECT until FROM {schema}.leases WHERE until >= leases_from
                    ORDER BY until LIMIT 1) <= leases_at
                OR (SELECT delayed_until FROM {schema}.documents WHERE delayed_until IS NOT NULL
                    ORDER BY delayed_until, number LIMIT 1) <= its_at
            THEN 2 ELSE 0 END
        INTO answer
        FROM (SELECT taken, weights FROM {schema}.turns ORDER BY version DESC LIMIT 1) u;
        IF answer = 2 THEN
            RETURN;
        END IF;
    END IF;

    IF answer = 1 THEN
        its_weight := coalesce(its_weight, {weight_one});
        its_cost := CASE WHEN costs_are_known THEN coalesce(its_cost, {cost_one}) ELSE {cost_one} END;
        charged := greatest(1, its_cost * 1000 / its_weight);
        begun := greatest(flow_time, its_clocks[its_level]);
        -- Its weight is the only one of its level.
        its_clocks[its_level] := greatest(
            its_clocks[its_level] + its_cost * 1000 / its_weight, begun);
        its_taken[its_priority] := its_taken[its_priority] + 1;
        WITH folded AS (
            DELETE FROM {schema}.recorded WHERE xid = told_xid AND number = told_number),
        leased AS (
            INSERT INTO {schema}.leases (fence, until, running, documents)
            VALUES (last_fence + 1, leases_at + lease, 1, ARRAY[its_number])),
        turned AS (
            INSERT INTO {schema}.turns (version, claims, fence, tick, clocks, weights, taken,
                promoted, boot, customers, levels, disturbed)
            VALUES (last_version + 1, last_claim + 1, last_fence + 1, last_tick + 1, its_clocks,
                its_weights, its_taken, its_promoted, its_boot, ARRAY[owner], ARRAY[its_level],
                ARRAY[false])),
        forgotten AS (
            DELETE FROM {schema}.turns WHERE version = last_version + 1 - {turns_kept}),
        kept AS (
            UPDATE {schema}.flows SET version = last_version + 1, place = begun + charged,
                tick = last_tick + 1, folded = 0, running = running + 1, taken = taken + 1,
                claimed_to = its_order, head_order = NULL, head_since = NULL, head_bound = NULL,
                held = false
            WHERE ctid = flow_row)
        UPDATE {schema}.documents d SET state = 2, returned = false, attempts = d.attempts + 1,
            fence = last_fence + 1, claimed_at = its_at, lease_until = leases_at + lease,
            worker = its_worker, charged_cost = its_cost, charged_weight = its_weight,
            charge = charged
        WHERE d.ctid = its_row AND d.state = 1
        RETURNING d.* INTO claimed;
        IF NOT FOUND THEN       -- nobody should have changed it: all who may hold the queue's lock
            RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE = 'overtaken';
        END IF;
        IF flow_row IS NULL THEN
            INSERT INTO {schema}.flows (version, customer, level, place, tick, folded, running,
                taken, claimed_to, held)
            VALUES (last_version + 1, owner, its_level, begun + charged, last_tick + 1, 0, 1, 1,
                its_order, false);
        END IF;
    END IF;
    IF its_at - coalesce(noted_at, its_at - note_every) NOT BETWEEN 0 AND note_every - 1 THEN
        INSERT INTO {schema}.workers (name, seen_at, idle) VALUES (its_worker, its_at, n - answer)
        ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at, idle = excluded.idle;
    END IF;
END
$$;
