"""Letting documents run that were picked, and what their claims are made of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fairturn.flows import Pick
from fairturn.model import Claim
from fairturn.stores.postgres.asking import NUMBER
from fairturn.stores.postgres.rows import CLAIM_COLUMNS, columns
from fairturn.stores.postgres.session import Answer, Session
from fairturn.stores.values import BODY, RUNNING, Row, to_claims

# The columns of a document that was just started, in the order of `claims_of`.
STARTED_COLUMNS = f"{CLAIM_COLUMNS.replace('d.attempts', 'd.attempts - 1')}, d.body_bytes"
_NUMBER_IN_CLAIM = 1  # where the number stands among them

# So many are started at a time: the server is at work on them while the next are picked.
PART = 125
# By the primary key. The claim fails if one of the documents does not wait.
_START = f"""
    WITH started AS (
        UPDATE fairturn.documents d SET state = {RUNNING}, returned = false,
            attempts = attempts + 1, fence = %s, claimed_at = %s, lease_until = %s, worker = %s,
            {{charged}} AND d.state = 1
        RETURNING {STARTED_COLUMNS}){{and_more}}
    SELECT * FROM started
    WHERE 1 / (SELECT CASE WHEN count(*) = %s THEN 1 ELSE 0 END FROM started) = 1"""
_CHARGED = """charged_cost = v.cost, charged_weight = v.weight, charge = v.charge
        FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
            AS v(cost, weight, charge, number)
        WHERE d.number = v.number"""
# Where all turns cost the same, as most do, there is nothing to join, and the server takes two
# thirds of the time.
_CHARGED_ALIKE = """charged_cost = %s, charged_weight = %s, charge = %s
        WHERE d.number = ANY (%s::bigint[])"""
_LEASED = """,
    leased AS (
        INSERT INTO fairturn.leases (fence, until, running, documents) VALUES (%s, %s, %s, %s))"""
_START_PART, _START_PART_ALIKE, _START_LAST, _START_LAST_ALIKE = (
    _START.format(charged=charged, and_more=and_more)
    for and_more in ("", _LEASED)
    for charged in (_CHARGED, _CHARGED_ALIKE)
)


class Batch(NamedTuple):
    """What was picked for one worker."""

    worker: str
    fence: int
    until: int  # so long is its lease
    picks: list[Pick]
    rows: list[Row]  # of the documents, as they were read ahead


class Lease(NamedTuple):
    """What all claims of one batch have in common."""

    worker: str
    fence: int
    at: int
    ends_at: int


class Starting:
    """A batch whose documents are started part by part, while more are picked for it."""

    def __init__(self, session: Session, batch: Batch, now: int) -> None:
        self._session = session
        self._batch = batch
        self._now = now
        self._numbers: list[int] = []
        self._answers: list[Answer] = []  # with a row for each document, in no order

    def go_on(self) -> None:
        """Let run what was picked since the last time; more is to come."""
        self._start(_START_PART, _START_PART_ALIKE, ())
        self._session.send()

    def end(self) -> None:
        """Let run what was picked last, and write the lease of all of them."""
        batch = self._batch
        lease = (batch.fence, batch.until, len(batch.rows), [row[NUMBER] for row in batch.rows])
        self._start(_START_LAST, _START_LAST_ALIKE, lease)

    def _start(self, statement: str, alike: str, lease: tuple[Any, ...]) -> None:
        batch, begun = self._batch, len(self._numbers)
        numbers = [row[NUMBER] for row in batch.rows[begun:]]
        self._numbers += numbers
        charges = [(pick.cost, pick.weight, pick.charge) for pick in batch.picks[begun:]]
        different = set(charges)
        charged: Sequence[Any] = columns(charges) or [[], [], []]
        if len(different) == 1:
            statement, (charged,) = alike, different
        shared = (batch.fence, self._now, batch.until, batch.worker)
        values = (*shared, *charged, numbers, *lease, len(numbers))
        self._answers.append(self._session.ask(statement, values))

    def rows(self) -> list[Row]:
        """The documents that were started, in the order of their turns."""
        found = {row[_NUMBER_IN_CLAIM]: row for part in self._answers for row in part.fetchall()}
        return [found[number] for number in self._numbers]


def claims_of(rows: list[Row], customers: list[str], key: int, lease: Lease) -> list[Claim]:
    """The claims of documents that were started together."""
    if not rows:
        return []
    if [row[-1] for row in rows].count(None) < len(rows):  # faster than any(), with 1,000 rows
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
