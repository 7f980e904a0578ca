"""The stored attempts of a document."""

from fairturn.model import AttemptRecord, ContentRef
from fairturn.stores import ids
from fairturn.stores.ids import IdKey
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import ATTEMPT_OUTCOMES, Row

# By the primary keys. A document without attempts has one row.
_ATTEMPTS = """
    SELECT a.number, a.step, k.name, a.attempt, a.worker, a.claimed_at, a.ended_at, a.outcome,
        a.error, a.details, CASE WHEN %s THEN a.value END, a.content_name, a.size_bytes, a.sha256
    FROM fairturn.documents d LEFT JOIN fairturn.attempts a ON a.document = d.number
        LEFT JOIN fairturn.kinds k ON k.number = a.kind
    WHERE d.number = %s ORDER BY a.number"""


def attempts(session: Session, key: IdKey, id: str, values: bool) -> list[AttemptRecord] | None:
    """Return the stored attempts of a document; None for an unknown id."""
    number = ids.decode(id, key)
    rows = [] if number is None else session.fetch(_ATTEMPTS, (values, number))
    if not rows:
        return None
    return [_record(row) for row in rows if row[0] is not None]


def _record(row: Row) -> AttemptRecord:
    began, (outcome, error, details, value, *content) = row[1:7], row[7:]
    ref = None if content[0] is None else ContentRef._make(content)
    return AttemptRecord._make((*began, ATTEMPT_OUTCOMES[outcome], error, details, value, ref))
