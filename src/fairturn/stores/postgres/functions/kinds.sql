-- Kinds of work, and the state of the scheduler by kind (decision 0033).

-- Return the band of a document: one level of one kind.
CREATE OR REPLACE FUNCTION {schema}.band(is_one_level boolean, priority smallint, kind smallint) RETURNS smallint
LANGUAGE sql IMMUTABLE AS $$
    SELECT (10 * kind + CASE WHEN is_one_level THEN 1 ELSE priority END)::smallint
$$;

-- Return the position of a band in the arrays of a scheduler state, which have nine elements for each of its kinds.
CREATE OR REPLACE FUNCTION {schema}.slot(kinds smallint[], band smallint) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT 9 * array_position(kinds, (band / 10)::smallint) - 9 + band % 10
$$;

-- Return the stored state of a kind other than the default one; zeros if it has no row. By the primary key.
CREATE OR REPLACE FUNCTION {schema}.kind_state(its_kind smallint) RETURNS {schema}.kind_states LANGUAGE plpgsql STABLE AS $$
DECLARE
    zeros constant bigint[] := array_fill(0::bigint, ARRAY[9]);
    lowest constant bigint := -9223372036854775807;
    k {schema}.kind_states;
BEGIN
    SELECT * INTO k FROM {schema}.kind_states o WHERE o.kind = its_kind
    ORDER BY o.kind DESC, o.version DESC LIMIT 1;
    IF NOT FOUND THEN
        k := (its_kind, -1, zeros, zeros, zeros, array_fill(lowest, ARRAY[9]), zeros, zeros, lowest, 0);
    END IF;
    RETURN k;
END
$$;

-- Append the values of these kinds to the arrays of a scheduler state, unless they are there; with `only_used`, of kinds
-- that have active flows or claims since their last patience claim.
CREATE OR REPLACE FUNCTION {schema}.load_kinds(
    t {schema}.scheduler_states, numbers smallint[], only_used boolean DEFAULT false
) RETURNS {schema}.scheduler_states LANGUAGE plpgsql AS $$
DECLARE
    number smallint;
    k {schema}.kind_states;
BEGIN
    FOREACH number IN ARRAY numbers LOOP
        CONTINUE WHEN number = ANY (t.kinds);
        k := {schema}.kind_state(number);
        CONTINUE WHEN only_used AND 0 >= ALL (k.weights) AND k.since_patience = 0;
        t.kinds := t.kinds || k.kind;
        t.clocks := t.clocks || k.clocks;
        t.weights := t.weights || k.weights;
        t.taken := t.taken || k.taken;
        t.places_from := t.places_from || k.places_from;
        t.kind_times := t.kind_times || k.kind_times;
        t.last_claims := t.last_claims || k.last_claims;
        t.kind_heads_from := t.kind_heads_from || k.heads_from;
        t.since_patience := t.since_patience || k.since_patience;
    END LOOP;
    RETURN t;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.load_all_kinds(t {schema}.scheduler_states) RETURNS {schema}.scheduler_states
LANGUAGE sql AS $$
    SELECT {schema}.load_kinds(t, ARRAY(SELECT k.number FROM {schema}.kinds k WHERE k.number > 0 ORDER BY k.number))
$$;

-- Reset the lower bounds from which claims read flows and leases, of the kinds that are loaded.
CREATE OR REPLACE FUNCTION {schema}.reset_bounds(t {schema}.scheduler_states) RETURNS {schema}.scheduler_states
LANGUAGE plpgsql AS $$
DECLARE
    lowest constant bigint := -9223372036854775807;
BEGIN
    t.places_from := array_fill(lowest, ARRAY[cardinality(t.places_from)]);
    t.kind_heads_from := array_fill(lowest, ARRAY[cardinality(t.kind_heads_from)]);
    t.leases_from := lowest;
    RETURN t;
END
$$;

-- Store the state, whose version is new: of other kinds than the default one, those that have changed. The version is a
-- part of the keys, so that scans find the newest rows first (decision 0011).
CREATE OR REPLACE FUNCTION {schema}.save_state(t {schema}.scheduler_states) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    stored {schema}.kind_states;
    k {schema}.kind_states;
    first integer;
    last integer;
