-- Submit documents, all or none, by the rule of fairturn.priority and the admission of fairturn.stores.admission;
-- tests compare both with this function. It writes after all checks. It locks the rows of the customers, in the order
-- of their names, and nothing that a claim needs.
--
-- `answer` is 0: accepted, 2: the key belongs to another document, 3: customer full, 4: queue full, 5: no such parent,
-- 6: another queue than `its_key` names, 7: `check_epoch` must begin a new epoch first, in a transaction of its own,
-- 8: over the quota of the customer, 9: no such kind, 10: the queue has the maximum of kinds, 11: the expiry has passed.
-- From 2 on nothing is stored, and `refused` is the position of the refused document.
CREATE OR REPLACE FUNCTION {schema}.submit(
    given_now bigint,               -- NULL: the clock of the server
    its_key bigint,                 -- the id_fingerprint() that the queue must have
    shard integer,                  -- of arrival_counters: the first to try
    customers text[], body_texts text[], body_bytes bytea[], body_types text[],
    sizes bigint[], hashes bytea[], content_names text[], names text[], metadata text[],
    tags text[], costs bigint[], due_ats bigint[], keys text[], digests bytea[], parents bigint[], expiries bigint[], kinds text[],
    OUT answer smallint, OUT refused integer,
    -- If a limit is reached: waiting and delayed documents, or stored bytes; the limit.
    OUT pending bigint, OUT maximum bigint,
    OUT refused_number bigint,                      -- the document that has the key
    OUT its_now bigint,
    -- 13 bytes for each document: number (8), count (4), priority (1, plus 16 if replayed). The server sends the
    -- reply before it commits: a small one fits into its buffers even if the client does not read.
    OUT receipts bytea,
    OUT replayed_at bigint[]                        -- when the replayed documents were submitted
) LANGUAGE plpgsql
SET lock_timeout = '{submit_lock_timeout}'
{planned_by_indexes}
AS $$
DECLARE
    q {schema}.queue;
    c record;
    numbers bigint[];
    counts bigint[];
    priorities smallint[];
    timestamps bigint[];
    replayed boolean[];
    n integer := cardinality(customers);
    distinct_names text[];
    new_customers bigint[];
    -- By position among distinct_names.
    owners bigint[] := '{{}}';
    customer_counts bigint[] := '{{}}';
    updated_ats bigint[] := '{{}}';
    submitted_before bigint[] := '{{}}';
    stored_before bigint[] := '{{}}';
    bytes_maxima bigint[] := '{{}}';
    added_bytes bigint[];
    added bigint[] := '{{}}';
    arrivals bigint[] := '{{}}';    -- by priority, nine for each customer
    -- By position of the document.
    customer_indexes integer[];
    firsts integer[];               -- the first position of the same customer and key
    kind_numbers smallint[];        -- NULL: a new kind
    has_rules boolean;              -- a kind has a rule of expiry
    is_new boolean[] := '{{}}';     -- not replayed
    total_arrived bigint[] := array_fill(0::bigint, ARRAY[9]);
    total_delayed bigint := 0;
    child_counts jsonb := '{{}}';   -- by number of the parent
    child_count integer;
    customer_index integer;
    arrival_index integer;
    p record;
    k record;
    is_inherited boolean;
