"""Claims: one call of the function `claim` decides and commits; then the documents are read.

The function takes the lock of claims and runs to its commit without waiting for the client, so that
a process that freezes or loses its network never keeps others from claiming. A claim is identified
by a token: if the reply is lost, the repeated call returns the same documents. Cancelled documents
are reported once: with the reply their report is lost.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from fairturn import crash
from fairturn.clock import Uptime
from fairturn.model import Claim, Document, Fence, Outcome
from fairturn.stores.postgres.finish import OUTCOME_TYPES, outcome_columns
from fairturn.stores.postgres.query import numbered
from fairturn.stores.postgres.rows import CLAIM_COLUMNS
from fairturn.stores.postgres.session import Session
from fairturn.stores.values import BODY, Row, to_claims

_LOG = logging.getLogger("fairturn.postgres")

SERVER_BOOT = "server"  # where leases follow the clock of the server
BUDGET = 2_000  # documents or events that each step of a claim handles in one transaction
BUDGET_MIN = 2  # a customer, and one of its documents
# Claims compare the counters of some customers with their flows, one batch after the other.
PROBE_SIZE = 100
PROBE_EVERY_US = 1_000_000
PROBE_EVERY_IDLE_US = 60_000_000  # while there is nothing to claim

CLAIM = """
    SELECT claimed, more, changed, repaired, suspects, cancelled, '{}'::int4[]
    FROM fairturn.claim(%s::uuid, %s::int4, %s::text, %s::int8, %s::int8, %s::int8, %s::text,
        %s::int4)"""
CLAIM_AFTER = f"""
    SELECT claimed, more, changed, repaired, suspects, cancelled, lost
    FROM fairturn.claim_after(%s::uuid, %s::int4, %s::text, %s::int8, %s::int8, %s::int8, %s::text,
        %s::int4, {OUTCOME_TYPES})"""
DOCUMENTS = f"""
    SELECT {CLAIM_COLUMNS.replace("d.attempts", "d.attempts - 1")}, d.body_bytes, t.customer_name,
        d.fence, d.claimed_at
    FROM fairturn.claimed(%s::uuid) t CROSS JOIN LATERAL (SELECT (t.document).*) d"""
_BYTES, _NAME, _FENCE, _CLAIMED_AT = -4, -3, -2, -1


class Request(NamedTuple):
    """What one claim asks for."""

    token: str  # a UUID
    n: int
    worker: str
    lease_us: int
    moment: int | None  # None: the clock of the server
    uptime: Uptime | None  # None: the same
    budget: int


class Granted(NamedTuple):
    """The claimed documents, the outcomes that did not count, and cancelled documents; whether
    anything has changed; whether more is left to fold; customers whose counters are to be repaired.
    """

    claims: list[Claim]
    lost: list[Fence]
    cancelled: list[Document]
    changed: bool
    more: bool
    suspects: list[int]


def claim(
    session: Session, request: Request, key: int, outcomes: Sequence[Outcome] = ()
) -> Granted:
    """Record outcomes and claim up to `n` documents, in one transaction; then read them."""
    uptime = request.uptime
    values = (
        request.token,
        request.n,
        request.worker,
        request.lease_us,
        request.moment,
        uptime.at if uptime else None,
        uptime.boot if uptime else SERVER_BOOT,
        request.budget,
    )
    session.unsure = bool(outcomes)  # without outcomes a repeated call returns the same documents
    crash.point("claim-before-commit")
    # One message, and no pipeline: the server would hold the lock of claims until its end arrives.
    if outcomes:
        told = session.fetch(CLAIM_AFTER, (*values, *outcome_columns(outcomes, key)))
    else:
        told = session.fetch(CLAIM, values)
    ((claimed, more, changed, repaired, suspects, cancels, lost),) = told
    if claimed or cancels or outcomes:
        crash.point("claim-after-commit")
    rows = session.fetch(DOCUMENTS, (request.token,)) if claimed else []
    cancelled = numbered(session, key, cancels) if cancels else []
    if repaired:
        _LOG.warning("corrected %d sums or flows that did not agree with the documents", repaired)
    superseded = [outcomes[position - 1].fence for position in lost]
    return Granted(_claims(rows, request, key), superseded, cancelled, changed, more, suspects)


def _claims(rows: list[Row], request: Request, key: int) -> list[Claim]:
    if not rows:
        return []
    at = rows[0][_CLAIMED_AT]
    return to_claims(
        [row if row[_BYTES] is None else _with_bytes(row) for row in rows],
        [row[_NAME] for row in rows],
        key,
        fence=rows[0][_FENCE],
        worker=request.worker,
        at=at,
        lease_ends_at=at + request.lease_us,
    )


def _with_bytes(row: Row) -> Row:
    """A row whose body is not a text."""
    return (*row[:BODY], row[_BYTES], *row[BODY + 1 :])
