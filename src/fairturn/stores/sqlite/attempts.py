"""The stored attempts and checkpoints of documents, and what a claim reads of them."""

import json
from collections.abc import Iterable, Sequence

import apsw

from fairturn.model import (
    ATTEMPTS_STORED_MAX,
    AttemptRecord,
    Claim,
    ContentRef,
    FinishedStep,
    Outcome,
)
from fairturn.scheduling.flows import kind_of
from fairturn.stores.sqlite.rows import KindNames, fetch
from fairturn.stores.transitions import Attempt, Ending, attempt_record
from fairturn.stores.values import ADVANCED, ATTEMPT_OUTCOMES, NUMBER, STEP, Row

ATTEMPT_COLUMNS = (
    "document",
    "number",
    "kind",
    "step",
    "attempt",
    "worker",
    "claimed_at",
    "ended_at",
    "outcome",
    "error",
    "details",
    "content_name",
    "size_bytes",
    "sha256",
    "value",
)
# By the primary key, as all statements here.
_ADD = f"""
    INSERT INTO attempts ({", ".join(ATTEMPT_COLUMNS)})
    SELECT ?1, coalesce(max(number), 0) + 1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14
    FROM attempts WHERE document = ?1 RETURNING number"""
_COUNT = "SELECT count(*) FROM attempts WHERE document = ?"
_DROP_OLDEST = f"""
    DELETE FROM attempts WHERE document = ?1 AND number = (
        SELECT min(number) FROM attempts WHERE document = ?1 AND outcome <> {ADVANCED})"""
_KIND = "(SELECT k.name FROM kinds k WHERE k.number = a.kind)"
_ATTEMPTS = f"""
    SELECT a.step, {_KIND}, a.attempt, a.worker, a.claimed_at, a.ended_at, a.outcome, a.error,
        a.details, iif(?2, a.value, NULL), a.content_name, a.size_bytes, a.sha256
    FROM attempts a WHERE a.document = ?1 ORDER BY a.number"""
_STEPS = f"""
    SELECT a.step, {_KIND}, a.attempt, a.worker, a.claimed_at, a.ended_at
    FROM attempts a WHERE a.document = ? AND a.outcome = {ADVANCED} ORDER BY a.number"""
_PREVIOUS = f"""
    SELECT value, content_name, size_bytes, sha256 FROM attempts
    WHERE document = ? AND outcome = {ADVANCED} ORDER BY number DESC LIMIT 1"""
_SAVE_CHECKPOINT = "INSERT OR REPLACE INTO checkpoints (document, value) VALUES (?, ?)"
_DROP_CHECKPOINT = "DELETE FROM checkpoints WHERE document = ?"
_CHECKPOINTS = """
    SELECT document, value FROM checkpoints WHERE document IN (SELECT value FROM json_each(?))"""


class AttemptWriter:
    """Stores the attempts that end in one transaction."""

    def __init__(self, connection: apsw.Connection, kinds: KindNames, now: int) -> None:
        self._connection = connection
        self._kinds = kinds
        self._now = now

    def store(
        self,
        document: int,
        worker: str | None,
        attempt: Attempt,
        ending: Ending,
        outcome: Outcome | None = None,
    ) -> None:
        """Insert the attempt if endings of this kind are stored; a lost one has no outcome. If the
        document has too many, delete the oldest one that is no step."""
        row = self.row(worker, attempt, ending, outcome)
        if row is None:
            return
        number = self._connection.execute(_ADD, (document, *row)).get
        if number > ATTEMPTS_STORED_MAX and self._count(document) > ATTEMPTS_STORED_MAX:
            self._connection.execute(_DROP_OLDEST, (document,))

    def row(
        self, worker: str | None, attempt: Attempt, ending: Ending, outcome: Outcome | None = None
    ) -> Row | None:
        """Return `ATTEMPT_COLUMNS` after document and number; None if the attempt is not stored."""
        if ending.stored_as is None:
            return None
        kind = kind_of(attempt.band)
        record = attempt_record(
            ending,
            outcome,
            step=attempt.step,
            kind=self._kinds.name(kind),
            attempt=attempt.attempts,
            worker=worker or "",
            claimed_at=attempt.claimed_at,
            ended_at=self._now,
        )
        assert record is not None
        return (
            kind,
            record.step,
            record.attempt,
            record.worker,
            record.claimed_at_us,
            record.ended_at_us,
            ATTEMPT_OUTCOMES.index(record.outcome),
            record.error,
            record.details,
            *(record.content or (None, None, None)),
            record.value,
        )

    def _count(self, document: int) -> int:
        number: int = self._connection.execute(_COUNT, (document,)).get
        return number


def read_attempts(
    connection: apsw.Connection, document: int, *, values: bool
) -> list[AttemptRecord]:
    """Return the stored attempts of a document, oldest first."""
    records = []
    for row in fetch(connection, _ATTEMPTS, (document, values)):
        *known, outcome, error, details, value, name, size_bytes, sha256 = row
        content = None if name is None else ContentRef(name, size_bytes, sha256)
        ending = (ATTEMPT_OUTCOMES[outcome], error, details, value, content)
        records.append(AttemptRecord._make((*known, *ending)))
    return records


def with_steps(
    connection: apsw.Connection, claims: list[Claim], rows: Sequence[Row], *, checkpoints: bool
) -> list[Claim]:
    """Return the claims with the finished steps, the value and file of the last one, and, if there
    are any in the queue, the last checkpoints. `rows` are the claimed documents."""
    stored: dict[int, str] = {}
    if checkpoints:
        numbers = json.dumps([row[NUMBER] for row in rows])
        stored = dict(fetch(connection, _CHECKPOINTS, (numbers,)))
    if not stored and not any(row[STEP] for row in rows):
        return claims
    found = []
    for claim, row in zip(claims, rows, strict=True):
        number = row[NUMBER]
        complete = _with_previous(connection, claim, number) if row[STEP] else claim
        found.append(complete._replace(checkpoint=stored.get(number)))
    return found


def _with_previous(connection: apsw.Connection, claim: Claim, document: int) -> Claim:
    steps = tuple(FinishedStep._make(row) for row in fetch(connection, _STEPS, (document,)))
    if not steps:
        return claim
    ((value, name, *rest),) = fetch(connection, _PREVIOUS, (document,))
    content = None if name is None else ContentRef(name, *rest)
    return claim._replace(previous=value, previous_content=content, steps=steps)


def save_checkpoint(connection: apsw.Connection, document: int, value: str) -> None:
    connection.execute(_SAVE_CHECKPOINT, (document, value))


def drop_checkpoints(connection: apsw.Connection, documents: Iterable[int]) -> None:
    """Delete the checkpoints of documents whose step has ended."""
    connection.executemany(_DROP_CHECKPOINT, [(number,) for number in documents])
