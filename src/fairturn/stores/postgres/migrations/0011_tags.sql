-- readable from 10
ALTER TABLE {schema}.documents ADD COLUMN tags text;    -- a JSON array; NULL: none