BEGIN
    answer := 0;
    SELECT * INTO q FROM {schema}.queue;
    -- Releases up to schema 11 pass id_key, and issue ids that are valid for numbers below ids_from only.
    IF its_key <> {schema}.id_fingerprint() AND (its_key <> q.id_key
            OR q.ids_from <= (SELECT last_value FROM {schema}.document_numbers)) THEN
        answer := 6;
        RETURN;
    END IF;
    IF NOT {schema}.is_same_incarnation(q.incarnation) THEN
        answer := 7;
        RETURN;
    END IF;
    IF {schema}.pending() + n > q.waiting_max - greatest(q.waiting_max / 10, 10000) THEN
        PERFORM pg_advisory_xact_lock(hashtext('{schema}.'), 3);    -- makes the limit exact
    END IF;
    PERFORM pg_advisory_xact_lock_shared(hashtext('{schema}.'), 1);
    SELECT * INTO q FROM {schema}.queue;
    distinct_names := ARRAY(SELECT DISTINCT u COLLATE "C" FROM unnest(customers) u ORDER BY 1);
    LOOP
        owners := '{{}}';
        customer_counts := '{{}}';
        updated_ats := '{{}}';
        submitted_before := '{{}}';
        stored_before := '{{}}';
        bytes_maxima := '{{}}';
        FOR c IN
            SELECT o.number, o.count, o.count_updated_at, o.submitted, o.stored_bytes,
                coalesce(o.bytes_max, q.bytes_per_customer_max) AS bytes_max
            FROM {schema}.customers o
            WHERE o.name = ANY (distinct_names) ORDER BY o.name FOR NO KEY UPDATE
        LOOP
            owners := owners || c.number;
            customer_counts := customer_counts || c.count;
            updated_ats := updated_ats || c.count_updated_at;
            submitted_before := submitted_before || c.submitted;
            stored_before := stored_before || c.stored_bytes;
            bytes_maxima := bytes_maxima || c.bytes_max;
        END LOOP;
        EXIT WHEN cardinality(owners) = cardinality(distinct_names);
        WITH inserted AS (
            INSERT INTO {schema}.customers (name) SELECT u FROM unnest(distinct_names) u ORDER BY u
            ON CONFLICT (name) DO NOTHING RETURNING number)
        SELECT array_agg(number) INTO new_customers FROM inserted;
    END LOOP;
    its_now := coalesce(given_now, {now});
    customer_indexes := ARRAY(
        SELECT w.rank FROM (
            SELECT u.position, dense_rank() OVER (ORDER BY u.name COLLATE "C") AS rank
            FROM unnest(customers) WITH ORDINALITY AS u(name, position)) w
        ORDER BY w.position);
    firsts := ARRAY(
        SELECT w.first FROM (
            SELECT u.position, min(u.position) OVER (PARTITION BY u.name, u.key) AS first
            FROM unnest(customers, keys) WITH ORDINALITY AS u(name, key, position)) w
        ORDER BY w.position);
    added := array_fill(0::bigint, ARRAY[cardinality(owners)]);
    arrivals := array_fill(0::bigint, ARRAY[9 * cardinality(owners)]);
    numbers := array_fill(NULL::bigint, ARRAY[n]);
    counts := numbers;
    timestamps := array_fill(its_now, ARRAY[n]);
    priorities := array_fill(NULL::smallint, ARRAY[n]);
    replayed := array_fill(false, ARRAY[n]);
    is_new := array_fill(true, ARRAY[n]);

    FOR i IN 1 .. n LOOP
        customer_index := customer_indexes[i];
        IF keys[i] IS NOT NULL THEN
            SELECT o.document, o.count, o.priority, o.submitted_at, o.digest INTO k
            FROM {schema}.idempotency_keys o
            WHERE o.customer = owners[customer_index] AND o.key = keys[i] AND o.submitted_at >= its_now - {key_kept};
            IF FOUND THEN
                numbers[i] := k.document;
                counts[i] := k.count;
                priorities[i] := k.priority;
                timestamps[i] := k.submitted_at;
            ELSE
                -- The same key earlier in this call.
                SELECT digests[firsts[i]] AS digest INTO k WHERE firsts[i] < i;
                IF FOUND THEN
                    numbers[i] := -firsts[i];
                END IF;
            END IF;
            IF FOUND THEN
                IF k.digest IS DISTINCT FROM digests[i] THEN
                    answer := 2;
                    refused := i;
                    refused_number := numbers[i];
                    EXIT;
                END IF;
                replayed[i] := true;
                is_new[i] := false;
                CONTINUE;
            END IF;
        END IF;
        IF expiries[i] <= its_now THEN
            answer := 11;
            refused := i;
            EXIT;
        END IF;
        is_inherited := false;
        IF parents[i] IS NOT NULL THEN
            SELECT d.customer, d.count, d.priority, coalesce(o.made, 0) AS made INTO p
            FROM {schema}.documents d LEFT JOIN {schema}.children o ON o.parent = d.number
            WHERE d.number = parents[i];
            IF p.customer IS DISTINCT FROM owners[customer_index] THEN
                answer := 5;
                refused := i;
                EXIT;
            END IF;
            child_count := coalesce((child_counts ->> parents[i]::text)::integer, p.made);
            child_counts := child_counts || jsonb_build_object(parents[i]::text, child_count + 1);
            is_inherited := child_count < {children_unchecked_max};
        END IF;
        IF is_inherited THEN
            counts[i] := p.count;
            priorities[i] := p.priority;
        ELSE
            IF customer_counts[customer_index] IS NULL OR its_now - updated_ats[customer_index] > q.reset_interval
                OR updated_ats[customer_index] - its_now > {clock_ahead_max}
            THEN
                customer_counts[customer_index] := 0;
                updated_ats[customer_index] := its_now;
            ELSE
                customer_counts[customer_index] := customer_counts[customer_index] - 1;
                IF NOT q.periodic AND its_now > updated_ats[customer_index] THEN
                    updated_ats[customer_index] := its_now;
                END IF;
            END IF;
            counts[i] := customer_counts[customer_index];
            priorities[i] := 1 + width_bucket(-customer_counts[customer_index] - 1, q.depths);
        END IF;
        added[customer_index] := added[customer_index] + 1;
        IF due_ats[i] > its_now THEN
            total_delayed := total_delayed + 1;
        ELSE
            arrival_index := 9 * (customer_index - 1) + priorities[i];
            arrivals[arrival_index] := arrivals[arrival_index] + 1;
            total_arrived[priorities[i]] := total_arrived[priorities[i]] + 1;
        END IF;
    END LOOP;

    IF answer = 0 AND '{default_kind_name}' <> ANY (kinds) THEN
        kind_numbers := {schema}.kind_numbers(kinds);
        IF array_position(kind_numbers, NULL) IS NOT NULL AND q.settings::json ->> 'kinds' IS DISTINCT FROM 'open' THEN
            SELECT u.position INTO refused
            FROM unnest(kinds, kind_numbers, is_new) WITH ORDINALITY AS u(kind, number, is_new, position)
            WHERE u.is_new AND u.number IS NULL ORDER BY u.kind COLLATE "C" LIMIT 1;
            IF FOUND THEN
                answer := 9;
            END IF;
        END IF;
    END IF;

    -- Fewer documents wait or are delayed than were ever submitted: usually this cheap check is enough.
    FOR i IN 1 .. cardinality(owners) LOOP
        EXIT WHEN answer <> 0;
        IF added[i] > 0 AND submitted_before[i] + added[i] > q.waiting_per_customer_max THEN
            SELECT {schema}.pending_of(o.number, o.arrived) INTO pending
            FROM {schema}.customers o WHERE o.number = owners[i];
            IF pending + added[i] > q.waiting_per_customer_max THEN
                answer := 3;
                refused := array_position(customer_indexes, i);
                maximum := q.waiting_per_customer_max;
            END IF;
        END IF;
    END LOOP;
    IF answer = 0 AND (SELECT sum(a) FROM unnest(added) a) > 0 THEN
        pending := {schema}.pending();
        IF pending + (SELECT sum(a) FROM unnest(added) a) > q.waiting_max THEN
            answer := 4;
            maximum := q.waiting_max;
        END IF;
    END IF;
    added_bytes := ARRAY(
        SELECT coalesce(sum({document_bytes} + u.size_bytes + coalesce(octet_length(u.metadata), 0))
            FILTER (WHERE u.is_new), 0)
        FROM unnest(customer_indexes, sizes, metadata, is_new) AS u(i, size_bytes, metadata, is_new)
        GROUP BY u.i ORDER BY u.i);
    FOR i IN 1 .. cardinality(owners) LOOP
        EXIT WHEN answer <> 0;
        IF added[i] > 0 AND stored_before[i] + added_bytes[i] > bytes_maxima[i] THEN
            PERFORM {schema}.subtract_released_bytes(ARRAY[owners[i]]);
            SELECT o.stored_bytes INTO pending FROM {schema}.customers o WHERE o.number = owners[i];
            IF pending + added_bytes[i] > bytes_maxima[i] THEN
                answer := 8;
                refused := array_position(customer_indexes, i);
                maximum := bytes_maxima[i];
            END IF;
        END IF;
    END LOOP;
    IF answer = 0 AND array_position(kind_numbers, NULL) IS NOT NULL THEN
        refused := array_position(kinds, {schema}.create_kinds(ARRAY(
            SELECT u.kind FROM unnest(kinds, is_new) AS u(kind, is_new) WHERE u.is_new)));
        IF refused IS NOT NULL THEN
            answer := 10;
        END IF;
        kind_numbers := {schema}.kind_numbers(kinds);
    END IF;
    IF answer <> 0 THEN
        DELETE FROM {schema}.customers o WHERE o.number = ANY (new_customers);
        RETURN;
    END IF;
    -- A new customer of which no document is stored is not created.
    DELETE FROM {schema}.customers o WHERE o.number = ANY (new_customers)
        AND added[array_position(owners, o.number)] = 0;

    IF array_remove(expiries, NULL) <> '{{}}' THEN
        PERFORM {schema}.require_schema({schema_of_steps});
    END IF;
    FOR i IN 1 .. n LOOP
        IF is_new[i] THEN
            numbers[i] := nextval('{schema}.document_numbers');
        ELSIF numbers[i] < 0 THEN
            numbers[i] := numbers[firsts[i]];
            counts[i] := counts[firsts[i]];
            priorities[i] := priorities[firsts[i]];
            timestamps[i] := timestamps[firsts[i]];
        END IF;
    END LOOP;
    has_rules := EXISTS (SELECT FROM {schema}.kinds o WHERE o.expires_in_us IS NOT NULL);
    WITH given AS MATERIALIZED (
        SELECT u.*, owners[customer_indexes[u.position]] AS owner, u.due_at > its_now AS is_delayed,
            coalesce(u.kind_number, {default_kind})::smallint AS kind,
            {schema}.band(q.one_level, u.priority, coalesce(u.kind_number, {default_kind})::smallint) AS level,
            coalesce(u.expiry, CASE WHEN has_rules THEN greatest(u.due_at, its_now) + (
                SELECT o.expires_in_us FROM {schema}.kinds o
                WHERE o.number = coalesce(u.kind_number, {default_kind})) END) AS expires_at
        FROM unnest(numbers, counts, priorities, kind_numbers, is_new, body_texts, body_bytes, body_types,
                sizes, hashes, content_names, names, metadata, tags, costs, due_ats, keys, digests,
                parents, expiries) WITH ORDINALITY
            AS u(number, count, priority, kind_number, is_new, body_text, body_bytes, body_type,
                size_bytes, sha256, content_name, name, metadata, tags, cost, due_at, key, digest, parent,
                expiry, position)
        WHERE u.is_new),
    documents AS (
        INSERT INTO {schema}.documents (number, customer, order_number, count, submitted_at,
            size_bytes, level, priority, kind, state, body_type, due_at, delayed_until, cost, parent, name,
            metadata, tags, content_name, sha256, body_text, body_bytes, expires_at)
        SELECT g.number, g.owner, CASE WHEN g.is_delayed THEN NULL ELSE g.number END, g.count, its_now,
            g.size_bytes, g.level, g.priority, g.kind,
            CASE WHEN g.is_delayed THEN {delayed} ELSE {waiting} END, g.body_type, g.due_at,
            CASE WHEN g.is_delayed THEN g.due_at END, g.cost, g.parent, g.name, g.metadata, g.tags,
            g.content_name, g.sha256, g.body_text, g.body_bytes, g.expires_at
        FROM given g),
    expiring AS (
        INSERT INTO {schema}.expirations (expires_at, document)
        SELECT g.expires_at, g.number FROM given g WHERE g.expires_at IS NOT NULL),
    keyed AS (
        INSERT INTO {schema}.idempotency_keys (customer, key, digest, document, count, priority, submitted_at)
        SELECT g.owner, g.key, g.digest, g.number, g.count, g.priority, its_now FROM given g
        WHERE g.key IS NOT NULL
        ON CONFLICT (customer, key) DO UPDATE SET digest = excluded.digest,
            document = excluded.document, count = excluded.count, priority = excluded.priority,
            submitted_at = excluded.submitted_at),
    flows AS (
        SELECT g.owner, g.level, min(g.number) AS head, count(*)::integer AS size FROM given g
        WHERE g.is_delayed IS NOT TRUE GROUP BY g.owner, g.level)
    INSERT INTO {schema}.event_log (at, customers, levels, heads, sizes)
    SELECT its_now, array_agg(f.owner ORDER BY f.head), array_agg(f.level ORDER BY f.head),
        array_agg(f.head ORDER BY f.head), array_agg(f.size ORDER BY f.head)
    FROM flows f HAVING count(*) > 0;
    INSERT INTO {schema}.children AS o (parent, made)
    SELECT key::bigint, value::text::integer FROM jsonb_each(child_counts)
    ON CONFLICT (parent) DO UPDATE SET made = excluded.made;
    UPDATE {schema}.customers o SET count = u.count, count_updated_at = u.updated_at,
        submitted = o.submitted + u.added, stored_bytes = o.stored_bytes + u.added_bytes, arrived = ARRAY(
            SELECT o.arrived[l] + arrivals[9 * (u.position - 1) + l] FROM generate_series(1, 9) l)
    FROM unnest(owners, customer_counts, updated_ats, added, added_bytes) WITH ORDINALITY
        AS u(number, count, updated_at, added, added_bytes, position)
    WHERE o.number = u.number AND u.added > 0;
    IF (SELECT sum(a) FROM unnest(added) a) > 0 THEN
        shard := {schema}.count_arrived(shard, total_arrived, total_delayed);
        IF kind_numbers IS NOT NULL THEN
            INSERT INTO {schema}.kind_arrivals AS a (kind, shard, arrived)
            SELECT u.kind, submit.shard, {schema}.by_priority(array_agg(u.priority))
            FROM unnest(kind_numbers, priorities, is_new, due_ats) AS u(kind, priority, is_new, due_at)
            WHERE u.kind <> {default_kind} AND u.is_new AND (u.due_at > its_now) IS NOT TRUE GROUP BY u.kind
            ON CONFLICT ON CONSTRAINT kind_arrivals_pkey
            DO UPDATE SET arrived = {schema}.add(a.arrived, excluded.arrived);
        END IF;
    END IF;
    SELECT string_agg(int8send(u.number) || int4send(greatest(u.count, -2147483648)::integer)
            || set_byte('\x00', 0, u.priority + CASE WHEN u.replayed THEN 16 ELSE 0 END), ''::bytea
            ORDER BY u.position),
        array_agg(u.submitted_at ORDER BY u.position) FILTER (WHERE u.replayed)
    INTO receipts, replayed_at
    FROM unnest(numbers, counts, priorities, replayed, timestamps) WITH ORDINALITY
        AS u(number, count, priority, replayed, submitted_at, position);
END
$$;
