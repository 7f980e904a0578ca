-- The signatures that the releases up to schema 13 call. Submissions and claims work until the queue uses kinds of work,
-- steps, expiries or outages: these releases would take all documents for theirs, and lose the kind of those that they
-- submit. Attempts that are running then can still end.

CREATE OR REPLACE FUNCTION {schema}.refuse_new_features() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.migrations m WHERE m.readable_from >= {schema_of_kinds}) THEN
        RAISE EXCEPTION 'the queue has kinds of work, steps, expiries or outages, which this release does not support; install the newer fairturn'
            USING ERRCODE = 'feature_not_supported';
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.submit(
    given_now bigint, its_key bigint, shard integer,
    customers text[], body_texts text[], body_bytes bytea[], body_types text[],
    sizes bigint[], hashes bytea[], content_names text[], names text[], metadata text[],
    tags text[], costs bigint[], due_ats bigint[], keys text[], digests bytea[], parents bigint[],
    OUT answer smallint, OUT refused integer, OUT pending bigint, OUT maximum bigint, OUT refused_number bigint,
    OUT its_now bigint, OUT receipts bytea, OUT replayed_at bigint[]
) LANGUAGE plpgsql
SET lock_timeout = '{submit_lock_timeout}'
{planned_by_indexes}
AS $$
BEGIN
    PERFORM {schema}.refuse_new_features();
    SELECT s.answer, s.refused, s.pending, s.maximum, s.refused_number, s.its_now, s.receipts, s.replayed_at
    INTO answer, refused, pending, maximum, refused_number, its_now, receipts, replayed_at
    FROM {schema}.submit(given_now, its_key, shard, customers, body_texts, body_bytes, body_types, sizes, hashes,
        content_names, names, metadata, tags, costs, due_ats, keys, digests, parents,
        array_fill(NULL::bigint, ARRAY[cardinality(customers)]),
        array_fill('{default_kind_name}'::text, ARRAY[cardinality(customers)])) s;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.claim(
    its_token uuid, n integer, its_worker text, lease bigint,
    given_now bigint, uptime bigint, its_boot text, budget integer,
    OUT claimed integer, OUT its_at bigint, OUT more boolean, OUT changed boolean,
    OUT repaired integer, OUT suspects bigint[], OUT cancelled bigint[]
) LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
BEGIN
    SELECT c.claimed, c.its_at, c.more, c.changed, c.repaired, c.suspects, c.cancelled
    INTO claimed, its_at, more, changed, repaired, suspects, cancelled
    FROM {schema}.claim(its_token, n, its_worker, lease, given_now, uptime, its_boot, budget,
        ARRAY['{default_kind_name}'], NULL, NULL) c;
    PERFORM {schema}.refuse_new_features();     -- last: the claim may have waited for their first use
END
$$;

CREATE OR REPLACE FUNCTION {schema}.claim_after(
    its_token uuid, n integer, its_worker text, lease bigint,
    given_now bigint, uptime bigint, its_boot text, budget integer,
    numbers bigint[], fences bigint[], kinds smallint[], errors text[], retries bigint[],
    kept_costs bigint[], real_costs bigint[],
    results text[], content_names text[], content_sizes bigint[], content_hashes bytea[],
    OUT claimed integer, OUT its_at bigint, OUT more boolean, OUT changed boolean,
    OUT repaired integer, OUT suspects bigint[], OUT cancelled bigint[], OUT lost integer[]
) LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
AS $$
BEGIN
    SELECT c.claimed, c.its_at, c.more, c.changed, c.repaired, c.suspects, c.cancelled, c.lost
    INTO claimed, its_at, more, changed, repaired, suspects, cancelled, lost
    FROM {schema}.claim_after(its_token, n, its_worker, lease, given_now, uptime, its_boot, budget,
        ARRAY['{default_kind_name}'], NULL, NULL,
        numbers, fences, kinds, errors, retries, kept_costs, real_costs, results, content_names, content_sizes,
        content_hashes, NULL, NULL, NULL, NULL) c;
    PERFORM {schema}.refuse_new_features();
END
$$;

CREATE OR REPLACE FUNCTION {schema}.finish(
    given_now bigint, numbers bigint[], fences bigint[], kinds smallint[], errors text[], retries bigint[],
    kept_costs bigint[], real_costs bigint[],
    results text[], content_names text[], content_sizes bigint[], content_hashes bytea[]
) RETURNS integer[] LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
BEGIN
    RETURN {schema}.finish(given_now, numbers, fences, kinds, errors, retries, kept_costs, real_costs,
        results, content_names, content_sizes, content_hashes, NULL, NULL, NULL, NULL);
END
$$;

CREATE OR REPLACE FUNCTION {schema}.renew(
    given_now bigint, lease bigint, numbers bigint[], fences bigint[], progresses text[]
) RETURNS TABLE (its_number bigint, its_fence bigint, is_cancelled boolean) LANGUAGE sql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
    SELECT * FROM {schema}.renew(given_now, lease, numbers, fences, progresses, NULL)
$$;
