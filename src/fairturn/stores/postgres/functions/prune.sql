-- Delete one batch: ended documents past their retention, then old keys, workers and idle customers. A round passes all
-- documents and all customers, batch by batch. `finished`: the round has ended, and its last batch found nothing.
CREATE OR REPLACE FUNCTION {schema}.prune(
    given_now bigint, budget integer,
    kept bigint[],                  -- how long a document in each state is kept, by code; NULL: it has not ended
    OUT contents text[], OUT finished boolean
) LANGUAGE plpgsql
SET lock_timeout = '{lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    done constant bigint := -1;
    least_kept constant bigint := (SELECT min(k) FROM unnest(kept) k);
    now_us bigint;
    next_document bigint;
    next_customer bigint;
    scanned bigint[];
    old bigint[];
    gone bigint[];
    expiries bigint[];
    is_last boolean;
    changed bigint := 0;
    n bigint;
BEGIN
    contents := '{{}}';
    IF cardinality(kept) <= {expired} THEN      -- releases up to schema 14 would delete the contents of steps as unreferenced
        PERFORM {schema}.refuse_new_features();
    END IF;
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    SELECT p.documents, p.customers INTO next_document, next_customer FROM {schema}.prune_cursor p FOR UPDATE;
    now_us := coalesce(given_now, {now});
    IF next_document <> done THEN
        -- By the primary key, from the end of the last batch. It stops at the first document that is too young,
        -- with a day's margin: numbers follow the time of submission, except after steps of the clock.
        SELECT array_agg(d.number ORDER BY d.number),
            (array_agg(d.number ORDER BY d.number) FILTER (WHERE d.is_old))[:budget],
            count(*) < 10 * budget
        INTO scanned, old, is_last
        FROM (
            SELECT o.number, o.ended_at < now_us - kept[o.state + 1] AS is_old,
                bool_or(o.submitted_at >= now_us + {day} - least_kept
                    AND o.submitted_at <= now_us + {day})   -- later: the clock was wrong
                    OVER (ORDER BY o.number) AS is_young
            FROM (
                SELECT * FROM {schema}.documents WHERE number > next_document
                ORDER BY number LIMIT 10 * budget) o) d
        WHERE NOT d.is_young;
        -- A document may have been retried meanwhile: its state and age are checked again.
        WITH deleted AS (
            DELETE FROM {schema}.documents d
            WHERE d.number = ANY (old) AND d.ended_at < now_us - kept[d.state + 1]
            RETURNING d.number, d.content_name, d.customer, d.expires_at, {stored_bytes} AS bytes),
        released AS (
            INSERT INTO {schema}.released_bytes (customer, bytes)
            SELECT d.customer, sum(d.bytes) FROM deleted d GROUP BY d.customer)
        SELECT array_agg(d.number), array_agg(d.expires_at),
            array_agg(d.content_name) FILTER (WHERE d.content_name IS NOT NULL)
        INTO gone, expiries, contents FROM deleted d;
        WITH deleted AS (
            DELETE FROM {schema}.results r WHERE r.document = ANY (gone) RETURNING r.content_name)
        SELECT coalesce(contents, '{{}}') || coalesce(
            array_agg(d.content_name) FILTER (WHERE d.content_name IS NOT NULL), '{{}}')
        INTO contents FROM deleted d;
        contents := contents || {schema}.delete_attempts(gone);
        DELETE FROM {schema}.children c WHERE c.parent = ANY (gone);
        PERFORM {schema}.delete_expirations(gone, expiries);
        changed := coalesce(cardinality(gone), 0);
        IF cardinality(old) = budget THEN
            next_document := old[budget];
        ELSIF is_last THEN
            next_document := done;
        ELSE
            next_document := scanned[cardinality(scanned)];
        END IF;
    END IF;
    IF next_document = done THEN
        DELETE FROM {schema}.idempotency_keys k WHERE (k.customer, k.key) IN (
            SELECT o.customer, o.key FROM {schema}.idempotency_keys o
            WHERE o.submitted_at < now_us - {key_kept} LIMIT budget);
        GET DIAGNOSTICS n = ROW_COUNT;
        changed := changed + n;
        DELETE FROM {schema}.workers w WHERE w.seen_at < now_us - {workers_kept};
        GET DIAGNOSTICS n = ROW_COUNT;
        changed := changed + n;
        DELETE FROM {schema}.children c WHERE c.parent IN (
            SELECT o.parent FROM {schema}.children o
            WHERE NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.number = o.parent) LIMIT budget);
        DELETE FROM {schema}.released_bytes r
        WHERE NOT EXISTS (SELECT FROM {schema}.customers c WHERE c.number = r.customer);
        SELECT p.next, changed + p.n INTO next_customer, changed
        FROM {schema}.prune_customers(now_us, next_customer, budget) p;
        IF EXISTS (SELECT FROM {schema}.outages o WHERE {schema}.is_over(o, now_us)) THEN
            PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 7);    -- last, after the row of `queue`
            DELETE FROM {schema}.outages o WHERE {schema}.is_over(o, now_us);
            GET DIAGNOSTICS n = ROW_COUNT;
            changed := changed + n;
        END IF;
    END IF;
    finished := next_document = done AND next_customer = done;
    IF finished THEN
        next_document := 0;
        next_customer := 0;
    END IF;
    UPDATE {schema}.prune_cursor SET documents = next_document, customers = next_customer;
    finished := finished AND changed = 0;
    IF changed > 0 THEN
        PERFORM {schema}.count_arrived(0, array_fill(0::bigint, ARRAY[9]), 0);
    END IF;
