"""Letting documents run that were picked, and what their claims are made of."""

from collections.abc import Sequence
from typing import NamedTuple

from fairturn.flows import Pick
from fairturn.model import Claim
from fairturn.stores.postgres.asking import NUMBER
from fairturn.stores.postgres.database import Answer, Session
from fairturn.stores.postgres.rows import CLAIM_COLUMNS, columns
from fairturn.stores.values import BODY, RUNNING, Row, to_claims

# The columns of a document that was just started, in the order of `claims_of`.
STARTED_COLUMNS = f"{CLAIM_COLUMNS.replace('d.attempts', 'd.attempts - 1')}, d.body_bytes"
_NUMBER_IN_CLAIM = 1  # where the number stands among them

# By the primary key. The claim fails if one of the documents does not wait.
_START = f"""
    WITH started AS (
        UPDATE fairturn.documents d SET state = {RUNNING}, returned = false,
            attempts = attempts + 1, fence = %s, claimed_at = %s, lease_until = %s, worker = %s,
            charged_cost = v.cost, charged_weight = v.weight, charge = v.charge
        FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
            AS v(number, cost, weight, charge)
        WHERE d.number = v.number AND d.state = 1
        RETURNING {STARTED_COLUMNS}),
    leased AS (
        INSERT INTO fairturn.leases (fence, until, running, documents) VALUES (%s, %s, %s, %s))
    SELECT * FROM started
    WHERE 1 / (SELECT CASE WHEN count(*) = %s THEN 1 ELSE 0 END FROM started) = 1"""


class Batch(NamedTuple):
    """What was picked for one worker."""

    worker: str
    fence: int
    until: int  # so long is its lease
    picks: Sequence[Pick]
    rows: Sequence[Row]  # of the documents, as they were read ahead


class Lease(NamedTuple):
    """What all claims of one batch have in common."""

    worker: str
    fence: int
    at: int
    ends_at: int


def start(session: Session, batch: Batch, now: int) -> Answer:
    """Let the picked documents run; the answer has a row for each, in no order."""
    numbers, n = [row[NUMBER] for row in batch.rows], len(batch.rows)
    _, _, _, *charges = columns(batch.picks)
    started = (batch.fence, now, batch.until, batch.worker, numbers, *charges)
    return session.ask(_START, (*started, batch.fence, batch.until, n, numbers, n))


def in_order(started: Answer, batch: Batch) -> list[Row]:
    """The rows of documents that were started, in the order of their turns."""
    found = {row[_NUMBER_IN_CLAIM]: row for row in started.fetchall()}
    return [found[row[NUMBER]] for row in batch.rows]


def claims_of(rows: list[Row], customers: list[str], key: int, lease: Lease) -> list[Claim]:
    """The claims of documents that were started together."""
    if not rows:
        return []
    if any(row[-1] is not None for row in rows):
        rows = [row if row[-1] is None else _with_bytes(row) for row in rows]
    return to_claims(
        rows,
        customers,
        key,
        fence=lease.fence,
        worker=lease.worker,
        at=lease.at,
        lease_ends_at=lease.ends_at,
    )


def _with_bytes(row: Row) -> Row:
    """A row whose body is not a text."""
    return (*row[:BODY], row[-1], *row[BODY + 1 :])
