-- readable from 11
-- Ids of documents are enciphered with id_secret (decision 0001). Numbers below ids_from keep the ids that releases up to
-- schema 11 issue. In a queue that such a release has made, numbers pass ids_from when the next epoch begins; from then
-- on `submit` refuses these releases, because nothing could resolve the ids that they would issue.
-- gen_random_uuid() has 122 random bits.
ALTER TABLE {schema}.queue ADD COLUMN id_secret bytea NOT NULL
    DEFAULT sha256((gen_random_uuid()::text || gen_random_uuid()::text)::bytea);
ALTER TABLE {schema}.queue ADD COLUMN ids_from bigint NOT NULL DEFAULT {epoch_jump_min};
UPDATE {schema}.queue SET ids_from = {epoch_jump_min} + (SELECT last_value FROM {schema}.document_numbers);
