-- How many documents a worker runs at the same time. `idle` was how many more documents a claim asked for than it
-- got; only processes of an older version that have the file open still write it.
ALTER TABLE workers ADD COLUMN slots INTEGER NOT NULL DEFAULT 0;