BEGIN
    FOR i IN 2 .. cardinality(t.kinds) LOOP
        stored := {schema}.kind_state(t.kinds[i]);
        first := 9 * i - 8;
        last := 9 * i;
        k := (t.kinds[i], stored.version, t.clocks[first:last], t.weights[first:last], t.taken[first:last],
            t.places_from[first:last], t.kind_times[first:last], t.last_claims[first:last],
            t.kind_heads_from[i], t.since_patience[i]);
        IF k IS DISTINCT FROM stored THEN
            DELETE FROM {schema}.kind_states o WHERE o.kind = stored.kind AND o.version = stored.version;
            k.version := t.version;
            INSERT INTO {schema}.kind_states SELECT k.*;
        END IF;
    END LOOP;
    IF cardinality(t.kinds) > 1 THEN
        t.kinds := t.kinds[:1];
        t.clocks := t.clocks[:9];
        t.weights := t.weights[:9];
        t.taken := t.taken[:9];
        t.places_from := t.places_from[:9];
        t.kind_times := t.kind_times[:9];
        t.last_claims := t.last_claims[:9];
        t.kind_heads_from := t.kind_heads_from[:1];
        t.since_patience := t.since_patience[:1];
    END IF;
    DELETE FROM {schema}.scheduler_states o WHERE o.version = t.version - 1;
    INSERT INTO {schema}.scheduler_states SELECT t.*;
END
$$;

-- Return the stored state of every kind. `taken` of the default kind counts the documents of all kinds.
CREATE OR REPLACE FUNCTION {schema}.states_of_kinds() RETURNS SETOF {schema}.kind_states LANGUAGE sql STABLE AS $$
    (SELECT t.kinds[1], t.version, t.clocks, t.weights, t.taken, t.places_from, t.kind_times, t.last_claims,
        t.kind_heads_from[1], t.since_patience[1]
    FROM {schema}.scheduler_states t ORDER BY t.version DESC LIMIT 1)
    UNION ALL
    SELECT s.* FROM {schema}.kinds k CROSS JOIN LATERAL {schema}.kind_state(k.number) s WHERE k.number <> {default_kind}
$$;

-- Return the kinds of which a claim may take documents now, ordered by name, and how many of each: kinds that it serves
-- (NULL: every kind), that are not paused, and that are neither at their limit, also that of a service from whose outage
-- work resumes, nor at the maximum that the claim names. Of kinds that an outage holds, `probing` has those of which the
-- claim may take one document. Running documents are read only if one of the kinds has a limit. Outcomes that commit
-- meanwhile lower their number, so under the lock of claims no limit is exceeded.
CREATE OR REPLACE FUNCTION {schema}.free_kinds(
    its_at bigint, served text[], capped text[], caps integer[],
    OUT numbers smallint[], OUT free integer[], OUT probing smallint[]
) LANGUAGE plpgsql AS $$
DECLARE
    limits integer[];
BEGIN
    probing := '{{}}';
    SELECT coalesce(array_agg(o.number), '{{}}'), coalesce(array_agg(coalesce(
            caps[array_position(capped, o.name)], 2147483647)), '{{}}'), array_agg(o.running_max)
    INTO numbers, free, limits
    FROM (
        SELECT * FROM {schema}.kinds k
        WHERE NOT k.paused AND k.name = ANY (coalesce(served, ARRAY(SELECT a.name FROM {schema}.kinds a)))
        ORDER BY k.name) o;
    IF EXISTS (SELECT FROM {schema}.outages) THEN
        SELECT array_agg(CASE WHEN o.is_held IS NOT TRUE THEN k.n WHEN o.may_probe THEN least(k.n, 1) ELSE 0 END ORDER BY k.position),
            array_agg(least(k.running_max, o.running_max) ORDER BY k.position),
            coalesce(array_agg(k.number) FILTER (WHERE o.is_held AND o.may_probe), '{{}}')
        INTO free, limits, probing
        FROM unnest(numbers, free, limits) WITH ORDINALITY AS k(number, n, running_max, position)
            LEFT JOIN {schema}.outage_limits(numbers, its_at) o ON o.kind = k.number;
    END IF;
    IF 0 < ANY (limits) THEN
        SELECT array_agg(least(k.n, k.running_max - coalesce(r.n, 0)) ORDER BY k.position) INTO free
        FROM unnest(numbers, free, limits) WITH ORDINALITY AS k(number, n, running_max, position)
            LEFT JOIN {schema}.running_by_kind() r ON r.kind = k.number;
    END IF;
    IF 0 >= ANY (free) THEN
        SELECT coalesce(array_agg(k.number ORDER BY k.position), '{{}}'), coalesce(array_agg(k.n ORDER BY k.position), '{{}}')
        INTO numbers, free FROM unnest(numbers, free) WITH ORDINALITY AS k(number, n, position) WHERE k.n > 0;
    END IF;
