-- Outages of services: fairturn.scheduling.outages in SQL, with the same rules and names. Tests compare both. A state is a
-- row of `outages`; NULL: the service has none.
--
-- Advisory lock 7 orders changes of these rows. Outcomes and operators change them under the exclusive lock, claims and
-- prune under the lock of claims too: a claim holds lock 7 shared from before it reads them until it commits. So `finish`
-- compares the fences of attempts with that of the last claim, and no claim in flight misses a hold. The holder of the
-- exclusive lock waits for no row that a claim in flight has locked.

CREATE OR REPLACE FUNCTION {schema}.resume_limit(o {schema}.outages, now_us bigint) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN NOT o.held AND now_us - o.resumed_at BETWEEN 0 AND {resume} - 1
        THEN 1 << ((now_us - o.resumed_at) / {resume_step})::integer END
$$;

CREATE OR REPLACE FUNCTION {schema}.may_probe(o {schema}.outages, now_us bigint) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT NOT (o.probe_set_at <= now_us AND now_us < o.probe_at)
$$;

CREATE OR REPLACE FUNCTION {schema}.is_over(o {schema}.outages, now_us bigint) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT NOT o.held AND {schema}.resume_limit(o, now_us) IS NULL
        AND (o.document IS NULL OR now_us - o.reported_at NOT BETWEEN 0 AND {reports_within})
$$;

CREATE OR REPLACE FUNCTION {schema}.after_report(
    INOUT o {schema}.outages, its_service text, its_document bigint, its_fence bigint, its_error text,
    retry_after bigint, others_wait boolean, last_fence bigint, now_us bigint,
    OUT delay bigint,               -- of the document
    OUT counts boolean              -- whether the hold has had probes_free probes, so that attempts may count
) LANGUAGE plpgsql AS $$
DECLARE
    given constant bigint := least(greatest(retry_after, {probe_min}), {retry_after_max});
    begins boolean;
BEGIN
    counts := false;
    IF o.held THEN
        counts := o.probes >= {probes_free};
        o.reported_at := now_us;
        o.document := its_document;
        o.error := its_error;
        IF its_fence > o.fence THEN     -- a probe; others were in flight when the hold began
            o.probes := o.probes + 1;
            o.interval_us := greatest(given, least(o.interval_us * 3 / 2, greatest(o.first_interval_us,
                least({probe_growth_max} * o.first_interval_us, {probe_max}))));
            o.probe_at := now_us + o.interval_us;
            o.probe_set_at := now_us;
        END IF;
        delay := {schema}.delay_while_held(o, others_wait, now_us);
        RETURN;
    END IF;
    IF o.service IS NOT NULL AND {schema}.is_over(o, now_us) THEN
        o := NULL;
    END IF;
    IF o.resumed_at IS NOT NULL AND its_fence <= o.fence THEN
        delay := given;             -- the attempt was claimed during the outage that is over
        RETURN;
    END IF;
    begins := NOT others_wait OR coalesce(o.document <> its_document, false);
    IF o.document IS NULL THEN
        o.began_at := now_us;
    END IF;
    IF begins OR o.service IS NULL THEN
        o.fence := last_fence;
        o.resumed_at := NULL;
    END IF;
    o.service := its_service;
    o.reported_at := now_us;
    o.document := its_document;
    o.error := its_error;
    o.first_interval_us := given;
    o.interval_us := given;
    o.held := begins;
    o.probes := 0;
    o.probe_at := now_us + given;
    o.probe_set_at := now_us;
    delay := CASE WHEN begins THEN {schema}.delay_while_held(o, others_wait, now_us) ELSE given END;
END
$$;

