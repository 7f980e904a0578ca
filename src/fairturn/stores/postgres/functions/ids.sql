-- The public ids of documents, as in fairturn.stores.ids; tests/vectors/ids.json has examples for both.

-- Return the first seven bytes as a number.
CREATE OR REPLACE FUNCTION {schema}.seven_bytes(bytes bytea) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT ('x00' || encode(substr(bytes, 1, 7), 'hex'))::bit(64)::bigint
$$;

-- Return a number that identifies the secret and does not reveal it: submitters pass it to `submit`.
CREATE OR REPLACE FUNCTION {schema}.id_fingerprint() RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT {schema}.seven_bytes(sha256(q.id_secret || '\x00')) FROM {schema}.queue q
$$;

-- Return the id of a document's number.
CREATE OR REPLACE FUNCTION {schema}.public_id(number bigint) RETURNS text LANGUAGE plpgsql STABLE STRICT AS $$
DECLARE
    q {schema}.queue;
    tag bytea;
BEGIN
    SELECT * INTO q FROM {schema}.queue;
    IF number < q.ids_from THEN
        RETURN {schema}.legacy_id(number, q.id_key);
    END IF;
    tag := substr(sha256(q.id_secret || '\x01' || int8send(number >> 2)), (1 + 7 * (number & 3))::integer, 7);
    RETURN encode(
        tag || substr(int8send(number # {schema}.seven_bytes(sha256(q.id_secret || '\x02' || tag))), 2), 'hex');
END
$$;

-- Return the number behind an id; NULL if the text is not an id of this queue.
CREATE OR REPLACE FUNCTION {schema}.document_number(id text) RETURNS bigint LANGUAGE plpgsql STABLE STRICT AS $$
DECLARE
    q {schema}.queue;
    number bigint;
    bytes bytea;
BEGIN
    SELECT * INTO q FROM {schema}.queue;
    IF id ~ '^[0-9a-f]{{28}}$' THEN
        bytes := decode(id, 'hex');
        number := {schema}.seven_bytes(substr(bytes, 8))
            # {schema}.seven_bytes(sha256(q.id_secret || '\x02' || substr(bytes, 1, 7)));
    ELSIF id ~ '^[0-9a-f]{{15}}$' THEN
        number := {schema}.legacy_number(id, q.id_key);
    END IF;
    RETURN CASE WHEN number >= 0 AND {schema}.public_id(number) = id THEN number END;
END
$$;

-- The ids of releases up to schema 11: 60 bits, multiplied by odd constants.
CREATE OR REPLACE FUNCTION {schema}.legacy_id(number bigint, key bigint) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    x bigint := ((number # key)::numeric * 712544676207699909 % 1152921504606846976)::bigint;
BEGIN
    x := ((x # (x >> 30))::numeric * 861740549572283995 % 1152921504606846976)::bigint;
    RETURN lpad(to_hex(x # (x >> 30)), 15, '0');
END
$$;

CREATE OR REPLACE FUNCTION {schema}.legacy_number(id text, key bigint) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    x bigint := ('x0' || id)::bit(64)::bigint;
BEGIN
    x := ((x # (x >> 30))::numeric * 833653923901485523 % 1152921504606846976)::bigint;
    x := ((x # (x >> 30))::numeric * 1152378312321023757 % 1152921504606846976)::bigint;
    RETURN x # key;
END
$$;
