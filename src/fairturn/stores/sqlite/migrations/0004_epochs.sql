-- How often numbers and fences have jumped, see `stores/epoch.py`.
ALTER TABLE queue ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
-- 1 in a copy that a backup made: the first transaction that writes begins a new epoch.
ALTER TABLE queue ADD COLUMN is_copy INTEGER NOT NULL DEFAULT 0;