-- Return the delay of a document until the next probe, or until the one after it if that can be another document.
CREATE OR REPLACE FUNCTION {schema}.delay_while_held(o {schema}.outages, others_wait boolean, now_us bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT least(greatest(0, o.probe_at - now_us), o.interval_us) + CASE WHEN others_wait THEN o.interval_us ELSE 0 END
$$;

CREATE OR REPLACE FUNCTION {schema}.after_success(
    o {schema}.outages, its_fence bigint, last_fence bigint, now_us bigint
) RETURNS {schema}.outages LANGUAGE plpgsql AS $$
BEGIN
    IF o.held THEN
        IF its_fence > o.fence THEN
            o := {schema}.resumed(o, last_fence, now_us);
        END IF;
        RETURN o;
    END IF;
    o.document := NULL;
    RETURN CASE WHEN o.resumed_at IS NOT NULL THEN o END;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.after_probe(o {schema}.outages, its_fence bigint, now_us bigint)
RETURNS {schema}.outages LANGUAGE plpgsql AS $$
BEGIN
    IF o.held AND its_fence > o.fence THEN
        o.probe_at := now_us + o.interval_us;
        o.probe_set_at := now_us;
    END IF;
    RETURN o;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.resumed(o {schema}.outages, last_fence bigint, now_us bigint)
RETURNS {schema}.outages LANGUAGE plpgsql AS $$
BEGIN
    o.document := NULL;
    o.fence := last_fence;
    o.held := false;
    o.probes := 0;
    o.resumed_at := now_us;
    RETURN o;
END
$$;

-- Return the services that a kind needs: those that workers have registered, and the one that stands for it alone.
CREATE OR REPLACE FUNCTION {schema}.services_of(its_kind smallint) RETURNS SETOF text LANGUAGE sql STABLE AS $$
    SELECT s.service FROM {schema}.kind_services s WHERE s.kind = its_kind
    UNION ALL
    SELECT '{of_kind}' || k.name FROM {schema}.kinds k WHERE k.number = its_kind
$$;

-- Record what the ends of attempts mean for the services of their kinds, in the order of the outcomes. Returns for each
-- report the delay of its document, in place of what it asks for, and whether the attempt counts; NULL for other outcomes.
-- Locks the documents, their leases, and then the outages, if an outcome may change one; otherwise it only reads them.
CREATE OR REPLACE FUNCTION {schema}.end_probes(
    now_us bigint, numbers bigint[], fences bigint[], codes smallint[], errors text[], INOUT delays bigint[],
    services text[], next_numbers smallint[],       -- as in `finish`
    OUT counted boolean[]
) LANGUAGE plpgsql AS $$
DECLARE
    last_fence bigint;
    waiting jsonb := '{{}}';        -- whether documents of a kind waited before the call, by number
    reported text;
    r record;
    o {schema}.outages;
    after record;
BEGIN
    IF 6 <> ALL (codes) AND NOT {schema}.has_outage(numbers) THEN
        RETURN;
    END IF;
    PERFORM FROM {schema}.documents d WHERE d.number = ANY (numbers) AND d.state = {running}
    ORDER BY d.number FOR NO KEY UPDATE;
    PERFORM FROM {schema}.leases l WHERE l.fence = ANY (fences) ORDER BY l.fence FOR UPDATE;
    PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 7);
    last_fence := (SELECT t.fence FROM {schema}.scheduler_states t ORDER BY t.version DESC LIMIT 1);
    counted := array_fill(NULL::boolean, ARRAY[cardinality(numbers)]);
    FOR r IN
        SELECT g.*, d.kind, k.name,
            g.code = 0 OR (g.code = 4 AND (d.cancel_requested
                OR (d.step < {steps_max} AND g.next_number IS NOT NULL))) AS has_succeeded
        FROM (
            SELECT DISTINCT ON (u.number, u.fence) u.*
            FROM unnest(numbers, fences, codes, errors, delays, services, next_numbers) WITH ORDINALITY
                AS u(number, fence, code, error, delay, service, next_number, position)
            ORDER BY u.number, u.fence, u.position) g
            JOIN {schema}.documents d ON d.number = g.number AND d.fence = g.fence
            JOIN {schema}.kinds k ON k.number = d.kind
        WHERE d.state = {running} ORDER BY g.position
    LOOP
        reported := NULL;
        IF r.code = 6 THEN
            IF NOT waiting ? r.kind::text THEN
                waiting := waiting || jsonb_build_object(r.kind, {schema}.kind_waits(r.kind));
            END IF;
            reported := coalesce((
                SELECT n.service FROM {schema}.kind_services n WHERE n.kind = r.kind AND n.service = r.service),
                '{of_kind}' || r.name);
            SELECT * INTO o FROM {schema}.outages u WHERE u.service = reported;
            SELECT * INTO after FROM {schema}.after_report(o, reported, r.number, r.fence, r.error, r.delay,
                (waiting ->> r.kind::text)::boolean, last_fence, now_us);
            PERFORM {schema}.save_outage(reported, after.o);
            delays[r.position] := after.delay;
            counted[r.position] := after.counts;
        END IF;
        FOR o IN
            SELECT u.* FROM {schema}.services_of(r.kind) n(service) JOIN {schema}.outages u ON u.service = n.service
            WHERE n.service IS DISTINCT FROM reported
        LOOP
            PERFORM {schema}.save_outage(o.service, CASE
                WHEN r.has_succeeded THEN {schema}.after_success(o, r.fence, last_fence, now_us)
                ELSE {schema}.after_probe(o, r.fence, now_us) END);
        END LOOP;
    END LOOP;
END
$$;

-- Return whether the end of an attempt of these documents may change the state of a service.
CREATE OR REPLACE FUNCTION {schema}.has_outage(numbers bigint[]) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.outages o WHERE o.held OR o.document IS NOT NULL) THEN
        RETURN false;
    END IF;
    RETURN EXISTS (
        SELECT FROM (SELECT DISTINCT d.kind FROM {schema}.documents d WHERE d.number = ANY (numbers)) k
            CROSS JOIN LATERAL {schema}.services_of(k.kind) n(service)
            JOIN {schema}.outages o ON o.service = n.service
        WHERE o.held OR o.document IS NOT NULL);
