-- Which flow has the next turn, and what a claim changes beside it: fairturn.scheduling.turns in SQL.

-- Return the flow with the oldest head among the served kinds, if it has been the head since before `before`. By
-- flows_head, one scan for each kind.
CREATE OR REPLACE FUNCTION {schema}.longest_waiting(t {schema}.scheduler_states, served smallint[], before bigint)
RETURNS {schema}.flows LANGUAGE plpgsql AS $$
DECLARE
    f {schema}.flows;
BEGIN
    SELECT o.* INTO f
    FROM unnest(t.kinds, t.kind_heads_from) AS k(number, heads_from) CROSS JOIN LATERAL (
        SELECT * FROM {schema}.flows x
        WHERE x.level / 10 = k.number AND x.head_since >= k.heads_from AND x.head_since < before AND NOT x.held
            AND x.generation = t.generation
        ORDER BY x.level / 10, x.head_since, x.head_order LIMIT 1) o
    WHERE k.number = ANY (served) ORDER BY o.head_since, o.head_order LIMIT 1;
    RETURN f;
END
$$;

-- Return whether one of the served kinds has an active flow and nine claims since its last patience claim.
CREATE OR REPLACE FUNCTION {schema}.is_patience_due(t {schema}.scheduler_states, served smallint[]) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM unnest(t.kinds, t.since_patience) WITH ORDINALITY AS k(number, n, position)
        WHERE k.number = ANY (served) AND k.n >= 9 AND 0 < ANY (t.weights[9 * k.position - 8:9 * k.position]));
END
$$;

-- Restart the counters of claims since the last patience claim, of the served kinds.
CREATE OR REPLACE FUNCTION {schema}.restart_patience(t {schema}.scheduler_states, served smallint[])
RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
BEGIN
    FOR k IN 1 .. cardinality(t.kinds) LOOP
        IF t.kinds[k] = ANY (served) THEN
            t.since_patience[k] := 0;
        END IF;
    END LOOP;
    RETURN t;
END
$$;

-- Return the band of the next turn: of each served kind the best level with an active flow; of these the best, and in it
-- the kind whose turn it is. `rival` is the kind time from which on another kind has the turn; in mode `levels` its
-- lowest order. NULL: no other kind has active flows in this level.
CREATE OR REPLACE FUNCTION {schema}.next_band(
    t {schema}.scheduler_states, its_mode text, served smallint[], OUT band smallint, OUT rival bigint
) LANGUAGE plpgsql AS $$
DECLARE
    r record;
    first integer;
BEGIN
    IF cardinality(served) = 1 THEN     -- as below, in a quarter of the time
        first := 9 * array_position(t.kinds, served[1]) - 9;
        band := 10 * served[1] + (SELECT min(l) FROM generate_series(1, 9) l WHERE t.weights[first + l] > 0);
        RETURN;
    END IF;
    FOR r IN
        SELECT b.band, CASE WHEN its_mode <> 'levels' THEN t.kind_times[b.slot] ELSE (
                -- By flows_turn.
                SELECT o.place FROM {schema}.flows o
                WHERE o.folded > 0 AND NOT o.held AND o.generation = t.generation
                    AND o.level = b.band AND o.place >= t.places_from[b.slot]
                ORDER BY o.generation, o.level, o.place, o.tick LIMIT 1) END AS turn
        FROM (
            SELECT (10 * k.number + l.level)::smallint AS band, l.level, 9 * k.position - 9 + l.level AS slot, s.position
            FROM unnest(t.kinds) WITH ORDINALITY AS k(number, position)
                JOIN unnest(served) WITH ORDINALITY AS s(number, position) ON s.number = k.number
                CROSS JOIN LATERAL (
                    SELECT min(v) AS level FROM generate_series(1, 9) v
                    WHERE t.weights[9 * k.position - 9 + v] > 0) l
            WHERE l.level IS NOT NULL) b
        ORDER BY b.level, turn NULLS FIRST, t.last_claims[b.slot], b.position LIMIT 2
    LOOP
        IF band IS NULL THEN
            band := r.band;
        ELSIF r.band % 10 = band % 10 THEN
            rival := r.turn;
        END IF;
    END LOOP;
END
$$;

