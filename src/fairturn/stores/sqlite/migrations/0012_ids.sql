-- readable from 11
-- Ids of documents are enciphered with id_secret (decision 0001). Numbers below ids_from keep the ids that releases up to
-- schema 11 issue. In a queue that such a release has made, numbers pass ids_from when the next epoch begins; from then
-- on these releases are refused, because nothing could resolve the ids that they would issue.
ALTER TABLE queue ADD COLUMN id_secret BLOB;
ALTER TABLE queue ADD COLUMN ids_from INTEGER NOT NULL DEFAULT 0;
UPDATE queue SET id_secret = randomblob(32), ids_from = next_number + 4294967296;

CREATE TRIGGER queue_of_schema_11 AFTER INSERT ON queue WHEN NEW.id_secret IS NULL BEGIN
    UPDATE queue SET id_secret = randomblob(32), ids_from = next_number + 4294967296;
END;
CREATE TRIGGER new_queue AFTER INSERT ON queue WHEN NEW.id_secret IS NOT NULL AND NEW.next_number >= NEW.ids_from BEGIN
    UPDATE migrations SET readable_from = 12 WHERE readable_from < 12;
END;
CREATE TRIGGER new_epoch AFTER UPDATE OF epoch ON queue WHEN NEW.next_number >= NEW.ids_from BEGIN
    UPDATE migrations SET readable_from = 12 WHERE readable_from < 12;
END;
