-- Wait for the queue's row. Who was served meanwhile does not keep it: what an inner block has locked
-- is let go when the block is undone. The lock by agreement tells others that somebody waits here.
CREATE OR REPLACE FUNCTION {schema}.await_turn(its_number integer, OUT its_fence bigint)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('{schema}.wanted'), its_number);
    BEGIN
        PERFORM FROM {schema}.queue FOR NO KEY UPDATE;
        SELECT w.fence INTO its_fence FROM {schema}.wanted w WHERE w.number = its_number;
        IF its_fence IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'FT000', MESSAGE = 'served';
        END IF;
    EXCEPTION WHEN SQLSTATE 'FT000' THEN
        NULL;
    END;
END
$$;
