-- How many times a claim has repaired a customer whose flows did not agree with its documents.
ALTER TABLE queue ADD COLUMN repairs INTEGER NOT NULL DEFAULT 0;
