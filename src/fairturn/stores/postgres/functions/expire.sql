-- Expiry: documents that were not started in time (decision 0035).

-- Record up to `most` documents that have expired, the earliest first. Returns how many, and whether to call it again.
-- Without any, no lock is taken.
CREATE OR REPLACE FUNCTION {schema}.expire_next(
    given_now bigint, most integer, OUT expired integer, OUT more boolean
) LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    now_us bigint := coalesce(given_now, {now});
BEGIN
    expired := 0;
    more := false;
    IF NOT EXISTS (SELECT FROM {schema}.expirations e WHERE e.expires_at <= now_us) THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
    SELECT r.expired, r.more INTO expired, more FROM {schema}.record_expired(coalesce(given_now, {now}), most) r;
    IF expired > 0 THEN
        PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
    END IF;
END
$$;

-- Record the documents of the next rows of `expirations`, under the lock of claims, and delete the rows: also those of
-- documents that run, which are inserted again if the attempt is given back. The row of a document that another
-- transaction has locked stays: its attempt ends, or is renewed. By the primary keys.
CREATE OR REPLACE FUNCTION {schema}.record_expired(now_us bigint, most integer, OUT expired integer, OUT more boolean)
LANGUAGE plpgsql AS $$
DECLARE
    due {schema}.expirations[];
    found bigint[];                 -- their documents that are locked now, or do not exist
    n bigint;
BEGIN
    due := ARRAY(
        SELECT e FROM {schema}.expirations e WHERE e.expires_at <= now_us ORDER BY e.expires_at, e.document LIMIT most);
    found := ARRAY(
        SELECT l.number FROM (
            SELECT d.number FROM unnest(due) e JOIN {schema}.documents d ON d.number = e.document
            ORDER BY d.number FOR NO KEY UPDATE OF d SKIP LOCKED) l
        UNION ALL
        SELECT e.document FROM unnest(due) e
        WHERE NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = e.document));
    -- A statement of its own: the one above may have read a state that changed before it locked the document.
    expired := cardinality({schema}.end_pending(ARRAY(
        SELECT d.number FROM unnest(due) e JOIN {schema}.documents d ON d.number = e.document
        WHERE d.number = ANY (found) AND d.expires_at = e.expires_at AND {may_expire}
        ORDER BY e.expires_at, e.document), {expired}::smallint, now_us));
    DELETE FROM {schema}.expirations o USING unnest(due) e
    WHERE o.expires_at = e.expires_at AND o.document = e.document AND o.document = ANY (found);
    GET DIAGNOSTICS n = ROW_COUNT;
    more := n > 0 AND cardinality(due) = most;
END
$$;

-- Delete the expiries of documents that are deleted. By the primary key.
CREATE OR REPLACE FUNCTION {schema}.delete_expirations(numbers bigint[], times bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM {schema}.expirations o USING unnest(numbers, times) AS u(number, expires_at)
    WHERE o.expires_at = u.expires_at AND o.document = u.number;
END
$$;
