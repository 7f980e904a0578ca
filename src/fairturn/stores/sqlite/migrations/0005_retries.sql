-- When the next attempt at a failed document is due, on the clock of the boot that leases count from:
-- no step of the wall clock moves it. Without it, after a reboot or by an older version, due_at decides.
ALTER TABLE documents ADD COLUMN retry_at INTEGER;
CREATE INDEX documents_retried ON documents (retry_at) WHERE state = 0 AND retry_at IS NOT NULL;
DROP INDEX documents_delayed;
CREATE INDEX documents_delayed ON documents (due_at, number, retry_at) WHERE state = 0;
