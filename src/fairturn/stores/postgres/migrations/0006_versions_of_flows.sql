-- Each claim that changes a flow gives its row another key. While some old transaction keeps the
-- server from removing what is dead, the versions of a row would lie in the way of whoever looks for
-- it; here the newest is found first. Only claims add flows, under the lock of the queue.
ALTER TABLE {schema}.flows ADD COLUMN version bigint NOT NULL DEFAULT 0; -- of `turns`; 0: before this step
ALTER TABLE {schema}.flows DROP CONSTRAINT flows_pkey;
ALTER TABLE {schema}.flows ADD PRIMARY KEY (customer, level, version);
