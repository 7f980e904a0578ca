-- readable from 11
ALTER TABLE queue ADD COLUMN is_erased INTEGER NOT NULL DEFAULT 1;      -- 0: the log contains rows of a purge
ALTER TABLE queue ADD COLUMN probed_at INTEGER;                         -- by a check of readiness
-- The bytes of a customer's documents, and their maximum (NULL: the setting of the queue).
ALTER TABLE customers ADD COLUMN stored_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE customers ADD COLUMN bytes_max INTEGER;
UPDATE customers SET stored_bytes = d.bytes FROM (
    SELECT customer, sum(1024 + size_bytes + coalesce(octet_length(metadata), 0)) AS bytes
    FROM documents GROUP BY customer) d
WHERE number = d.customer;