-- Return a band of the served kinds with an active flow although all their sums of weights are 0, which only a wrong sum
-- causes. Searched in one second of 16, because idle claims would pay for it.
CREATE OR REPLACE FUNCTION {schema}.hidden_band(t {schema}.scheduler_states, served smallint[], its_at bigint)
RETURNS smallint LANGUAGE plpgsql AS $$
BEGIN
    IF its_at / 1000000 % 16 <> 0 THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT o.level FROM unnest(served) AS k CROSS JOIN LATERAL (
        SELECT x.level FROM {schema}.flows x
        WHERE x.folded > 0 AND NOT x.held AND x.generation = t.generation
            AND x.level BETWEEN (10 * k)::smallint AND (10 * k + 9)::smallint
        ORDER BY x.generation, x.level, x.place, x.tick LIMIT 1) o LIMIT 1);
END
$$;

-- Recompute the sum of weights and the lowest place of a band from its active flows. Its kind is loaded.
CREATE OR REPLACE FUNCTION {schema}.recount_band(t {schema}.scheduler_states, its_band smallint)
RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    i integer := {schema}.slot(t.kinds, its_band);
    band_weight bigint;
    lowest_place bigint;
BEGIN
    SELECT coalesce(sum(least(greatest(coalesce(s.weight, {weight_one}), {weight_min}), {weight_max})), 0),
        coalesce(min(o.place), 0)
    INTO band_weight, lowest_place
    FROM {schema}.flows o LEFT JOIN {schema}.customer_states s ON s.customer = o.customer
    WHERE o.folded > 0 AND NOT o.held AND o.generation = t.generation AND o.level = its_band;
    t.weights[i] := band_weight;
    t.places_from[i] := lowest_place;
    RAISE LOG 'fairturn: recounted the active flows of band %', its_band;
    RETURN t;
END
$$;

-- Subtract each band's clock from its places, and each level's time from those of its kinds, before virtual times reach
-- 2^63. Only differences within a band or a level matter.
CREATE OR REPLACE FUNCTION {schema}.rebase_clocks(t {schema}.scheduler_states) RETURNS {schema}.scheduler_states
LANGUAGE plpgsql AS $$
BEGIN
    t := {schema}.reset_bounds({schema}.load_all_kinds(t));
    UPDATE {schema}.flows o SET place = o.place - t.clocks[{schema}.slot(t.kinds, o.level)];
    t.clocks := array_fill(0::bigint, ARRAY[cardinality(t.clocks)]);
    t.kind_times := ARRAY(
        SELECT u.kind_time - t.level_times[1 + (u.position - 1) % 9]
        FROM unnest(t.kind_times) WITH ORDINALITY AS u(kind_time, position) ORDER BY u.position);
    t.level_times := array_fill(0::bigint, ARRAY[9]);
    RETURN t;
END
$$;

-- Find the customer's new head of the kind, after the flow that had it gave documents.
CREATE OR REPLACE FUNCTION {schema}.move_head(
    f {schema}.flows, its_mode text, at bigint, its_version bigint
) RETURNS {schema}.flows LANGUAGE plpgsql AS $$
DECLARE
    first_band smallint := f.level - f.level % 10 + 1;  -- of its kind
BEGIN
    IF f.next_elsewhere IS NULL OR f.head_order IS NULL OR f.head_order > f.next_elsewhere THEN
        f.next_elsewhere := {no_order};
        IF its_mode <> 'equal' THEN
            SELECT coalesce(min(o.head_order), {no_order}) INTO f.next_elsewhere
            FROM generate_series(first_band, first_band + 8) l CROSS JOIN LATERAL (
                SELECT x.head_order FROM {schema}.flows x
                WHERE x.customer = f.customer AND x.level = l::smallint
                ORDER BY x.customer DESC, x.level DESC, x.version DESC LIMIT 1) o
            WHERE l <> f.level;
        END IF;
    END IF;
    IF f.head_order < f.next_elsewhere THEN
        f.head_since := at;
    ELSE
        UPDATE {schema}.flows o SET head_since = at, next_elsewhere = NULL, version = its_version
        WHERE o.customer = f.customer AND o.level BETWEEN first_band AND first_band + 8 AND o.level <> f.level
            AND o.head_order = f.next_elsewhere;
        f.head_since := NULL;
        f.next_elsewhere := NULL;
    END IF;
    RETURN f;
END
$$;