END
$$;

-- Store the state of a service; NULL: forget it.
CREATE OR REPLACE FUNCTION {schema}.save_outage(its_service text, o {schema}.outages) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF o.service IS NULL THEN
        DELETE FROM {schema}.outages u WHERE u.service = its_service;
        RETURN;
    END IF;
    UPDATE {schema}.outages u SET began_at = o.began_at, reported_at = o.reported_at, document = o.document,
        error = o.error, first_interval_us = o.first_interval_us, interval_us = o.interval_us, fence = o.fence,
        held = o.held, probes = o.probes, probe_at = o.probe_at, probe_set_at = o.probe_set_at,
        resumed_at = o.resumed_at
    WHERE u.service = its_service;
    IF NOT FOUND THEN
        INSERT INTO {schema}.outages SELECT o.*;
    END IF;
END
$$;

-- Return whether documents of a kind wait, by the counters. The default kind has the rest of all.
CREATE OR REPLACE FUNCTION {schema}.kind_waits(its_kind smallint) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN its_kind <> {default_kind} THEN {schema}.waiting_of_kind(its_kind) > 0 ELSE (
            SELECT sum(n) FROM {schema}.arrival_counters a CROSS JOIN LATERAL unnest(a.arrived) n) - (
            SELECT sum(n) FROM unnest((
                SELECT t.taken FROM {schema}.scheduler_states t ORDER BY t.version DESC LIMIT 1)) n) + (
            SELECT coalesce(sum(c.waiting), 0) FROM {schema}.counter_changes c) > (
            SELECT coalesce(sum({schema}.waiting_of_kind(k.number)), 0) FROM {schema}.kinds k
            WHERE k.number <> {default_kind}) END
$$;

-- Return the number of waiting documents of a kind other than the default one.
CREATE OR REPLACE FUNCTION {schema}.waiting_of_kind(its_kind smallint) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT ((SELECT coalesce(sum(n), 0) FROM {schema}.kind_arrivals a CROSS JOIN LATERAL unnest(a.arrived) n
            WHERE a.kind = its_kind)
        - (SELECT sum(n) FROM unnest(({schema}.kind_state(its_kind)).taken) n)
        + (SELECT coalesce(sum(c.waiting), 0) FROM {schema}.counter_changes c WHERE c.kind = its_kind))::bigint
$$;

-- Return what outages permit a claim to take now, for each of these kinds with one: NULL: as many as without; 0: nothing;
-- and whether a document is a probe.
CREATE OR REPLACE FUNCTION {schema}.outage_limits(numbers smallint[], now_us bigint)
RETURNS TABLE (kind smallint, running_max integer, is_held boolean, may_probe boolean) LANGUAGE sql STABLE AS $$
    SELECT k.number, min({schema}.resume_limit(o, now_us)), bool_or(o.held),
        coalesce(bool_and({schema}.may_probe(o, now_us)) FILTER (WHERE o.held), true)
    FROM unnest(numbers) AS k(number) CROSS JOIN LATERAL {schema}.services_of(k.number) n(service)
        JOIN {schema}.outages o ON o.service = n.service
    GROUP BY k.number
$$;

-- Record that a claim has taken a document of a held kind as a probe: its services may be probed again after the lease.
-- Returns the kinds of which it may take nothing more, those that need one of these services.
CREATE OR REPLACE FUNCTION {schema}.take_probe(its_kind smallint, served smallint[], lease bigint, now_us bigint)
RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    probed text[];
BEGIN
    WITH changed AS (
        UPDATE {schema}.outages o SET probe_at = now_us + lease, probe_set_at = now_us
        WHERE o.held AND o.service IN (SELECT {schema}.services_of(its_kind))
        RETURNING o.service)
    SELECT array_agg(c.service) INTO probed FROM changed c;
    RETURN ARRAY(
        SELECT k FROM unnest(served) k
        WHERE EXISTS (SELECT FROM {schema}.services_of(k) n(service) WHERE n.service = ANY (probed)));
END
$$;

-- End the hold of a service. Returns whether it was held.
CREATE OR REPLACE FUNCTION {schema}.resume(given_now bigint, its_service text) RETURNS boolean LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
AS $$
DECLARE
    o {schema}.outages;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 7);
    SELECT * INTO o FROM {schema}.outages u WHERE u.service = its_service AND u.held;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM {schema}.save_outage(its_service, {schema}.resumed(o, (
        SELECT t.fence FROM {schema}.scheduler_states t ORDER BY t.version DESC LIMIT 1), coalesce(given_now, {now})));
    PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
    RETURN true;
END
$$;
