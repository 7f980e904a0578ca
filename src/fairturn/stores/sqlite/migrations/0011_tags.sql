-- readable from 10
ALTER TABLE documents ADD COLUMN tags TEXT;     -- a JSON array; NULL: none