END
$$;

-- Return the number of running documents of each kind. By the leases, and the primary key of documents.
CREATE OR REPLACE FUNCTION {schema}.running_by_kind() RETURNS TABLE (kind smallint, n bigint) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
        SELECT d.kind, count(*)
        FROM {schema}.leases l CROSS JOIN LATERAL unnest(l.documents) AS u(number)
            JOIN {schema}.documents d ON d.number = u.number AND d.fence = l.fence
        WHERE d.state = {running} GROUP BY d.kind;
END
$$;

-- Return the maximum of attempts of a document of this kind.
CREATE OR REPLACE FUNCTION {schema}.attempts_max(its_kind smallint, of_queue integer) RETURNS integer
LANGUAGE plpgsql AS $$
BEGIN
    RETURN coalesce((SELECT k.attempts_max FROM {schema}.kinds k WHERE k.number = its_kind), of_queue);
END
$$;

-- Return the numbers of kinds; NULL for one that does not exist.
CREATE OR REPLACE FUNCTION {schema}.kind_numbers(names text[]) RETURNS smallint[] LANGUAGE plpgsql AS $$
BEGIN
    IF names[1] = ALL (names) THEN      -- as below, in a tenth of the time for a thousand names
        RETURN array_fill((SELECT k.number FROM {schema}.kinds k WHERE k.name = names[1]), ARRAY[cardinality(names)]);
    END IF;
    RETURN ARRAY(
        SELECT k.number FROM unnest(names) WITH ORDINALITY AS u(name, position)
            LEFT JOIN {schema}.kinds k ON k.name = u.name
        ORDER BY u.position);
END
$$;

