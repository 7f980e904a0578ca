-- readable from 11
-- The bytes of a customer's documents, and their maximum (NULL: that of the queue). Submissions add to stored_bytes under
-- the lock of the customer. Prune and purge insert what they delete into released_bytes, because prune must not wait for
-- that lock; submissions near the maximum and prune subtract these rows.
ALTER TABLE {schema}.customers ADD COLUMN stored_bytes bigint NOT NULL DEFAULT 0, ADD COLUMN bytes_max bigint;
ALTER TABLE {schema}.queue ADD COLUMN bytes_per_customer_max bigint NOT NULL DEFAULT {bytes_per_customer_max};
-- One row, written by checks of readiness.
CREATE TABLE {schema}.probes (
    one       smallint PRIMARY KEY DEFAULT 1 CHECK (one = 1),
    probed_at bigint   NOT NULL
);
CREATE TABLE {schema}.released_bytes (
    customer bigint NOT NULL,
    bytes    bigint NOT NULL
);
CREATE INDEX released_bytes_customer ON {schema}.released_bytes (customer);
UPDATE {schema}.customers c SET stored_bytes = d.bytes FROM (
    SELECT o.customer, sum({document_bytes} + o.size_bytes + coalesce(octet_length(o.metadata), 0)) AS bytes
    FROM {schema}.documents o GROUP BY o.customer) d
WHERE c.number = d.customer;
