-- Steps and stored attempts of documents (decision 0034).

-- Create the kinds of next steps in an open queue, as far as there is room, and refuse earlier releases with the first step
-- or report. Its locks come before the row of `queue` and documents, so that no claim waits for a transaction of a caller
-- that has created a kind. A document that loses its lease meanwhile leaves at most a kind without documents.
CREATE OR REPLACE FUNCTION {schema}.prepare_outcomes(
    numbers bigint[], fences bigint[], codes smallint[], next_kinds text[]      -- as in `finish`
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r record;
BEGIN
    IF NOT codes && ARRAY[4, 6]::smallint[] THEN
        RETURN;
    END IF;
    IF (SELECT q.settings::json ->> 'kinds' = '{open_kinds}' FROM {schema}.queue q) THEN
        FOR r IN
            SELECT g.kind
            FROM (
                SELECT DISTINCT ON (u.number, u.fence) u.*
                FROM unnest(numbers, fences, next_kinds) WITH ORDINALITY AS u(number, fence, kind, position)
                ORDER BY u.number, u.fence, u.position) g
                JOIN {schema}.documents d ON d.number = g.number AND d.fence = g.fence
            WHERE d.state = {running} AND NOT d.cancel_requested AND d.step < {steps_max}
                AND g.kind NOT IN (SELECT k.name FROM {schema}.kinds k)
            GROUP BY g.kind ORDER BY min(g.position)
        LOOP
            PERFORM {schema}.create_kinds(ARRAY[r.kind]);
        END LOOP;
    END IF;
    PERFORM {schema}.require_schema({schema_of_steps});
END
$$;

-- Return the number of a document's next stored attempt. By the primary key.
CREATE OR REPLACE FUNCTION {schema}.next_attempt(its_document bigint) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RETURN coalesce((
        SELECT a.number FROM {schema}.attempts a WHERE a.document = its_document
        ORDER BY a.document DESC, a.number DESC LIMIT 1), 0) + 1;
END
$$;

-- Delete the oldest attempts that ended no step, beyond the maximum of each document. By the primary key.
CREATE OR REPLACE FUNCTION {schema}.trim_attempts(documents bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM {schema}.attempts a USING (
        SELECT s.document, s.number
        FROM unnest(documents) AS u(number) CROSS JOIN LATERAL (
            SELECT o.document, o.number FROM {schema}.attempts o
            WHERE o.document = u.number AND o.outcome <> {advanced}
            ORDER BY o.document, o.number
            LIMIT (SELECT greatest(count(*) - {attempts_stored_max}, 0) FROM {schema}.attempts n
                WHERE n.document = u.number)) s) surplus
    WHERE a.document = surplus.document AND a.number = surplus.number;
END
$$;

-- Delete what belongs to these documents beside their rows and results. Returns the contents of their steps.
CREATE OR REPLACE FUNCTION {schema}.delete_attempts(documents bigint[]) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    contents text[];
BEGIN
    DELETE FROM {schema}.checkpoints c WHERE c.document = ANY (documents);
    WITH deleted AS (
        DELETE FROM {schema}.attempts a WHERE a.document = ANY (documents) RETURNING a.content_name)
    SELECT coalesce(array_agg(d.content_name) FILTER (WHERE d.content_name IS NOT NULL), '{{}}')
    INTO contents FROM deleted d;
    RETURN contents;
END
$$;
