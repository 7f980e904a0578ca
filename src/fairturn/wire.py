"""What the service and its clients have to agree on: types of bodies, headers, limits."""

JSON, LINES = "application/json", "application/x-ndjson"
BINARY, PROBLEM = "application/octet-stream", "application/problem+json"

IDEMPOTENCY_KEY = "Idempotency-Key"
REPEATED = "Idempotency-Replayed"  # of an answer: the key was known

JSON_BYTES_MAX = 1_048_576  # of a payload or a request; what is larger is a content
BATCH_BYTES_MAX = 32 * 1_048_576
IDS_MAX = 500  # in the query of a list, which has to fit into the head of a request
WAIT_S_MAX = 60.0  # of a long poll
