"""SQL that takes a file back to an earlier schema, for tests of migrations with data."""

TO_SCHEMA_14 = """
    DROP TRIGGER document_deleted;
    DROP TRIGGER first_rule_of_expiry;
    DROP TRIGGER prune_of_schema_14;
    DROP TRIGGER claim_of_schema_13;
    DROP TABLE attempts;
    DROP TABLE checkpoints;
    DROP TABLE expirations;
    DROP TABLE kind_services;
    DROP TABLE outages;
    ALTER TABLE documents DROP COLUMN step;
    ALTER TABLE documents DROP COLUMN snoozes;
    ALTER TABLE documents DROP COLUMN expires_at;
    DROP INDEX kinds_expiry;
    ALTER TABLE kinds DROP COLUMN expires_in_us;
    ALTER TABLE outcome_counters DROP COLUMN expired;
    ALTER TABLE queue DROP COLUMN prunes;
    CREATE TRIGGER claim_of_schema_13 BEFORE INSERT ON leases
    WHEN NEW.supports_kinds = 0 AND EXISTS (SELECT 1 FROM kinds WHERE number > 0) BEGIN
        SELECT RAISE(ABORT, 'the queue has kinds of work');
    END;
    DELETE FROM migrations WHERE number > 14;
    PRAGMA user_version = 14;"""
