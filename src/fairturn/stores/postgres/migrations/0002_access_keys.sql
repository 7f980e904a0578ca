-- Who may ask the service for what. A key is found by its id; of its secret only a hash is here.
CREATE TABLE {schema}.access_keys (
    id       text   COLLATE "C" PRIMARY KEY,
    role     text   NOT NULL,
    customer text   COLLATE "C",                -- by name: a key outlives a customer that is idle
    name     text   NOT NULL,
    digest   bytea  NOT NULL,                   -- SHA-256 of the secret
    made_at  bigint NOT NULL,
    used_at  bigint,
    ends_at  bigint,
    CHECK ((role = 'customer') = (customer IS NOT NULL))
);
CREATE INDEX access_keys_customer ON {schema}.access_keys (customer, id)
    WHERE customer IS NOT NULL;