END
$$;

-- Delete the idle customers of the next batch. Returns the start of the batch after it, and the number of changed rows.
-- A customer with running documents, unapplied events or counter changes is not idle.
CREATE OR REPLACE FUNCTION {schema}.prune_customers(
    its_now bigint, begin bigint, budget integer, OUT next bigint, OUT n bigint
) LANGUAGE plpgsql AS $$
DECLARE
    q {schema}.queue;
    current_generation bigint;
    owed bigint := 0;               -- the most by which corrections of costs may set a clock back
    customers bigint[];
    idle bigint[];
    rows bigint;
BEGIN
    n := 0;
    customers := ARRAY(SELECT c.number FROM {schema}.customers c WHERE c.number > begin
        ORDER BY c.number LIMIT budget);
    next := CASE WHEN cardinality(customers) = budget THEN customers[budget] ELSE -1 END;
    -- With a large backlog of events, leave all customers to the next round instead of reading every event.
    IF EXISTS (SELECT FROM {schema}.event_log OFFSET budget) THEN
        RETURN;
    END IF;
    -- A submission in flight locks its customers: they are not idle.
    idle := ARRAY(
        SELECT l.number FROM (
            SELECT c.number FROM {schema}.customers c WHERE c.number = ANY (customers)
            ORDER BY c.name FOR UPDATE SKIP LOCKED) l);
    PERFORM {schema}.subtract_released_bytes(idle);
    SELECT * INTO q FROM {schema}.queue FOR NO KEY UPDATE;
    idle := ARRAY(
        SELECT i FROM unnest(idle) i
        EXCEPT
        SELECT d.customer
        FROM {schema}.leases l CROSS JOIN LATERAL unnest(l.documents) AS u(number)
            JOIN {schema}.documents d ON d.number = u.number AND d.fence = l.fence
        WHERE d.state = {running}
        EXCEPT
        SELECT unnest(r.customers) FROM {schema}.event_log r
        EXCEPT
        SELECT m.customer FROM {schema}.counter_changes m);
    SELECT t.generation INTO current_generation
    FROM {schema}.scheduler_states t ORDER BY t.version DESC LIMIT 1;
    IF q.costs = 'learned' THEN
        SELECT coalesce(sum(d.charged_cost), 0) * 100 INTO owed     -- the lowest weight is 10
        FROM {schema}.leases l CROSS JOIN LATERAL unnest(l.documents) AS u(number)
            JOIN {schema}.documents d ON d.number = u.number AND d.fence = l.fence
        WHERE d.state = {running};
    END IF;
    -- A flow can be deleted if a new one would get the same place. Its `taken` is subtracted from `arrived`.
    WITH states AS MATERIALIZED (SELECT s.kind, s.clocks FROM {schema}.states_of_kinds() s),
    deleted AS (
        DELETE FROM {schema}.flows f WHERE f.customer = ANY (idle) AND f.folded = 0
            AND f.generation = current_generation AND (q.mode = 'levels' OR f.place <= (
                SELECT s.clocks[f.level % 10] FROM states s WHERE s.kind = f.level / 10) - owed)
        RETURNING f.customer, f.taken)
    UPDATE {schema}.customers c SET arrived = ARRAY(
        SELECT a.n - (SELECT sum(f.taken[a.priority]) FROM deleted f WHERE f.customer = c.number)::bigint
        FROM unnest(c.arrived) WITH ORDINALITY AS a(n, priority) ORDER BY a.priority)
    WHERE c.number IN (SELECT f.customer FROM deleted f);
    GET DIAGNOSTICS rows = ROW_COUNT;
    n := n + rows;
    DELETE FROM {schema}.limited_customers l WHERE l.customer = ANY (idle) AND NOT EXISTS (
        SELECT FROM {schema}.customers c WHERE c.number = l.customer AND c.running_max IS NOT NULL);
    WITH deleted AS (
        DELETE FROM {schema}.customers c WHERE c.number = ANY (idle)
            AND c.weight = {weight_one} AND c.running_max IS NULL AND NOT c.paused AND c.bytes_max IS NULL
            AND (c.count_updated_at IS NULL OR c.count_updated_at < its_now - q.reset_interval
                OR c.count_updated_at > its_now + {clock_ahead_max})
            AND NOT EXISTS (SELECT FROM {schema}.documents d WHERE d.customer = c.number)
            AND NOT EXISTS (SELECT FROM {schema}.flows f WHERE f.customer = c.number)
            AND NOT EXISTS (SELECT FROM {schema}.idempotency_keys k WHERE k.customer = c.number)
        RETURNING c.number)
    DELETE FROM {schema}.customer_states s WHERE s.customer IN (SELECT d.number FROM deleted d);
    SELECT count(*) INTO rows FROM unnest(idle) i
    WHERE NOT EXISTS (SELECT FROM {schema}.customers c WHERE c.number = i);
    n := n + rows;
END
$$;
