-- One document in one round trip: the rule of fairturn.priority and the admission of
-- fairturn.stores.admission, for a document without a parent. Tests hold it against both. What it returns
-- is one array, because to make a row of names and types takes the server, and the driver, longer: the
-- answer (0: accepted, 1: known key, 2: key of another document, 3: customer full, 4: queue full), the
-- number, the count, the priority, the moment, how many wait, at most how many may, and the version of the
-- settings.
CREATE OR REPLACE FUNCTION {schema}.submit_document(
    moment bigint,              -- NULL: the clock of the server
    roomy_for bigint,           -- there is room enough for this waiting_max; NULL: perhaps not,
                                -- and then they go one by one
    first_shard integer,
    key_kept bigint,
    new_customer text, new_body_text text, new_body_bytes bytea, new_is_payload boolean,
    new_size_bytes bigint, new_sha256 bytea, new_content_name text, new_name text,
    new_metadata text, new_cost bigint, new_due_at bigint, new_key text, new_digest bytea
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    answer smallint := 0;
    its_number bigint;
    its_count bigint;
    its_priority smallint;
    its_at bigint;
    its_pending bigint;
    its_maximum bigint;
    its_settings bigint;
    locked text;
    owner bigint;
    its_row tid;
    is_new boolean := false;
    submitted_before bigint;
    updated_at bigint;
    its_level smallint;
    its_depths bigint[];
    interval_us bigint;
    is_periodic boolean;
    is_one_level boolean;
    all_max bigint;
    own_max bigint;
    known_count bigint;
    known_at bigint;
    known smallint;
    counted bigint;
BEGIN
    IF roomy_for IS NULL THEN
        PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 3);
    END IF;
    -- An assignment takes less time than a statement. What follows sees what was committed before.
    locked := pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    LOOP
        SELECT c.ctid, c.number, c.count, c.count_updated_at, c.submitted, q.settings_version,
            q.depths, q.reset_interval, q.periodic, q.one_level, q.waiting_max,
            q.waiting_per_customer_max
        INTO its_row, owner, its_count, updated_at, submitted_before, its_settings,
            its_depths, interval_us, is_periodic, is_one_level, all_max, own_max
        FROM {schema}.customers c LEFT JOIN {schema}.queue q ON true WHERE c.name = new_customer
        FOR NO KEY UPDATE OF c;
        EXIT WHEN FOUND;
        INSERT INTO {schema}.customers (name) VALUES (new_customer) ON CONFLICT (name) DO NOTHING;
        is_new := FOUND;
    END LOOP;
    its_at := coalesce(moment, {now});
    IF new_key IS NOT NULL THEN
        SELECT k.document, k.count, k.priority, k.submitted_at,
            CASE WHEN k.digest IS NOT DISTINCT FROM new_digest THEN 1 ELSE 2 END
        INTO its_number, known_count, its_priority, known_at, known
        FROM {schema}.keys k
        WHERE k.customer = owner AND k.key = new_key AND k.submitted_at >= its_at - key_kept;
        IF FOUND THEN
            answer := known;
            its_count := known_count;
            its_at := known_at;
        END IF;
    END IF;
    -- It has not more documents waiting or delayed than it ever had: as a rule that is enough.
    IF answer = 0 AND submitted_before >= own_max THEN
        SELECT {schema}.pending_of(c.number, c.arrived) INTO its_pending
        FROM {schema}.customers c WHERE c.number = owner;
        IF its_pending >= own_max THEN
            answer := 3;
            its_maximum := own_max;
        END IF;
    END IF;
    IF answer = 0 AND all_max IS DISTINCT FROM roomy_for THEN
        its_pending := {schema}.pending();
        IF its_pending >= all_max THEN
            answer := 4;
            its_maximum := all_max;
        END IF;
    END IF;
    IF answer <> 0 THEN
        IF is_new THEN
            DELETE FROM {schema}.customers c WHERE c.number = owner;
        END IF;
        RETURN ARRAY[answer, its_number, its_count, its_priority, its_at, its_pending, its_maximum,
            its_settings];
    END IF;

    IF its_count IS NULL OR its_at - updated_at > interval_us THEN
        its_count := 0;
        updated_at := its_at;
    ELSE
        its_count := its_count - 1;
        IF NOT is_periodic AND its_at >= updated_at THEN
            updated_at := its_at;
        END IF;
    END IF;
    its_priority := 1 + width_bucket(-its_count - 1, its_depths);
    its_level := CASE WHEN is_one_level THEN 1 ELSE its_priority END;
    its_number := nextval('{schema}.document_numbers');
    IF new_due_at > its_at THEN
        INSERT INTO {schema}.documents (number, customer, count, submitted_at, size_bytes, level,
            priority, state, is_payload, due_at, delayed_until, cost, name, metadata, content_name,
            sha256, body_text, body_bytes)
        VALUES (its_number, owner, its_count, its_at, new_size_bytes, its_level,
            its_priority, 0, new_is_payload, new_due_at, new_due_at, new_cost, new_name,
            new_metadata, new_content_name, new_sha256, new_body_text, new_body_bytes);
        UPDATE {schema}.customers c
        SET count = its_count, count_updated_at = updated_at, submitted = c.submitted + 1
        WHERE c.number = owner;
        PERFORM {schema}.count_arrived(first_shard, array_fill(0::bigint, ARRAY[9]), 1);
    ELSE
        -- One statement with parts takes less time than four. The customer's row is locked, and so
        -- where it was.
        WITH document AS (
            INSERT INTO {schema}.documents (number, customer, order_number, count, submitted_at,
                size_bytes, level, priority, state, is_payload, due_at, cost, name, metadata,
                content_name, sha256, body_text, body_bytes)
            VALUES (its_number, owner, its_number, its_count, its_at, new_size_bytes, its_level,
                its_priority, 1, new_is_payload, new_due_at, new_cost, new_name, new_metadata,
                new_content_name, new_sha256, new_body_text, new_body_bytes)),
        word AS (
            INSERT INTO {schema}.recorded (at, customers, levels, heads, sizes)
            VALUES (its_at, ARRAY[owner], ARRAY[its_level], ARRAY[its_number], ARRAY[1])),
        customer AS (
            UPDATE {schema}.customers c SET count = its_count, count_updated_at = updated_at,
                submitted = c.submitted + 1, arrived[its_priority] = c.arrived[its_priority] + 1
            WHERE c.ctid = its_row)
        UPDATE {schema}.totals t
        SET arrived[its_priority] = t.arrived[its_priority] + 1, changes = t.changes + 1
        -- Tried once, and not for every row that is looked at.
        WHERE t.shard = (SELECT first_shard
            WHERE pg_try_advisory_xact_lock(hashtext('{schema}.totals'), first_shard))
        RETURNING t.shard INTO counted;
        IF counted IS NULL THEN
            PERFORM {schema}.count_arrived(first_shard, ARRAY(
                SELECT CASE WHEN p = its_priority THEN 1 ELSE 0 END
                FROM generate_series(1, 9) p ORDER BY p)::bigint[], 0);
        END IF;
    END IF;
    IF new_key IS NOT NULL THEN
        INSERT INTO {schema}.keys AS k (customer, key, digest, document, count, priority,
            submitted_at)
        VALUES (owner, new_key, new_digest, its_number, its_count, its_priority, its_at)
        ON CONFLICT (customer, key) DO UPDATE SET digest = excluded.digest,
            document = excluded.document, count = excluded.count, priority = excluded.priority,
            submitted_at = excluded.submitted_at;
    END IF;
    RETURN ARRAY[answer, its_number, its_count, its_priority, its_at, its_pending, its_maximum,
        its_settings];
END
$$;
