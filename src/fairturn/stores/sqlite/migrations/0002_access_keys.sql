-- Who may ask the service for what. A key is found by its id; of its secret only a hash is here.
CREATE TABLE access_keys (
    id       TEXT    PRIMARY KEY,
    role     TEXT    NOT NULL,
    customer TEXT,                              -- by name: a key outlives a customer that is idle
    name     TEXT    NOT NULL,
    digest   BLOB    NOT NULL,                  -- SHA-256 of the secret
    made_at  INTEGER NOT NULL,
    used_at  INTEGER,
    ends_at  INTEGER,
    CHECK ((role = 'customer') = (customer IS NOT NULL))
) STRICT, WITHOUT ROWID;
CREATE INDEX access_keys_customer ON access_keys (customer, id) WHERE customer IS NOT NULL;