-- Create the kinds that do not exist. Returns the name of the first that would be one too many; then none is created.
CREATE OR REPLACE FUNCTION {schema}.create_kinds(names text[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    new_names text[];
    known integer;
BEGIN
    IF NOT EXISTS (SELECT FROM unnest(names) u WHERE u NOT IN (SELECT k.name FROM {schema}.kinds k)) THEN
        RETURN NULL;
    END IF;
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1), pg_advisory_xact_lock(hashtext('{schema}.'), 6);
    new_names := ARRAY(
        SELECT DISTINCT u COLLATE "C" FROM unnest(names) u
        WHERE u NOT IN (SELECT k.name FROM {schema}.kinds k) ORDER BY 1);
    known := (SELECT count(*) FROM {schema}.kinds);
    IF known + cardinality(new_names) > {kinds_max} THEN
        RETURN new_names[{kinds_max} - known + 1];
    END IF;
    INSERT INTO {schema}.kinds (number, name)
    SELECT known + u.position - 1, u.name FROM unnest(new_names) WITH ORDINALITY AS u(name, position)
    ON CONFLICT DO NOTHING;         -- a conflict fails in a transaction of the caller whose snapshot is older
    INSERT INTO {schema}.kind_states (kind, version)
    SELECT known + n - 1, 0 FROM generate_series(1, cardinality(new_names)) n;
    PERFORM {schema}.require_schema({schema_of_kinds});
    RETURN NULL;
END
$$;

-- Let no release open the queue that does not know this schema, because the queue uses what it has added.
CREATE OR REPLACE FUNCTION {schema}.require_schema(its_schema integer) RETURNS void LANGUAGE sql AS $$
    UPDATE {schema}.migrations m SET readable_from = its_schema
    WHERE m.readable_from < its_schema AND m.number >= its_schema
$$;

-- Require the schema of what a queue that was loaded uses.
CREATE OR REPLACE FUNCTION {schema}.require_schema_in_use() RETURNS void LANGUAGE sql AS $$
    SELECT {schema}.require_schema({schema_of_kinds})
    WHERE EXISTS (SELECT FROM {schema}.kinds k WHERE k.number <> {default_kind});
    SELECT {schema}.require_schema({schema_of_steps})
    WHERE EXISTS (SELECT FROM {schema}.attempts a WHERE a.outcome = {advanced})
        OR EXISTS (SELECT FROM {schema}.expirations) OR EXISTS (SELECT FROM {schema}.outages)
        OR EXISTS (SELECT FROM {schema}.kinds k WHERE k.expires_in_us IS NOT NULL);
$$;

-- Change the settings of a kind, if they are the expected ones or `is_expected` is false. A new kind is created. `answer`
-- is 0: they are not, 1: changed, 2: the queue has the maximum of kinds.
CREATE OR REPLACE FUNCTION {schema}.configure_kind(
    its_name text, new_limit integer, new_paused boolean, new_attempts_max integer, new_expires_in bigint,
    is_expected boolean, old_limit integer, old_paused boolean, old_attempts_max integer, old_expires_in bigint
) RETURNS smallint LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    -- An unknown kind has the default settings. It is not created if others are expected.
    IF is_expected AND (old_limit, old_paused, old_attempts_max, old_expires_in) IS DISTINCT FROM
        (NULL::integer, false, NULL::integer, NULL::bigint)
        AND NOT EXISTS (SELECT FROM {schema}.kinds k WHERE k.name = its_name)
    THEN
        RETURN 0;
    END IF;
    IF {schema}.create_kinds(ARRAY[its_name]) IS NOT NULL THEN
        RETURN 2;
    END IF;
    UPDATE {schema}.kinds k SET running_max = new_limit, paused = new_paused, attempts_max = new_attempts_max,
        expires_in_us = new_expires_in
    WHERE k.name = its_name AND (NOT is_expected OR (k.running_max, k.paused, k.attempts_max, k.expires_in_us)
        IS NOT DISTINCT FROM (old_limit, old_paused, old_attempts_max, old_expires_in));
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF new_expires_in IS NOT NULL THEN
        PERFORM {schema}.require_schema({schema_of_steps});
    END IF;
    PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
    RETURN 1;
END
$$;

-- Record a worker's heartbeat, the kinds that it serves (NULL: every kind) and the services that kinds need. New kinds are
-- created. Returns the name of a kind that would be one too many; then nothing is recorded.
CREATE OR REPLACE FUNCTION {schema}.sign_on(
    given_now bigint, worker text, its_slots bigint, its_kinds text[],
    needy_kinds text[],             -- whose services are replaced
    needs text[], services text[]   -- each a kind and a service that it needs
) RETURNS text LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
AS $$
DECLARE
    refused text := {schema}.create_kinds(its_kinds || needy_kinds);
BEGIN
    IF refused IS NOT NULL THEN
        RETURN refused;
    END IF;
    INSERT INTO {schema}.workers AS w (name, seen_at, slots, kinds)
    VALUES (worker, coalesce(given_now, {now}), its_slots, its_kinds)
    ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at, slots = excluded.slots, kinds = excluded.kinds;
    -- Heartbeats repeat what is stored: then nothing is written.
    DELETE FROM {schema}.kind_services s USING {schema}.kinds k
    WHERE k.number = s.kind AND k.name = ANY (needy_kinds) AND NOT EXISTS (
        SELECT FROM unnest(needs, services) AS u(kind, service) WHERE u.kind = k.name AND u.service = s.service);
    INSERT INTO {schema}.kind_services (kind, service)
    SELECT k.number, u.service FROM unnest(needs, services) AS u(kind, service) JOIN {schema}.kinds k ON k.name = u.kind
    WHERE NOT EXISTS (SELECT FROM {schema}.kind_services s WHERE s.kind = k.number AND s.service = u.service)
    ORDER BY k.number, u.service
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END
$$;
